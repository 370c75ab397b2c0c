"""What a study says on the way: the plan, then axis, cells done, best so far, time left."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from habitus.progress import Note
from habitus.record import Record
from habitus.store import direction_of
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
    best: str  # metric and value of the best run so far
    seconds_left: float | None  # of the whole study


class StudyMonitor:
    """Keeps the thread between sweeps: time left over all axes, and the best run so far."""

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
        self.on_state: Callable[[StudyState], None] = lambda _state: None
        self._state: StudyState | None = None
        self._seen: dict[str, float] = {}
        self._looked = 0.0

    def stated(self, state: StudyState) -> None:
        """Tell the plan, once."""
        for text in state.notes:
            self.note(text)
        for line in plan_lines(state):
            self.note(line)

    def begin(self, state: StudyState) -> None:
        self._state = state

    def sweeping(self, number: int, axes: int) -> Callable[[SweepProgress], None]:
        """A listener for one sweep."""

        def heard(where: SweepProgress) -> None:
            left = where.seconds_left
            if self._state is not None and left is not None:
                left += sum(cost.seconds for cost in self._state.costs[number:])
            name = "probes" if number == 0 else where.axis
            self.progress(StudyProgress(name, number, axes, where.done, where.total, where.failed, self._best(), left))

        return heard

    def finished(self, result: SweepResult) -> None:
        failed = result.number("failed")
        ran = sum(result.counts.get(name, 0) for name in ("published",))
        told = f"{result.axis}: {len(result.runs)} runs, {ran} of them now in {result.seconds:.0f} s"
        told += f", {failed} failed" if failed else ""
        left_out = len(result.design.left_out)
        told += f"; {left_out} cell{'s' * (left_out > 1)} not run, the report says why" if left_out else ""
        self.note(told)
        for text in result.design.decided:
            self.note(f"  {text}")

    def _best(self) -> str:
        """The best value of the metric among the Records so far; looked up now and then."""
        if time.monotonic() - self._looked > 2.0:
            self._looked = time.monotonic()
            for path in self.store.glob("cells/*/record.json"):
                if path.parent.name not in self._seen:
                    record = Record.read(path)
                    measured = record.metrics.get(self.metric) or record.metrics.get("batch/loss")
                    if measured is not None:
                        name = self.metric if self.metric in record.metrics else "batch/loss"
                        self._seen[path.parent.name] = measured.value if name == self.metric else float("nan")
        values = [value for value in self._seen.values() if value == value]
        if not values:
            return ""
        best = min(values) if direction_of(self.metric) == "min" else max(values)
        return f"{self.metric} {best:.4g}"


def plan_lines(state: StudyState) -> list[str]:
    """The study's plan as a table: axis, runs, FLOPs, time."""
    lines = [f"{'axis':<12}{'runs':>6}{'FLOPs':>11}{'time':>9}"]
    for cost in state.costs:
        lines.append(f"{cost.axis:<12}{cost.runs:>6}{cost.flops:>11.3g}{format_seconds(cost.seconds):>9}")
    runs = sum(cost.runs for cost in state.costs)
    lines.append(f"{'together':<12}{runs:>6}{state.flops:>11.3g}{format_seconds(state.seconds):>9}")
    workers = f"{state.workers} worker{'s' * (state.workers > 1)}"
    lines.append(f"on {workers}, after {format_seconds(state.probe_seconds)} of probes")
    return lines
