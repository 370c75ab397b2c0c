"""Many callers, one worker: what waits together is computed together.

Callers live on an event loop, the work on one thread of its own. The worker takes the lane whose oldest job has waited
longest, and with it as many jobs of that lane as a batch holds; so batches form by themselves while it is busy. Before
it begins it may linger a moment, for as many jobs as were lately there at once: callers who have just been answered
come back soon, and where batches are long, one of all costs less than two of half. A lone caller never waits.
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
# and for thirty), the next may be put off by a share of it. Short ones overlap better with the reading of requests.
LONG_BATCH_S, LINGER_SHARE = 0.1, 0.1
Work = Callable[[list[Any]], Sequence[Any]]


class QueueFullError(Exception):
    """As many jobs wait as may wait."""


class DeadlineError(Exception):
    """The job's time was over before its answer was there."""


class StoppedError(Exception):
    """The worker takes no more jobs."""


@dataclass(frozen=True)
class Lane:
    """Jobs of one kind: how many fit into a batch, and what is done with them.

    `work` gets the payloads of a batch and returns a result for each. `patient` jobs are waited for once they have
    begun, however long they take: a caller must know whether an update has happened. A lane that is not `limited` takes
    jobs even where the queue is full.
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
        self._callers = dict.fromkeys(lanes, 1)  # that the lane had at the end of its last batch
        self._put_off_s = dict.fromkeys(lanes, 0.0)
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

    async def ask(self, lane: str, payload: Any, deadline: float) -> Any:
        """The result for one payload; `deadline` is a time of time.monotonic()."""
        loop = asyncio.get_running_loop()
        job = _Job(payload, deadline, loop.create_future())
        with self._changed:
            if self._stopping:
                raise StoppedError
            if self.lanes[lane].limited and self.num_waiting >= self.max_queue:
                raise QueueFullError
            self._waiting[lane].append(job)
            self._changed.notify()
        timer = loop.call_later(max(0.0, deadline - time.monotonic()), self._expire, lane, job)
        try:
            return await job.future
        finally:
            timer.cancel()

    def _expire(self, lane: str, job: _Job) -> None:
        with self._changed:
            if job.begun and self.lanes[lane].patient:
                return
            if not job.begun and job in self._waiting[lane]:
                self._waiting[lane].remove(job)
        if not job.future.done():
            job.future.set_exception(DeadlineError())

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            name, jobs = taken
            began, worked = time.monotonic(), time.thread_time()
            outcomes = _outcomes(self.lanes[name].work, [job.payload for job in jobs])
            worked = time.thread_time() - worked
            self._callers[name] = len(jobs) + len(self._waiting[name])
            self._put_off_s[name] = LINGER_SHARE * worked if worked >= LONG_BATCH_S and self.max_wait_s else 0.0
            self.on_batch(name, len(jobs), time.monotonic() - began)
            assert self._loop is not None
            self._loop.call_soon_threadsafe(_deliver, jobs, outcomes)

    def _take(self) -> tuple[str, list[_Job]] | None:
        """The next batch; None when the worker is to end."""
        with self._changed:
            while True:
                while not self.num_waiting:
                    if self._stopping:
                        return None
                    self._changed.wait()
                name = min(filter(self._waiting.get, self._waiting), key=lambda name: self._waiting[name][0].since)
                self._linger(name)
                lane, waiting = self.lanes[name], self._waiting[name]
                jobs = [waiting.popleft() for _ in range(min(len(waiting), lane.max_batch))]
                if jobs:  # none where all that waited ran out of time meanwhile
                    break
            for job in jobs:
                job.begun = True
            return name, jobs

    def _linger(self, name: str) -> None:
        """Wait until as many jobs are there as were lately, but not for long."""
        waiting = self._waiting[name]
        wanted = min(self._callers[name], self.lanes[name].max_batch)
        until = max(waiting[0].since + self.max_wait_s, time.monotonic() + self._put_off_s[name])
        while 0 < len(waiting) < wanted and not self._stopping:
            left = until - time.monotonic()
            if left <= 0 or not self._changed.wait(left):
                return


def _outcomes(work: Work, payloads: list[Any]) -> list[Any]:
    """A result or an exception for every payload; a failing batch is done again one by one, so that only one fails."""
    try:
        results = list(work(payloads))
    except Exception as error:
        if len(payloads) > 1:
            return [_outcomes(work, [payload])[0] for payload in payloads]
        if not isinstance(error, HabitusError):
            log.exception("a request could not be answered")
        return [error]
    if len(results) != len(payloads):
        return [RuntimeError(f"{len(results)} results for {len(payloads)} requests")] * len(payloads)
    return results


def _deliver(jobs: list[_Job], outcomes: list[Any]) -> None:
    for job, outcome in zip(jobs, outcomes, strict=True):
        if job.future.done():  # its time was over, or its caller is gone
            continue
        if isinstance(outcome, Exception):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)
