"""Tables and datasets in an object store: moto's server of S3's interface, on loopback."""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer
from pyarrow import fs

from habitus.data import Dataset, prepare, remote_datasets
from habitus.errors import DataError
from tests.data.tables import SCHEMA, SMALL, make_events, make_items, write_tables


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel("ERROR")
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def store(server: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> fs.S3FileSystem:
    """An empty bucket 'logs', which the environment names; the cache of datasets is in tmp_path."""
    _post(f"{server}/moto-api/reset", b"")
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "someone",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HABITUS_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    store = fs.S3FileSystem(endpoint_override=server.removeprefix("http://"), scheme="http", allow_bucket_creation=True)
    store.create_dir("logs")
    return store


def _post(url: str, body: bytes) -> None:
    with urlopen(Request(url, body, {"Content-Type": "text/plain"}, method="POST")):
        pass


def upload(store: fs.S3FileSystem, folder: Path, kind: str = "parquet") -> None:
    write_tables(folder, make_events(), make_items(), kind)
    for path in folder.iterdir():
        fs.copy_files(str(path), f"logs/in/{path.name}", fs.LocalFileSystem(), store)


def names_below(store: fs.S3FileSystem, folder: str) -> list[str]:
    found = store.get_file_info(fs.FileSelector(folder, recursive=True, allow_not_found=True))
    return [info.path for info in found if info.type == fs.FileType.File]


def test_a_dataset_prepared_from_a_bucket_into_a_bucket_is_the_local_one(
    store: fs.S3FileSystem, tmp_path: Path
) -> None:
    upload(store, tmp_path / "in")
    local = prepare(str(tmp_path / "in/ev*.parquet"), str(tmp_path / "in/items.parquet"), SCHEMA, tmp_path / "d", SMALL)
    manifest = prepare("s3://logs/in/ev*.parquet", "s3://logs/**/items.parquet", SCHEMA, "s3://logs/d", SMALL)
    assert manifest == local
    assert not list(tmp_path.glob("habitus-*"))  # the copy that was published
    dataset = Dataset.open(Path("s3://logs/d"))  # pathlib makes s3:/logs/d of it
    assert dataset.path.is_relative_to(tmp_path / "cache")
    assert dataset.checksum == local.checksum

    # A second open reads the cache; what is missing there is fetched again.
    (dataset.path / "events" / "time.npy").unlink()
    assert Dataset.open("s3://logs/d").checksum == local.checksum

    with pytest.raises(DataError, match="s3://logs/d exists already"):
        prepare("s3://logs/in/events.parquet", "s3://logs/in/items.parquet", SCHEMA, "s3://logs/d", SMALL)


def test_processes_that_open_a_dataset_at_once_fetch_it_once(
    store: fs.S3FileSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload(store, tmp_path / "in")
    manifest = prepare("s3://logs/in/events.parquet", "s3://logs/in/items.parquet", SCHEMA, "s3://logs/d", SMALL)
    fetched: list[str] = []
    fetch_file = remote_datasets.fetch_file

    def count(store: fs.FileSystem, key: str, path: Path) -> None:
        fetched.append(key)
        fetch_file(store, key, path)

    monkeypatch.setattr(remote_datasets, "fetch_file", count)
    with ThreadPoolExecutor(3) as pool:  # the lock holds between open files, so that threads stand for processes
        opened = list(pool.map(Dataset.open, ["s3://logs/d"] * 3))
    assert {dataset.checksum for dataset in opened} == {manifest.checksum}
    assert sorted(fetched) == sorted(
        [f"logs/d/{name}" for name in manifest.files] + 4 * ["logs/d/manifest.json"]
    )  # the manifest is read by all

    (tmp_path / "file").touch()
    monkeypatch.setenv("HABITUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"s3://logs/d cannot be copied to the cache .*file") as error:
        Dataset.open("s3://logs/d")
    assert "HABITUS_CACHE" in error.value.next_step


def test_damage_on_the_way_is_noticed_and_not_cached(store: fs.S3FileSystem, tmp_path: Path) -> None:
    upload(store, tmp_path / "in")
    prepare("s3://logs/in/events.parquet", "s3://logs/in/items.parquet", SCHEMA, "s3://logs/d", SMALL)
    with store.open_input_file("logs/d/events/time.npy") as file:
        content = file.read()
    with store.open_output_stream("logs/d/events/time.npy") as file:
        file.write(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"s3://logs/d/events/time\.npy has changed since it was prepared"):
        Dataset.open("s3://logs/d")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    store.delete_file("logs/d/manifest.json")
    with pytest.raises(DataError, match=r"s3://logs/d holds no manifest\.json"):
        Dataset.open("s3://logs/d")


def test_errors_name_the_object_and_nothing_is_published(store: fs.S3FileSystem, tmp_path: Path) -> None:
    upload(store, tmp_path / "in", "csv")
    with store.open_output_stream("logs/in/more-events.parquet") as file:
        file.write(b"cut off")
    for events, expected in (
        ("s3://logs/in/*events.parquet", r"s3://logs/in/more-events\.parquet cannot be read as Parquet"),
        ("s3://logs/in/none*.csv", r"events: s3://logs/in/none\*\.csv does not exist"),
        ("s3://logs/in", r"s3://logs/in is a folder"),
        ("s3://other-bucket/*.csv", "there is no such bucket"),
    ):
        with pytest.raises(DataError, match=expected):
            prepare(events, "s3://logs/in/items.csv", SCHEMA, "s3://logs/d", SMALL)
    assert names_below(store, "logs/d") == []
    assert not list(tmp_path.glob("habitus-*"))


def test_a_bucket_without_permission_is_a_clear_error(store: fs.S3FileSystem, server: str, tmp_path: Path) -> None:
    upload(store, tmp_path / "in")
    inputs = str(tmp_path / "in/events.parquet"), str(tmp_path / "in/items.parquet")
    _post(f"{server}/moto-api/reset-auth", b"0")  # from now on 'someone' is not known
    try:
        with pytest.raises(DataError, match=r"s3://logs/in/events\.parquet cannot be read: access is denied") as error:
            prepare("s3://logs/in/events.parquet", inputs[1], SCHEMA, tmp_path / "d", SMALL)
        assert "AWS_ACCESS_KEY_ID" in error.value.next_step
        with pytest.raises(DataError, match="s3://logs/d cannot be written: access is denied"):
            prepare(*inputs, SCHEMA, "s3://logs/d", SMALL)
        with pytest.raises(DataError, match="s3://logs/d cannot be read: access is denied"):
            Dataset.open("s3://logs/d")
    finally:
        _post(f"{server}/moto-api/reset-auth", b"inf")
    assert not (tmp_path / "d").exists()
    assert not list(tmp_path.glob("habitus-*"))


KILLED = """
import os, signal, sys
from habitus.data import prepare
from tests.data.tables import SCHEMA, SMALL

def die(phase, done):
    if phase == "computing checksums":
        os.kill(os.getpid(), signal.SIGKILL)

prepare(sys.argv[1], sys.argv[2], SCHEMA, "s3://logs/d", SMALL, die)
"""


@pytest.mark.slow
def test_what_a_killed_call_left_goes_with_the_next(store: fs.S3FileSystem, tmp_path: Path) -> None:
    upload(store, tmp_path / "in")
    inputs = str(tmp_path / "in/events.parquet"), str(tmp_path / "in/items.parquet")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-c", KILLED, *inputs], cwd=root, env=environment, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert names_below(store, "logs/d") == ["logs/d/.habitus-writing"]
    assert list(scratch.iterdir())
    with pytest.raises(DataError, match=r"s3://logs/d holds no manifest\.json"):
        Dataset.open("s3://logs/d")
    tempfile.tempdir = str(scratch)  # as the fixture does, which puts it back
    prepare(*inputs, SCHEMA, "s3://logs/d", SMALL)
    assert "logs/d/.habitus-writing" not in names_below(store, "logs/d")
    assert not list(scratch.iterdir())
    assert Dataset.open("s3://logs/d").num_events == len(make_events()["user_id"])


def test_a_dataset_that_cannot_be_copied_is_kept(store: fs.S3FileSystem, server: str, tmp_path: Path) -> None:
    upload(store, tmp_path / "in")
    inputs = str(tmp_path / "in/events.parquet"), str(tmp_path / "in/items.parquet")
    try:
        with pytest.raises(DataError, match="the prepared dataset is complete in") as error:

            def revoke(phase: str, done: float) -> None:
                if phase == "computing checksums":
                    _post(f"{server}/moto-api/reset-auth", b"0")

            prepare(*inputs, SCHEMA, "s3://logs/d", SMALL, revoke)
    finally:
        _post(f"{server}/moto-api/reset-auth", b"inf")
    folder = Path(error.value.problem.rpartition(" ")[2])
    assert Dataset.open(folder).num_events == len(make_events()["user_id"])
