"""The verb: from a store (or a flat CSV) to every law its records support."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.laws.axes import AxisLaws, fit_allocation, fit_batch, fit_batch_size, fit_depth, fit_negatives, fit_share
from habitus.laws.bootstrap import allocation_pipeline, hierarchical_bootstrap
from habitus.laws.context_axis import fit_context
from habitus.laws.correlation import correlation_by_budget, paired_regimes, slice_agreement, surrogacy
from habitus.laws.law_builders import law_without_values
from habitus.laws.learning_rate import learning_rate_drift
from habitus.laws.log_axis import fit_log_axis
from habitus.laws.paired_users import PairedUsers
from habitus.laws.pure_error import PureError, axis_error, untested
from habitus.laws.run_sources import read_runs
from habitus.laws.runs import MeasuredRun
from habitus.laws.selection import TAIL_LOSS, Selection, of_group, select
from habitus.laws.shape_axis import fit_regularisation, fit_shape
from habitus.laws.size_test import size_tests
from habitus.laws.study_recipe import fit_study_recipe
from habitus.laws.surface_axis import fit_surface
from habitus.store import (
    CORRELATED_REGIMES,
    EVALUATION_SLICE,
    HISTORY_SLICE,
    LOG_AXIS,
    SURFACE_AXIS,
    EvaluationFiles,
    LawEntry,
    LawGroup,
    Laws,
    NamedBootstrap,
    NamedTables,
    RateDrift,
    RegimePairs,
    RunRow,
    Surrogacy,
    correlated_axes,
    direction_of,
    headline_metrics,
    is_archive,
    open_store,
    read_store_info,
)
from habitus.typed import suggest_name
from habitus.units import pluralize

_DEFINITIONS = {
    "N": "params: embedder + contextualizer, without vocabulary tables",
    "D": "slots_seen: steps * batch_sequences * seq_len",
    "C": "flops_budget: nominal FLOPs of Equation 1, not 6ND",
    "intervals": "80% and 95%, profile likelihood or Student's t; see docs/laws.md",
    "learning rate": "lowest mean training loss of the last 100 steps, per cell, never by validation",
}
_JUDGED_AXES = ("share", "depth", "batch_size", "allocation", "negatives")  # whose valleys seeds can refuse
_FITTERS: dict[str, Callable[..., AxisLaws]] = {
    "share": fit_share,
    "depth": fit_depth,
    "batch": fit_batch,
    "batch_size": fit_batch_size,
    "allocation": fit_allocation,
    "negatives": fit_negatives,
    "context": fit_context,
    "shape": fit_shape,
    "regularisation": fit_regularisation,
    SURFACE_AXIS: fit_surface,
    LOG_AXIS: fit_log_axis,
}


def fit(
    source: str | Path,
    metrics: Sequence[str] = (),
    seed: int = 0,
    bootstrap: int = 0,
    allow_repeats: bool = False,
    group: str = "",
) -> Laws:
    """Every law that the runs of a store, its archive or a CSV support, per metric. The same for the same seed.

    Runs of one optimizer and init form a group, and groups are never pooled. `group` names the one that `entries` and
    everything beside them are of, as in "muon/default"; by default the one with the most runs of the allocation axis.
    """
    if seed < 0 or bootstrap < 0 or bootstrap == 1:
        raise FitError(
            f"seed = {seed}, bootstrap = {bootstrap}", expected="a seed from 0 up; 0 or at least 2 resamplings"
        )
    if is_archive(source):
        with open_store(source) as folder:
            return fit(folder, metrics, seed, bootstrap, allow_repeats, group)
    whole = select(read_runs(source), allow_repeats)
    if not whole.runs:
        reasons = sorted({e.reason for e in whole.exclusions})
        raise FitError(
            f"{source}: none of {len(whole.exclusions)} runs can be used ({'; '.join(reasons[:3])})",
            expected="finished runs with a training loss",
        )
    main, *others = _groups(whole, group)
    selection = of_group(whole, main)
    fitted = _metrics_to_fit(selection.runs, metrics)
    paired = PairedUsers(Path(source))
    by_axis = _fit_group(selection, fitted, paired)
    laws = Laws(
        source=Path(source).name,
        seed=seed,
        metrics=tuple(fitted),
        definitions={**_DEFINITIONS, "optimizer": main.partition("/")[0].replace("any", "") or "not stated"}
        | {"init": main.partition("/")[2]},
        evaluation=_evaluation(Path(source), selection),
        entries=tuple(e for f in by_axis for e in f.entries),
        rollouts=tuple(r for f in by_axis for r in f.rollouts),
        forms=tuple(x for f in by_axis for x in f.forms),
        correlations=tuple(_correlations(selection, fitted, seed)),
        surrogacy=_surrogacy(selection, fitted, seed),
        regimes=tuple(_regimes(selection, seed)),
        learning_rate_drift=_drift(selection),
        bootstrap=tuple(_bootstrap(selection, fitted, bootstrap, seed)),
        learning_rates=selection.choices,
        exclusions=selection.exclusions,
        runs=tuple(_rows(selection)),
        groups=tuple(_law_group(of_group(whole, name), name, fitted, paired) for name in others),
        notes=tuple(_notes(selection, main, others)),
    )
    return laws.model_copy(update={"notes": (*laws.notes, laws.unsealed)}) if laws.unsealed else laws


def _groups(selection: Selection, named: str) -> list[str]:
    """The optimizer/init pairs of the runs, the one that laws are asked of first."""
    runs = [run for run in selection.runs if run.axis != "init"] or list(selection.runs)
    sizes: dict[str, tuple[int, int]] = {}
    for run in runs:
        on_axis, every = sizes.get(run.group, (0, 0))
        sizes[run.group] = (on_axis + (run.axis == "allocation"), every + 1)
    if named and named not in sizes:
        raise FitError(f"group {named!r} has no run ({suggest_name(named, list(sizes))})", expected=", ".join(sizes))
    return sorted(sizes, key=lambda name: (name != named, *(-n for n in sizes[name]), name))


def _fit_group(selection: Selection, metrics: Sequence[str], paired: PairedUsers) -> list[AxisLaws]:
    """Every axis and metric of one group, and whether metrics want another size than the loss does."""
    by_axis = [_fit_axis(axis, metric, selection) for axis in _FITTERS for metric in metrics]
    by_axis += [fit_study_recipe(selection.everything, metric) for metric in metrics]
    tests = size_tests(selection.runs, metrics, lambda axis, metric: _error_of(selection, axis, metric), paired)
    return [*by_axis, AxisLaws(tuple(tests))]


def _law_group(selection: Selection, name: str, metrics: Sequence[str], paired: PairedUsers) -> LawGroup:
    optimizer, _, init = name.partition("/")
    by_axis = _fit_group(selection, metrics, paired)
    return LawGroup(
        optimizer=optimizer,
        init=init,
        entries=tuple(e for f in by_axis for e in f.entries),
        rollouts=tuple(r for f in by_axis for r in f.rollouts),
        runs=tuple(_rows(selection)),
    )


def _error_of(selection: Selection, axis: str, metric: str) -> PureError | None:
    """The error from seed to seed: the axis's own, or that of all runs of stage 1 where it has too little."""
    return axis_error(selection.everything, axis, metric)


