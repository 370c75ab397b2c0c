"""What a sweep returns, and the progress that it reports on the way."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from habitus.sizing import Parts, SpeedModel, part_factors, seconds_taken, wall_seconds
from habitus.sweeps.cells import Design, PlannedRun, own_shares
from habitus.sweeps.estimate import seconds_of
from habitus.sweeps.lease import holder
from habitus.sweeps.store import Store

Status = Literal["done", "failed", "missing"]


@dataclass(frozen=True)
class SweepProgress:
    """Where a sweep is."""

    axis: str
    done: int
    failed: int
    total: int
    running: int
    seconds_left: float | None
    finished: tuple[float, float] = (0.0, 0.0)  # seconds stated for what has finished, and taken; of one worker


@dataclass(frozen=True)
class RunOutcome:
    """One planned run and how it ended."""

    planned: PlannedRun
    status: Status
    reason: str = ""
    seconds: float = 0.0  # estimated, or as taken where it is done


@dataclass(frozen=True)
class SweepResult:
    """All runs of a sweep, finished or not."""

    axis: str
    store: Path
    design: Design
    runs: tuple[RunOutcome, ...]
    manifests: tuple[Path, ...] = ()
    seconds: float = 0.0  # of this call
    estimated_seconds: float = 0.0  # of what is missing, on `workers` workers
    estimate_source: str = ""
    workers: int = 1
    stopped: str = ""  # why runs are missing, where they are
    counts: dict[str, int] = field(default_factory=dict)  # published, failed, duplicates, abandoned by this call
    dry_run: bool = False

    def number(self, status: Status) -> int:
        return sum(run.status == status for run in self.runs)

    @property
    def complete(self) -> bool:
        return self.number("missing") == 0

    @property
    def flops_missing(self) -> float:
        shares = own_shares(self.design.distinct_runs())
        missing = (run.planned for run in self.runs if run.status == "missing")
        return float(sum(planned.cell.flops * shares[planned.hash] for planned in missing))

    def to_values(self) -> dict[str, Any]:
        """Plain values for --json."""
        return {
            "axis": self.axis,
            "store": str(self.store),
            "dry_run": self.dry_run,
            "done": self.number("done"),
            "failed": self.number("failed"),
            "missing": self.number("missing"),
            "complete": self.complete,
            "stopped": self.stopped,
            "seconds": round(self.seconds, 3),
            "flops": self.design.flops,
            "flops_missing": self.flops_missing,
            "workers": self.workers,
            "estimated_seconds": round(self.estimated_seconds, 3),
            "estimate_source": self.estimate_source,
            "counts": self.counts,
            "decided": list(self.design.decided),
            "manifests": [str(path) for path in self.manifests],
            "cells": [
                {
                    **run.planned.row.to_values(),
                    "bytes": run.planned.cell.bytes["total"],
                    "seconds": round(run.seconds, 3),
                    "status": run.status,
                    **({"reason": run.reason} if run.reason else {}),
                }
                for run in self.runs
            ],
            "left_out": [out.to_values() for out in self.design.left_out],
        }


def run_outcomes(store: Store | None, design: Design, speeds: SpeedModel) -> list[RunOutcome]:
    """Every run of a design with how it ended, or how long it is expected to take."""
    estimates = seconds_of(speeds, design.distinct_runs())
    outcomes = []
    for planned in design.distinct_runs():
        record = store.record(planned.hash) if store else None
        if record is None:
            outcomes.append(RunOutcome(planned, "missing", "", estimates[planned.hash]))
        else:
            took = record.seconds.warmup + record.seconds.train + record.seconds.evaluate if record.seconds else 0.0
            outcomes.append(RunOutcome(planned, record.status, record.reason or "", took))
    return outcomes


class SweepMonitor:
    """Looks at the store now and then and reports where the sweep is."""

    def __init__(
        self,
        axis: str,
        store: Store,
        design: Design,
        stated: Mapping[str, Parts],
        workers: int,
        progress: Callable[[SweepProgress], None],
    ) -> None:
        self.axis, self.store, self.workers, self.progress = axis, store, workers, progress
        self._parts = dict(stated)
        self._left = {planned.hash for planned in design.distinct_runs()}
        self._total = len(self._left)
        self._failed = 0
        self._last_look = 0.0
        self._running: dict[str, float] = {}  # when each was first seen to run
        self._stated: list[Parts] = []  # of runs that ended well
        self._taken: list[float] = []

    def __call__(self, every: float = 1.0) -> None:
        now = time.monotonic()
        if now - self._last_look < every:
            return
        self._last_look = now
        for digest in list(self._left):
            if self.store.has_record(digest):
                self._left.discard(digest)
                self._count(digest)
        running = [digest for digest in self._left if holder(self.store.cell(digest)) is not None]
        self._running = {digest: self._running.get(digest, now) for digest in running}
        done = self._total - len(self._left)
        finished = sum(map(sum, self._stated)) / self.workers, sum(self._taken) / self.workers
        self.progress(
            SweepProgress(self.axis, done, self._failed, self._total, len(running), self._seconds_left(now), finished)
        )

    def _count(self, digest: str) -> None:
        """Note how a run ended, and what it took."""
        record = self.store.record(digest)
        if record is None:
            return
        self._failed += record.status == "failed"
        taken, stated = seconds_taken(record), self._parts.get(digest)
        if taken is not None and stated is not None:
            self._taken.append(taken)
            self._stated.append(stated)

    def _seconds_left(self, now: float) -> float:
        """What is left as the runs that ended correct it, less what those under way have behind them."""
        factors, none = part_factors(self._stated, self._taken), (0.0, 0.0, 0.0)
        left = {
            digest: sum(factor * part for factor, part in zip(factors, self._parts.get(digest, none), strict=True))
            for digest in self._left
        }
        left |= {digest: max(0.0, left[digest] - (now - since)) for digest, since in self._running.items()}
        return wall_seconds(list(left.values()), self.workers)
