"""The worker's loop: claim a cell, run it, publish its Record, until nothing is left. The same on one CPU, on a
packed GPU and on a cluster."""

import contextlib
import errno
import os
import re
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from habitus.data import Dataset
from habitus.errors import HabitusError, Interrupted, OutOfMemory, RunError
from habitus.record import Record
from habitus.sweeps import attempts
from habitus.sweeps.jobs import Admission, Job, Tally, WorkerOptions
from habitus.sweeps.lease import Lease, LeaseLostError, WorkerFile, try_claim, wait
from habitus.sweeps.store import RECORD, Store

if TYPE_CHECKING:
    from habitus.training import TrainOptions

_DISK_TROUBLE = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
_DISK_TRIES = 6
_DEVICE_TRIES = 3  # claims of a cell after which an error of the GPU is the cell's own fault
_MOST_DEATHS = 20  # claims of one cell that ended without a word, none of which saved a step


class DeviceLostError(RunError):
    """After an error of the GPU itself nothing works in this process any more; a new one may well succeed."""


class _StopError(Exception):
    """Time is up, or somebody asked the worker to stop."""


@dataclass
class _Trouble:
    """What went wrong with a cell so far, in this worker."""

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
        note: Callable[[str], None] | None = None,
    ) -> None:
        self.store, self.dataset = store, dataset
        self.options = options or WorkerOptions()
        self.admission = admission or Admission()
        self.progress = progress or (lambda _digest, _progress: None)
        self.note = note or (lambda _text: None)
        self.file = WorkerFile(store.path)
        self.tally = Tally()
        self._trouble: dict[str, _Trouble] = {}
        self._parents: dict[str, str | None] = {}
        self._disk_trouble = 0
        self._lost = ""  # what the device said before it went
        self._stop = threading.Event()

    def work(self, jobs: Sequence[Job]) -> Tally:
        """Run jobs until every one has a Record, whoever ran it, or until told to stop."""
        pending = list(jobs)
        self.file.write("start", jobs=len(pending))
        with self._listening(), self._sharing():
            try:
                while pending:
                    before = len(pending), self.tally.published, self.tally.duplicates, self.tally.abandoned
                    pending = [job for job in pending if not self._finished(job)]
                    after = len(pending), self.tally.published, self.tally.duplicates, self.tally.abandoned
                    if pending and before == after:
                        wait(self.options.poll_seconds)
                self.file.write("end", **self.tally.counts())
            except _StopError:
                self.file.write("stopped", **self.tally.counts())
        self.file.close()
        return self.tally

    def _finished(self, job: Job) -> bool:
        """Whether the job needs no further look; runs it where it can be claimed."""
        if self._stop.is_set():
            raise _StopError
        if self.store.settled(job.digest):
            return True
        trouble = self._trouble.get(job.digest, _Trouble())
        if not self._parent_ready(job) or not self.admission.enter(job, trouble.alone):
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

    def _parent_ready(self, job: Job) -> bool:
        """Whether the stage-1 run that this one continues is there; a failed one fails its children too."""
        if job.digest not in self._parents:
            self._parents[job.digest] = self.store.recipe(job.digest).train.parent
        parent = self._parents[job.digest]
        return parent is None or self.store.settled(parent)

    def _run(self, job: Job, lease: Lease) -> bool:
        attempt, step = attempts.begin(lease)
        self.file.write("claimed", cell=job.digest, claim=lease.number, from_step=step)
        try:
            with lease.kept(self.options.lease_seconds):
                if step >= 0:
                    self._train(job, lease, attempt)
                    if not (attempt / RECORD).exists():
                        return False
                lease.check()
                return self._publish(job, lease, attempt)
        except LeaseLostError:
            self.tally.abandoned += 1
            self.file.write("abandoned", cell=job.digest, claim=lease.number)
            attempts.abandon(attempt)
            return self.store.settled(job.digest)

    def _publish(self, job: Job, lease: Lease, attempt: Path) -> bool:
        record = Record.read(attempt / RECORD)
        if not attempts.publish(attempt, lease.cell):
            same = attempts.same_measurement(record, Record.read(lease.cell / RECORD))
            self.tally.duplicates += 1
            self.file.write("duplicate", cell=job.digest, claim=lease.number, equal=same)
            attempts.abandon(attempt)
            return True
        self._disk_trouble = 0
        self.tally.published += 1
        self.tally.failed += record.status == "failed"
        self.file.write("published", cell=job.digest, claim=lease.number, status=record.status)
        attempts.settle(lease.cell, self.file.name)
        if self._lost:
            raise DeviceLostError(f"the device is of no more use to this process: {self._lost}")
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
                progress=lambda where: self.progress(job.digest, where),
                on_save=lambda _step: lease.check(),
            )
        except (LeaseLostError, _StopError):
            raise
        except Interrupted:
            lease.release()
            self.file.write("released", cell=job.digest, claim=lease.number, why="asked to stop")
            raise _StopError from None
        except OutOfMemory as error:
            self._out_of_memory(job, lease, attempt, error)
        except KeyboardInterrupt:
            lease.release()
            raise
        except Exception as error:
            lease.check()  # a worker that woke up too late finds its folder gone: no failure of the cell
            self._failed(job, lease, attempt, error)
        finally:
            self._free_device()

    def _out_of_memory(self, job: Job, lease: Lease, attempt: Path, error: OutOfMemory) -> None:
        """Try again alone on the device, then in smaller pieces, then give up with a failed Record."""
        trouble = self._trouble.setdefault(job.digest, _Trouble())
        most = self.store.recipe(job.digest).train.batch_sequences
        if not trouble.alone:
            trouble.alone, how = True, "alone on the device"
        elif trouble.accumulate * 2 <= min(most, 64):
            trouble.accumulate *= 2
            how = f"in {trouble.accumulate} micro-batches"
        else:
            self._write_failed(job, attempt, f"out of memory, alone and in micro-batches: {error.problem}")
            return
        self.note(f"{job.digest[:12]} ran out of memory; it is tried again {how}")
        self.file.write("retry", cell=job.digest, why="out of memory", how=how)
        attempts.abandon(attempt)
        lease.release()

    def _failed(self, job: Job, lease: Lease, attempt: Path, error: Exception) -> None:
        """Wait where the disk is to blame; else the cell has failed, and its Record says why."""
        if _device_lost(error):
            self._lost = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if lease.number < _DEVICE_TRIES:
                self.file.write("retry", cell=job.digest, why=self._lost, how="in a new process")
                attempts.abandon(attempt)
                lease.release()
                raise DeviceLostError(f"the device is of no more use to this process: {self._lost}") from error
        trouble = _disk_error(error)
        if trouble is not None:
            self._disk_trouble += 1
            lease.release()
            with contextlib.suppress(OSError):
                self.file.write("retry", cell=job.digest, why=os.strerror(trouble), how="after a pause")
            if self._disk_trouble >= _DISK_TRIES:
                raise RunError(
                    f"{self.store.path} cannot be written to: {os.strerror(trouble)}",
                    expected="room for checkpoints and bundles",
                    next_step="make room and run the same sweep again; what is finished stays",
                ) from error
            self.note(f"{job.digest[:12]}: {os.strerror(trouble)}; it is tried again after a pause")
            wait(min(60.0, self.options.poll_seconds * 2**self._disk_trouble))
            return
        expected = isinstance(error, HabitusError)
        reason = error.problem if isinstance(error, HabitusError) else f"{type(error).__name__}: {error}"
        if not expected:
            (attempt / "failure.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self._write_failed(job, attempt, reason)

    def _write_failed(self, job: Job, attempt: Path, reason: str) -> None:
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
        ).write(attempt / RECORD)

    def _free_device(self) -> None:
        """Give back what the cell held on a GPU, since others share it."""
        if self.options.device.startswith("cuda") and not self._lost:
            import gc

            import torch

            gc.collect()
            torch.cuda.empty_cache()

    def _train_options(self, job: Job) -> "TrainOptions":
        from habitus.training import TrainOptions

        trouble = self._trouble.get(job.digest, _Trouble())
        save_every = self.options.save_every
        if save_every is None:
            long = job.seconds > 2 * self.options.save_seconds
            save_every = max(1, round(job.steps * self.options.save_seconds / job.seconds)) if long else 0
        return TrainOptions(
            device=self.options.device,
            threads=self.options.threads,
            save_every=save_every,
            resume=True,
            accumulate=trouble.accumulate,
            flops_budget=job.flops_budget,
        )

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Stop on TERM and when the time is up: training saves where it is, and everything else ends at once."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGTERM, self._asked_to_stop)
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
            signal.signal(signal.SIGTERM, before)

    @contextmanager
    def _sharing(self) -> Iterator[None]:
        """On a GPU the dataset is put there once for all cells."""
        if not self.options.device.startswith("cuda"):
            yield
            return
        from habitus.training import events_kept

        with events_kept():
            yield

    def _asked_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._stop.set()


def _device_lost(error: BaseException) -> bool:
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def _disk_error(error: BaseException | None) -> int | None:
    """The number of a passing trouble with the disk behind an error, if that is what it was."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_TROUBLE:
            return error.errno
        # Libraries written in Rust, safetensors among them, keep the number in the text alone.
        for number in re.findall(r"\(os error (\d+)\)", str(error)):
            if int(number) in _DISK_TROUBLE:
                return int(number)
        error = error.__cause__ or error.__context__
    return None
