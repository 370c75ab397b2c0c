"""Preparing on a Ray cluster: the bytes of the plain way, whatever the log, and whoever is killed."""

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, prepare, update
from habitus.data.manifest import DatasetManifest
from habitus.errors import ConfigError, DataError, RunError
from habitus.events import Schema
from habitus.progress import Progress

from .tables import SCHEMA, SMALL, make_events, make_items, write_tables

ON_RAY = replace(SMALL, backend="ray", parts=3)
USERS = {"users": {"user": "user_id", "fields": {"plan": "category"}}}
PAIRS = {"events": {**SCHEMA.to_values()["events"], "item": ["item_id", "event_type"], "fields": {"paid": "number"}}}
TARGETS = {"targets": {"column": "event_type", "weights": {"buy": 1.0}}}


class OneProcess:
    """A cluster without processes: tasks run here, one after the other."""

    num_cpus = 2

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], ahead: int | None = None
    ) -> Iterator[Any]:
        return (function(*job) for job in jobs)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connect() -> Iterator[OneProcess]:
        yield OneProcess()

    monkeypatch.setattr(sys.modules["habitus.data.prepare"], "ray_driver", connect)


def write_log(folder: Path, num_users: int, bad_rows: bool = False) -> dict[str, str]:
    """Events in three files of different lengths, items, and a users table; the paths by role."""
    events = make_events(num_users)
    if bad_rows:
        events["user_id"][5] = None
        events["item_id"][-3] = "nobody knows"
        events["item_id"][-2] = "nor this"
        events["paid"][7] = float("inf")
    write_tables(folder, events, make_items())
    table = pa.table(events)
    (folder / "log").mkdir()
    cuts = [0, table.num_rows // 7, table.num_rows // 2, table.num_rows]
    for number, (first, stop) in enumerate(pairwise(cuts)):
        pq.write_table(table.slice(first, stop - first), folder / "log" / f"{number}.parquet", row_group_size=64)
    plans = {"user_id": [f"u{n}" for n in range(num_users)], "plan": ["ab"[n % 2] for n in range(num_users)]}
    pq.write_table(pa.table(plans), folder / "users.parquet")
    return {"events": f"{folder}/log/*.parquet", "items": f"{folder}/items.parquet", "users": f"{folder}/users.parquet"}


@pytest.mark.parametrize(
    ("extra", "split"), [({**USERS, **TARGETS}, "time"), (PAIRS, "last")], ids=["users and targets", "pairs"]
)
def test_shares_and_parts_make_the_same_bytes(
    one_process: None, tmp_path: Path, extra: dict[str, Any], split: Any
) -> None:
    paths = write_log(tmp_path, 30, bad_rows=True)
    schema = Schema.parse({**SCHEMA.to_values(), **extra}, "test")
    users = paths["users"] if "users" in extra else None
    tables = paths["events"], paths["items"]
    plain, on_ray = (replace(options, split=split, on_bad="drop") for options in (SMALL, ON_RAY))
    manifest = prepare(*tables, schema, tmp_path / "plain", plain, users=users)
    assert prepare(*tables, schema, tmp_path / "ray", on_ray, users=users) == manifest
    Dataset.open(tmp_path / "ray")  # the files are those of the manifest
    assert [path.name for path in tmp_path.iterdir() if "ray" in path.name] == ["ray"]


def test_bad_rows_are_reported_as_the_plain_way_does(one_process: None, tmp_path: Path) -> None:
    paths = write_log(tmp_path, 40, bad_rows=True)
    errors = []
    for options in (SMALL, ON_RAY):
        with pytest.raises(DataError, match="cannot be used") as error:
            prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "out", options)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "2.parquet row" in errors[0]


def test_a_file_that_a_task_cannot_read_and_an_update_are_clear_errors(one_process: None, tmp_path: Path) -> None:
    paths = write_log(tmp_path, 40)
    damaged = tmp_path / "log" / "1.parquet"
    content = bytearray(damaged.read_bytes())
    content[4:2000] = bytes(1996)  # the footer is whole, the pages are not
    damaged.write_bytes(content)
    with pytest.raises(DataError, match=r"a part of .*0\.parquet \.\.\. .*2\.parquet cannot be read on node"):
        prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "out", ON_RAY)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    prepare(str(tmp_path / "events.parquet"), paths["items"], SCHEMA, tmp_path / "day", SMALL)
    with pytest.raises(ConfigError, match="backend ray"):
        update(Dataset.open(tmp_path / "day"), paths["events"], paths["items"], tmp_path / "more", ON_RAY)


def kill_tasks(killed: list[int], wanted: int, enough: threading.Event) -> None:
    """SIGKILL to worker processes while they run a task, until so many are killed."""
    import psutil

    while len(killed) < wanted and not enough.is_set():
        for process in psutil.process_iter(["cmdline"]):
            is_task = "".join(process.info["cmdline"] or []).startswith("ray::_guarded")
            if is_task and process.pid not in killed and len(killed) < wanted:
                process.kill()
                killed.append(process.pid)
        time.sleep(0.005)


@pytest.mark.slow
def test_three_nodes_two_killed_workers_a_full_disk_and_a_lost_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    paths = write_log(tmp_path, 1000)
    plain = prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "plain", SMALL)
    store = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    disk = tmp_path / "full-disk"
    disk.mkdir()

    def run(name: str, progress: Progress | None = None) -> DatasetManifest:
        return prepare(paths["events"], paths["items"], SCHEMA, tmp_path / name, ON_RAY, progress)

    def lose_head(phase: str, done: float) -> None:
        if phase == "partitioning events":
            cluster.head_node.kill_all_processes(False)

    try:
        cluster.add_node(num_cpus=1, **store)
        node = cluster.add_node(num_cpus=1, **store)
        killed: list[int] = []
        enough = threading.Event()
        killer = threading.Thread(target=kill_tasks, args=(killed, 2, enough))
        killer.start()
        try:
            assert run("ray") == plain
        finally:
            enough.set()
            killer.join()
        assert len(killed) == 2

        if not subprocess.run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", disk]).returncode:
            cluster.remove_node(node)
            cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(disk)}, **store)
            with pytest.raises(DataError, match="a disk is full on node"):
                run("full")
        with pytest.raises(RunError, match="lost its head"):
            run("headless", lose_head)
    finally:
        cluster.shutdown()
        subprocess.run(["umount", disk], check=False, capture_output=True)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"events.parquet", "items.parquet", "users.parquet", "log", "plain", "ray", "full-disk"}
