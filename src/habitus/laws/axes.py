"""The laws of each axis, from selected runs to entries of laws.json."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.laws.allocation import surface_optimum
from habitus.laws.allocation_runs import AllocationRuns
from habitus.laws.cell_scatter import cell_means, cell_scatter
from habitus.laws.checks import num_distinct, sign_of
from habitus.laws.cost import realised_cost
from habitus.laws.critical_batch import critical_batch
from habitus.laws.forecast import allocation_rollouts
from habitus.laws.forms import compare_approaches, compare_scaling, compare_valleys
from habitus.laws.frontier import Frontier, frontier
from habitus.laws.isoflop import depth_optimum
from habitus.laws.law_builders import law_without_values
from habitus.laws.power_law import power_law
from habitus.laws.pure_error import PureError, judge_fit, untested
from habitus.laws.runs import MeasuredRun
from habitus.laws.steps import EWMA_HALF_LIFE, iso_target, smooth, steps_to_target
from habitus.laws.surface import surface
from habitus.laws.two_term import two_term, two_term_by_budget
from habitus.store import AXES, TRAIN, Direction, Law, LawEntry, NamedForms, NamedRollout, direction_of
from habitus.units import pluralize

_FLOOR_JOINT_DIM = 4  # the smallest embedder that can be built: what is left of one, not a choice of share
_REFERENCE_SHARES = (0.25, 0.4, 0.55, 0.7, 0.85)  # of the reference run's steps
_TUNED = "values of the allocation axis are those at the best rate, by this curve"
_MISSING_ALLOWED = 0.25  # of an axis's runs; beyond it a law would describe whoever happened to report


@dataclass(frozen=True)
class AxisLaws:
    """What one axis gives for one metric."""

    entries: tuple[LawEntry, ...] = ()
    rollouts: tuple[NamedRollout, ...] = ()
    forms: tuple[NamedForms, ...] = ()


@dataclass(frozen=True)
class AxisData:
    """Budget, knob and metric of the runs that have both."""

    budget: np.ndarray
    x: np.ndarray
    y: np.ndarray
    runs: tuple[MeasuredRun, ...]
    note: str = ""


def axis_data(runs: Sequence[MeasuredRun], knob: str, metric: str) -> AxisData:
    """The runs that hold the knob and the metric; an error where too many lack the metric."""
    with_knob = [run for run in runs if knob in run.knobs]
    have = [run for run in with_knob if metric in run.metrics]
    lacking = len(with_knob) - len(have)
    if not have:
        raise FitError(f"no run has {knob!r} and {metric!r}", expected="runs that measured both")
    if lacking > _MISSING_ALLOWED * len(with_knob):
        raise FitError(
            f"{metric} is missing in {lacking} of {len(with_knob)} runs",
            expected=f"at most {_MISSING_ALLOWED:.0%} missing",
            next_step="evaluate the remaining runs, or fit a metric that all runs have",
        )
    # Two seeds that agree to the last printed digit look like one row listed twice: the second is dropped,
    # which only widens intervals.
    rows = {(run.budget, run.knobs[knob], run.metrics[metric]): run for run in reversed(have)}
    have = [run for run in have if rows[(run.budget, run.knobs[knob], run.metrics[metric])] is run]
    note = f"{metric} is missing in {lacking} of {len(with_knob)} runs, which are left out" if lacking else ""
    return AxisData(
        np.array([run.budget for run in have]),
        np.array([run.knobs[knob] for run in have]),
        np.array([run.metrics[metric] for run in have]),
        tuple(have),
        note,
    )


def fit_share(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """s* per budget by two-term valleys, and s*(C) over the interior ones. The floor of joint_dim 4 does not enter."""
    above = [run for run in runs if run.knobs.get("joint_dim", np.inf) > _FLOOR_JOINT_DIM]
    data = axis_data(above, AXES["share"].knob, metric)
    direction = direction_of(metric)
    rows = {float(c): (data.x[data.budget == c], data.y[data.budget == c]) for c in np.unique(data.budget)}
    optima = {c: judge_fit(two_term(x, y, direction, error=error), error) for c, (x, y) in rows.items()}
    scatter = cell_scatter(optima, shared=False)
    if scatter is not None:
        means = {c: cell_means(x, y) for c, (x, y) in rows.items()}
        optima = {c: scatter.noted(two_term(x, y, direction, error=scatter.error)) for c, (x, y) in means.items()}
    return AxisLaws(tuple(_optima_and_law("share", "share", metric, optima, data.note, untested(error))))


def fit_negatives(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """K* per budget with α free and with α shared, and K*(C) over the interior ones."""
    data = axis_data(runs, AXES["negatives"].knob, metric)
    entries = []
    for name, share in (("negatives", "none"), ("negatives_shared_alpha", "alpha")):
        try:
            optima = two_term_by_budget(
                data.budget,
                data.x,
                data.y,
                direction_of(metric),
                share=share,  # type: ignore[arg-type]
                error=error,
            )
        except FitError as why:
            optima = {float(c): _not_fitted(why) for c in np.unique(data.budget)}
        optima = {c: judge_fit(law, error) for c, law in optima.items()}
        entries += _optima_and_law("negatives", name, metric, optima, data.note, untested(error))
    return AxisLaws(tuple(entries))


def fit_depth(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """The parabola in log share per budget, with the gap at 2%."""
    data = axis_data(runs, AXES["depth"].knob, metric)
    entries = []
    for c in np.unique(data.budget):
        at = data.budget == c
        law = judge_fit(depth_optimum(data.x[at], data.y[at], direction_of(metric), error=error), error)
        entries.append(_entry("depth_optimum", "depth", metric, law, float(c), data.note))
    return AxisLaws(tuple(entries))


def fit_batch(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """B_crit of one metric, from the trajectories of all batch sizes; for each arm of the axis its own.

    In one arm the candidates grow with the batch; in the other they are those of a fixed number of windows, so that
    steps to a target measure the noise of gradients alone.
    """
    with_trajectory = [r for r in runs if "batch_sequences" in r.knobs and any(m == metric for _, m, _ in r.trajectory)]
    if not with_trajectory:
        raise FitError(f"no run on the batch axis has a trajectory of {metric!r}")
    entries = []
    for c in sorted({run.budget for run in with_trajectory}):
        at_budget = [run for run in with_trajectory if run.budget == c]
        pools = {run.knobs["pool_sequences"] for run in at_budget if "pool_sequences" in run.knobs}
        for pool in (None, *sorted(pools)):
            arm = [run for run in at_budget if _is_of_arm(run, pool)]
            if arm:
                name = "critical_batch" if pool is None else "critical_batch_fixed_pool"
                entries.append(_entry(name, "batch", metric, _critical_batch(arm, metric, pool), c))
    return AxisLaws(tuple(entries))


def fit_batch_size(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """B* per budget at equal compute, by valleys of one shape as sizes have, and B*(C) over the interior ones."""
    if metric.startswith(f"{TRAIN}/"):
        return AxisLaws()  # batches of other sizes have other candidates
    data = axis_data(runs, AXES["batch_size"].knob, metric)
    fitted = frontier(data.budget, data.x, data.y, direction_of(metric), error)
    optima = [_entry("batch_size_optimum", "batch_size", metric, law, c, data.note) for c, law in fitted.optima.items()]
    return AxisLaws((*optima, _entry("batch_size_law", "batch_size", metric, fitted.size, note=untested(error))))


def _is_of_arm(run: MeasuredRun, pool: float | None) -> bool:
    """Whether a run has the candidates of its own batch (None), or of `pool` windows, as a batch of so many has."""
    own = run.knobs.get("pool_sequences")
    return own == pool or (own is None and run.knobs["batch_sequences"] == pool)


def _critical_batch(arm: Sequence[MeasuredRun], metric: str, pool: float | None) -> Law:
    """B_crit of one arm of the axis, and what it is at other targets."""
    direction = direction_of(metric)
    paths: Paths = {}
    for run in sorted(arm, key=lambda run: run.trajectory[-1][0]):  # the longest run of a batch size counts
        paths[run.knobs["batch_sequences"], run.seed] = [(s, v) for s, m, v in run.trajectory if m == metric]
    # Several seeds of one batch size all have to reach the target; their steps are then averaged.
    chosen = iso_target(dict(enumerate(paths.values())), direction)
    law = _critical_batch_at(chosen.target, paths, direction)
    by_target = _by_target(paths, direction)
    details = {
        "target": chosen.target,
        "target_rule": chosen.rule,
        "limiting_batch": list(paths)[int(chosen.limiting_batch)][0],
        "by_target": by_target,
        **({} if pool is None else {"pool_sequences": pool}),
    }
    law = law.model_copy(update={"details": {**law.details, **details}})
    return law.with_warnings(*_drift_of_critical_batch(by_target))


Paths = dict[tuple[float, int], list[tuple[float, float]]]  # by batch size and seed: (step, value)


def _critical_batch_at(target: float, paths: Paths, direction: Direction) -> Law:
    by_batch: dict[float, list[float]] = {}
    for (batch, _), path in paths.items():
        steps = steps_to_target(path, target, direction)
        if steps is not None:
            by_batch.setdefault(batch, []).append(steps)
    return critical_batch(list(by_batch), [float(np.mean(s)) for s in by_batch.values()])


def _by_target(paths: Paths, direction: Direction) -> list[dict[str, Any]]:
    """B_crit at the values that the middle batch size has after given shares of its steps, the same for every metric.

    B_crit grows during training, so that two metrics can be compared at equal steps of one reference only.
    """
    batches = sorted({batch for batch, _ in paths})
    reference = next(path for (batch, _), path in paths.items() if batch == batches[len(batches) // 2])
    steps = np.array([step for step, _ in reference])
    smoothed = smooth(np.array([value for _, value in reference]), EWMA_HALF_LIFE)
    times = smooth(steps, EWMA_HALF_LIFE)
    rows = []
    for share in _REFERENCE_SHARES:
        at = share * float(steps[-1])
        law = _critical_batch_at(float(np.interp(at, times, smoothed)), paths, direction)
        reached = len(law.points.get("batch", ()))
        if at <= times[-1] and reached == len(batches):
            low, high = law.interval("b_crit") if "b_crit" in law.values else (None, None)
            rows.append(
                {
                    "reference_batch": batches[len(batches) // 2],
                    "reference_steps": at,
                    "target": float(np.interp(at, times, smoothed)),
                    "b_crit": law.values.get("b_crit"),
                    "low": low if low is not None and np.isfinite(low) else None,
                    "high": high if high is not None and np.isfinite(high) else None,
                    "status": law.status,
                }
            )
    return rows


def _drift_of_critical_batch(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A warning where B_crit depends on the target by more than 1.5 times."""
    known = [row for row in rows if row["status"] == "ok"]
    if len(known) < 2 or not max(r["b_crit"] for r in known) > 1.5 * min(r["b_crit"] for r in known):
        return []
    ends = ", ".join(f"{r['b_crit']:.0f} at {r['reference_steps']:.0f} steps" for r in (known[0], known[-1]))
    return [f"b_crit depends on the target ({ends} of batch {known[0]['reference_batch']:g}): compare metrics there"]


