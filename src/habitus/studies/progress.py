"""What a study reports on the way: the plan, then axis, runs done, best so far, time left."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from habitus.errors import ConfigError, HabitusError, Interrupted
from habitus.progress import Note
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.sizing import Parts, pace, part_factors, seconds_taken
from habitus.store import RECORD_FILE, direction_of, read_record
from habitus.studies.paired_cells import stated_seconds
from habitus.studies.state import StatedSpeeds, StudyState
from habitus.sweeps import SweepProgress, SweepResult
from habitus.typed import Typed
from habitus.units import format_seconds

PROGRESS_FILE = "progress.json"  # in a study's folder while it runs
_LOOK_SECONDS = 2.0


class AxisProgress(Typed):
    """How far one axis, or one kind of round of a search, is."""

    axis: str
    done: int
    total: int
    failed: int = 0


class StudyProgress(Typed):
    """Where a study is."""

    axis: str = Field(description="probes, share, depth, ...")
    number: int = Field(description="Of the axis, the probes being 0.")
    axes: int
    done: int
    total: int
    failed: int
    best: str = Field(description="Metric and value of the best run so far, and of the best baseline.")
    seconds_left: float | None = Field(None, description="Of the whole study.")
    metric: str = ""
    baseline: float | None = Field(None, description="The metric of the best baseline.")
    per_axis: tuple[AxisProgress, ...] = ()
    curve: tuple[float, ...] = Field((), description="The best value after each run that ended, in their order.")
    at: float = Field(0.0, description="When this was so, in seconds since 1970.")
    first_at: float | None = Field(None, description="When the time left was first estimated.")
    first_left: float | None = Field(None, description="The seconds that were left then.")

    def drift(self) -> float | None:
        """How much longer the whole takes by now than was first said, as a share of it; None before that is known."""
        if self.seconds_left is None or self.first_at is None or not self.first_left:
            return None
        return (self.at + self.seconds_left - self.first_at) / self.first_left - 1


@dataclass(frozen=True)
class EndedRun:
    """What the time of a run was made of."""

    recipe: Recipe
    steps: int
    executed_flops: float
    taken: float

    @classmethod
    def of(cls, record: Record) -> "EndedRun | None":
        """None of failed runs, and of those that share their steps with others."""
        taken, executed = seconds_taken(record), record.flops_executed
        if taken is None or executed is None or record.recipe.train.schedule == "wsd":
            return None
        return cls(record.recipe, record.steps, executed, taken)


class BestSoFar:
    """The best value of a metric among the runs of a store, as they end; every Record is read once."""

    def __init__(self, store: Path, metric: str) -> None:
        self.store, self.metric = store, metric
        self.curve: list[float] = []
        self.ended: list[EndedRun] = []
        self._seen: set[str] = set()
        self._last_look = 0.0

    def look(self) -> list[float]:
        """The best value after each run that has the metric; looked up every two seconds."""
        if time.monotonic() - self._last_look <= _LOOK_SECONDS:
            return self.curve
        self._last_look = time.monotonic()
        new = [path for path in self.store.glob(f"cells/*/{RECORD_FILE}") if path.parent.name not in self._seen]
        better = min if direction_of(self.metric) == "min" else max
        for path in sorted(new, key=modified_at):
            self._seen.add(path.parent.name)
            try:
                record = read_record(self.store, path.parent.name)
            except Interrupted:  # a signal may arrive anywhere
                raise
            except (HabitusError, OSError):
                continue  # fit, plan and report refuse it by name
            if record is None:
                continue
            ended, metric = EndedRun.of(record), record.metrics.get(self.metric)
            if ended is not None:
                self.ended.append(ended)
            if metric is not None:
                self.curve.append(better([metric.value, *self.curve[-1:]]))
        return self.curve


def modified_at(path: Path) -> float:
    """When a file was last written; 0 where it is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


