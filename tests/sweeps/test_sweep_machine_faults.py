"""Faults of the machine itself: a clock that jumps, memory that runs out, a network that is cut in two.

Each test says what it needs and is skipped where that is not permitted. All end with the Records of a sweep in peace.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.pool import Pool
from habitus.sweeps.preset import Preset
from habitus.sweeps.worker import Worker, WorkerOptions
from tests.sweeps.cells_of_tests import assert_equal_stores, quick_cells, store_with

LEASE = 3.0
FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

WORKER = """
import select, sys, time
time.sleep = lambda seconds: select.select([], [], [], seconds)  # Python's own, until a time, libfaketime garbles
from habitus.data import Dataset
from habitus.sweeps.store import Store
from habitus.sweeps.worker import Job, Worker, WorkerOptions
store = Store.open(sys.argv[1])
options = WorkerOptions(device="cpu", lease_seconds=float(sys.argv[3]), save_every=4, poll_seconds=0.2)
print(time.time(), flush=True)
Worker(store, Dataset.open(sys.argv[2], verify=False), options).work([Job(d, 4e7, steps=12) for d in store.digests()])
print(time.time())
"""


@pytest.mark.slow
@pytest.mark.skipif(not FAKETIME, reason="needs libfaketime (apt install libfaketime)")
@pytest.mark.parametrize("files_jump", [False, True])
def test_a_clock_that_jumps_by_an_hour_changes_nothing(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts, files_jump: bool
) -> None:
    """Of two workers one lives an hour ahead, then an hour behind, changing whenever a Record is published.

    Its clock is its own where a file server stamps the files. With `files_jump` it stamps what it writes.
    """
    cells = quick_cells(tiny, facts, 12)
    alone, jobs = store_with(tmp_path / "alone", dataset, tiny, cells)
    Worker(alone, dataset, WorkerOptions(device="cpu")).work(jobs)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, cells)
    offset = tmp_path / "offset"
    offset.write_text("+3600s")
    # A jump moves the wall clock, not the one that only runs on. With FAKE_UTIME=1 file times are real.
    environment = os.environ | {
        "LD_PRELOAD": str(FAKETIME[0]), "FAKETIME_TIMESTAMP_FILE": str(offset), "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1", "NO_FAKE_STAT": "1", "FAKE_UTIME": "0" if files_jump else "1",
    }  # fmt: skip
    command = [sys.executable, "-c", WORKER, str(store.path), str(dataset.path), str(LEASE)]
    odd = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert odd.stdout is not None
    assert float(odd.stdout.readline()) - time.time() == pytest.approx(3600, abs=60)
    options = WorkerOptions(device="cpu", lease_seconds=LEASE, save_every=4, poll_seconds=0.2)
    pool = Pool(store, dataset, jobs[6:], options, workers=1)  # the first six are left to the other one
    pool.start()
    published, end = 0, time.monotonic() + 200
    while pool.alive() or odd.poll() is None:
        assert time.monotonic() < end, "the sweep does not end"
        before, published = published, sum(event["event"] == "published" for event in store.events())
        if published > before:
            offset.with_name("next").write_text("-3600s" if published % 2 else "+3600s")
            offset.with_name("next").replace(offset)
        time.sleep(0.02)
    assert odd.wait() == 0
    assert abs(float(odd.stdout.readline()) - time.time()) > 3000
    events = list(store.events())
    assert sum(e["event"] == "published" and f"-{odd.pid}-" in e["worker"] for e in events) >= 6
    if not files_jump:
        assert not [e for e in events if e["event"] in ("abandoned", "duplicate")]  # no lease ran out before its time
    assert_equal_stores(store, alone, cells)


@contextlib.contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A memory cgroup within that of this process; the test is skipped where none can be made."""
    memberships = Path("/proc/self/cgroup").read_text(encoding="ascii")
    first = re.search(r"^\d+:memory:(.*)$", memberships, re.MULTILINE)
    path = (
        Path("/sys/fs/cgroup/memory" + first[1])
        if first
        else Path("/sys/fs/cgroup" + memberships.split("::")[-1].strip())
    )
    group, limit = path / f"habitus-{os.getpid()}", "memory.limit_in_bytes" if first else "memory.max"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"needs a memory cgroup of its own: {error}")
    try:
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.05)
        group.rmdir()


def out_of_memory_kills(group: Path) -> int:
    counts = group / "memory.oom_control"
    text = (counts if counts.exists() else group / "memory.events").read_text(encoding="ascii")
    return int(re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)[1])  # type: ignore[index]


@pytest.mark.slow
def test_workers_that_the_system_kills_for_memory_are_replaced(
    tmp_path: Path, dataset: Dataset, tiny: Preset, facts: DatasetFacts
) -> None:
    """Two workers at their cells may suddenly have no more than what they hold: the next page is their end."""
    cells = quick_cells(tiny, facts, 12)
    alone, jobs = store_with(tmp_path / "alone", dataset, tiny, cells)
    Worker(alone, dataset, WorkerOptions(device="cpu")).work(jobs)
    store, jobs = store_with(tmp_path / "store", dataset, tiny, cells)
    options = WorkerOptions(device="cpu", lease_seconds=LEASE, save_every=4, poll_seconds=0.2)
    notes: list[str] = []
    pool = Pool(store, dataset, jobs, options, workers=2, note=notes.append)
    with memory_group(2 << 20) as group:
        pool.start()
        moved, end = set[int](), time.monotonic() + 200
        while pool.alive():
            assert time.monotonic() < end, "the sweep does not end"
            claimed = {e["worker"] for e in store.events() if e["event"] == "claimed"}
            for pid in pool.pids():
                if len(moved) < 2 and pid not in moved and any(f"-{pid}-" in worker for worker in claimed):
                    with contextlib.suppress(ProcessLookupError):
                        (group / "cgroup.procs").write_text(str(pid))
                        moved.add(pid)
            time.sleep(0.01)
        assert out_of_memory_kills(group) == 2
    assert sum("killed by SIGKILL" in note for note in notes) == 2
    assert_equal_stores(store, alone, cells)
