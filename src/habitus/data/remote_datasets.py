"""Datasets in object stores: copied to a cache before they are opened, and published with their manifest last."""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from habitus.data.manifest import MANIFEST_FILE, DatasetManifest, verify_files
from habitus.data.remote import explained, fetch_file, is_remote, named_as, open_store, plain_url
from habitus.errors import DataError
from habitus.files import scratch_folder, staged_folder
from habitus.units import format_bytes

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

_MARKER = ".habitus-writing"


def local_dataset(path: str | Path) -> Path:
    """The folder of a dataset: `path` itself, or a checked copy of the one at a URL, which is fetched once.

    The cache is HABITUS_CACHE, or habitus in the user's folder for caches.
    """
    if not is_remote(path):
        return Path(path)
    url = plain_url(path)
    try:
        with explained(url, "read"):
            return _cached_dataset(url)
    except OSError as error:  # not of the store, but of the disk here
        raise DataError(
            f"{url} cannot be copied to the cache {_cache()}: {error}",
            expected="a folder that can be written, with room for the dataset",
            next_step="set HABITUS_CACHE to such a folder",
        ) from error


def _cached_dataset(url: str) -> Path:
    store, key = open_store(url)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = _fetch_manifest(store, key, url, Path(scratch))
    folder = _cache() / "datasets" / manifest.checksum
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder.with_suffix(".lock")):  # of the processes of a node, the others find what it fetched
        if not _is_whole(folder, manifest):
            _fetch_dataset(store, key, url, manifest, folder)
    return folder


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Wait until no other process of this machine is in the block; one that is killed has left it."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_whole(folder: Path, manifest: DatasetManifest) -> bool:
    """Whether the cache has a dataset; one in which someone has tidied up is removed."""
    if not folder.exists():
        return False
    try:
        verify_files(folder, manifest, contents=False)
    except DataError:
        shutil.rmtree(folder)
        return False
    return True


def _fetch_dataset(store: "FileSystem", key: str, url: str, manifest: DatasetManifest, folder: Path) -> None:
    needed, free = sum(entry.bytes for entry in manifest.files.values()), shutil.disk_usage(folder.parent).free
    if needed > free:
        raise DataError(
            f"{url} has {format_bytes(needed)}, and the disk of the cache {_cache()} has {format_bytes(free)} left",
            expected="room for a copy: training maps the files of a dataset into memory",
            next_step="set HABITUS_CACHE to a folder on a larger disk",
        )
    # Another machine that shares the cache may publish it meanwhile.
    with suppress(FileExistsError), staged_folder(folder) as stage, named_as({stage: url}):
        for name in (*manifest.files, MANIFEST_FILE):
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            fetch_file(store, f"{key}/{name}", stage / name)
        verify_files(stage, manifest, contents=True)


def publish_dataset(url: str | Path, write: Callable[[Path], DatasetManifest]) -> DatasetManifest:
    """Let `write` fill a local folder, then copy it to a URL, the manifest last: it is what makes a dataset of files.

    Whether the URL can be written is found out first. A dataset that cannot be copied stays, and the error says where.
    What a killed call left goes with the next one: its folder here, and under the same URL its marker.
    """
    from pyarrow import fs

    url = plain_url(url)
    with explained(url, "written"):
        store, key = open_store(url)
        if store.get_file_info(f"{key}/{MANIFEST_FILE}").type != fs.FileType.NotFound:
            raise DataError(
                f"{url} exists already", expected="a name that is free", next_step="remove it or choose another --out"
            )
        with store.open_output_stream(f"{key}/{_MARKER}") as file:
            file.write(b"a dataset is being written here\n")
    try:
        with scratch_folder(Path(tempfile.gettempdir()) / "habitus") as work:
            with named_as({work / "dataset": url}):
                manifest = write(work / "dataset")
            try:
                _upload(work / "dataset", store, key, url)
            except DataError as error:
                kept = (work / "dataset").rename(Path(tempfile.mkdtemp(prefix="habitus-")) / "dataset")
                raise DataError(
                    f"{error.problem}; the prepared dataset is complete in {kept}",
                    expected=error.expected,
                    next_step=f"copy that folder to {url}, or use it where it is",
                ) from error
    finally:
        with suppress(OSError):  # a lost connection has said so already, and the marker harms nobody
            store.delete_file(f"{key}/{_MARKER}")
    return manifest


def _upload(folder: Path, store: "FileSystem", key: str, url: str) -> None:
    from pyarrow import fs

    with explained(url, "written"):
        names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        for name in sorted(names, key=lambda name: (name == MANIFEST_FILE, name)):
            fs.copy_files(str(folder / name), f"{key}/{name}", fs.LocalFileSystem(), store)


def _fetch_manifest(store: "FileSystem", key: str, url: str, scratch: Path) -> DatasetManifest:
    from pyarrow import fs

    if store.get_file_info(f"{key}/{MANIFEST_FILE}").type == fs.FileType.NotFound:
        raise DataError(
            f"{url} holds no {MANIFEST_FILE}",
            expected="a dataset that 'habitus prepare' wrote",
            next_step=f"habitus prepare EVENTS ITEMS --schema schema.toml --out {url}",
        )
    fetch_file(store, f"{key}/{MANIFEST_FILE}", scratch / MANIFEST_FILE)
    with named_as({scratch: url}):
        return DatasetManifest.open(scratch)


def _cache() -> Path:
    if named := os.environ.get("HABITUS_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "habitus"
