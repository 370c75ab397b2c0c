"""After the last run: laws, the recipe, the table on test users, the page."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

from habitus.data import Dataset
from habitus.errors import ConfigError, FitError, HabitusError, RunError
from habitus.laws import fit
from habitus.planning import PlanOptions, log_limits, plan_best_run, plan_of_run, refit_recipe, register_plan
from habitus.planning import plan as make_plan
from habitus.progress import Note
from habitus.record import Record
from habitus.store import (
    LAWS_FILE,
    LOG_AXIS,
    TEST_TABLE_FILE,
    Laws,
    Plan,
    RegisteredPlan,
    cell_folder,
    direction_of,
    headline_metrics,
    read_record,
    read_records,
)
from habitus.studies.log_table import TestTable, compare_on_test
from habitus.studies.options import StudyOptions
from habitus.studies.search_state import SearchState
from habitus.units import format_seconds

PLAN, REPORT = "plan.json", "report.html"
_OTHER_SHARES = (0.5, 0.0)  # of stage 2, where the usual one leaves it or stage 1 too few steps
_LOG_METRICS = ("catalogue/ndcg@10", "catalogue/recall@10", "catalogue/loss")


def fit_laws(store: Path, options: StudyOptions, dataset: Dataset, *, allow_repeats: bool) -> Laws:
    """The laws of the store, with the dataset they belong to."""
    assert options.metric is not None
    laws = fit(store, allow_repeats=allow_repeats)
    metrics = [name for name in headline_metrics() if name in laws.metrics]
    if options.metric not in metrics:
        if not any(options.metric in run.metrics for run in laws.runs):
            raise ConfigError(
                f"no Record of {store} has --metric {options.metric}", expected=f"one of {', '.join(metrics)}"
            )
        laws = fit(store, [*metrics, options.metric], allow_repeats=allow_repeats)
    return _write_laws(laws, store, dataset)


def fit_log_laws(store: Path, metric: str, dataset: Dataset) -> Laws:
    """The laws of a search: of the metric and of those that a log is judged by, since each takes seconds."""
    return _write_laws(fit(store, list(dict.fromkeys([metric, *_LOG_METRICS]))), store, dataset)


def _write_laws(laws: Laws, store: Path, dataset: Dataset) -> Laws:
    laws = laws.model_copy(update={"extra": {**laws.extra, "dataset_checksum": dataset.checksum}})
    laws.write(store / LAWS_FILE)
    return laws


def plan_larger_budget(store: Path, options: StudyOptions, laws: Laws, dataset: Dataset, note: Note) -> Plan:
    """The recipe for the next larger budget; where no plan can be made, the best run's."""
    assert options.metric is not None
    sizes = [run.budget for run in laws.runs if run.axis == "allocation"]  # the batch axes reach beyond them
    largest = max(sizes or [run.budget for run in laws.runs])
    flops = options.plan_flops or float(f"{10 * largest:.3g}")
    common = PlanOptions(laws=store / LAWS_FILE, dataset=dataset, gpu=options.gpu)
    why = ""
    for share in (common.stage2_share, *_OTHER_SHARES):  # a second stage may be what is too dear, or too poor
        try:
            plan = make_plan(flops, options.metric, replace(common, stage2_share=share))
        except (ConfigError, FitError, RunError) as refused:
            why = why or refused.problem
            continue
        said = (f"stage 2 has {share:.0%} of the budget: {why}",) if why else ()
        return plan.model_copy(update={"warnings": (*said, *plan.warnings)})
    why = f"no plan for {flops:.3g} FLOPs: {why}; the recipe is that of the best run"
    note(why)
    return plan_best_run(store, options.metric, dataset, warnings=(why,))


def plan_winner(store: Path, search: SearchState, dataset: Dataset, limit_seconds: float | None) -> Plan:
    """The plan of a search's winner."""
    assert search.winner is not None
    first = read_record(store, search.winner)
    second = None if search.stage2 is None else read_record(store, search.stage2)
    assert first is not None
    runs = sum(len(one.trials) for one in search.rounds)
    seeds = len(search.winner_values)
    over = f", {seeds} seeds" if seeds > 1 else ""
    how = f"best of {runs} runs by {search.metric} on validation{over}"
    return plan_of_run(
        first, second, dataset, search.metric, how=how, values=search.winner_values,
        laws=str(store / LAWS_FILE), warnings=search_warnings(search, limit_seconds),
    )  # fmt: skip


