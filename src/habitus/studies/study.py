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

from habitus.cards import write_study_card
from habitus.data import Dataset, data_facts
from habitus.errors import ConfigError, FitError, Interrupted
from habitus.laws import fit
from habitus.planning import DeviceKind, LogRegime, log_regime
from habitus.progress import Note
from habitus.store import LAWS_FILE, RECORD_FILE, STUDY_RECIPE, Laws, Plan, horizon_of
from habitus.studies import conclusion, finalists, paired_cells
from habitus.studies.baseline import best_baseline, check_horizon
from habitus.studies.design import LARGE_WORLD, design_study, open_stand_in
from habitus.studies.envelope import repeat_share
from habitus.studies.log_search import LogSearch, describe_search
from habitus.studies.log_table import TestTable
from habitus.studies.options import StudyOptions
from habitus.studies.probes import PROBES
from habitus.studies.progress import PROGRESS_FILE, StudyMonitor, StudyProgress, interruption
from habitus.studies.search_state import Envelope, SearchState
from habitus.studies.state import STATE_FILE, StudyState, add_seconds, load_state, request_values
from habitus.sweeps import (
    EvaluationSettings,
    Preset,
    RecipeRunner,
    device_kind,
    load_preset,
    preset_dataset,
    sweep,
    usual_workers,
)

STORE, DATASET, RECIPE = "store", "dataset", "recipe"
DEFAULT_LOG_HOURS = {"cuda": 0.16, "cpu": 0.5}  # of a study of one's own log without an envelope
_ASSUMED_RATES = {"cuda": 5e13, "cpu": 1e10}  # nominal FLOP/s, of a core on a CPU: tells regimes apart, nothing else
_AXES_SHARE = 0.5  # of an envelope between the regimes, for the axes; the rest is searched
# The laws that a recipe rests on.
_RECIPE_LAWS = ("share_law", "share_optimum", "depth_optimum", "critical_batch", "batch_size_law", "batch_size_optimum",
                "size_law", "size_optimum", "loss_law", STUDY_RECIPE, "negatives_law", "negatives_optimum")  # fmt: skip


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
    seconds: float = 0.0  # of all calls together
    swept: float = 0.0  # seconds of the sweeps in this call, to be compared with what was stated
    continued: bool = False  # an earlier call had begun
    identified: dict[str, str] = field(default_factory=dict)  # law -> status
    search: SearchState | None = None  # of a log that ends before the compute does
    table: TestTable | None = None  # of the best run, on test users
    refit: tuple[Path, ...] = ()  # the recipes on training and validation events
    notes: tuple[str, ...] = ()  # what the plan says about itself
    dry_run: bool = False

    @property
    def next_command(self) -> str:
        """What to type next; works as it stands."""
        assert self.data is not None
        return _train_command(program(), self.recipes, self.data, self.out / "run")

    @property
    def check_command(self) -> str:
        """What to type when that run has ended."""
        return f"{program()} plan --check {quote(str(self.out / 'run'))}"

    @property
    def refit_command(self) -> str | None:
        """What trains the model to serve, with the validation events too, where there are recipes for it."""
        assert self.data is not None
        return _train_command(program(), self.refit, self.data, self.out / "refit") if self.refit else None


def study(
    out: str | Path,
    options: StudyOptions | None = None,
    *,
    progress: Callable[[StudyProgress], None] | None = None,
    note: Note | None = None,
) -> StudyResult:
    """Probe, state a plan, sweep or search, fit, plan and report into a folder; the same call continues."""
    options = options or StudyOptions()
    options.check()
    options = options.for_device(device_kind(options.device))
    running = _Study(Path(out), options, progress, note)
    try:
        with _stop_on_signal():
            return running.run()
    finally:
        running.monitor.close()
        if not options.dry_run:
            running.count_seconds()


