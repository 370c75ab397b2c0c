"""The worker's loop: claim a cell, run it, publish its Record, until nothing is left. The same on one CPU, on a
packed GPU and on a cluster."""

import contextlib
import errno
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from habitus.data import Dataset
from habitus.errors import ConfigError, HabitusError, Interrupted, OutOfMemory, RunError
from habitus.progress import Note
from habitus.record import Record
from habitus.store import RECORD_FILE
from habitus.sweeps import attempts
from habitus.sweeps.cells import PlannedRun
from habitus.sweeps.lease import LEASE_SECONDS, Lease, LeaseLostError, WorkerFile, try_claim, wait
from habitus.sweeps.store import Store

if TYPE_CHECKING:
    from habitus.training import TrainOptions

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
_DISK_TRIES = 6
_DEVICE_TRIES = 3  # claims of a cell after which an error of the GPU is the cell's own fault
_MOST_DEATHS = 20  # claims of one cell whose workers died without saving a step


@dataclass(frozen=True)
class Job:
    """One run that a worker may take."""

    digest: str
    flops_budget: float
    seconds: float = 0.0  # as estimated
    bytes: int = 0  # as predicted
    steps: int = 1

    @classmethod
    def of(cls, planned: PlannedRun, seconds: float) -> "Job":
        """A planned run that is estimated to take so long."""
        return cls(
            digest=planned.hash,
            flops_budget=planned.row.flops_budget,
            seconds=seconds,
            bytes=planned.cell.bytes["total"] + planned.cell.bytes.get("item_cache", 0),
            steps=planned.recipe.train.steps,
        )


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
    compile: bool | None = None  # as in TrainOptions


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
    """Whether a job may start on the device. Without packing it always may."""

    def enter(self, job: Job, alone: bool) -> bool:
        return True

    def leave(self) -> None:
        pass


class DeviceLostError(RunError):
    """After an error of the GPU itself nothing works in this process any more; a new one may well succeed."""


class _StopError(Exception):
    """Time is up, or the worker was asked to stop."""


@dataclass
class _Retry:
    """How this worker tries a cell again that ran out of memory."""

    alone: bool = False
    accumulate: int = 1


