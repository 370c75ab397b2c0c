"""Preparing on a Ray cluster: the bytes of the plain way, whatever the log, and whoever is killed."""

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare, update
from habitus.data.manifest import DatasetManifest
from habitus.errors import ConfigError, DataError, RunError
from habitus.events import Schema
from habitus.progress import Progress

from .tables import SCHEMA, SMALL, make_events, make_items, write_tables

ON_RAY = replace(SMALL, backend="ray", parts=3)
USERS = {"users": {"user": "user_id", "fields": {"plan": "category"}}}
PAIRS = {"events": {**SCHEMA.to_values()["events"], "item": ["item_id", "event_type"], "fields": {"paid": "number"}}}
TEXTS = {"events": {**SCHEMA.to_values()["events"], "fields": {"event_type": "text"}}}
TARGETS = {"targets": {"column": "event_type", "weights": {"buy": 1.0}}}


class OneProcess:
    """A cluster without processes: tasks run here, one after the other."""

    num_cpus = 2

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], memory: int, ahead: int | None = None
    ) -> Iterator[Any]:
        return (function(*job) for job in jobs)


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["habitus.data.prepare"], "ray_driver", lambda: nullcontext(OneProcess()))


def write_log(folder: Path, num_users: int, bad_rows: bool = False) -> dict[str, str]:
    """Events in three files of different lengths, items, and a users table; the paths by role."""
    events = make_events(num_users)
    if bad_rows:
        events["user_id"][5] = None
        events["item_id"][-3] = "nobody knows"
        events["item_id"][-2] = "nor this"
        events["paid"][7] = float("inf")
    folder.mkdir(exist_ok=True)
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
    ("extra", "split"),
    [({**USERS, **TARGETS}, "time"), (PAIRS, "last"), (TEXTS, "user")],
    ids=["users and targets", "pairs", "texts of events"],
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
    with pytest.raises(DataError, match=r"log/1\.parquet cannot be read: .* \(on node "):
        prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "out", ON_RAY)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]
    prepare(str(tmp_path / "events.parquet"), paths["items"], SCHEMA, tmp_path / "day", SMALL)
    with pytest.raises(ConfigError, match="backend ray"):
        update(Dataset.open(tmp_path / "day"), paths["events"], paths["items"], tmp_path / "more", ON_RAY)


def test_files_that_differ_in_types_make_the_same_bytes(one_process: None, tmp_path: Path) -> None:
    """A share may hold files whose types are not those of all files together, and only a part of each."""
    draw = np.random.default_rng(0)
    rows = 60
    seconds = pa.array(draw.integers(1_700_000_000, 1_700_000_500, rows)).cast(pa.timestamp("s"))
    columns = {
        "user_id": pa.array(draw.integers(0, 9, rows)),
        "item_id": pa.array([f"i{n}" for n in draw.integers(0, 6, rows)]),
        "timestamp": seconds,
        "event_type": pa.array(draw.random(rows) < 0.5),
        "paid": pa.array(draw.random(rows)),
    }
    others = {
        "user_id": pa.int16(),
        "timestamp": pa.timestamp("ns"),
        "event_type": pa.null(),
        "item_id": pa.dictionary(pa.int32(), pa.string()),
        "paid": pa.null(),
    }
    table = pa.table(columns)
    (tmp_path / "log").mkdir()
    empty = table.slice(0, 0)
    for number, part in enumerate((table.slice(0, 13), empty, table.slice(13, 9), table.slice(22, 9), table.slice(31))):
        if number in (0, 3):
            cast = {n: pa.nulls(len(part), t) if pa.types.is_null(t) else part[n].cast(t) for n, t in others.items()}
            part = pa.table({**{name: part[name] for name in part.column_names}, **cast})
        pq.write_table(part, tmp_path / "log" / f"it's {number}.parquet")
    pq.write_table(pa.table(make_items()), tmp_path / "items.parquet")
    tables = str(tmp_path / "log" / "*.parquet"), str(tmp_path / "items.parquet")
    manifest = prepare(*tables, SCHEMA, tmp_path / "plain", SMALL)
    assert prepare(*tables, SCHEMA, tmp_path / "ray", ON_RAY) == manifest


class Elsewhere(OneProcess):
    """A cluster whose nodes do not see the folder of the driver."""

    def run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], memory: int, ahead: int | None = None
    ) -> Iterator[Any]:
        for task, inputs, *job in jobs:
            gone = Path("/nowhere") / inputs.scratch.name
            tables = tuple(gone / path.name for path in inputs.tables)
            yield function(task, replace(inputs, scratch=gone, tables=tables), *job)