def fit_allocation(
    runs: Sequence[MeasuredRun],
    metric: str,
    error: PureError | None = None,
    every_rate: Sequence[MeasuredRun] = (),
) -> AxisLaws:
    """Optima per budget, N*(C), D*(C) by both conventions, L*(C), L(N, D), and their agreement.

    Where cells of the axis among `every_rate` were run at several rates, each run counts as it would at its best one.
    Roll-outs have the runs as measured, and learn of rates and seeds from those of `every_rate` at the fitted budgets.
    """
    direction = direction_of(metric)
    data = axis_data(runs, AXES["allocation"].knob, metric)
    measured = AllocationRuns(metric, data.runs, tuple(every_rate))
    response = measured.response
    data = replace(data, y=measured.at_best_rate)
    fitted = frontier(data.budget, data.x, data.y, direction, error)
    entries = [
        *(_entry("size_optimum", "allocation", metric, law, c, data.note) for c, law in fitted.optima.items()),
        *(_entry("size_parabola", "allocation", metric, law, c) for c, law in fitted.parabolas.items()),
        _entry("size_law", "allocation", metric, fitted.size, note=untested(error)),
        _entry("size_law_parabola", "allocation", metric, fitted.size_by_parabola),
        _entry("loss_law", "allocation", metric, fitted.height),
        *_data_laws(fitted, data, metric),
    ]
    if response is not None:
        top = float(data.budget.max())
        best = float(data.x[data.budget == top][np.argmin(sign_of(direction) * data.y[data.budget == top])])
        entries.append(_entry("rate_response", "allocation", metric, response.law(best, top), note=_TUNED))
    if direction == "min" and (data.y > 0).all() and all("slots_seen" in run.knobs for run in data.runs):
        entries += _surface_entries(fitted, data, metric)
    rollouts = allocation_rollouts(measured, fitted)
    return AxisLaws(tuple(entries), tuple(rollouts), tuple(_forms(fitted, data, metric)))


