"""Several workers on one machine: processes that import torch once and are replaced when they die."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from habitus.data import Dataset
from habitus.errors import HabitusError, RunError
from habitus.progress import Note
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Admission, DeviceLostError, Job, Tally, Worker, WorkerOptions, deadline

_PROCESS_BYTES = 700 << 20  # what a process takes before it trains anything: about the same on a GPU and on the host
_SPARE = 1.3  # predicted bytes are by structure; allocators and kernels take more
_MOST_RESTARTS = 1_000


@dataclass
class _Slot:
    process: ForkServerProcess
    connection: Connection
    finished: bool = False  # it sent its tally or an error


class Pool:
    """Workers on this machine. `run` starts them and stays until all jobs have a Record or time is up."""

    def __init__(
        self,
        store: Store,
        dataset: Dataset,
        jobs: Sequence[Job],
        options: WorkerOptions,
        workers: int,
        *,
        device_bytes: int | None = None,
        environment: Mapping[str, str] | None = None,
        note: Note | None = None,
    ) -> None:
        self.store, self.dataset, self.jobs, self.options, self.workers = store, dataset, list(jobs), options, workers
        self.note = note or (lambda _text: None)
        self.restarts = 0
        self._environment = dict(environment or {})
        self._context = _forkserver()
        # One number per worker, written by that worker alone: what its cell is predicted to take on the device.
        self._reserved = self._context.RawArray(ctypes.c_int64, workers)
        self._device_bytes = device_bytes or 0
        self._seconds_left = deadline(options.seconds_left)
        self._slots: list[_Slot | None] = [None] * workers
        self._tallies: list[Tally] = []
        self._error: str | None = None

    def run(self, watch: Callable[[], None] | None = None, every: float = 0.2) -> Tally:
        """Start the workers and wait for them; `watch` is called while they work."""
        self.start()
        try:
            while self.alive() and self._error is None:
                if watch is not None:
                    watch()
                time.sleep(every)
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self.stop()
            raise RunError(self._error)
        return self.tally()

    def start(self) -> None:
        for number in range(self.workers):
            self._slots[number] = self._start_worker(number)

    def alive(self) -> bool:
        """Whether any worker is at work; replaces one that died before it had finished."""
        busy = False
        for number, slot in enumerate(self._slots):
            if slot is None:
                continue
            alive = slot.process.is_alive()
            self._receive(slot)  # after the look: its last message comes before its end
            if alive:
                busy = True
                continue
            slot.process.join()
            self._reserved[number] = 0
            self._slots[number] = None
            left = self._seconds_left()
            if not slot.finished and self._error is None and (left is None or left > 0):
                self.restarts += 1
                if self.restarts > _MOST_RESTARTS:
                    self._error = f"{self.restarts} workers died one after the other"
                    continue
                self.note(f"a worker died ({_exit_reason(slot.process.exitcode)}); another takes its place")
                self._slots[number] = self._start_worker(number)
                busy = True
        return busy

    def pids(self) -> list[int]:
        """The processes at work."""
        return [s.process.pid for s in self._slots if s is not None and s.process.is_alive() and s.process.pid]

    def stop(self) -> None:
        """Ask all workers to save and stop, and wait for them."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        for slot in self._slots:
            if slot is not None:
                slot.process.join(30)
                if slot.process.is_alive():
                    slot.process.kill()
                self._receive(slot)

    def tally(self) -> Tally:
        """What all workers did together, without those that died."""
        total = Tally()
        for one in self._tallies:
            total.add(one)
        return total

    def _start_worker(self, number: int) -> _Slot:
        ours, theirs = self._context.Pipe()
        options = replace(self.options, seconds_left=self._seconds_left())
        memory = (self._reserved, number, self._device_bytes)
        arguments = (
            str(self.store.path),
            str(self.dataset.path),
            self.jobs,
            options,
            memory,
            self._environment,
            theirs,
        )
        process = self._context.Process(target=_worker, args=arguments, daemon=False)
        process.start()
        theirs.close()
        return _Slot(process, ours)

    def _receive(self, slot: _Slot) -> None:
        """Take the messages of a worker."""
        with contextlib.suppress(EOFError, OSError):
            while not slot.finished and slot.connection.poll():
                kind, value = slot.connection.recv()
                if kind == "note":
                    self.note(value)
                    continue
                slot.finished = True
                if kind == "error":
                    self._error = value
                else:
                    self._tallies.append(Tally(**value))


class _SharedMemory(Admission):
    """Admission by the memory of a device that several workers share.

    No locks: a worker that dies must not leave one behind. Each worker writes what it is about to take, then looks at
    the sum. Two that do so at once may both step back; they try again after pauses of different lengths.
    """

    def __init__(self, reserved: Any, number: int, limit: int) -> None:
        self._reserved, self._number, self._limit = reserved, number, limit

    def enter(self, job: Job, alone: bool) -> bool:
        if not self._limit:
            return True
        own = int(job.bytes * _SPARE) + _PROCESS_BYTES
        self._reserved[self._number] = self._limit if alone else min(own, self._limit)
        if sum(self._reserved) <= self._limit:
            return True
        self._reserved[self._number] = 0
        return False

    def leave(self) -> None:
        self._reserved[self._number] = 0


def _worker(
    store: str,
    dataset: str,
    jobs: list[Job],
    options: WorkerOptions,
    memory: tuple[Any, int, int],
    environment: dict[str, str],
    connection: Connection,
) -> None:
    """What a worker process runs."""
    os.environ.update(environment)  # the fork server's is older; CUDA looks when it is first used
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt at the terminal means
    threading.Thread(target=_stop_with_parent, args=(connection,), daemon=True).start()
    try:
        opened = Store.open(store)
        worker = Worker(
            opened,
            Dataset.open(Path(dataset), verify=False),
            options,
            admission=_SharedMemory(*memory),
            note=lambda text: connection.send(("note", text)),
        )
        connection.send(("tally", worker.work(jobs).counts()))
    except DeviceLostError:
        os._exit(70)  # without a last message, so that another process takes its place
    except HabitusError as error:
        connection.send(("error", str(error)))
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except Exception:
        connection.send(("error", f"a worker failed unexpectedly:\n{traceback.format_exc()}"))


def _stop_with_parent(connection: Connection) -> None:
    """Save and stop when the parent is gone: it never writes, so anything that arrives is its end."""
    with contextlib.suppress(EOFError, OSError):
        connection.recv()
    os.kill(os.getpid(), signal.SIGTERM)


def _forkserver() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["habitus.training", "habitus.sweeps.pool"])
    return context


def _exit_reason(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}"
