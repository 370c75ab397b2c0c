"""After the sweeps, and between them: laws, the next recipe, the page."""

from pathlib import Path

from habitus.data import Dataset
from habitus.errors import ConfigError, FitError
from habitus.laws import fit
from habitus.planning import PlanOptions, register
from habitus.planning import plan as make_plan
from habitus.store import CUTOFFS, METRICS, REGIMES, Laws, Plan, RegisteredPlan, direction_of, headline_metrics
from habitus.studies.options import StudyOptions

STORE, DATASET, RECIPE, PLAN, REPORT = "store", "dataset", "recipe", "plan.json", "report.html"


def check_metric(metric: str) -> None:
    """Refuse a metric that no run of a study records, before anything is spent."""
    regime, _, bare = metric.partition("/")
    kinds = [kind for kind in METRICS.values() if kind.group is not None]
    if regime not in REGIMES or bare.partition("/")[0] not in [name for kind in kinds for name in kind.names()]:
        plain, ranked = (", ".join(k.name for k in kinds if k.at_cutoff is at) for at in (False, True))
        raise ConfigError(
            f"--metric {metric!r} is not recorded",
            expected=f"{'/ or '.join(REGIMES)}/ and {plain}, or {ranked} at @{', '.join(map(str, CUTOFFS))}, "
            "as in catalogue/recall@10",
        )
    direction_of(metric)


def fit_loss(store: Path, allow_repeats: bool) -> None:
    """The laws of the loss alone, which is all that the next axis asks for; the others are fitted once, at the end."""
    records = [path.stat().st_mtime for path in store.glob("cells/*/record.json")]
    laws = store / "laws.json"
    if not records or (laws.exists() and laws.stat().st_mtime >= max(records)):
        return
    try:
        fit(store, ["batch/loss"], allow_repeats=allow_repeats).write(laws)
    except FitError:  # the sweep says what it does without laws
        return


def fit_all(out: Path, options: StudyOptions, dataset: Dataset) -> Laws:
    """The laws of the store, with the dataset they belong to."""
    store = out / STORE
    first = fit(store, allow_repeats=options.allow_repeats)
    wanted = [name for name in headline_metrics() if name in first.metrics]
    if options.metric not in wanted:
        if not any(options.metric in run.metrics for run in first.runs):
            raise ConfigError(
                f"--metric {options.metric} stands in no Record of {store}", expected=f"one of {', '.join(wanted)}"
            )
        first = fit(store, [*wanted, options.metric], allow_repeats=options.allow_repeats)
    laws = first.model_copy(update={"extra": {**first.extra, "dataset_checksum": dataset.checksum}})
    laws.write(store / "laws.json")
    return laws


def plan_next(out: Path, options: StudyOptions, laws: Laws, dataset: Dataset) -> Plan:
    """The recipe for the next larger budget, registered before anyone runs it."""
    top = max(run.budget for run in laws.runs)
    made = make_plan(
        options.plan_flops or float(f"{10 * top:.3g}"),
        options.metric,
        PlanOptions(laws=out / STORE / "laws.json", dataset=dataset, gpu=options.gpu),
    )
    path = out / PLAN
    if path.exists() and not _same_promise(RegisteredPlan.read(path), made):
        path.replace(path.with_name("plan-before.json"))
    if not path.exists():
        register(made, path)
    return made


def _same_promise(registered: Plan, made: Plan) -> bool:
    """Whether two plans ask and promise the same; the hours may differ, since machines do."""
    return (registered.stage1, registered.stage2, registered.predictions) == (
        made.stage1,
        made.stage2,
        made.predictions,
    )


def write_report(out: Path, metric: str, next_command: str) -> Path:
    from habitus.reporting import report

    name = out.resolve().name
    title = f"Scaling study for {metric}" + (f": {name}" if name != "study" else "")
    return report(out / STORE, out / REPORT, plan=out / PLAN, title=title, next_command=next_command)


def identified(laws: Laws, metric: str) -> dict[str, str]:
    """The laws that the recipe rests on, and whether each is identified."""
    found: dict[str, str] = {}
    for name in ("share_law", "share_optimum", "depth_optimum", "critical_batch", "size_law", "size_optimum",
                 "loss_law", "negatives_law", "negatives_optimum"):  # fmt: skip
        for entry in laws.entries:
            if entry.name == name and entry.metric in (metric, "batch/loss", "catalogue/loss"):
                at = "" if entry.budget is None else f" at {entry.budget:.3g}"
                found[f"{name} of {entry.metric}{at}"] = entry.law.status
    return found
