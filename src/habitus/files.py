"""Files and folders that are whole or absent: written beside their name, then renamed."""

import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextmanager
def staged_folder(final: str | Path) -> Iterator[Path]:
    """A folder to fill; renamed to `final` when the block ends well, removed when it does not.

    A killed process leaves its folder behind under a name that starts with a dot; the next run on the
    same host clears it. `final` must not exist.
    """
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(final)
    stage = final.with_name(f".{final.name}.partial-{socket.gethostname()}-{os.getpid()}")
    stage.mkdir()
    try:
        yield stage
        sync_folder(stage)
        stage.rename(final)  # refuses where another process has published meanwhile
        _fsync_directory(final.parent)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush every file below `folder` to the disk, so that the rename that follows publishes whole files."""
    for directory, _, names in os.walk(folder):
        for name in names:
            with Path(directory, name).open("rb") as file:
                os.fsync(file.fileno())
        _fsync_directory(Path(directory))


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _clear_leftovers(final: Path) -> None:
    prefix = f".{final.name}.partial-{socket.gethostname()}-"
    for leftover in final.parent.glob(prefix.replace("[", "[[]") + "*"):
        pid = leftover.name.removeprefix(prefix)
        if pid.isdigit() and int(pid) != os.getpid() and not _alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fsync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
