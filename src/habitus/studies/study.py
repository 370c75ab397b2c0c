"""The verb: event log in; laws, a recipe and a page out."""

import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from types import FrameType

from habitus.data import Dataset
from habitus.errors import ConfigError, FitError, Interrupted
from habitus.laws import fit
from habitus.planning import PlanOptions, register_plan
from habitus.planning import plan as make_plan
from habitus.progress import Note
from habitus.store import LAWS_FILE, RECORD_FILE, Laws, Plan, RegisteredPlan, headline_metrics
from habitus.studies.design import design_study
from habitus.studies.options import StudyOptions
from habitus.studies.progress import StudyMonitor, StudyProgress, interruption
from habitus.studies.state import StudyState, load_state
from habitus.sweeps import Preset, load_preset, preset_dataset, sweep, usual_workers

STORE, DATASET, RECIPE, PLAN, REPORT = "store", "dataset", "recipe", "plan.json", "report.html"
# The laws that a recipe rests on.
_RECIPE_LAWS = ("share_law", "share_optimum", "depth_optimum", "critical_batch", "size_law", "size_optimum",
                "loss_law", "negatives_law", "negatives_optimum")  # fmt: skip


@dataclass(frozen=True)
class StudyResult:
    """What a study leaves behind."""

    out: Path
    state: StudyState
    laws: Path | None = None
    plan: Path | None = None
    recipes: tuple[Path, ...] = ()
    report: Path | None = None
    data: Path | None = None
    seconds: float = 0.0  # of this call
    swept: float = 0.0  # seconds of the sweeps in this call, to be compared with what was stated
    continued: bool = False  # an earlier call had begun
    identified: dict[str, str] = field(default_factory=dict)  # law -> status
    dry_run: bool = False

    @property
    def next_command(self) -> str:
        """What to type next; works as it stands."""
        assert self.data is not None
        return _train_command(program(), self.recipes, self.data, self.out)


def study(
    out: str | Path,
    options: StudyOptions | None = None,
    *,
    progress: Callable[[StudyProgress], None] | None = None,
    note: Note | None = None,
) -> StudyResult:
    """Probe, state a plan, sweep, fit, plan and report into a folder; the same call continues where it stopped."""
    options = options or StudyOptions()
    options.check()
    out, began = Path(out), time.monotonic()
    preset = load_preset(options.preset)

    def hours_left() -> float | None:
        if options.max_minutes is None:
            return None
        return max(1e-9, options.max_minutes / 60 - (time.monotonic() - began) / 3600)

    monitor = StudyMonitor(out / STORE, options.metric, progress, note)
    with _stop_on_signal():
        dataset = _open_dataset(out, options, preset, monitor.note)
        state = load_state(out, options, dataset.checksum)
        continued = state is not None
        if state is None:
            state = design_study(out, options, preset, dataset, monitor, hours_left)
        if options.dry_run:
            return StudyResult(out, state, data=dataset.path, seconds=time.monotonic() - began, dry_run=True)
        swept = _sweep_axes(out, options, state, dataset, monitor, hours_left)
        laws = _fit_laws(out / STORE, options, dataset)
        plan = _plan_next(out, options, laws, dataset)
        recipes = tuple(plan.write_recipes(out / RECIPE))
        # The page is kept and passed on: it calls the program by its name.
        page = _write_report(out, options.metric, _train_command("habitus", recipes, dataset.path, out))
    return StudyResult(
        out=out,
        state=state,
        laws=out / STORE / LAWS_FILE,
        plan=out / PLAN,
        recipes=recipes,
        report=page,
        data=dataset.path,
        seconds=time.monotonic() - began,
        swept=swept,
        continued=continued,
        identified=_recipe_laws(laws, options.metric),
    )


def _train_command(name: str, recipes: Sequence[Path], data: Path, out: Path) -> str:
    """The command that trains the recipes of a study into its folder."""
    arguments = [name, "train", *map(str, recipes), "--data", str(data), "--out", str(out / "run")]
    return " ".join(map(quote, arguments))


def program() -> str:
    """What a shell calls this program: its name, or where it was started from when the name alone finds nothing."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "habitus" and shutil.which("habitus") is None else "habitus"


def _open_dataset(out: Path, options: StudyOptions, preset: Preset, note: Note) -> Dataset:
    """The user's dataset, or the synthetic world of the study, generated where it does not exist yet."""
    if options.data is not None:
        return Dataset.open(options.data)
    path = out / DATASET
    size = {"num_items": options.items or preset.world.num_items, "num_users": options.users or preset.world.num_users}
    if not path.exists():
        note(f"making a synthetic world of {size['num_items']:,} items and {size['num_users']:,} users in {path}")
    out.mkdir(parents=True, exist_ok=True)
    sized = preset.model_copy(update={"world": preset.world.model_copy(update=size)})
    dataset = preset_dataset(sized, path, seed=options.seed, threads=usual_workers("cpu"))
    if dataset.num_items != size["num_items"]:
        raise ConfigError(
            f"{path} holds a world of {dataset.num_items:,} items",
            expected=f"{size['num_items']:,} items",
            next_step="give --items as before, or another --out",
        )
    return dataset