def _optima_and_law(
    axis: str, name: str, metric: str, optima: dict[float, Law], note: str, doubt: str = ""
) -> list[LawEntry]:
    """The optima per budget and the power law through those that are interior."""
    inside = [c for c, law in optima.items() if law.ok]
    outside = [f"{c:.3g} ({law.status.replace('_', ' ')})" for c, law in optima.items() if not law.ok]
    law = power_law(inside, [optima[c]["x_opt"] for c in inside])
    law = law.with_warnings(
        f"n = {pluralize(len(inside), 'interior budget')}" + (f"; left out: {', '.join(outside)}" if outside else "")
    )
    per_budget = [_entry(f"{name}_optimum", axis, metric, optimum, c, note) for c, optimum in optima.items()]
    return [*per_budget, _entry(f"{name}_law", axis, metric, law, note=doubt)]


def _data_laws(fitted: Frontier, data: AxisData, metric: str) -> Iterable[LawEntry]:
    """D*(C) as realised on the iso-FLOP lines, and as C/(6N*), which overstates it where C ≠ 6ND."""
    inside = [c for c, law in fitted.optima.items() if law.ok]
    sizes = [float(fitted.optima[c]["x_opt"]) for c in inside]
    by_6nd = power_law(inside, [c / (6 * n) for c, n in zip(inside, sizes, strict=True)])
    yield _entry("data_law_6nd", "allocation", metric, by_6nd)
    if all("slots_seen" in run.knobs for run in data.runs):
        slots = np.array([run.knobs["slots_seen"] for run in data.runs])
        realised = []
        for c, n in zip(inside, sizes, strict=True):
            at = data.budget == c
            order = np.argsort(data.x[at], kind="stable")
            log_d = np.interp(np.log(n), np.log(data.x[at][order]), np.log(slots[at][order]))
            realised.append(float(np.exp(log_d)))
        yield _entry("data_law", "allocation", metric, power_law(inside, realised))