class _Study:
    """One call."""

    def __init__(
        self,
        out: Path,
        options: StudyOptions,
        progress: Callable[[StudyProgress], None] | None,
        note: Note | None,
    ) -> None:
        assert options.preset is not None and options.metric is not None
        self.out, self.options, self.metric = out, options, options.metric
        self.began = time.monotonic()
        self.preset = _measuring(load_preset(options.preset), self.metric)
        file = None if options.dry_run else out / PROGRESS_FILE
        self.monitor = StudyMonitor(out / STORE, self.metric, progress, note, file)
        self.note = self.monitor.note
        self.dataset = _open_dataset(out, options, self.preset, self.note)
        check_horizon(self.dataset, self.metric)
        self._counted = False

    def run(self) -> StudyResult:
        options, out = self.options, self.out
        state = load_state(out, options, self.dataset.checksum)
        continued = state is not None
        if state is None:
            state = self._begin()
        if options.dry_run:
            if state.search:
                kind: DeviceKind = "gpu" if device_kind(options.device) == "cuda" else "cpu"
                for line in describe_search(self.dataset, kind, self._envelope(state)):
                    self.note(line)
            seconds = time.monotonic() - self.began
            return StudyResult(out, state, data=self.dataset.path, seconds=seconds, dry_run=True)
        self.monitor.begin(state)
        swept = self._sweep_axes(state)
        search = self._search(state) if state.search else None
        laws = self._fit(state, search)
        for line in conclusion.describe_limits(laws, self.metric) if search is not None else ():
            self.note(line)
        plan = self._plan(state, laws, search)
        recipes = tuple(plan.write_recipes(out / RECIPE))
        refit = conclusion.write_refit(plan, out / RECIPE / "refit", self.dataset) if search is not None else ()
        conclusion.register(plan, out / conclusion.PLAN)
        table = self._test_table(plan)
        # The page is kept and passed on: it calls the program by its name.
        command = _train_command("habitus", recipes, self.dataset.path, out / "run")
        page = conclusion.write_report(out, out / STORE, self.metric, command)
        write_study_card(out, data_facts(self.dataset.manifest))
        return StudyResult(
            out=out,
            state=state,
            laws=out / STORE / LAWS_FILE,
            plan=out / conclusion.PLAN,
            recipes=recipes,
            report=page,
            data=self.dataset.path,
            seconds=self.count_seconds(),
            swept=swept,
            continued=continued,
            identified=_recipe_laws(laws, self.metric),
            search=search,
            table=table,
            refit=refit,
            notes=plan.warnings if search is not None else (),
        )

    def count_seconds(self) -> float:
        """Add this call's time to that of earlier ones, once; the sum."""
        seconds = 0.0 if self._counted else time.monotonic() - self.began
        self._counted = True
        return add_seconds(self.out, seconds, calls=int(seconds > 0)).seconds

    def _begin(self) -> StudyState:
        """Decide what is run, and write it down."""
        options = self.options
        regime = None if options.data is None else self._regime()
        # Axes that are named, and one pass that may be left, are what the user asked for, whatever the regime.
        named = bool(options.axes) or options.allow_repeats
        searches = regime is not None and not named and regime.kind != "compute-limited"
        if regime is not None:
            self.note(_describe_log(self.dataset))
            self.note(regime.describe())
        if regime is not None and searches and regime.kind == "data-limited":
            state = self._state_of_search()
        else:
            share = _AXES_SHARE if searches else self._axes_share(regime)
            try:
                state = design_study(
                    self.out, options, self.preset, self.dataset, self.monitor, self._hours_left, share
                )
            except ConfigError as refused:
                if not searches:
                    raise
                self.note(f"no axes: {refused.problem}")
                state = self._state_of_search()
        settings = state.preset.evaluate
        baseline = None if options.dry_run else best_baseline(self.dataset, self.metric, settings)
        state = state.model_copy(update={"regime": regime, "search": searches, "baseline": baseline})
        if not options.dry_run:
            self.out.mkdir(parents=True, exist_ok=True)
            state.write(self.out / STATE_FILE)
        self.monitor.report_plan(state)
        return state

    def _axes_share(self, regime: LogRegime | None) -> float:
        """All of an envelope but what finalists of a log get; a world has none."""
        given = self.options.flops is not None or self.options.gpu_hours is not None
        return 1 - finalists.SHARE if given and regime is not None and regime.kind == "compute-limited" else 1.0

    def _regime(self) -> LogRegime:
        options = self.options
        if options.flops is not None:
            return log_regime(self.dataset, options.flops)
        kind = device_kind(options.device)
        cores = usual_workers("cpu") if kind == "cpu" else 1
        return log_regime(self.dataset, _ASSUMED_RATES[kind] * cores * 3600 * self._hours())

    def _hours(self) -> float:
        return self.options.gpu_hours or DEFAULT_LOG_HOURS[device_kind(self.options.device)]

    def _state_of_search(self) -> StudyState:
        """The decisions of a study without axes."""
        options = self.options
        preset = _measuring(self.preset.model_copy(update={"evaluate": EvaluationSettings()}), self.metric)
        return StudyState(
            dataset_checksum=self.dataset.checksum,
            request=request_values(options),
            preset=preset,
            axes=(),
            costs=(),
            probe_seconds=0.0,
            workers=options.workers or usual_workers(device_kind(options.device)),
        )

    def _hours_left(self) -> float | None:
        """Until this call is to stop."""
        if self.options.max_minutes is None:
            return None
        return max(1e-9, self.options.max_minutes / 60 - (time.monotonic() - self.began) / 3600)

    def _sweep_axes(self, state: StudyState) -> float:
        """Run every axis in its turn; the seconds that they took."""
        options, began = self.options, time.monotonic()
        for number, (axis, cost) in enumerate(zip(state.axes, state.costs, strict=True)):
            if not cost.budgets:
                self.note(f"{axis}: no cell can be run at these budgets; the axis is left out")
                continue
            _fit_loss(self.out / STORE, options.allow_repeats)
            result = sweep(
                axis,
                self.dataset,
                self.out / STORE,
                budgets=cost.budgets,
                preset=state.preset,
                workers=options.workers,
                backend=options.backend,
                device=options.device,
                threads=options.threads,
                max_hours=self._hours_left(),
                allow_repeats=options.allow_repeats,
                speeds=None if state.speeds is None else state.speeds.model(),
                progress=self.monitor.sweep_progress(1 + number, 1 + len(state.axes)),
                note=self.note,
            )
            if not result.complete:
                raise interruption(self.out, f"{axis} axis", result.stopped)
            self.monitor.finish_axis(result)
        return time.monotonic() - began

    def _search(self, state: StudyState) -> SearchState:
        """The best recipe of several passes, within what the axes left of the envelope."""
        envelope, earlier = self._envelope(state), add_seconds(self.out, 0.0, calls=0).seconds

        def left() -> float:
            return max(0.0, envelope.limit - earlier - (time.monotonic() - self.began))

        known = left if envelope.unit == "seconds" else None
        search = LogSearch(
            self.dataset,
            self.out,
            self._runner(state, STORE, known),
            lambda: self._runner(state, PROBES, known),
            self.metric,
            envelope,
            note=self.note,
            pause_after=self._hours_left,
            began=self.began,
            earlier_seconds=earlier,
        )
        result = search.run()
        for line in conclusion.search_warnings(result, self._limit_seconds()):
            self.note(line)
        return result

    def _runner(self, state: StudyState, folder: str, seconds_left: Callable[[], float] | None = None) -> RecipeRunner:
        number = 1 + len(state.axes)
        return RecipeRunner(
            self.dataset,
            self.out / folder,
            state.preset.evaluate,
            device=self.options.device,
            workers=self.options.workers,
            threads=self.options.threads,
            progress=self.monitor.sweep_progress(number, 1 + number, seconds_left),
            note=self.note,
        )

    def _envelope(self, state: StudyState) -> Envelope:
        if self.options.flops is not None:
            return Envelope(self.options.flops - state.flops, "FLOPs")
        return Envelope(self._hours() * 3600, "seconds")  # of all calls, the axes among them

    def _limit_seconds(self) -> float | None:
        return None if self.options.flops is not None else self._hours() * 3600

    def _fit(self, state: StudyState, search: SearchState | None) -> Laws:
        store = self.out / STORE
        if search is not None and not state.axes:
            return conclusion.fit_log_laws(store, self.metric, self.dataset)
        repeats = self.options.allow_repeats
        paired_cells.keep_users(store, state, self.metric, self.dataset, self.options.device, self.note, repeats)
        return conclusion.fit_laws(store, self.options, self.dataset, allow_repeats=repeats)

    def _plan(self, state: StudyState, laws: Laws, search: SearchState | None) -> Plan:
        store = self.out / STORE
        if search is not None:
            return conclusion.plan_winner(store, search, self.dataset, self._limit_seconds())
        plan = conclusion.plan_larger_budget(store, self.options, laws, self.dataset, self.note)
        share = self._axes_share(state.regime)
        if share == 1 or state.search:
            return plan
        flops, hours = state.flops * (1 - share) / share, self._hours_left()
        left = None if hours is None else hours * 3600
        runner = self._runner(state, STORE)
        return finalists.choose_rate(runner, self.dataset, self.metric, flops, left, self.out, self.note).apply(plan)

    def _test_table(self, plan: Plan) -> TestTable | None:
        """Of the recipe's own run, or of the best one; a world's users are no one's."""
        best = conclusion.best_run_hash(self.out / STORE, plan, self.dataset)
        if self.options.data is None or best is None:
            return None
        return conclusion.write_test_table(self.out / STORE, best, self.dataset, self.options.device, self.note)