def _metrics_to_fit(runs: Sequence[MeasuredRun], named: Sequence[str]) -> list[str]:
    present = _metric_names(runs)
    present |= {name for run in runs for _, name, _ in run.trajectory}
    for name in named:
        if name not in present:
            raise FitError(
                f"metric {name!r} stands in no run ({suggest_name(name, sorted(present))})",
                expected="<regime>/<metric>[@k][/<slice>], as in batch/loss or catalogue/recall@10",
            )
    for name in named:
        direction_of(name)  # refuses what it does not know
    kept = sorted({name.partition(f"/{EVALUATION_SLICE}")[2] for name in present} - {""})
    headlines = [f"{name}/{EVALUATION_SLICE}{one}" for one in kept for name in headline_metrics()]
    return list(dict.fromkeys(named)) or [name for name in (*headline_metrics(), *headlines) if name in present]


def _fit_axis(axis: str, metric: str, selection: Selection) -> AxisLaws:
    """The axis's laws for a metric; where it cannot be fitted, one entry says why."""
    runs = [run for run in selection.runs if run.axis == axis]
    if axis == "batch":
        measured = any(name == metric for run in runs for _, name, _ in run.trajectory)
    else:
        measured = any(metric in run.metrics for run in runs)
    # Stage 2 trains against pools of different sizes, so its own training loss ranks nothing across K.
    if not measured or (axis == "negatives" and not metric.startswith("catalogue/")):
        return AxisLaws()
    judged_by: tuple[Any, ...] = () if axis == LOG_AXIS else (_error_of(selection, axis, metric),)
    if axis == "allocation":
        judged_by = (*judged_by, selection.everything)
    try:
        return _FITTERS[axis](runs, metric, *judged_by)
    except FitError as error:
        law = law_without_values(axis, "", "not_identified", len(runs), str(error).replace("\n", " "))
        return AxisLaws((LawEntry(name=f"{axis}_fit", axis=axis, metric=metric, law=law),))


