"""Batches form while the worker is busy; nothing is lost, mixed up, or kept waiting for company that does not come."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from habitus.errors import DataError
from habitus.serving.batching import Batcher, DeadlineError, Lane, QueueFullError, StoppedError

SOON = 5.0


class Doubling:
    """Doubles numbers, batch by batch, while a gate is open; negative numbers are refused."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []

    def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(list(numbers))
        self.gate.wait(SOON)
        if min(numbers) < 0:
            raise DataError(f"{min(numbers)} is negative")
        return [2 * number for number in numbers]


def run(
    work: Callable[[list[Any]], list[Any]],
    scene: Callable[[Batcher], Any],
    *,
    max_queue: int = 100,
    max_wait_s: float = 0.0,
    max_batch: int = 8,
    patient: bool = False,
) -> Any:
    async def main() -> Any:
        batcher = Batcher({"one": Lane(work, max_batch, patient)}, max_queue=max_queue, max_wait_s=max_wait_s)
        batcher.start()
        try:
            return await scene(batcher)
        finally:
            await batcher.stop()

    return asyncio.run(main())


def soon() -> float:
    return time.monotonic() + SOON


async def until(condition: Callable[[], bool]) -> None:
    end = soon()
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_what_waits_while_the_worker_is_busy_is_computed_together_and_in_order() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> list[int]:
        work.gate.clear()
        first = asyncio.create_task(batcher.submit("one", 0, soon()))
        await until(lambda: work.batches == [[0]])
        rest = [asyncio.create_task(batcher.submit("one", number, soon())) for number in range(1, 12)]
        await until(lambda: batcher.num_waiting == 11)
        work.gate.set()
        return list(await asyncio.gather(first, *rest))

    assert run(work, scene) == [0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22]
    assert work.batches == [[0], [1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11]]


def test_a_lone_caller_is_not_kept_waiting_and_company_is_waited_for_after_company() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> tuple[float, float]:
        began = time.monotonic()
        await batcher.submit("one", 1, soon())
        alone = time.monotonic() - began
        work.gate.clear()
        blocked = asyncio.create_task(batcher.submit("one", 2, soon()))
        await until(lambda: len(work.batches) == 2)
        pair = [asyncio.create_task(batcher.submit("one", number, soon())) for number in (3, 4)]
        await until(lambda: batcher.num_waiting == 2)
        work.gate.set()
        await asyncio.gather(blocked, *pair)
        began = time.monotonic()
        await batcher.submit("one", 5, soon())
        return alone, time.monotonic() - began

    alone, after_a_pair = run(work, scene, max_wait_s=0.3)
    assert alone < 0.2
    assert 0.3 <= after_a_pair < 1.5
    assert work.batches == [[1], [2], [3, 4], [5]]


def test_one_bad_request_fails_alone() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> list[Any]:
        work.gate.clear()
        first = asyncio.create_task(batcher.submit("one", 0, soon()))
        await until(lambda: len(work.batches) == 1)
        rest = [asyncio.create_task(batcher.submit("one", number, soon())) for number in (1, -2, 3)]
        await until(lambda: batcher.num_waiting == 3)
        work.gate.set()
        return list(await asyncio.gather(first, *rest, return_exceptions=True))

    zero, one, bad, three = run(work, scene)
    assert [zero, one, three] == [0, 2, 6]
    assert isinstance(bad, DataError)


def test_an_error_among_the_results_goes_to_its_own_caller() -> None:
    def work(numbers: list[int]) -> list[Any]:
        return [DataError("odd") if number % 2 else number for number in numbers]

    async def scene(batcher: Batcher) -> list[Any]:
        asked = [batcher.submit("one", number, soon()) for number in range(4)]
        return list(await asyncio.gather(*asked, return_exceptions=True))

    found = run(work, scene)
    assert (found[0], found[2]) == (0, 2)
    assert isinstance(found[1], DataError)
    assert isinstance(found[3], DataError)


def test_a_full_queue_refuses_and_empties_again() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> list[int]:
        work.gate.clear()
        first = asyncio.create_task(batcher.submit("one", 0, soon()))
        await until(lambda: len(work.batches) == 1)
        waiting = [asyncio.create_task(batcher.submit("one", number, soon())) for number in (1, 2)]
        await until(lambda: batcher.num_waiting == 2)
        with pytest.raises(QueueFullError):
            await batcher.submit("one", 3, soon())
        work.gate.set()
        found = list(await asyncio.gather(first, *waiting))
        return [*found, await batcher.submit("one", 4, soon())]

    assert run(work, scene, max_queue=2) == [0, 2, 4, 8]


