"""Files and folders that are complete or absent: written under a temporary name, then renamed."""

import errno
import hashlib
import os
import secrets
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: str | Path, content: bytes) -> None:
    """Write `content` so that a reader sees the old file or the new one, never a part."""
    with staged_file(path) as partial:
        partial.write_bytes(content)


@contextmanager
def staged_file(final: str | Path) -> Iterator[Path]:
    """A name to write a file under; renamed to `final` when the block ends well, removed when it does not."""
    partial = _partial_name(Path(final))
    try:
        yield partial
        _sync_file(partial)
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)


def write_once(path: str | Path, content: bytes) -> bool:
    """Write a file under a name that may be taken only once; False where another process was first."""
    partial = _partial_name(Path(path))
    try:
        partial.write_bytes(content)
        _sync_file(partial)
        return link_once(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def link_once(source: str | Path, path: str | Path) -> bool:
    """Give a finished file a second name that may be taken only once; False where another process was first."""
    try:
        os.link(source, path)
    except FileExistsError:
        return False
    return True


@contextmanager
def staged_folder(final: str | Path) -> Iterator[Path]:
    """A folder to fill; renamed to `final` when the block ends well, removed when it does not.

    A killed process leaves its folder behind under a name that starts with a dot; the next run on the
    same host clears it. `final` must not exist.
    """
    final = Path(final)
    final.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(final) as stage:
        yield stage
        _sync_tree(stage)
        try:
            stage.rename(final)
        except OSError as error:  # another process has published meanwhile
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise FileExistsError(errno.EEXIST, "exists already", str(final)) from error
            raise
        sync_folder(final.parent)


@contextmanager
def scratch_folder(name: Path) -> Iterator[Path]:
    """A folder beside `name`, removed when the block ends; what killed processes of this host left there goes first."""
    _clear_leftovers(name)
    stage = name.with_name(f"{_stage_prefix(name)}{os.getpid()}-{secrets.token_hex(4)}")
    stage.mkdir()
    _own_stages.add(stage.name)
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        _own_stages.discard(stage.name)


def _sync_tree(folder: Path) -> None:
    """Flush every file below `folder` to the disk, so that the rename that follows publishes complete files."""
    for directory, _, names in os.walk(folder):
        for name in names:
            _sync_file(Path(directory, name))
        sync_folder(Path(directory))


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Flush the names in `folder` to the disk, so that a rename in it outlives a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: str | Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Stages of this process. A restarted container may have the host name and the process id of a killed one, so
# that the id alone does not tell a leftover from a folder in use.
_own_stages: set[str] = set()


def _partial_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")


def _stage_prefix(final: Path) -> str:
    return f".{final.name}.partial-{socket.gethostname()}-"


def _clear_leftovers(final: Path) -> None:
    prefix = _stage_prefix(final)
    for leftover in final.parent.iterdir():
        pid = leftover.name.removeprefix(prefix).partition("-")[0]
        if not leftover.name.startswith(prefix) or not pid.isdigit() or leftover.name in _own_stages:
            continue
        if int(pid) == os.getpid() or not _is_running(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