def _metric_names(runs: Iterable[MeasuredRun]) -> set[str]:
    """Names that stand in some run; most runs have the same ones."""
    return {name for names in {tuple(run.metrics) for run in runs} for name in names}


def _table(runs: Sequence[MeasuredRun], names: Sequence[str]) -> dict[str, np.ndarray]:
    return {name: np.array([run.metrics.get(name, np.nan) for run in runs]) for name in names}


def _correlations(selection: Selection, metrics: Sequence[str], seed: int) -> list[NamedTables]:
    """Stage 1 and stage 2 matrices, and slice agreement, each with the best rate only and with all runs."""
    correlations = []
    for label, pool in (("best learning rate only", selection.runs), ("all evaluations", selection.everything)):
        for stage, regime in CORRELATED_REGIMES.items():
            axes = correlated_axes(stage)
            runs = [run for run in pool if run.axis in axes]
            present = _metric_names(runs)
            names = [m for m in metrics if m.startswith(f"{regime}/") and m in present]
            if len(runs) < 3:
                continue
            budgets = [run.budget for run in runs]
            if len(names) >= 2:
                tables = correlation_by_budget(budgets, _table(runs, names), seed)
                correlations.append(NamedTables(name=stage, runs=label, tables=tables))
            for metric in names:
                slices = sorted(m for m in present if m.startswith(f"{metric}/{HISTORY_SLICE}"))
                if slices:
                    columns = {m.removeprefix(metric + "/"): v for m, v in _table(runs, slices).items()}
                    columns["all"] = _table(runs, [metric])[metric]
                    tables = slice_agreement(budgets, columns, seed)
                    name = f"slices:{metric}"
                    correlations.append(NamedTables(name=name, runs=label, tables=tables))
    return correlations


def _surrogacy(selection: Selection, metrics: Sequence[str], seed: int) -> tuple[Surrogacy, ...]:
    runs = [r for r in selection.runs if r.axis == "negatives" and "train/in_batch_loss" in r.metrics]
    names = [m for m in metrics if m.startswith("catalogue/") and any(m in r.metrics for r in runs)]
    if not runs or not names:
        return ()
    loss = [run.metrics["train/in_batch_loss"] for run in runs]
    return surrogacy([run.budget for run in runs], loss, _table(runs, names), seed)


def _regimes(selection: Selection, seed: int) -> list[RegimePairs]:
    """Both regimes side by side, for every axis and budget whose runs were scored in both."""
    regimes = []
    for axis in sorted({run.axis for run in selection.runs}):
        for budget in sorted({run.budget for run in selection.runs if run.axis == axis}):
            runs = [run for run in selection.runs if run.axis == axis and run.budget == budget]
            names = sorted(
                {
                    m.removeprefix("batch/")
                    for run in runs
                    for m in run.metrics
                    if m.startswith("batch/") and m.count("/") == 1
                    and "catalogue/" + m.removeprefix("batch/") in run.metrics
                }
            )  # fmt: skip
            if names and len(runs) >= 3:
                local = _table(runs, [f"batch/{n}" for n in names])
                catalogue = _table(runs, [f"catalogue/{n}" for n in names])
                pairs = paired_regimes(
                    {n: local[f"batch/{n}"] for n in names}, {n: catalogue[f"catalogue/{n}"] for n in names}, seed
                )
                regimes.append(RegimePairs(axis=axis, budget=budget, pairs=pairs))
    return regimes


