"""Workers killed, paused, with a wrong clock and a full disk: every cell still ends with one Record, the same one."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.errors import RunError
from habitus.sweeps.attempts import begin
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.lease import LeaseLostError, holder, try_claim
from habitus.sweeps.pool import Pool
from habitus.sweeps.preset import Preset
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, Worker, WorkerOptions
from tests.sweeps.cells_of_tests import assert_equal_stores, quick_cells, store_with

CELLS = 40
CELLS_OF_SOAK = 200  # enough that a hundred kills find somebody at work: the third worker, never killed, does many
LEASE = 3.0

# A worker whose clock jumps an hour ahead, then an hour back, and whose disk is full once, as the system would tell it.
ODD_WORKER = """
import errno, os, sys, time
real_time, real_time_ns, real_fsync = time.time, time.time_ns, os.fsync
def jump():
    return 3600 * (1 - int(time.monotonic() / 2) % 3)  # +1 h, 0, -1 h, each for two seconds
time.time = lambda: real_time() + jump()
time.time_ns = lambda: real_time_ns() + jump() * 10**9
calls = 0
def fsync(descriptor):
    global calls
    calls += 1
    if calls == 5:
        raise OSError(errno.ENOSPC, "No space left on device")
    real_fsync(descriptor)
os.fsync = fsync
from habitus.data import Dataset
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, WorkerOptions
from habitus.sweeps.worker import Worker
store = Store.open(sys.argv[1])
options = WorkerOptions(device="cpu", lease_seconds=float(sys.argv[3]), save_every=4, poll_seconds=0.2)
Worker(store, Dataset.open(sys.argv[2], verify=False), options).work([Job(d, 4e7, steps=12) for d in store.digests()])
"""


@pytest.fixture(scope="module")
def cells(tiny: Preset, facts: DatasetFacts) -> list[PlannedRun]:
    return quick_cells(tiny, facts, CELLS)


@pytest.fixture(scope="module")
def undisturbed(
    cells: list[PlannedRun], dataset: Dataset, tiny: Preset, tmp_path_factory: pytest.TempPathFactory
) -> Store:
    return in_peace(tmp_path_factory.mktemp("peace") / "store", dataset, tiny, cells)


def in_peace(path: Path, dataset: Dataset, tiny: Preset, cells: list[PlannedRun]) -> Store:
    """The same sweep by one worker in this process."""
    store, jobs = store_with(path, dataset, tiny, cells)
    tally = Worker(store, dataset, WorkerOptions(device="cpu")).work(jobs)
    assert tally.published == len(cells)
    return store


def survive(
    path: Path, dataset: Dataset, tiny: Preset, cells: list[PlannedRun], undisturbed: Store, kills: int, seed: int
) -> None:
    """Run the sweep with so many kills and everything else that may go wrong, and compare."""
    store, jobs = store_with(path, dataset, tiny, cells)
    options = WorkerOptions(device="cpu", lease_seconds=LEASE, save_every=4, poll_seconds=0.2)
    pool = Pool(store, dataset, jobs, options, workers=2)
    chance = random.Random(seed)
    pool.start()
    odd = subprocess.Popen([sys.executable, "-c", ODD_WORKER, str(path), str(dataset.path), str(LEASE)])
    paused, pause_at = None, time.monotonic() + 0.8
    killed, next_kill = 0, time.monotonic() + 0.5
    end = time.monotonic() + 400
    while pool.alive():
        assert time.monotonic() < end, "the sweep does not end"
        now = time.monotonic()
        if paused is None and now >= pause_at and pool.pids():
            paused = chance.choice(pool.pids())
            os.kill(paused, signal.SIGSTOP)
            woken_at = now + 1.5 * LEASE
        if paused and woken_at is not None and now >= woken_at:
            os.kill(paused, signal.SIGCONT)
            woken_at = None
        others = [pid for pid in pool.pids() if pid != paused or woken_at is None]
        if killed < kills and now >= next_kill and others:
            os.kill(chance.choice(others), signal.SIGKILL)
            killed += 1
            next_kill = now + chance.uniform(0.05, 0.4)
        time.sleep(0.05)
    assert odd.wait(timeout=120) == 0
    events = list(store.events())
    assert paused is not None and killed == kills
    assert any(event["event"] == "retry" and event["why"] == "No space left on device" for event in events)
    assert all(event["equal"] for event in events if event["event"] == "duplicate")
    assert_equal_stores(store, undisturbed, cells)
    published = [event["cell"] for event in events if event["event"] == "published"]
    assert len(published) == len(set(published))  # nobody was told twice that its Record is the one


@pytest.mark.slow
def test_ten_kills_lose_nothing(
    tmp_path: Path, dataset: Dataset, tiny: Preset, cells: list[PlannedRun], undisturbed: Store
) -> None:
    survive(tmp_path / "store", dataset, tiny, cells, undisturbed, kills=10, seed=1)


@pytest.mark.soak
def test_a_hundred_kills_lose_nothing(tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts) -> None:
    cells = quick_cells(tiny, facts, CELLS_OF_SOAK)
    undisturbed = in_peace(tmp_path / "peace", dataset, tiny, cells)
    survive(tmp_path / "store", dataset, tiny, cells, undisturbed, kills=100, seed=2)


@contextlib.contextmanager
def asleep(pids: list[int]) -> Iterator[None]:
    """Processes stopped while the block runs."""

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    send(signal.SIGSTOP)
    try:
        yield
    finally:
        send(signal.SIGCONT)


def test_cells_altered_while_a_sweep_runs_are_named_and_run_again(
    tmp_path: Path, dataset: Dataset, tiny: Preset, cells: list[PlannedRun], undisturbed: Store
) -> None:
    """One Record is edited once it is published; the folder of another cell vanishes while it is trained."""
    cells = cells[:16]
    store, jobs = store_with(tmp_path / "store", dataset, tiny, cells)
    options = WorkerOptions(device="cpu", lease_seconds=LEASE, save_every=2, poll_seconds=0.1)
    pool = Pool(store, dataset, jobs, options, workers=2)
    pool.start()
    edited, vanished = None, None
    end = time.monotonic() + 200
    while pool.alive():
        assert time.monotonic() < end, "the sweep does not end"
        if vanished is None and any(event["event"] == "published" for event in store.events()):
            with asleep(pool.pids()):
                events = list(store.events())
                published = [event["cell"] for event in events if event["event"] == "published"]
                running = [e["cell"] for e in events if e["event"] == "claimed" and not store.has_record(e["cell"])]
                if running and store.settled(published[0]):
                    edited, vanished = store.cell(published[0]) / "record.json", store.cell(running[-1])
                    edited.write_text(edited.read_text().replace('"steps": ', '"steps": 1'))
                    shutil.rmtree(vanished)
        time.sleep(0.01)
    assert edited is not None and vanished is not None
    with pytest.raises(RunError, match=edited.parent.name):
        store.record(edited.parent.name)
    for folder in (edited.parent, vanished):  # as the errors say: delete what was changed and run again
        shutil.rmtree(folder, ignore_errors=True)
    for planned in cells:
        store.add(planned.hash, planned.recipe)
    Worker(store, dataset, options).work(jobs)
    assert_equal_stores(store, undisturbed, cells)


def test_a_worker_that_wakes_up_too_late_changes_nothing(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    (planned,) = quick_cells(tiny, facts, 1)
    train = planned.recipe.train.model_copy(update={"steps": 150})
    recipe = planned.recipe.model_copy(update={"train": train})
    digest = recipe.hash(dataset.checksum)
    jobs = [Job(digest, 4e7, steps=150)]
    options = WorkerOptions(device="cpu", lease_seconds=1.0, save_every=20, poll_seconds=0.1)

    def put_to_sleep(store: Store) -> tuple[Pool, int]:
        """A worker that was stopped after its claim; it may have come to its end before that on a busy machine."""
        pool = Pool(store, dataset, jobs, options, workers=1)
        pool.start()
        (pid,) = pool.pids()
        while not any(event["event"] == "claimed" for event in store.events()):
            time.sleep(0.02)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
        return pool, pid

    for attempt in range(10):
        store = Store.create(tmp_path / f"store-{attempt}", dataset, tiny.evaluate)
        store.add(digest, recipe)
        pool, pid = put_to_sleep(store)
        if not store.has_record(digest):
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        while pool.alive():
            time.sleep(0.05)
    tally = Worker(store, dataset, options).work(jobs)  # waits for the lease to run out
    before = (store.cell(digest) / "record.json").read_bytes()
    os.kill(pid, signal.SIGCONT)
    while pool.alive():
        time.sleep(0.05)
    assert (tally.published, pool.tally().published) == (1, 0)
    assert pool.tally().abandoned + pool.tally().duplicates == 1
    assert (store.cell(digest) / "record.json").read_bytes() == before
    assert store.settled(digest)


def test_a_worker_that_finds_its_attempt_cleared_has_lost_the_cell(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    """It went to sleep between its last look at the lease and the publication."""
    cells = quick_cells(tiny, facts, 1)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, cells)
    sleeper, other = (Worker(store, dataset, WorkerOptions(device="cpu", lease_seconds=0.0)) for _ in range(2))
    lease = try_claim(store.cell(jobs[0].digest), sleeper.file)
    assert lease is not None
    attempt, _ = begin(lease)
    lease.check()
    assert other.work(jobs).published == 1
    with pytest.raises(LeaseLostError):
        sleeper._publish(jobs[0], lease, attempt)


@pytest.mark.slow
def test_workers_save_and_stop_when_the_sweep_itself_is_killed(tmp_path: Path, dataset: Dataset, tiny: Preset) -> None:
    command = [sys.executable, "-m", "habitus", "sweep", "allocation", "--preset", "tiny", "--workers", "2"]
    command += ["--data", str(dataset.path), "--store", str(tmp_path / "store"), "--device", "cpu"]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120

    def said(what: str) -> int:
        if not (tmp_path / "store" / "store.json").exists():
            return 0
        return sum(event["event"] == what for event in Store.open(tmp_path / "store").events())

    while said("published") < 2:
        assert parent.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while said("stopped") + said("end") < 2:
        assert time.monotonic() < end, "the workers go on without their parent"
        time.sleep(0.05)
    store = Store.open(tmp_path / "store")
    waiting = [digest for digest in store.digests() if not store.settled(digest)]
    assert waiting and all(holder(store.cell(digest)) is None for digest in waiting)  # free for whoever comes next
