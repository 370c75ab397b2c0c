"""What workers are given, how they run, and what they tell afterwards."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from habitus.sweeps.lease import LEASE_SECONDS


@dataclass(frozen=True)
class Job:
    """One run that a worker may take."""

    digest: str
    flops_budget: float
    seconds: float = 0.0  # as estimated
    bytes: int = 0  # as predicted
    steps: int = 1


@dataclass(frozen=True)
class WorkerOptions:
    """How workers run; nothing of it changes a Record beyond times."""

    device: str = "auto"
    threads: int | None = 1
    lease_seconds: float = LEASE_SECONDS
    save_seconds: float = 300.0  # between checkpoints, as far as the estimate of a run's time is right
    save_every: int | None = None  # steps between checkpoints, instead
    poll_seconds: float = 0.5  # between looks at a store in which everything is taken
    seconds_left: float | None = None  # of the time that the user gave


@dataclass
class Tally:
    """What one worker did."""

    published: int = 0
    failed: int = 0
    duplicates: int = 0
    abandoned: int = 0

    def counts(self) -> dict[str, int]:
        return asdict(self)

    def add(self, other: "Tally") -> None:
        """Count what another worker did as well."""
        for name, count in other.counts().items():
            setattr(self, name, getattr(self, name) + count)


class Admission:
    """Room on the device. Without packing there is always room."""

    def enter(self, job: Job, alone: bool) -> bool:
        return True

    def leave(self) -> None:
        pass


def deadline(seconds: float | None) -> Callable[[], float | None]:
    """A function that tells how many seconds are left, on a clock that nobody can set."""
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: None if end is None else end - time.monotonic()