def test_a_lane_without_limit_is_let_into_a_full_queue() -> None:
    work = Doubling()

    async def main() -> list[int]:
        lanes = {"one": Lane(work), "swap": Lane(lambda numbers: numbers, limited=False)}
        batcher = Batcher(lanes, max_queue=1, max_wait_s=0.0)
        batcher.start()
        work.gate.clear()
        asked = [asyncio.create_task(batcher.submit("one", 0, soon()))]
        await until(lambda: len(work.batches) == 1)
        asked.append(asyncio.create_task(batcher.submit("one", 1, soon())))
        await until(lambda: batcher.num_waiting == 1)
        asked.append(asyncio.create_task(batcher.submit("swap", 5, soon())))
        await until(lambda: batcher.num_waiting == 2)
        work.gate.set()
        found = list(await asyncio.gather(*asked))
        await batcher.stop()
        return found

    assert asyncio.run(main()) == [0, 2, 5]


def test_a_job_whose_time_is_over_is_never_computed() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> None:
        work.gate.clear()
        first = asyncio.create_task(batcher.submit("one", 0, soon()))
        await until(lambda: len(work.batches) == 1)
        with pytest.raises(DeadlineError):
            await batcher.submit("one", 1, time.monotonic() + 0.05)
        assert batcher.num_waiting == 0
        work.gate.set()
        assert await first == 0

    run(work, scene)
    assert work.batches == [[0]]


def test_a_running_job_is_given_up_unless_its_lane_is_patient() -> None:
    def slow(numbers: list[int]) -> list[int]:
        time.sleep(0.3)
        return numbers

    async def scene(batcher: Batcher) -> Any:
        return await batcher.submit("one", 7, time.monotonic() + 0.05)

    with pytest.raises(DeadlineError):
        run(slow, scene)
    assert run(slow, scene, patient=True) == 7


def test_stopping_answers_what_waits_and_takes_nothing_more() -> None:
    work = Doubling()

    async def scene(batcher: Batcher) -> list[int]:
        work.gate.clear()
        asked = [asyncio.create_task(batcher.submit("one", number, soon())) for number in range(20)]
        await until(lambda: batcher.num_waiting + sum(map(len, work.batches)) == 20)
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0.02)
        with pytest.raises(StoppedError):
            await batcher.submit("one", 99, soon())
        work.gate.set()
        await stopping
        return list(await asyncio.gather(*asked))

    assert run(work, scene) == [2 * number for number in range(20)]


def test_many_callers_each_get_their_own_answer() -> None:
    async def scene(batcher: Batcher) -> list[list[int]]:
        async def caller(number: int) -> list[int]:
            return [await batcher.submit("one", 1000 * number + turn, soon()) for turn in range(50)]

        return list(await asyncio.gather(*map(caller, range(20))))

    found = run(Doubling(), scene, max_wait_s=0.001)
    assert found == [[2 * (1000 * number + turn) for turn in range(50)] for number in range(20)]


def test_jobs_that_could_not_be_done_in_time_are_refused_at_once() -> None:
    work = Doubling()

    def slowly(numbers: list[int]) -> list[int]:
        time.sleep(0.2)
        return work(numbers)

    async def scene(batcher: Batcher) -> list[Any]:
        assert await batcher.submit("one", 1, soon()) == 2  # a job takes 0.2 s
        work.gate.clear()
        first = asyncio.create_task(batcher.submit("one", 0, soon() + 60))
        await until(lambda: work.batches == [[1], [0]])  # the worker is busy, so that all others wait
        asked = [asyncio.create_task(batcher.submit("one", number, soon() + 60)) for number in range(600)]
        await asyncio.sleep(0)
        refused = [task for task in asked if task.done()]
        work.gate.set()
        assert all(isinstance(task.exception(), QueueFullError) for task in refused)
        kept = [task for task in asked if task not in refused]
        return [len(refused), await asyncio.gather(first, *kept[:20])]

    # 65 s are left and half of them may be spent waiting, so that at most 163 jobs of 0.2 s and more are taken.
    refused, answers = run(slowly, scene, max_queue=1_000, max_batch=64)
    assert refused >= 600 - 164
    assert answers == [0, *(2 * number for number in range(20))]