class Worker:
    """One worker on one store."""

    def __init__(
        self,
        store: Store,
        dataset: Dataset,
        options: WorkerOptions | None = None,
        *,
        admission: Admission | None = None,
        progress: Callable[[str, Any], None] | None = None,
        note: Note | None = None,
    ) -> None:
        self.store, self.dataset = store, dataset
        self.options = options or WorkerOptions()
        self.admission = admission or Admission()
        self.progress = progress or (lambda _digest, _progress: None)
        self.note = note or (lambda _text: None)
        self.file = WorkerFile(store.path)
        self.tally = Tally()
        self._retries: dict[str, _Retry] = {}
        self._waits_for: dict[str, list[str]] = {}
        self._disk_errors = 0
        self._lost = ""  # the error after which the device could not be used any more
        self._stop = threading.Event()

    def work(self, jobs: Sequence[Job]) -> Tally:
        """Run jobs until every one has a Record, whoever ran it, or until asked to stop."""
        pending = list(jobs)
        self._waits_for = self._dependencies(pending)
        self.file.write("start", jobs=len(pending))
        with self._stop_on_signal(), self._share_events():
            try:
                while pending:
                    before = len(pending), self.tally.published, self.tally.duplicates, self.tally.abandoned
                    pending = [job for job in pending if not self._try_job(job)]
                    after = len(pending), self.tally.published, self.tally.duplicates, self.tally.abandoned
                    if pending and before == after:
                        wait(self.options.poll_seconds)
                self.file.write("end", **self.tally.counts())
            except _StopError:
                self.file.write("stopped", **self.tally.counts())
        self.file.close()
        return self.tally

    def _try_job(self, job: Job) -> bool:
        """Run the job where it can be claimed; True once nothing is left to do about it."""
        if self._stop.is_set():
            raise _StopError
        if self.store.settled(job.digest):
            return True
        retry = self._retries.get(job.digest, _Retry())
        if not self._is_ready(job) or not self.admission.enter(job, retry.alone):
            return False
        try:
            lease = try_claim(self.store.cell(job.digest), self.file, self.options.lease_seconds)
            if lease is None:
                return False
            if self.store.has_record(job.digest):  # published while it was claimed, perhaps without being settled
                attempts.settle(lease.cell, self.file.name)
                return True
            return self._run(job, lease)
        finally:
            self.admission.leave()

    def _is_ready(self, job: Job) -> bool:
        """Whether all that the run begins from is there; a failed parent fails its children too."""
        if job.digest not in self._waits_for:
            self._waits_for |= self._dependencies([job])
        return all(self.store.settled(digest) for digest in self._waits_for[job.digest])

    def _dependencies(self, jobs: Sequence[Job]) -> dict[str, list[str]]:
        """By job: the stage-1 run that it continues, and the next shorter run of its trunk."""
        recipes = {job.digest: self.store.recipe(job.digest) for job in jobs}
        waits_for = {digest: [recipe.train.parent] if recipe.train.parent else [] for digest, recipe in recipes.items()}
        longest: dict[Path, str] = {}  # of each trunk, so far
        for digest in sorted(recipes, key=lambda digest: recipes[digest].train.stable_steps):
            trunk = self.store.trunk(recipes[digest])
            if trunk is not None:
                waits_for[digest] += [longest[trunk]] if trunk in longest else []
                longest[trunk] = digest
        return waits_for

    def _run(self, job: Job, lease: Lease) -> bool:
        attempt, step = attempts.begin(lease)
        self.file.write("claimed", cell=job.digest, claim=lease.number, from_step=step)
        try:
            with lease.keep_alive(self.options.lease_seconds):
                if step >= 0:
                    self._train(job, lease, attempt)
                    if not (attempt / RECORD_FILE).exists():
                        return False
                lease.check()
                return self._publish(job, lease, attempt)
        except LeaseLostError:
            self.tally.abandoned += 1
            self.file.write("abandoned", cell=job.digest, claim=lease.number)
            attempts.abandon(attempt)
            return self.store.settled(job.digest)

    def _publish(self, job: Job, lease: Lease, attempt: Path) -> bool:
        try:
            record = Record.read(attempt / RECORD_FILE)
            is_first = attempts.publish(attempt, lease.cell)
        except (ConfigError, FileNotFoundError):
            lease.check()  # another may have published the cell since the last look, and cleared all attempts
            raise
        if not is_first:
            same = attempts.same_measurement(record, Record.read(lease.cell / RECORD_FILE))
            self.tally.duplicates += 1
            self.file.write("duplicate", cell=job.digest, claim=lease.number, equal=same)
            attempts.abandon(attempt)
            return True
        self._disk_errors = 0
        self.tally.published += 1
        self.tally.failed += record.status == "failed"
        self.file.write("published", cell=job.digest, claim=lease.number, status=record.status)
        attempts.settle(lease.cell, self.file.name)
        if self._lost:
            raise DeviceLostError(f"this process can no longer use the device: {self._lost}")
        return True

    def _train(self, job: Job, lease: Lease, attempt: Path) -> None:
        """Train into the attempt's folder. Leaves a Record there, or none where the cell is to be tried again."""
        from habitus.training import train

        recipe = self.store.recipe(job.digest)
        parent = None if recipe.train.parent is None else self.store.cell(recipe.train.parent)
        try:
            if lease.number > _MOST_DEATHS and not list(attempt.glob("checkpoints/step-*")):
                raise RunError(f"{lease.number - 1} workers died on this cell before they saved a step")
            train(
                recipe,
                self.dataset,
                attempt,
                parent=parent,
                options=self._train_options(job),
                progress=lambda progress: self.progress(job.digest, progress),
                on_save=lambda _step: lease.check(),
            )
        except (LeaseLostError, _StopError):
            raise
        except Interrupted:
            lease.release()
            self.file.write("released", cell=job.digest, claim=lease.number, why="asked to stop")
            raise _StopError from None
        except OutOfMemory as error:
            self._handle_out_of_memory(job, lease, attempt, error)
        except KeyboardInterrupt:
            lease.release()
            raise
        except Exception as error:
            lease.check()  # a worker that woke up too late finds its folder gone: not a failure of the cell
            self._handle_failure(job, lease, attempt, error)
        finally:
            self._free_device()

    def _handle_out_of_memory(self, job: Job, lease: Lease, attempt: Path, error: OutOfMemory) -> None:
        """Try again alone on the device, then in smaller pieces, then give up with a failed Record."""
        retry = self._retries.setdefault(job.digest, _Retry())
        most = self.store.recipe(job.digest).train.batch_sequences
        if not retry.alone:
            retry.alone, how = True, "alone on the device"
        elif retry.accumulate * 2 <= min(most, 64):
            retry.accumulate *= 2
            how = f"in {retry.accumulate} micro-batches"
        else:
            self._write_failed_record(job, attempt, f"out of memory, alone and in micro-batches: {error.problem}")
            return
        self.note(f"{job.digest[:12]} ran out of memory; trying again {how}")
        self.file.write("retry", cell=job.digest, why="out of memory", how=how)
        attempts.abandon(attempt)
        lease.release()

    def _handle_failure(self, job: Job, lease: Lease, attempt: Path, error: Exception) -> None:
        """Retry where the device or the disk is to blame; else the cell has failed, and its Record says why."""
        if _is_device_error(error):
            self._lost = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if lease.number < _DEVICE_TRIES:
                self.file.write("retry", cell=job.digest, why=self._lost, how="in a new process")
                attempts.abandon(attempt)
                lease.release()
                raise DeviceLostError(f"this process can no longer use the device: {self._lost}") from error
        disk_error = _disk_error(error)
        if disk_error is not None:
            self._disk_errors += 1
            lease.release()
            with contextlib.suppress(OSError):
                self.file.write("retry", cell=job.digest, why=os.strerror(disk_error), how="after a pause")
            if self._disk_errors >= _DISK_TRIES:
                raise RunError(
                    f"{self.store.path} cannot be written to: {os.strerror(disk_error)}",
                    expected="space for checkpoints and bundles",
                    next_step="free space and run the same command again; finished runs are kept",
                ) from error
            self.note(f"{job.digest[:12]}: {os.strerror(disk_error)}; trying again after a pause")
            wait(min(60.0, self.options.poll_seconds * 2**self._disk_errors))
            return
        expected = isinstance(error, HabitusError)
        reason = error.problem if isinstance(error, HabitusError) else f"{type(error).__name__}: {error}"
        if not expected:
            (attempt / "failure.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self._write_failed_record(job, attempt, reason)

    def _write_failed_record(self, job: Job, attempt: Path, reason: str) -> None:
        recipe = self.store.recipe(job.digest)
        Record(
            recipe=recipe,
            recipe_hash=job.digest,
            parent_hash=recipe.train.parent,
            dataset_checksum=self.dataset.checksum,
            status="failed",
            reason=reason,
            flops_budget=job.flops_budget,
            seed=recipe.train.seed,
        ).write(attempt / RECORD_FILE)

    def _free_device(self) -> None:
        """Free what the cell held on a GPU, since others share it."""
        if self.options.device.startswith("cuda") and not self._lost:
            import gc

            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def _train_options(self, job: Job) -> "TrainOptions":
        from habitus.training import TrainOptions

        retry = self._retries.get(job.digest, _Retry())
        save_every = self.options.save_every
        trunk = self.store.trunk(self.store.recipe(job.digest))
        if save_every is None:
            long = job.seconds > 2 * self.options.save_seconds
            save_every = max(1, round(job.steps * self.options.save_seconds / job.seconds)) if long else 0
        return TrainOptions(
            device=self.options.device,
            threads=self.options.threads,
            save_every=save_every,
            trunk=trunk,
            resume=True,
            accumulate=retry.accumulate,
            compile=self.options.compile,
            card=False,  # a store has thousands of cells
            flops_budget=job.flops_budget,
        )

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """Stop on TERM and when the time is up: training saves where it is, and everything else ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        timer = None
        if self.options.seconds_left is not None:
            timer = threading.Timer(max(0.0, self.options.seconds_left), os.kill, (os.getpid(), signal.SIGTERM))
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            signal.signal(signal.SIGTERM, previous)

    @contextmanager
    def _share_events(self) -> Iterator[None]:
        """On a GPU the dataset is put there once for all cells."""
        if not self.options.device.startswith("cuda"):
            yield
            return
        from habitus.training import keep_events_on_device

        with keep_events_on_device():
            yield

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()


def deadline(seconds: float | None) -> Callable[[], float | None]:
    """A function that returns the seconds left, on a monotonic clock; None for no limit."""
    end = None if seconds is None else time.monotonic() + seconds
    return lambda: None if end is None else end - time.monotonic()


def _is_device_error(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _disk_error(error: BaseException | None) -> int | None:
    """The errno of the passing disk error behind an error; None where there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            return error.errno
        # Libraries written in Rust, such as safetensors, keep the number only in the text.
        for number in re.findall(r"\(os error (\d+)\)", str(error)):
            if int(number) in _DISK_ERRORS:
                return int(number)
        error = error.__cause__ or error.__context__
    return None
