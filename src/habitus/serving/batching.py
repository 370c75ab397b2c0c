"""Many callers, one worker: what waits together is computed together.

Callers run on an event loop, the work on one thread of its own. The worker takes the lane whose oldest job has waited
longest, and with it as many jobs of that lane as a batch holds; so batches form by themselves while it is busy. Before
it begins it may wait a moment until as many jobs are there as in the last batch: callers who have just been answered
come back soon, and if batches are slow, one full batch costs less than two half ones. A lone caller never waits.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from habitus.errors import HabitusError

log = logging.getLogger(__name__)

# After a batch of this much processor time (the scan of a large catalogue, most of which is the same for one request
# and for thirty), the next may wait for a share of it. Short ones overlap better with the reading of requests.
_LONG_BATCH_S, _EXTRA_WAIT_SHARE = 0.1, 0.1
# A job is taken where those before it need at most this share of its time. Without that, an overloaded worker would
# let all of them wait until they are about to be late, and do most of its work for callers who have gone.
_SHARE_FOR_WAITING = 0.5
_NEWEST = 0.3  # weight of the last batch in what a job is expected to take
Work = Callable[[list[Any]], Sequence[Any]]


class QueueFullError(Exception):
    """As many jobs wait as are allowed to, or as can be done in time."""


class DeadlineError(Exception):
    """The job's deadline passed before its result was there."""


class StoppedError(Exception):
    """The worker takes no more jobs."""


@dataclass(frozen=True)
class Lane:
    """Jobs of one kind: how many fit into a batch, and what is done with them.

    `work` gets the payloads of a batch and returns a result for each. `patient` jobs are waited for once they have
    begun, however long they take: a caller must know whether an update has happened. A lane that is not `limited` takes
    jobs even if the queue is full.
    """

    work: Work
    max_batch: int = 1
    patient: bool = False
    limited: bool = True


@dataclass(eq=False)
class _Job:
    payload: Any
    deadline: float
    future: "asyncio.Future[Any]"
    since: float = field(default_factory=time.monotonic)
    begun: bool = False


class Batcher:
    """Lanes of jobs before one worker thread."""

    def __init__(
        self,
        lanes: Mapping[str, Lane],
        *,
        max_queue: int,
        max_wait_s: float,
        on_batch: Callable[[str, int, float], None] = lambda lane, size, seconds: None,
    ) -> None:
        self.lanes = dict(lanes)
        self.max_queue = max_queue
        self.max_wait_s = max_wait_s
        self.on_batch = on_batch
        self._waiting: dict[str, deque[_Job]] = {name: deque() for name in lanes}
        self._callers = dict.fromkeys(lanes, 1)  # of each lane at the end of its last batch
        self._extra_wait_s = dict.fromkeys(lanes, 0.0)
        self._job_s = dict.fromkeys(lanes, 0.0)  # as expected of each lane's jobs; 0 before the first
        self._changed = threading.Condition()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the worker; called on the event loop that the callers live on."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="habitus-worker", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Finish every job that waits, then end the worker."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    @property
    def num_waiting(self) -> int:
        return sum(len(jobs) for jobs in self._waiting.values())

    async def submit(self, lane: str, payload: Any, deadline: float) -> Any:
        """The result for one payload; `deadline` is a time of time.monotonic()."""
        loop = asyncio.get_running_loop()
        job = _Job(payload, deadline, loop.create_future())
        with self._changed:
            if self._stopping:
                raise StoppedError
            if self.lanes[lane].limited and (self.num_waiting >= self.max_queue or self._would_be_late(deadline)):
                raise QueueFullError
            self._waiting[lane].append(job)
            self._changed.notify()
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire, lane, job)
        try:
            return await job.future
        finally:
            timer.cancel()

    def _would_be_late(self, deadline: float) -> bool:
        expected = sum(len(jobs) * self._job_s[name] for name, jobs in self._waiting.items())
        return expected > max(0.0, _SHARE_FOR_WAITING * (deadline - time.monotonic()))

    def _expire(self, lane: str, job: _Job) -> None:
        with self._changed:
            if job.begun and self.lanes[lane].patient:
                return
            if not job.begun and job in self._waiting[lane]:
                self._waiting[lane].remove(job)
        if not job.future.done():
            job.future.set_exception(DeadlineError())

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            name, jobs = batch
            began, cpu_s = time.monotonic(), time.thread_time()
            results = _compute_results(self.lanes[name].work, [job.payload for job in jobs])
            cpu_s = time.thread_time() - cpu_s
            self._callers[name] = len(jobs) + len(self._waiting[name])
            self._extra_wait_s[name] = _EXTRA_WAIT_SHARE * cpu_s if cpu_s >= _LONG_BATCH_S and self.max_wait_s else 0.0
            seconds = time.monotonic() - began
            self._job_s[name] += (_NEWEST if self._job_s[name] else 1.0) * (seconds / len(jobs) - self._job_s[name])
            self.on_batch(name, len(jobs), seconds)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, jobs, results)

    def _take(self) -> tuple[str, list[_Job]] | None:
        """The next batch; None when the worker is to end."""
        with self._changed:
            while True:
                while not self.num_waiting:
                    if self._stopping:
                        return None
                    self._changed.wait()
                name = min(filter(self._waiting.get, self._waiting), key=lambda name: self._waiting[name][0].since)
                self._wait_for_batch(name)
                lane, waiting = self.lanes[name], self._waiting[name]
                jobs = [waiting.popleft() for _ in range(min(len(waiting), lane.max_batch))]
                if jobs:  # none if all of them reached their deadline meanwhile
                    break
            for job in jobs:
                job.begun = True
            return name, jobs

    def _wait_for_batch(self, name: str) -> None:
        """Wait until as many jobs are there as in the last batch, but not for long."""
        waiting = self._waiting[name]
        expected = min(self._callers[name], self.lanes[name].max_batch)
        until = max(waiting[0].since + self.max_wait_s, time.monotonic() + self._extra_wait_s[name])
        while 0 < len(waiting) < expected and not self._stopping:
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _compute_results(work: Work, payloads: list[Any]) -> list[Any]:
    """A result or an exception for every payload; a failing batch is done again one by one, so that only one fails."""
    try:
        results = list(work(payloads))
    except Exception as error:
        if len(payloads) > 1:
            return [_compute_results(work, [payload])[0] for payload in payloads]
        if not isinstance(error, HabitusError):
            log.exception("a request could not be answered")
        return [error]
    if len(results) != len(payloads):
        return [RuntimeError(f"{len(results)} results for {len(payloads)} requests")] * len(payloads)
    return results


def _deliver(jobs: list[_Job], results: list[Any]) -> None:
    for job, result in zip(jobs, results, strict=True):
        if job.future.done():  # its deadline has passed, or its caller is gone
            continue
        if isinstance(result, Exception):
            job.future.set_exception(result)
        else:
            job.future.set_result(result)
