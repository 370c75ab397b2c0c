"""Six knobs at once: the quadratic surface, its optimum, its error on cells that were held out, and the centre's place.

And shares with dropout in the embedder: whether a regularised embedder bears a larger one.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.laws.axes import AxisLaws, axis_data
from habitus.laws.checks import sign_of
from habitus.laws.context_axis import valley
from habitus.laws.law_builders import law_without_values, make_intervals
from habitus.laws.pure_error import PureError, judge_fit
from habitus.laws.response_surface import (
    IN_REGION,
    compare_with_optimum,
    optimum_in_range,
    predict_response,
    response_surface,
)
from habitus.laws.runs import MeasuredRun
from habitus.store import AXES, HELD_OUT, LEVELS, TRAIN, Law, LawEntry, Residuals, direction_of

KNOBS = ("joint_dim", "width", "depth", "text_depth", "batch_sequences", "rate_at_512")
_CENTRE = "centre"
_NOTHING = 0.05  # p value above which the knobs say nothing


def fit_shape(runs: Sequence[MeasuredRun], metric: str, _error: PureError | None = None) -> AxisLaws:
    """Per budget the surface with its error on held-out cells, its optimum, and how far the centre is from it."""
    entries: list[LawEntry] = []
    if metric.startswith(f"{TRAIN}/"):
        return AxisLaws()  # other batches have other candidates
    for budget in sorted({run.budget for run in runs if metric in run.metrics}):
        measured = [run for run in runs if run.budget == budget and metric in run.metrics]
        for name, law in _laws_at(measured, metric, budget).items():
            entries.append(LawEntry(name=name, axis="shape", metric=metric, budget=budget, law=law))
    if not entries:
        raise FitError(f"no run of the shape axis has {metric!r}", expected="runs that measured it")
    return AxisLaws(tuple(entries))


def shape_knobs(run: MeasuredRun) -> dict[str, float]:
    """The six knobs of a run; its rate as it would be with 512 windows per step, by the rule of the square root."""
    rate = run.learning_rate / math.sqrt(run.knobs["batch_sequences"] / 512)
    return {**{name: run.knobs[name] for name in KNOBS[:-1]}, "rate_at_512": rate}


def _laws_at(runs: Sequence[MeasuredRun], metric: str, budget: float) -> dict[str, Law]:
    held_out = [run for run in runs if run.cell_id.startswith(HELD_OUT)]
    fitted = [run for run in runs if not run.cell_id.startswith(HELD_OUT)]
    table = _columns(fitted)
    # A knob with one value, as on a log without texts, is no knob.
    table = {name: column for name, column in table.items() if len(set(column)) > 1}
    direction = direction_of(metric)
    surface = response_surface(table, [budget] * len(fitted), [run.metrics[metric] for run in fitted], direction)
    if not surface.values:
        return {"shape_surface": surface}
    if held_out:
        surface = _with_held_out(surface, held_out, metric, budget)
    flat = _p_of_nothing(surface)
    if flat > _NOTHING:
        why = f"the surface is no better than a constant (p = {flat:.2f}): no optimum above the noise"
        return {"shape_surface": surface.model_copy(update={"status": "flat"}).with_warnings(why)}
    best = optimum_in_range(surface, budget)
    if surface.status == "misfit":
        best = best.model_copy(update={"status": "misfit"}).with_warnings(*surface.warnings)
    laws = {"shape_surface": surface, "shape_optimum": best}
    centre = next((run for run in fitted if run.cell_id.startswith(_CENTRE)), None)
    if centre is not None:
        laws["shape_centre"] = _centre_law(surface, best, shape_knobs(centre), budget)
    return laws


def _p_of_nothing(surface: Law) -> float:
    """The p value of an F test that no knob matters."""
    from scipy.stats import f

    terms = surface.residuals.n - surface.residuals.dof - 1
    r2 = surface.residuals.r2 or 0.0
    return float(f.sf(r2 / terms / max((1 - r2) / surface.residuals.dof, 1e-300), terms, surface.residuals.dof))


def _columns(runs: Sequence[MeasuredRun]) -> dict[str, list[float]]:
    rows = [shape_knobs(run) for run in runs]
    return {name: [row[name] for row in rows] for name in KNOBS}


def _with_held_out(surface: Law, runs: Sequence[MeasuredRun], metric: str, budget: float) -> Law:
    """The surface with its error on cells that it has not seen, beside the spread of their metric."""
    measured = np.array([run.metrics[metric] for run in runs])
    missed = measured - predict_response(surface, _columns(runs), [budget] * len(runs))
    values: dict[str, Any] = {
        **surface.values,
        "held_out_rmse": float(np.sqrt((missed**2).mean())),
        "held_out_spread": float(measured.std()),
    }
    surface = surface.model_copy(update={"values": values, "details": {**surface.details, "held_out": len(runs)}})
    if values["held_out_rmse"] < values["held_out_spread"]:
        return surface
    why = f"{len(runs)} cells that were held out are predicted no better than by their mean"
    return surface.model_copy(update={"status": "misfit"}).with_warnings(why)


def _centre_law(surface: Law, best: Law, centre: dict[str, float], budget: float) -> Law:
    """What the centre loses to the joint optimum; for every knob the best value with the others at the centre, and
    whether the joint interval holds it; and what all of these values together lose."""
    names = list(surface.details["knobs"])
    at = {name: centre[name] for name in names}
    compared = compare_with_optimum(surface, at, budget)
    one_at_a_time = {name: _best_alone(surface, at, name, budget) for name in names}
    together = compare_with_optimum(surface, one_at_a_time, budget)
    inside = {}
    for name, value in one_at_a_time.items():
        low, high = best.interval(name)
        inside[name] = bool(low * (1 - 1e-9) <= value <= high * (1 + 1e-9))  # ends of the range differ by rounding
    return Law(
        law="shape_centre",
        form="metric at the centre less metric at the joint optimum, in the direction of worse",
        status="misfit" if surface.status == "misfit" else "ok",
        values={
            "lost": compared["lost"],
            "p_value": compared["p_value"],
            "lost_one_at_a_time": together["lost"],
        },
        intervals=make_intervals(
            {
                0.95: {
                    "lost": (compared["low"], compared["high"]),
                    "lost_one_at_a_time": (together["low"], together["high"]),
                }
            }
        ),
        residuals=Residuals(n=surface.residuals.n, dof=surface.residuals.dof),
        details={
            "centre": at,
            "inside_region": compared["p_value"] > IN_REGION,
            "one_at_a_time": one_at_a_time,
            "one_at_a_time_inside_region": together["p_value"] > IN_REGION,
            "inside_interval": inside,
        },
    )


def _best_alone(surface: Law, centre: dict[str, float], name: str, budget: float) -> float:
    """The best value of one knob, of those between the ends that were tried, with the others at the centre."""
    tried = np.asarray(surface.points[name])
    values = np.geomspace(tried.min(), tried.max(), 201)
    table = {other: np.full(len(values), value) for other, value in centre.items()} | {name: values}
    metric = predict_response(surface, table, np.full(len(values), budget))
    return float(values[np.argmin(sign_of(surface.details["direction"]) * metric)])


def fit_regularisation(runs: Sequence[MeasuredRun], metric: str, error: PureError | None = None) -> AxisLaws:
    """Per budget the best share with each dropout of the embedder, and how far dropout moves it."""
    if metric.startswith(f"{TRAIN}/"):
        return AxisLaws()  # dropout changes what is minimised
    data = axis_data(runs, AXES["regularisation"].knob, metric)
    dropout = np.array([run.knobs.get("item_dropout", 0.0) for run in data.runs])
    entries = []
    for c in np.unique(data.budget):
        laws = {}
        for level in np.unique(dropout[data.budget == c]):
            at = (data.budget == c) & (dropout == level)
            laws[float(level)] = judge_fit(valley(data.x[at], data.y[at], direction_of(metric)), error)
        law = _moved_share(laws, int((data.budget == c).sum()))
        entries.append(
            LawEntry(name="regularised_share", axis="regularisation", metric=metric, budget=float(c), law=law)
        )
    return AxisLaws(tuple(entries))


def _moved_share(laws: dict[float, Law], n: int) -> Law:
    """s* with the largest dropout over s* without; open where a valley has no interior optimum."""
    form = "s* with dropout in the embedder over s* without"
    optima = {f"{level:g}": law.values.get("x_opt") for level, law in laws.items()}
    statuses = {f"{level:g}": law.status for level, law in laws.items()}
    heights = {f"{level:g}": law.values.get("y_opt") for level, law in laws.items()}
    details = {"shares": optima, "statuses": statuses, "metrics": heights}
    plain, dropped = laws.get(0.0), laws[max(laws)]
    if plain is None or len(laws) < 2:
        return law_without_values("regularised_share", form, "too_few", n, "runs with and without dropout", **details)
    if not (plain.ok and dropped.ok):
        why = f"the share has no interior optimum {'without' if not plain.ok else 'with'} dropout in the embedder"
        return law_without_values("regularised_share", form, "not_identified", n, why, **details)
    ratio = dropped["x_opt"] / plain["x_opt"]
    by_level = {}
    for level in LEVELS:
        halves: list[tuple[float, float]] = []
        for law in (plain, dropped):
            low, high = law.interval("x_opt", level)
            ends = (max(low, 1e-12), min(high, 1e12))
            halves.append((math.log(law["x_opt"] / ends[0]), math.log(ends[1] / law["x_opt"])))
        low, high = math.hypot(halves[1][0], halves[0][1]), math.hypot(halves[1][1], halves[0][0])
        by_level[level] = {
            "ratio": (ratio * math.exp(-low), ratio * math.exp(high)),
            "share_plain": plain.interval("x_opt", level),
            "share_regularised": dropped.interval("x_opt", level),
        }
    return Law(
        law="regularised_share",
        form=form,
        status="ok",
        values={"ratio": ratio, "share_plain": plain["x_opt"], "share_regularised": dropped["x_opt"]},
        intervals=make_intervals(by_level),
        residuals=Residuals(n=n, dof=0),
        details=details,
    )
