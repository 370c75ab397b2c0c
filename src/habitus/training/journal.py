"""journal.jsonl: one line per step, and one per evaluation, as they happen; trackers read it, analysis does not."""

import json
import time
from pathlib import Path
from typing import Any, TextIO

from habitus.files import write_atomic

_FLUSH_SECONDS = 1.0


class Journal:
    """The journal of a run, opened to go on after `step` steps; lines of later steps are dropped."""

    def __init__(self, path: Path, step: int, *, wanted: bool) -> None:
        self._file: TextIO | None = None
        if not wanted:  # only the first process writes
            return
        if path.exists():
            _cut(path, step)
        self._file = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def write(self, values: dict[str, Any]) -> None:
        """Append one line. Numbers that JSON does not know (NaN) are written as text."""
        if self._file is None:
            return
        values = {name: _plain(value) for name, value in values.items()}
        self._file.write(json.dumps(values, ensure_ascii=False) + "\n")
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Hand everything to the operating system."""
        if self._file is not None:
            self._file.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal; a last one that was cut short by a kill is left out."""
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines


def _cut(path: Path, step: int) -> None:
    """Keep what belongs to the first `step` steps. An evaluation's step counts those done before it."""
    kept = [line for line in read_journal(path) if line.get("step", 0) < step + ("metrics" in line)]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in kept)
    write_atomic(path, text.encode())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and value - value != 0 else value