def _describe_log(dataset: Dataset) -> str:
    counts = dataset.counts("train")
    return (
        f"log: {counts.events:,} training events of {counts.users:,} users on {dataset.num_items:,} items; "
        f"{repeat_share(dataset):.0%} of next items are in the visible past"
    )


def _train_command(name: str, recipes: Sequence[Path], data: Path, out: Path) -> str:
    """The command that trains recipes into a folder."""
    arguments = [name, "train", *map(str, recipes), "--data", str(data), "--out", str(out)]
    return " ".join(map(quote, arguments))


def program() -> str:
    """What a shell calls this program: its name, or where it was started from when the name alone finds nothing."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "habitus" and shutil.which("habitus") is None else "habitus"


def _measuring(preset: Preset, metric: str) -> Preset:
    """The preset whose runs measure the metric's horizon, where it has one."""
    horizon = horizon_of(metric)
    if horizon is None:
        return preset
    return preset.model_copy(update={"evaluate": preset.evaluate.model_copy(update={"horizons": (horizon,)})})


def _open_dataset(out: Path, options: StudyOptions, preset: Preset, note: Note) -> Dataset:
    """The user's dataset, or the synthetic world of the study, generated where it does not exist yet."""
    if options.data is not None:
        return Dataset.open(options.data)
    path = out / DATASET
    size = {"num_items": options.items or preset.world.num_items, "num_users": options.users or preset.world.num_users}
    if options.dry_run and not path.exists() and size["num_users"] * preset.world.events_per_user > LARGE_WORLD:
        note(f"a dry run makes no world of {size['num_items']:,} items and {size['num_users']:,} users")
        return open_stand_in(preset)
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