class StudyMonitor:
    """Reports between and during sweeps: the plan, the time left over all axes, the best run so far."""

    def __init__(
        self,
        store: Path,
        metric: str,
        progress: Callable[[StudyProgress], None] | None,
        note: Note | None,
        file: Path | None = None,
    ) -> None:
        self.store, self.metric = store, metric
        self.progress = progress or (lambda _progress: None)
        self.note = note or (lambda _text: None)
        self.file = file  # where others look, while the study runs
        self._state: StudyState | None = None
        self.baseline = ""  # the best one and its value, in words
        self._runs = BestSoFar(store, metric)
        self._finished: dict[str, tuple[float, float]] = {}  # axis: seconds stated and taken
        self._per_axis: dict[str, AxisProgress] = {}
        self._earlier: dict[str, AxisProgress] = {}  # rounds of a search that have the same name
        self._first: tuple[float, float] | None = None
        self._last: StudyProgress | None = None

    def report_plan(self, state: StudyState) -> None:
        """Note what was decided, then the plan of the study."""
        for text in (*state.notes, *(_plan_lines(state, self.metric) if state.axes else ())):
            self.note(text)
        if state.baseline is not None:
            self.note(f"best baseline: {state.baseline.scorer}, {self.metric} {state.baseline.value:.4f} on validation")

    def begin(self, state: StudyState) -> None:
        """From here on the time left is that of all axes."""
        self._state = state
        for cost in state.costs:
            self._per_axis.setdefault(cost.axis, AxisProgress(axis=cost.axis, done=0, total=cost.runs))
        if state.baseline is not None:
            self.baseline = f"{state.baseline.scorer} {state.baseline.value:.4g}"

    def sweep_progress(
        self, number: int, axes: int, left: Callable[[], float] | None = None
    ) -> Callable[[SweepProgress], None]:
        """A callback for the sweep of one axis; the probes are number 0. `left` knows the time left better."""

        def report(sweep: SweepProgress) -> None:
            seconds = sweep.seconds_left
            if left is not None:
                seconds = left()
            elif self._state is not None and seconds is not None:
                seconds += self._rest(number, sweep.finished if number else (0.0, 0.0))
            name = "probes" if number == 0 else sweep.axis
            self._count(AxisProgress(axis=name, done=sweep.done, total=sweep.total, failed=sweep.failed))
            self._report(name, number, axes, sweep, seconds)

        return report

    def close(self) -> None:
        """Nobody is to take what was reported for the present any more."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)

    def _count(self, now: AxisProgress) -> None:
        """Note where an axis is; rounds of one name are added up. The axis before it has ended."""
        before = None if self._last is None else self._per_axis.get(self._last.axis)
        if before is not None and before.axis != now.axis:
            self._per_axis[before.axis] = before.model_copy(update={"done": before.total})
        last = self._per_axis.get(now.axis)
        earlier = self._earlier.get(now.axis)
        if last is not None and now.done < last.done - (earlier.done if earlier else 0):
            earlier = self._earlier[now.axis] = last
        if earlier is not None:
            now = AxisProgress(
                axis=now.axis,
                done=earlier.done + now.done,
                total=earlier.total + now.total,
                failed=earlier.failed + now.failed,
            )
        self._per_axis[now.axis] = now

    def _report(self, name: str, number: int, axes: int, sweep: SweepProgress, seconds: float | None) -> None:
        now = time.time()
        if self._first is None and seconds is not None and self._state is not None:
            self._first = now, seconds
        state = self._state
        progress = StudyProgress(
            axis=name,
            number=number,
            axes=axes,
            done=sweep.done,
            total=sweep.total,
            failed=sweep.failed,
            best=self._best(),
            seconds_left=seconds,
            metric=self.metric,
            baseline=None if state is None or state.baseline is None else state.baseline.value,
            per_axis=tuple(self._per_axis.values()),
            curve=tuple(self._runs.curve),
            at=now,
            first_at=None if self._first is None else self._first[0],
            first_left=None if self._first is None else self._first[1],
        )
        self._publish(progress)

    def _publish(self, progress: StudyProgress) -> None:
        self._last = progress
        if self.file is not None:
            with contextlib.suppress(ConfigError):  # a full disk is the runs' to notice
                progress.write(self.file)
        self.progress(progress)

    def finish_axis(self, result: SweepResult) -> None:
        """Note how the sweep of an axis ended."""
        failed, left_out = result.number("failed"), len(result.design.left_out)
        runs = len(result.runs)
        self._per_axis[result.axis] = AxisProgress(axis=result.axis, done=runs, total=runs, failed=failed)
        if self._last is not None:
            update = {
                "best": self._best(),
                "per_axis": tuple(self._per_axis.values()),
                "curve": tuple(self._runs.curve),
            }
            self._publish(self._last.model_copy(update={**update, "at": time.time()}))
        published = result.counts.get("published", 0)
        text = f"{result.axis}: {len(result.runs)} runs, {published} of them now in {result.seconds:.0f} s"
        text += f", {failed} failed" if failed else ""
        text += f"; {left_out} cell{'s' * (left_out > 1)} not run, the report says why" if left_out else ""
        self.note(text)
        for decision in result.design.decided:
            self.note(f"  {decision}")
        self._correct_times(result)

    def _correct_times(self, result: SweepResult) -> None:
        """Hold what an axis took against what was stated for it, and say what that makes of the rest."""
        costs = self._state.costs if self._state is not None else ()
        stated = next((cost.seconds for cost in costs if cost.axis == result.axis), 0.0)
        if not stated or result.counts.get("published", 0) < len(result.runs):
            return  # runs of an earlier call took their time there
        self._finished[result.axis] = stated, result.seconds
        done = [cost.axis for cost in costs].index(result.axis)
        left = self._rest(done + 1)
        if left:
            rest = format_seconds(left)
            self.note(f"  stated with {format_seconds(stated)}; the rest should take {rest} at this pace")

    def _rest(self, number: int, running: tuple[float, float] = (0.0, 0.0)) -> float:
        """The seconds of the axes from that one on, as the runs that ended correct them: part by part where the parts
        were stated, else by one pace."""
        costs = self._state.costs[number:] if self._state is not None else ()
        parts = [cost.parts for cost in costs if cost.parts is not None]
        if self._state is None or self._state.speeds is None or len(parts) < len(costs):
            return self._pace(running) * sum(cost.seconds for cost in costs)
        factors = self._factors(self._state.speeds)
        return sum(factor * seconds for one in parts for factor, seconds in zip(factors, one, strict=True))

    def _factors(self, speeds: StatedSpeeds) -> Parts:
        """Of the stated parts, by all runs of the store."""
        self._runs.look()
        ended = self._runs.ended
        stated = [speeds.parts(run.recipe, run.steps, run.executed_flops) for run in ended]
        return part_factors(stated, [run.taken for run in ended])

    def _pace(self, running: tuple[float, float] = (0.0, 0.0)) -> float:
        """What finished axes, and the runs of this one, took over what was stated for them."""
        pairs = [*self._finished.values(), running]
        return pace([stated for stated, _ in pairs], [took for _, took in pairs])

    def _best(self) -> str:
        """The best value of the metric among the Records so far, in words."""
        curve = self._runs.look()
        if not curve:
            return ""
        return f"{self.metric} {curve[-1]:.4g}" + (f" ({self.baseline})" if self.baseline else "")


def interruption(out: Path, where: str, why: str) -> Interrupted:
    """The error of a study that stops before its end."""
    return Interrupted(
        f"{why or 'stopped'} during the {where}; what is finished stays in {out}",
        next_step="run the same command again: it continues where it stopped",
    )


def _plan_lines(state: StudyState, metric: str) -> list[str]:
    """The study's plan as a table: axis, runs, FLOPs, time."""
    lines = [f"{'axis':<12}{'runs':>6}{'FLOPs':>11}{'time':>13}"]
    for cost in state.costs:
        lines.append(f"{cost.axis:<12}{cost.runs:>6}{cost.flops:>11.3g}{format_seconds(cost.seconds):>13}")
    runs = sum(cost.runs for cost in state.costs)
    lines.append(f"{'together':<12}{runs:>6}{state.flops:>11.3g}{format_seconds(state.seconds):>13}")
    workers = f"{state.workers} worker{'s' * (state.workers > 1)}"
    lines.append(f"on {workers}, after {format_seconds(state.probe_seconds)} of probes")
    paired = stated_seconds(state, metric)
    if paired:
        lines.append(f"then {format_seconds(paired)} to evaluate two cells again, user by user")
    return lines
