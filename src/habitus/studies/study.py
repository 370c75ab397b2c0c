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
from habitus.errors import Interrupted
from habitus.progress import Note
from habitus.studies.design import decide
from habitus.studies.finishing import (
    DATASET,
    PLAN,
    RECIPE,
    STORE,
    check_metric,
    fit_all,
    fit_loss,
    identified,
    plan_next,
    write_report,
)
from habitus.studies.options import StudyOptions, stopped
from habitus.studies.progress import StudyMonitor, StudyProgress
from habitus.studies.state import StudyState, read_state
from habitus.sweeps import Preset, load_preset, preset_dataset, sweep, usual_workers


@dataclass(frozen=True)
class StudyResult:
    """What a study leaves behind."""

    out: Path
    state: StudyState | None  # absent where only the size of a dry run is known
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
        return train_command(program(), self.recipes, self.data, self.out)


def train_command(name: str, recipes: Sequence[Path], data: Path, out: Path) -> str:
    """The command that trains the recipes of a study into its folder."""
    words = [name, "train", *map(str, recipes), "--data", str(data), "--out", str(out / "run")]
    return " ".join(map(quote, words))


def program() -> str:
    """What a shell calls this program: its name, or where it was started from when the name alone finds nothing."""
    started = Path(sys.argv[0])
    return str(started) if started.name == "habitus" and shutil.which("habitus") is None else "habitus"


def study(
    out: str | Path,
    options: StudyOptions | None = None,
    *,
    progress: Callable[[StudyProgress], None] | None = None,
    note: Note | None = None,
) -> StudyResult:
    """Probe, state a plan, sweep, fit, plan and report into a folder; the same call goes on where it stopped."""
    options = options or StudyOptions()
    options.check()
    check_metric(options.metric)
    out, began = Path(out), time.monotonic()
    preset = load_preset(options.preset)

    def hours_left() -> float | None:
        if options.max_minutes is None:
            return None
        return max(1e-9, options.max_minutes / 60 - (time.monotonic() - began) / 3600)

    story = StudyMonitor(out / STORE, options.metric, progress, note)
    with _stoppable():
        dataset = _dataset(out, options, preset, story)
        state = read_state(out, options, dataset.checksum)
        continued = state is not None
        if state is None:
            state = decide(out, options, preset, dataset, story, hours_left)
        if options.dry_run:
            return StudyResult(out, state, data=dataset.path, seconds=time.monotonic() - began, dry_run=True)
        swept = _sweep_all(out, options, state, dataset, story, hours_left)
        laws = fit_all(out, options, dataset)
        made = plan_next(out, options, laws, dataset)
        recipes = tuple(made.write_recipes(out / RECIPE))
        # The page is kept and passed on: it calls the program by its name.
        page = write_report(out, options.metric, train_command("habitus", recipes, dataset.path, out))
    return StudyResult(
        out=out,
        state=state,
        laws=out / STORE / "laws.json",
        plan=out / PLAN,
        recipes=recipes,
        report=page,
        data=dataset.path,
        seconds=time.monotonic() - began,
        swept=swept,
        continued=continued,
        identified=identified(laws, options.metric),
    )


def _dataset(out: Path, options: StudyOptions, preset: Preset, story: StudyMonitor) -> Dataset:
    if options.data is not None:
        return Dataset.open(options.data)
    path = out / DATASET
    if not path.exists():
        world = preset.world
        story.note(f"making a synthetic world of {world.num_items:,} items and {world.num_users:,} users in {path}")
    out.mkdir(parents=True, exist_ok=True)
    return preset_dataset(preset, path, seed=options.seed, threads=usual_workers("cpu"))


def _sweep_all(
    out: Path,
    options: StudyOptions,
    state: StudyState,
    dataset: Dataset,
    story: StudyMonitor,
    hours_left: Callable[[], float | None],
) -> float:
    """Run every axis in its turn; the seconds that they took."""
    story.begin(state)
    began = time.monotonic()
    for number, (axis, cost) in enumerate(zip(state.axes, state.costs, strict=True)):
        if not cost.budgets:
            story.note(f"{axis}: no cell can be run at these budgets; the axis is left out")
            continue
        fit_loss(out / STORE, options.allow_repeats)
        result = sweep(
            axis,
            dataset,
            out / STORE,
            budgets=cost.budgets,
            preset=state.preset,
            workers=options.workers,
            backend=options.backend,  # type: ignore[arg-type]
            device=options.device,
            max_hours=hours_left(),
            allow_repeats=options.allow_repeats,
            progress=story.sweeping(1 + number, 1 + len(state.axes)),
            note=story.note,
        )
        if not result.complete:
            raise stopped(out, f"{axis} axis", result.stopped)
        story.finished(result)
    return time.monotonic() - began


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGTERM into an exception, so that workers are asked to save before this process ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise Interrupted("asked to stop", next_step="give the same command again: it goes on where it stopped")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