def _surface_entries(fitted: Frontier, data: AxisData, metric: str) -> list[LawEntry]:
    """L(N, D), what it implies at ten times the top budget, and whether both approaches agree."""
    slots = np.array([run.knobs["slots_seen"] for run in data.runs])
    law = surface(data.x, slots, data.y)
    entries = [_entry("surface", "allocation", metric, law)]
    if not law.values:
        return entries
    try:
        cost = realised_cost(data.x, slots, data.budget)
    except FitError as why:
        none = law_without_values("surface_optimum", law.form, "too_few", len(slots), why.problem)
        return [*entries, _entry("surface_optimum_10x", "allocation", metric, none)]
    best = surface_optimum(law, 10 * float(data.budget.max()), cost)
    entries.append(_entry("surface_optimum_10x", "allocation", metric, best))
    if all("flops_executed" in run.knobs for run in data.runs):
        # Equation 1 charges every slot for its item; a run embeds each distinct item of a step once.
        executed = np.array([run.knobs["flops_executed"] for run in data.runs])
        by_executed = surface_optimum(law, 10 * float(executed.max()), realised_cost(data.x, slots, executed))
        entries.append(_entry("surface_optimum_executed_10x", "allocation", metric, by_executed))
    if fitted.size.values and best.values:
        both = compare_approaches(
            fitted.size["exponent"], best["exponent"], fitted.size.interval("exponent"), best.interval("exponent")
        )
        entries.append(_entry("both_approaches", "allocation", metric, both))
    return entries


def _forms(fitted: Frontier, data: AxisData, metric: str) -> Iterable[NamedForms]:
    for c in np.unique(data.budget):
        at = data.budget == c
        if num_distinct(data.x[at]) >= 4:
            yield NamedForms(
                name="iso-FLOP curve", metric=metric, budget=float(c), forms=compare_valleys(data.x[at], data.y[at])
            )
    inside = [c for c, law in fitted.optima.items() if law.ok]
    if len(inside) >= 3:
        heights = [float(fitted.optima[c]["y_opt"]) for c in inside]
        yield NamedForms(name="L*(C)", metric=metric, forms=compare_scaling(inside, heights))


def _entry(name: str, axis: str, metric: str, law: Law, budget: float | None = None, note: str = "") -> LawEntry:
    return LawEntry(name=name, axis=axis, metric=metric, budget=budget, law=law.with_warnings(note) if note else law)


def _not_fitted(error: FitError) -> Law:
    return law_without_values("two_term", "", "too_few", 0, error.problem)
