"""What a study reports on the way: the plan, then axis, runs done, best so far, time left."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from habitus.errors import Interrupted
from habitus.progress import Note
from habitus.sizing import pace
from habitus.store import RECORD_FILE, direction_of, read_record
from habitus.studies.state import StudyState
from habitus.sweeps import SweepProgress, SweepResult
from habitus.units import format_seconds


@dataclass(frozen=True)
class StudyProgress:
    """Where a study is."""

    axis: str  # probes, share, depth, ...
    number: int  # of the axis, the probes being 0
    axes: int
    done: int
    total: int
    failed: int
    best: str  # metric and value of the best run so far, and of the best baseline
    seconds_left: float | None  # of the whole study


class StudyMonitor:
    """Reports between and during sweeps: the plan, the time left over all axes, the best run so far."""

    def __init__(
        self,
        store: Path,
        metric: str,
        progress: Callable[[StudyProgress], None] | None,
        note: Note | None,
    ) -> None:
        self.store, self.metric = store, metric
        self.progress = progress or (lambda _progress: None)
        self.note = note or (lambda _text: None)
        self._state: StudyState | None = None
        self.baseline = ""  # the best one and its value, in words
        self._values: dict[str, float | None] = {}  # of the metric, by the cells that have a Record
        self._last_look = 0.0
        self._finished: dict[str, tuple[float, float]] = {}  # axis: seconds stated and taken

    def report_plan(self, state: StudyState) -> None:
        """Note what was decided, then the plan of the study."""
        for text in (*state.notes, *(_plan_lines(state) if state.axes else ())):
            self.note(text)
        if state.baseline is not None:
            self.note(f"best baseline: {state.baseline.scorer}, {self.metric} {state.baseline.value:.4f} on validation")

    def begin(self, state: StudyState) -> None:
        """From here on the time left is that of all axes."""
        self._state = state
        if state.baseline is not None:
            self.baseline = f"{state.baseline.scorer} {state.baseline.value:.4g}"

    def sweep_progress(self, number: int, axes: int) -> Callable[[SweepProgress], None]:
        """A callback for the sweep of one axis; the probes are number 0."""

        def report(sweep: SweepProgress) -> None:
            left = sweep.seconds_left
            if self._state is not None and left is not None:
                left += self._pace() * sum(cost.seconds for cost in self._state.costs[number:])
            name = "probes" if number == 0 else sweep.axis
            self.progress(StudyProgress(name, number, axes, sweep.done, sweep.total, sweep.failed, self._best(), left))

        return report

    def finish_axis(self, result: SweepResult) -> None:
        """Note how the sweep of an axis ended."""
        failed, left_out = result.number("failed"), len(result.design.left_out)
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
        left = self._pace() * sum(cost.seconds for cost in costs[done + 1 :])
        if left:
            rest = format_seconds(left)
            self.note(f"  stated with {format_seconds(stated)}; the rest should take {rest} at this pace")

    def _pace(self) -> float:
        return pace([stated for stated, _ in self._finished.values()], [took for _, took in self._finished.values()])

    def _best(self) -> str:
        """The best value of the metric among the Records so far; looked up every two seconds."""
        if time.monotonic() - self._last_look > 2.0:
            self._last_look = time.monotonic()
            for path in self.store.glob(f"cells/*/{RECORD_FILE}"):
                if path.parent.name not in self._values:
                    record = read_record(self.store, path.parent.name)
                    metric = None if record is None else record.metrics.get(self.metric)
                    self._values[path.parent.name] = None if metric is None else metric.value
        values = [value for value in self._values.values() if value is not None]
        if not values:
            return ""
        best = min(values) if direction_of(self.metric) == "min" else max(values)
        return f"{self.metric} {best:.4g}" + (f" ({self.baseline})" if self.baseline else "")


def interruption(out: Path, where: str, why: str) -> Interrupted:
    """The error of a study that stops before its end."""
    return Interrupted(
        f"{why or 'stopped'} during the {where}; what is finished stays in {out}",
        next_step="run the same command again: it continues where it stopped",
    )


def _plan_lines(state: StudyState) -> list[str]:
    """The study's plan as a table: axis, runs, FLOPs, time."""
    lines = [f"{'axis':<12}{'runs':>6}{'FLOPs':>11}{'time':>9}"]
    for cost in state.costs:
        lines.append(f"{cost.axis:<12}{cost.runs:>6}{cost.flops:>11.3g}{format_seconds(cost.seconds):>9}")
    runs = sum(cost.runs for cost in state.costs)
    lines.append(f"{'together':<12}{runs:>6}{state.flops:>11.3g}{format_seconds(state.seconds):>9}")
    workers = f"{state.workers} worker{'s' * (state.workers > 1)}"
    lines.append(f"on {workers}, after {format_seconds(state.probe_seconds)} of probes")
    return lines