def _sweep_axes(
    out: Path,
    options: StudyOptions,
    state: StudyState,
    dataset: Dataset,
    monitor: StudyMonitor,
    hours_left: Callable[[], float | None],
) -> float:
    """Run every axis in its turn; the seconds that they took."""
    monitor.begin(state)
    began = time.monotonic()
    for number, (axis, cost) in enumerate(zip(state.axes, state.costs, strict=True)):
        if not cost.budgets:
            monitor.note(f"{axis}: no cell can be run at these budgets; the axis is left out")
            continue
        _fit_loss(out / STORE, options.allow_repeats)
        result = sweep(
            axis,
            dataset,
            out / STORE,
            budgets=cost.budgets,
            preset=state.preset,
            workers=options.workers,
            backend=options.backend,
            device=options.device,
            max_hours=hours_left(),
            allow_repeats=options.allow_repeats,
            progress=monitor.sweep_progress(1 + number, 1 + len(state.axes)),
            note=monitor.note,
        )
        if not result.complete:
            raise interruption(out, f"{axis} axis", result.stopped)
        monitor.finish_axis(result)
    return time.monotonic() - began


def _fit_loss(store: Path, allow_repeats: bool) -> None:
    """Write the laws of the loss alone, all that the next axis needs; the others are fitted once, at the end."""
    records = [path.stat().st_mtime for path in store.glob(f"cells/*/{RECORD_FILE}")]
    laws = store / LAWS_FILE
    if not records or (laws.exists() and laws.stat().st_mtime >= max(records)):
        return
    try:
        fit(store, ["batch/loss"], allow_repeats=allow_repeats).write(laws)
    except FitError:  # the sweep says what it does without laws
        return


def _fit_laws(store: Path, options: StudyOptions, dataset: Dataset) -> Laws:
    """The laws of the store, with the dataset they belong to."""
    laws = fit(store, allow_repeats=options.allow_repeats)
    metrics = [name for name in headline_metrics() if name in laws.metrics]
    if options.metric not in metrics:
        if not any(options.metric in run.metrics for run in laws.runs):
            raise ConfigError(
                f"no Record of {store} has --metric {options.metric}", expected=f"one of {', '.join(metrics)}"
            )
        laws = fit(store, [*metrics, options.metric], allow_repeats=options.allow_repeats)
    laws = laws.model_copy(update={"extra": {**laws.extra, "dataset_checksum": dataset.checksum}})
    laws.write(store / LAWS_FILE)
    return laws


def _plan_next(out: Path, options: StudyOptions, laws: Laws, dataset: Dataset) -> Plan:
    """The recipe for the next larger budget, registered before anyone runs it."""
    largest = max(run.budget for run in laws.runs)
    plan = make_plan(
        options.plan_flops or float(f"{10 * largest:.3g}"),
        options.metric,
        PlanOptions(laws=out / STORE / LAWS_FILE, dataset=dataset, gpu=options.gpu),
    )
    path = out / PLAN
    if path.exists() and not _predicts_the_same(RegisteredPlan.read(path), plan):
        path.replace(path.with_name("plan-before.json"))
    if not path.exists():
        register_plan(plan, path)
    return plan


def _predicts_the_same(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same recipes and predictions; the hours may differ, since machines do."""
    return (one.stage1, one.stage2, one.predictions) == (other.stage1, other.stage2, other.predictions)


def _write_report(out: Path, metric: str, next_command: str) -> Path:
    from habitus.reporting import report

    name = out.resolve().name
    title = f"Scaling study for {metric}" + (f": {name}" if name != "study" else "")
    return report(out / STORE, out / REPORT, plan=out / PLAN, title=title, next_command=next_command)


def _recipe_laws(laws: Laws, metric: str) -> dict[str, str]:
    """The laws that the recipe rests on, and whether each is identified."""
    statuses: dict[str, str] = {}
    for name in _RECIPE_LAWS:
        for entry in laws.entries:
            if entry.name == name and entry.metric in (metric, "batch/loss", "catalogue/loss"):
                at = "" if entry.budget is None else f" at {entry.budget:.3g}"
                statuses[f"{name} of {entry.metric}{at}"] = entry.law.status
    return statuses


@contextmanager
def _stop_on_signal() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that workers are asked to save before this process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted("asked to stop", next_step="run the same command again: it continues where it stopped")

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