def test_a_node_that_does_not_see_the_output_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = write_log(tmp_path, 10)
    monkeypatch.setattr(sys.modules["habitus.data.prepare"], "ray_driver", lambda: nullcontext(Elsewhere()))
    with pytest.raises(DataError, match="does not see /nowhere") as error:
        prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "out", ON_RAY)
    assert "storage that all nodes see" in error.value.expected
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_cluster_that_does_not_answer_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    paths = write_log(tmp_path, 10)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"  # free again, with nobody there
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(RunError, match=f"the Ray cluster at {address} cannot be joined: .*refused"):
        prepare(paths["events"], paths["items"], SCHEMA, tmp_path / "out", ON_RAY)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def write_numbers(folder: Path, num_events: int) -> tuple[str, str, Schema]:
    """A log of integers, in one file: events, items and schema."""
    draw = np.random.default_rng(1)
    users, items = draw.integers(0, num_events // 20, num_events), draw.integers(0, 1000, num_events)
    events = {"user": users, "item": items, "time": np.arange(num_events), "score": draw.random(num_events)}
    folder.mkdir()
    pq.write_table(pa.table(events), folder / "events.parquet", row_group_size=1 << 16)
    pq.write_table(pa.table({"item": np.arange(1000), "size": draw.random(1000)}), folder / "items.parquet")
    roles = {"user": "user", "item": "item", "timestamp": "time", "time_unit": "s", "fields": {"score": "number"}}
    schema = Schema.parse({"events": roles, "items": {"item": "item", "fields": {"size": "number"}}}, "test")
    return str(folder / "events.parquet"), str(folder / "items.parquet"), schema


@contextmanager
def killed_tasks(wanted: int) -> Iterator[list[int]]:
    """SIGKILL to so many worker processes of this test's cluster while they run a task; yields their ids."""
    psutil = pytest.importorskip("psutil")
    killed: list[int] = []
    enough = threading.Event()

    def kill() -> None:
        while len(killed) < wanted and not enough.wait(0.005):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    is_task = "".join(process.cmdline()).startswith("ray::run_task")
                    if is_task and process.pid not in killed and len(killed) < wanted:
                        process.kill()
                        killed.append(process.pid)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        enough.set()
        killer.join()


@pytest.mark.slow
def test_three_nodes_two_killed_workers_a_full_disk_and_a_lost_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    paths = write_log(tmp_path / "small", 300, bad_rows=True)
    *numbers, numbers_schema = write_numbers(tmp_path / "numbers", 1_500_000)
    dropping = replace(SMALL, on_bad="drop")
    logs: dict[str, tuple[tuple[Any, ...], dict[str, Any], PrepareOptions]] = {
        "users": (
            (paths["events"], paths["items"], Schema.parse({**SCHEMA.to_values(), **USERS, **TARGETS}, "test")),
            {"users": paths["users"]},
            replace(dropping, split="time"),
        ),
        "pairs": (
            (paths["events"], paths["items"], Schema.parse({**SCHEMA.to_values(), **PAIRS}, "test")),
            {},
            dropping,
        ),
        "numbers": ((*numbers, numbers_schema), {}, replace(SMALL, memory="64MiB")),
    }
    (tmp_path / "out").mkdir()
    plain = {
        name: prepare(*tables, tmp_path / f"plain-{name}", options, **more)
        for name, (tables, more, options) in logs.items()
    }

    def run(name: str, out: str, progress: Progress | None = None, parts: int = 3) -> DatasetManifest:
        tables, more, options = logs[name]
        return prepare(*tables, tmp_path / "out" / out, replace(options, backend="ray", parts=parts), progress, **more)

    def lose_head(phase: str, done: float) -> None:
        if phase == "partitioning events":
            cluster.head_node.kill_all_processes(False)

    store = {"object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **store})
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    spill, disk = tmp_path / "spill", tmp_path / "small-disk"
    spill.mkdir()
    disk.mkdir()
    is_mounted = not subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk]).returncode
    try:
        nodes = [cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(spill)}, **store) for _ in range(2)]
        with killed_tasks(2) as killed:
            assert run("numbers", "numbers") == plain["numbers"]
        assert len(killed) == 2
        for name in ("users", "pairs"):
            assert run(name, name) == plain[name]
        assert not list(spill.glob("*habitus*")), "what a killed worker left goes with the next task of its node"
        if is_mounted:  # parts too large for the memory are sorted on the node's disk
            cluster.remove_node(nodes[1])
            cluster.add_node(num_cpus=1, env_vars={"TMPDIR": str(disk)}, **store)
            with pytest.raises(DataError, match="a disk is full on node"):
                run("numbers", "full", parts=2)
            assert not list(disk.iterdir())
        with pytest.raises(RunError, match="lost its head"):
            run("numbers", "headless", lose_head)
    finally:
        cluster.shutdown()
        subprocess.run(["umount", disk], check=False, capture_output=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(logs)