def _drift(selection: Selection) -> dict[str, RateDrift]:
    drifts = {}
    for init in sorted({run.init for run in selection.runs if run.axis == "init"}):
        runs = [r for r in selection.runs if r.axis == "init" and r.init == init and "params" in r.knobs]
        if len({run.knobs["params"] for run in runs}) >= 2:
            # Two seeds that agree to the last digit are not one row listed twice.
            rows = dict.fromkeys((run.knobs["params"], run.learning_rate, run.metrics[TAIL_LOSS]) for run in runs)
            sizes, rates, losses = zip(*rows, strict=True)
            drifts[init] = learning_rate_drift(sizes, rates, losses)
    return drifts


def _bootstrap(selection: Selection, metrics: Sequence[str], times: int, seed: int) -> list[NamedBootstrap]:
    runs = selection.by_axis.get("allocation", [])
    results = []
    for metric in metrics if times else ():
        if any(metric in run.metrics for run in runs):
            try:
                result = hierarchical_bootstrap(runs, allocation_pipeline(metric, direction_of(metric)), times, seed)
            except FitError:
                continue  # the laws of this metric already say why there are none
            results.append(NamedBootstrap(metric=metric, result=result))
    return results


def _rows(selection: Selection) -> list[RunRow]:
    chosen = {id(run) for run in selection.runs}
    return [
        RunRow(
            axis=run.axis,
            budget=run.budget,
            cell_id=run.cell_id,
            learning_rate=run.learning_rate,
            seed=run.seed,
            init=run.init,
            chosen=id(run) in chosen,
            knobs=dict(run.knobs),
            metrics=dict(run.metrics),
            trajectory=run.trajectory if run.axis == "batch" else (),
        )
        for run in selection.everything
    ]


def _evaluation(source: Path, selection: Selection) -> EvaluationFiles | None:
    """What the store says that all of its runs were evaluated on; None of a CSV, and where a Record says otherwise."""
    if not source.is_dir():
        return None
    evaluation = read_store_info(source).evaluation
    return evaluation if _query_sets(selection) <= {evaluation.query_set_checksum} else None


def _query_sets(selection: Selection) -> set[str]:
    """Checksums of the queries that runs were evaluated on.

    Runs of the context axis have windows of their own, and are compared on queries that all of them share.
    """
    return {run.query_set for run in selection.runs if run.axis != "context"} - {""}


def _notes(selection: Selection, group: str, other_groups: Sequence[str]) -> list[str]:
    notes = []
    query_sets = _query_sets(selection)
    if len(query_sets) > 1:
        notes.append(
            f"the runs were evaluated on {len(query_sets)} different query sets: their metrics are not comparable"
        )
    if other_groups:
        notes.append(
            f"laws are of {group} (optimizer and init are part of a law); "
            f"{', '.join(other_groups)}: fitted apart, see groups, or --group"
        )
    edges = [c for c in selection.choices if c.at_edge]
    if edges:
        named = ", ".join(f"{c.axis} {c.cell_id} at {c.budget:.3g}" for c in edges[:5])
        notes.append(
            f"{len(edges)} of {len(selection.choices)} cells have their best learning rate at the edge of its grid "
            f"({named}{', ...' if len(edges) > 5 else ''}): extend those grids"
        )
    if selection.exclusions:
        notes.append(f"{pluralize(len(selection.exclusions), 'run')} left out; see exclusions")
    return [*notes, *_untested(selection)]


def _untested(selection: Selection) -> list[str]:
    """Which axes have no seeds that could show a wrong form, their own or those of others, and which have too few."""
    axes_by_doubt: dict[str, list[str]] = {}
    for axis in _JUDGED_AXES:
        if axis in selection.by_axis:
            axes_by_doubt.setdefault(untested(_error_of(selection, axis, TAIL_LOSS)), []).append(axis)
    return [f"{', '.join(axes)}: {doubt}" for doubt, axes in axes_by_doubt.items() if doubt]
