"""Items added, changed or withdrawn at run time: on disk before the call returns.

One file, journal.jsonl: a line per change, each with the checksum of its own bytes, appended and flushed to the disk.
A process killed while it writes leaves a torn last line, which was acknowledged to nobody and is cut off at the next
start. A damaged line elsewhere is refused by number. When most lines are outdated, a new file
with one line per item replaces it.

One process writes; it takes the lock at its first change. Others read what is there when they open.
"""

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from habitus.errors import RunError
from habitus.files import sync_folder
from habitus.serving.schemas import OtherWriterError, StorageError
from habitus.serving.values import Key

JOURNAL, LOCK = "journal.jsonl", "lock"
FORMAT = {"format": "habitus items", "version": 1}
COMPACT_LINES = 1_000  # outdated lines below this number are left where they are
_CHECKSUM = 16


@dataclass(frozen=True)
class JournalEntry:
    """The last known state of one item."""

    fields: Mapping[str, Any]  # as read; empty for a trained item that was only withdrawn
    withdrawn: bool
    vector: bytes  # float32; empty where the fields are
    embedder: str  # checksum of the embedder that computed the vector; another one must compute its own


class ItemStore:
    """The run-time items of a folder. Several retrievers of one process may share it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._mutex = threading.RLock()
        self._states: dict[Key, tuple[int, JournalEntry]] = {}  # in the order of the last change
        self._version = 0
        self._lines = 0
        self._size = 0  # bytes of complete lines
        self._file = -1
        self._lock = -1
        self._compact_at = COMPACT_LINES
        self._load()

    def __len__(self) -> int:
        return len(self._states)

    def get(self, key: Key) -> JournalEntry | None:
        with self._mutex:
            state = self._states.get(key)
        return None if state is None else state[1]

    def changes(self, since: int) -> tuple[int, list[tuple[Key, JournalEntry]]]:
        """The version now, and the items that changed after version `since`, oldest change first."""
        with self._mutex:
            changes = []
            for key, (version, entry) in reversed(self._states.items()):
                if version <= since:
                    break
                changes.append((key, entry))
            return self._version, changes[::-1]

    def put(self, key: Key, entry: JournalEntry) -> None:
        """Write an item's new state; it is on the disk when this returns. On failure nothing has changed."""
        with self._mutex:
            self._acquire()
            line = _line({"id": list(key) if isinstance(key, tuple) else key, **_to_json(entry)})
            self._append(line)
            self._set_state(key, entry)
            self._lines += 1
            if self._lines - len(self._states) > max(self._compact_at, len(self._states)):
                self._try_compaction()

    def close(self) -> None:
        """Give the lock back."""
        with self._mutex:
            for descriptor in (self._file, self._lock):
                if descriptor >= 0:
                    os.close(descriptor)
            self._file = self._lock = -1

    def compact(self) -> None:
        """Write the journal anew with one line per item. On failure the old one goes on."""
        with self._mutex:
            self._acquire()
            partial = self.folder / f".{JOURNAL}.partial"
            fresh = -1
            try:
                fresh = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
                size = 0
                for line in self._current_lines():
                    size += _write_fully(fresh, line, size)
                os.fsync(fresh)
                partial.replace(self.folder / JOURNAL)
            except OSError as error:
                if fresh >= 0:
                    os.close(fresh)
                raise StorageError(f"the items could not be written: {error.strerror}") from error
            finally:
                with contextlib.suppress(OSError):
                    partial.unlink(missing_ok=True)
            # From the rename on, the new file is the journal: nothing may be written to the old one any more.
            os.close(self._file)
            self._file, self._lines, self._size = fresh, len(self._states), size
            try:
                sync_folder(self.folder)
            except OSError as error:
                self.close()  # the next change opens and reads what is there
                raise StorageError(f"the items could not be written: {error.strerror}") from error

    def _current_lines(self) -> Iterator[bytes]:
        yield _line(FORMAT)
        for key, (_, entry) in self._states.items():
            yield _line({"id": list(key) if isinstance(key, tuple) else key, **_to_json(entry)})

    def _try_compaction(self) -> None:
        try:
            self.compact()
        except StorageError:  # the change itself is safe; try again when there is twice as much to gain
            self._compact_at *= 2

    def _append(self, line: bytes) -> None:
        try:
            _write_fully(self._file, line, self._size)
            os.fsync(self._file)
        except OSError as error:
            self._undo()
            raise StorageError(
                f"the item could not be written: {error.strerror}",
                expected="room on the disk; nothing has changed",
                next_step="free some space and send it again",
            ) from error
        self._size += len(line)

    def _undo(self) -> None:
        """Cut off what was half written. Should even that fail, no further change is accepted by this process."""
        try:
            os.ftruncate(self._file, self._size)
        except OSError:
            self.close()

    def _acquire(self) -> None:
        """Become the one process that writes, and see what others wrote before."""
        if self._file >= 0:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise StorageError(
                f"the folder of the items cannot be written to: {error.strerror}", next_step="choose another folder"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise OtherWriterError(
                "another process is writing the items of this run",
                expected="one writer; any number of readers",
                next_step="send changes to that process, or stop it",
            ) from None
        self._lock = lock
        try:
            self._load()
            self._open_journal()
        except BaseException:
            self.close()
            raise

    def _open_journal(self) -> None:
        path = self.folder / JOURNAL
        try:
            if self._size == 0:  # absent, or torn within its first line
                with path.open("wb") as file:
                    file.write(_line(FORMAT))
                    file.flush()
                    os.fsync(file.fileno())
                sync_folder(self.folder)
                self._size = len(_line(FORMAT))
            self._file = os.open(path, os.O_RDWR)
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise StorageError(f"the items could not be written: {error.strerror}") from error

    def _load(self) -> None:
        """Read the journal; entries that have not changed keep their version."""
        path = self.folder / JOURNAL
        self._lines, self._size = 0, 0
        if not path.exists():
            return
        content = path.read_bytes()
        for number, (values, size) in enumerate(_read_lines(path, content)):
            self._size += size
            if number == 0:
                if values != FORMAT:
                    raise RunError(f"{path} is of another format: {str(values)[:80]}", expected=str(FORMAT))
                continue
            key = tuple(values["id"]) if isinstance(values["id"], list) else values["id"]
            entry = _from_json(values)
            state = self._states.get(key)
            if state is None or state[1] != entry:
                self._set_state(key, entry)
            self._lines += 1

    def _set_state(self, key: Key, entry: JournalEntry) -> None:
        self._version += 1
        self._states.pop(key, None)
        self._states[key] = self._version, entry


def _write_fully(descriptor: int, line: bytes, at: int) -> int:
    """Write all bytes at a place of a file; returns how many."""
    written = 0
    while written < len(line):
        written += os.pwrite(descriptor, line[written:], at + written)
    return written


def _line(values: Mapping[str, Any]) -> bytes:
    body = json.dumps(values, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return hashlib.sha256(body).hexdigest()[:_CHECKSUM].encode() + b" " + body + b"\n"


def _read_lines(path: Path, content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """(values, bytes) of the complete lines. A torn last line ends the reading; another damaged one is an error."""
    lines = content.split(b"\n")
    for number, line in enumerate(lines[:-1]):  # what follows the last newline is torn, or empty
        checksum, _, body = line.partition(b" ")
        if hashlib.sha256(body).hexdigest()[:_CHECKSUM].encode() != checksum:
            if not any(lines[number + 1 :]):
                return
            raise RunError(
                f"{path}, line {number + 1}, is damaged: its checksum is not that of its bytes",
                expected="the file as it was written",
                next_step="restore it from a copy; deleting the line loses that change only",
            )
        try:
            values = json.loads(body)
        except ValueError as error:  # not JSON, or not UTF-8
            raise RunError(
                f"{path}, line {number + 1}, cannot be read: {error}",
                expected="the file as it was written",
                next_step="restore it from a copy",
            ) from None
        yield values, len(line) + 1


def _to_json(entry: JournalEntry) -> dict[str, Any]:
    if entry.withdrawn and not entry.fields:
        return {"withdrawn": True}
    values: dict[str, Any] = {"fields": dict(entry.fields)}
    if entry.withdrawn:
        values["withdrawn"] = True
    values["vector"] = base64.b64encode(entry.vector).decode()
    values["embedder"] = entry.embedder
    return values


def _from_json(values: Mapping[str, Any]) -> JournalEntry:
    return JournalEntry(
        fields=values.get("fields", {}),
        withdrawn=values.get("withdrawn", False),
        vector=base64.b64decode(values.get("vector", "")),
        embedder=values.get("embedder", ""),
    )