def search_warnings(search: SearchState, limit_seconds: float | None) -> list[str]:
    """Where the log ends, and what seeds say about the choice."""
    lines = [search.ended]
    unused = 0.0 if limit_seconds is None else limit_seconds - search.seconds
    if limit_seconds is not None and unused > 0.25 * limit_seconds:
        lines.append(
            f"the log ended after {format_seconds(search.seconds)}: {format_seconds(unused)} of "
            f"{format_seconds(limit_seconds)} were not needed"
        )
    if len(search.winner_values) > 1:
        low, high = min(search.winner_values), max(search.winner_values)
        lines.append(
            f"{search.metric} of the recipe's seeds: mean {fmean(search.winner_values):.4f}, from {low:.4f} to "
            f"{high:.4f}; the recipe has the best seed"
        )
    return lines


def describe_limits(laws: Laws, metric: str) -> list[str]:
    """What the law of a finite log says about more passes, more parameters and more users, where it is fitted."""
    entries = [entry for entry in laws.entries if entry.axis == LOG_AXIS and entry.metric == metric]
    return [line for entry in entries for line in log_limits(entry.law, metric).lines()]


def write_refit(plan: Plan, folder: Path, dataset: Dataset) -> tuple[Path, ...]:
    """The plan's recipes on training and validation events, to be served: nothing is left to choose."""
    first = refit_recipe(plan.stage1, dataset)
    more = first.train.steps / plan.stage1.train.steps
    second = None
    if plan.stage2 is not None:
        train = plan.stage2.train.model_copy(update={"steps": max(1, round(more * plan.stage2.train.steps))})
        second = plan.stage2.model_copy(update={"data": first.data, "train": train})
    return tuple(plan.model_copy(update={"stage1": first, "stage2": second}).write_recipes(folder))


def register(plan: Plan, path: Path) -> None:
    """Register the plan before anyone runs it; one that says something else is kept beside it."""
    if path.exists() and not _predicts_the_same(RegisteredPlan.read(path), plan):
        path.replace(path.with_name("plan-before.json"))
    if not path.exists():
        register_plan(plan, path)


def write_test_table(store: Path, run_hash: str, dataset: Dataset, device: str, note: Note) -> TestTable | None:
    """The table of a run on test users, also as a file of the store; None where it cannot be made, which is said."""
    path = store / TEST_TABLE_FILE
    note("comparing with baselines on test users")
    try:
        table = compare_on_test(cell_folder(store, run_hash), dataset, device)
    except HabitusError as error:
        note(f"no table on test users: {error.problem}")
        return None
    table.write(path)
    return table


def write_report(out: Path, store: Path, metric: str, next_command: str) -> Path:
    from habitus.reporting import report

    name = out.resolve().name
    title = f"Scaling study for {metric}" + (f": {name}" if name != "study" else "")
    return report(store, out / REPORT, plan=out / PLAN, title=title, next_command=next_command)


def best_run_hash(store: Path, plan: Plan, dataset: Dataset) -> str | None:
    """The store's run that the plan's recipe is; else its best one by the metric."""
    for recipe in (plan.stage2, plan.stage1):
        if recipe is None:
            continue
        for record in read_records(store):
            same = record.recipe.model_copy(update={"train": _no_parent(record)}) == recipe.model_copy(
                update={"train": recipe.train.model_copy(update={"parent": None})}
            )
            if same and record.status == "done":
                return record.recipe_hash
    records = [r for r in read_records(store) if r.status == "done" and plan.metric in r.metrics]
    sign = 1.0 if direction_of(plan.metric) == "max" else -1.0
    best = max(records, key=lambda record: sign * record.metrics[plan.metric].value, default=None)
    return None if best is None else best.recipe_hash


def _no_parent(record: Record) -> object:
    return record.recipe.train.model_copy(update={"parent": None})


def _predicts_the_same(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same recipes and predictions; the hours may differ, since machines do."""
    return (one.stage1, one.stage2, one.predictions) == (other.stage1, other.stage2, other.predictions)
