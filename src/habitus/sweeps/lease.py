"""Claims by lease. Times are the file server's: a worker touches a file of its own and compares.

A claim is the file `lease-<n>` in the folder of a cell, made by `os.link`, so that one worker gets each number; the
highest number holds the cell. The holder touches its lease; one that was not touched for a while may be followed by
the next number, which is the fencing token: a holder looks for a higher one before it writes anything that counts.
"""

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from habitus.files import write_once

PREFIX = "lease-"
LEASE_SECONDS = 120.0
_RELEASED = 0.0  # the time of a lease that was released


class LeaseLostError(Exception):
    """Another worker holds the cell now: stop without writing anything."""


class WorkerFile:
    """A worker's own file in the store: what it did, line by line, and the file server's clock."""

    def __init__(self, store: Path) -> None:
        self.name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
        self.path = store / "workers" / f"{self.name}.jsonl"
        self.path.parent.mkdir(exist_ok=True)
        self._clock = self.path.with_suffix(".clock")

    def write(self, event: str, **values: Any) -> None:
        """Append one line."""
        line = json.dumps({"at": round(self.now(), 3), "worker": self.name, "event": event, **values})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def now(self) -> float:
        """The file server's time."""
        with self._clock.open("ab") as file:
            os.utime(file.fileno())
        return _modified(self._clock)

    def close(self) -> None:
        self._clock.unlink(missing_ok=True)


class Lease:
    """One claim of one cell."""

    def __init__(self, cell: Path, number: int, worker: WorkerFile) -> None:
        self.cell = cell
        self.number = number
        self.worker = worker
        self.path = cell / _name(number)

    def touch(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path)

    def check(self) -> None:
        """Raise where a later claim exists, or the claim itself is gone, which a published cell's is."""
        if latest_claim(self.cell) != self.number:
            raise LeaseLostError(f"{self.cell.name[:12]}: claim {self.number} was superseded")

    def release(self) -> None:
        """Free the cell at once, without waiting for the lease to run out."""
        with contextlib.suppress(FileNotFoundError):
            os.utime(self.path, (_RELEASED, _RELEASED))

    @contextmanager
    def keep_alive(self, lease_seconds: float) -> Iterator[None]:
        """Touch the lease in the background while the block runs."""
        with _Heartbeat(self, lease_seconds / 5):
            yield


def try_claim(cell: Path, worker: WorkerFile, lease_seconds: float = LEASE_SECONDS) -> Lease | None:
    """The next claim of a cell; None where somebody holds it."""
    latest = latest_claim(cell)
    if latest:
        try:
            touched = _modified(cell / _name(latest))
        except FileNotFoundError:
            return None  # being cleared: the cell has just been published
        if touched > _RELEASED and worker.now() - touched <= lease_seconds:
            return None
    content = json.dumps({"worker": worker.name, "number": latest + 1}) + "\n"
    try:
        claimed = write_once(cell / _name(latest + 1), content.encode())
    except FileNotFoundError:  # a worker that has just published the cell cleared the half-written claim
        return None
    return Lease(cell, latest + 1, worker) if claimed else None


def latest_claim(cell: Path) -> int:
    """The number of the latest claim; 0 where there is none."""
    names = [path.name for path in cell.iterdir()]
    numbers = [int(name.removeprefix(PREFIX)) for name in names if name.startswith(PREFIX)]
    return max(numbers, default=0)


def holder(cell: Path) -> tuple[str, float] | None:
    """Who holds a cell, and when its lease was last touched; None where nobody does."""
    number = latest_claim(cell)
    try:
        touched = _modified(cell / _name(number)) if number else _RELEASED
        if touched <= _RELEASED:
            return None
        return str(json.loads((cell / _name(number)).read_text(encoding="utf-8"))["worker"]), touched
    except (FileNotFoundError, ValueError, KeyError):
        return None


def clear_claims(cell: Path) -> None:
    """Remove all claims of a published cell, the latest last: until then earlier holders see that it is not theirs."""
    for number in range(1, latest_claim(cell) + 1):
        (cell / _name(number)).unlink(missing_ok=True)


class _Heartbeat:
    """Touches a lease from a thread. A stopped process stops its thread as well, which is the point."""

    def __init__(self, lease: Lease, seconds: float) -> None:
        self._lease = lease
        self._seconds = seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="lease")

    def _beat(self) -> None:
        while not self._over.wait(self._seconds):
            with contextlib.suppress(OSError):  # a server that is away for a moment
                self._lease.touch()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()


def _name(number: int) -> str:
    return f"{PREFIX}{number:06d}"


def _modified(path: Path) -> float:
    # Opening makes a network file system ask the server, where a bare stat may answer from memory.
    with path.open("rb") as file:
        return os.fstat(file.fileno()).st_mtime


def wait(seconds: float) -> None:
    """Sleep with a little jitter, so that workers do not look at the store in step."""
    time.sleep(seconds * (0.5 + secrets.randbelow(1000) / 1000))
