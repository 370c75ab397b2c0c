"""What a study or a sweep is doing, read from its files: for the page that is served while it runs."""

import json
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from habitus.errors import HabitusError
from habitus.machine import idle_cores, usable_cores
from habitus.reporting import Live, LiveAxis, LiveLog, LiveRun
from habitus.store import AXES, INFO_FILE
from habitus.studies.options import LOG_METRIC, WORLD_METRIC
from habitus.studies.probes import PROBES
from habitus.studies.progress import PROGRESS_FILE, BestSoFar, StudyProgress, modified_at
from habitus.sweeps import ListedRun, RunList, list_runs
from habitus.units import format_bytes, format_seconds

_SILENT_SECONDS = 60.0  # after which a study that reported nothing is taken for dead
_METRICS = (WORLD_METRIC, LOG_METRIC, "batch/loss")  # of a store whose study does not say which; the first measured
_TAIL_BYTES, _LOG_LINES, _MOST_LOGS = 16_384, 200, 16


class Watcher:
    """Looks at the files of a store, and of the study around it where there is one. Nothing of them is written."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self._ended: dict[Path, dict[str, ListedRun]] = {}
        self._best: BestSoFar | None = None
        self._last: StudyProgress | None = None
        self._first: tuple[float, float] | None = None  # when the time left was first known, and what it was

    def progress(self) -> StudyProgress | None:
        """What the study around the store reported last; None where none runs."""
        try:
            self._last = StudyProgress.read(self.store.parent / PROGRESS_FILE)
        except HabitusError:
            return None
        return self._last if time.time() - self._last.at < _SILENT_SECONDS else None

    def metrics(self) -> list[str]:
        """The metrics that figures are drawn for while runs end."""
        self.progress()
        return list(dict.fromkeys(_METRICS if self._last is None else (self._last.metric, "batch/loss")))

    def change(self) -> tuple[int, float, int]:
        """Differs whenever a run has ended or a manifest was written: how many there are, and the newest."""
        records = [modified_at(path) for path in self.store.glob("cells/*/record.json")]
        return len(records), max(records, default=0.0), len(list(self.store.glob("sweeps/*.json")))

    def look(self) -> Live:
        """The panel now."""
        progress = self.progress()
        store = self.store if (self.store / INFO_FILE).exists() else self.store.parent / PROBES
        facts = _machine_facts()
        if not (store / INFO_FILE).exists():
            return Live("running" if progress else "idle", "starting" if progress else "", facts=facts)
        try:
            runs = list_runs(store, ended=self._ended.setdefault(store, {}))
        except (HabitusError, OSError) as error:  # a file that is being replaced, or one that was changed
            return Live("running" if progress else "idle", facts=facts, problem=str(error))
        running = progress is not None or any(run.state == "running" for run in runs.runs)
        live = Live(
            state="running" if running else "idle",
            doing="" if progress is None else _describe_axis(progress),
            axes=_axes_of_runs(runs) if self._last is None else _axes_of_study(self._last),
            facts=(*self._time_facts(progress, runs), *facts),
            runs=tuple(_running(store, runs)),
            failures=tuple(Counter(run.reason for run in runs.runs if run.state == "failed").most_common()),
            logs=tuple(_logs(store, {run.digest: _title(run.axes, run.cell_id) for run in runs.runs})),
        )
        if self._last is not None:
            return replace(live, metric=self._last.metric, curve=self._last.curve, baseline=self._last.baseline)
        best = self._best_of_store()
        return live if best is None else replace(live, metric=best.metric, curve=tuple(best.curve))

    def _time_facts(self, progress: StudyProgress | None, runs: RunList) -> list[tuple[str, str]]:
        """Time left, and how far what was first said of it is off by now."""
        now = time.time()
        if progress is None:
            if not runs.seconds_left:
                return []
            if self._first is None:
                self._first = now, runs.seconds_left
            progress = StudyProgress(
                axis="", number=0, axes=0, done=0, total=0, failed=0, best="", seconds_left=runs.seconds_left, at=now,
                first_at=self._first[0], first_left=self._first[1],
            )  # fmt: skip
        if progress.seconds_left is None:
            return [("Time left", "not known yet")]
        lines = [format_seconds(progress.seconds_left)]
        drift = progress.drift()
        if drift is not None and progress.first_left:
            whole = progress.first_left * (1 + drift)
            first = format_seconds(progress.first_left)
            lines.append(f"first said {first} for all, by now {format_seconds(whole)} ({drift:+.0%})")
        return [("Time left", "\n".join(lines))]

    def _best_of_store(self) -> BestSoFar | None:
        """By the first of the usual metrics that a run has."""
        for metric in _METRICS if self._best is None else ():
            best = BestSoFar(self.store, metric)
            if best.look():
                self._best = best
                break
        if self._best is not None:
            self._best.look()
        return self._best


def _describe_axis(progress: StudyProgress) -> str:
    if not progress.number:
        return progress.axis
    return f"{progress.axis} ({progress.number} of {max(progress.number, progress.axes - 1)})"


def _axes_of_study(progress: StudyProgress) -> tuple[LiveAxis, ...]:
    return tuple(LiveAxis(one.axis, one.done, one.total, one.failed) for one in progress.per_axis)


def _axes_of_runs(runs: RunList) -> tuple[LiveAxis, ...]:
    """The runs of each axis of a store, in the order in which axes are run; parents are counted apart."""
    names = {name for run in runs.runs for name in run.axes or ("others",)}
    order = [*AXES, *sorted(names - set(AXES))]
    axes = []
    for name in sorted(names, key=order.index):
        of_axis = [run for run in runs.runs if name in (run.axes or ("others",))]
        failed = sum(run.state == "failed" for run in of_axis)
        axes.append(LiveAxis(name, failed + sum(run.state == "done" for run in of_axis), len(of_axis), failed))
    return tuple(axes)


def _running(store: Path, runs: RunList) -> Iterable[LiveRun]:
    """The runs that workers are at, each with the last line of its journal."""
    for run in runs.runs:
        if run.state not in ("running", "stalled"):
            continue
        lines = [
            line for path in (store / "cells" / run.digest).glob("attempts/*/journal.jsonl") for line in _tail(path)
        ]
        journal = _parse(lines[-1]) if lines else {}
        step, loss = journal.get("step"), journal.get("loss")
        yield LiveRun(
            title=f"{_title(run.axes, run.cell_id)}, {run.params:,} parameters"
            + (", stalled" * (run.state == "stalled")),
            worker=run.worker,
            steps=run.steps,
            step=step + 1 if isinstance(step, int) else None,
            loss=float(loss) if isinstance(loss, int | float) else None,
        )


def _title(axes: tuple[str, ...], cell_id: str) -> str:
    return f"{', '.join(axes) or 'run'} {cell_id}"


def _logs(store: Path, titles: dict[str, str]) -> Iterable[LiveLog]:
    """What the workers that wrote last wrote down, the latest worker first."""
    paths = sorted((store / "workers").glob("*.jsonl"), key=modified_at, reverse=True)
    for path in paths[:_MOST_LOGS]:
        lines = []
        for line in _tail(path)[-_LOG_LINES:]:
            event = _parse(line)
            cell = str(event.get("cell", ""))
            words = [f"{event.get('event', '')} {titles.get(cell, cell[:8])}".strip()]
            words += [f"{name} {event[name]}" for name in ("status", "from_step", "why", "how") if event.get(name)]
            at = event.get("at")
            clock = time.strftime("%H:%M:%S", time.localtime(at)) if isinstance(at, int | float) else ""
            lines.append(f"{clock} {', '.join(words)}".strip())
        yield LiveLog(path.stem, tuple(lines))


def _tail(path: Path) -> list[str]:
    """The last complete lines of a file that is being written; none where it is gone."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    lines = text[: text.rfind("\n") + 1].splitlines()
    return lines[1:] if size > _TAIL_BYTES else lines


def _parse(line: str) -> dict[str, object]:
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _machine_facts() -> tuple[tuple[str, str], ...]:
    """Cores in use on this machine, and each GPU where there is one."""
    cores = usable_cores()
    facts = [("Cores busy", f"{max(0.0, cores - idle_cores()):.1f} of {cores}")]
    for number, (use, used, total) in enumerate(_gpu_use()):
        facts.append((f"GPU {number}", f"{use:.0f}%\n{format_bytes(used)} of {format_bytes(total)}"))
    return tuple(facts)


def _gpu_use() -> list[tuple[float, float, float]]:
    """Per GPU the share of time that kernels ran, in percent, and bytes in use and altogether."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.splitlines()
        rows = [[float(word) for word in line.split(",")] for line in lines]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
    return [(row[0], row[1] * 2**20, row[2] * 2**20) for row in rows if len(row) == 3]
