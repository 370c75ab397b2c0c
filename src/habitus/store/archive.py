"""A store as one small file under one seal, to be kept beside a page: `fit` and `report` read it like the folder.

The file is xz over JSON: the texts of store.json, the manifests, kept evaluations and every Record. Bundles,
checkpoints, journals and laws, which can be fitted again, stay behind.
"""

import hashlib
import json
import lzma
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from habitus.errors import ConfigError, RunError
from habitus.files import write_atomic
from habitus.store.folder import RECORD_FILE, SEAL_FILE, Seal, read_record
from habitus.typed import CHECKSUM, Sealed

ARCHIVE_SUFFIX = ".store.xz"
_KEPT = ("store.json", "sweeps/*.json", "evaluations/*.json", f"cells/*/{RECORD_FILE}")


class StoreArchive(Sealed):
    """The files of a store, by their path in it."""

    files: dict[str, str]


def is_archive(path: str | Path) -> bool:
    return str(path).endswith(ARCHIVE_SUFFIX)


def pack_store(store: str | Path, out: str | Path) -> int:
    """Write the archive of a store; returns the number of its Records. One that has changed is refused."""
    store, out = Path(store), Path(out)
    if not is_archive(out):
        raise RunError(f"{out} cannot be used", expected=f"a name that ends in {ARCHIVE_SUFFIX}")
    paths = [path for pattern in _KEPT for path in sorted(store.glob(pattern))]
    records = [path for path in paths if path.name == RECORD_FILE]
    if not records:
        raise RunError(f"{store} holds no Records", expected="a run store", next_step="run `habitus sweep` first")
    for path in records:
        read_record(store, path.parent.name)
    files = {path.relative_to(store).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    write_atomic(out, lzma.compress(StoreArchive(files=files).to_json().encode(), preset=6))
    return len(records)


@contextmanager
def open_store(source: str | Path) -> Iterator[Path]:
    """The folder of a store: of an archive, one that lasts as long as the block; anything else as it is."""
    source = Path(source)
    if not is_archive(source):
        yield source
        return
    archive = _read_archive(source)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / source.name.removesuffix(ARCHIVE_SUFFIX)
        for name, text in archive.files.items():
            _check_name(source, name)
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            if path.name == RECORD_FILE:
                digest = hashlib.sha256(text.encode()).hexdigest()
                Seal(record_sha256=digest, worker=source.name, claims=1).write(path.with_name(SEAL_FILE))
        yield folder


def _read_archive(source: Path) -> StoreArchive:
    try:
        values = json.loads(lzma.decompress(source.read_bytes()))
    except OSError as error:
        raise RunError(f"{source} cannot be read: {error.strerror}", expected="an archive of a store") from error
    except (lzma.LZMAError, ValueError, EOFError) as error:
        raise RunError(
            f"{source} is no archive of a store, or damaged ({error})", expected="the file as it was packed"
        ) from error
    if not isinstance(values, dict) or CHECKSUM not in values:
        raise RunError(
            f"{source} has no {CHECKSUM}, so nothing shows that its Records are as they were packed",
            expected="the file as it was packed",
            next_step="restore it, or pack the store again",
        )
    try:
        return StoreArchive.parse(values, str(source))
    except ConfigError as error:
        raise RunError(
            error.problem, expected="the file as it was packed", next_step="restore it, or pack the store again"
        ) from None


def _check_name(source: Path, name: str) -> None:
    parts = PurePosixPath(name).parts
    if not any(PurePosixPath(name).match(pattern) for pattern in _KEPT) or ".." in parts or name.startswith("/"):
        raise RunError(f"{source} holds {name!r}, which is no file of a store", expected="the file as it was packed")
