"""Files of recommendations: a row per item (Parquet, CSV), or an object per user (JSON lines)."""

import csv
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date, datetime
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.errors import ConfigError
from habitus.serving import Response, Retriever

RESULT_SUFFIXES = (".parquet", ".csv", ".jsonl")
ROWS = 1 << 16


class Results(Protocol):
    """Takes answers one after another."""

    def add(self, user: Any, answer: Response) -> None: ...

    def close(self) -> None: ...


@contextmanager
def open_results(out: Path, retriever: Retriever, *, replace: bool) -> Iterator[Results]:
    """A file of the kind that its suffix names, written beside its name and renamed when the block ends well."""
    check_out(out, RESULT_SUFFIXES, replace=replace)
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    columns = _Columns(retriever)
    try:
        results: Results
        if out.suffix == ".parquet":
            results = _ParquetResults(beside, columns)
        else:
            results = _CsvResults(beside, columns) if out.suffix == ".csv" else _JsonResults(beside, columns)
        try:
            yield results
        finally:
            results.close()
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(out)
    finally:
        beside.unlink(missing_ok=True)


def check_out(out: Path, suffixes: tuple[str, ...], *, replace: bool) -> None:
    """Refuse a name that could not be written, before any work is done."""
    if out.suffix not in suffixes:
        raise ConfigError(f"--out {out} has no known suffix", expected=", ".join(suffixes))
    if out.is_dir():
        raise ConfigError(f"{out} is a folder", expected="the name of a file to write")
    if out.exists() and not replace:
        raise ConfigError(f"{out} exists already", next_step="remove it, name another file, or pass --replace")
    if not out.parent.is_dir():
        raise ConfigError(f"the folder {out.parent} does not exist", next_step=f"mkdir -p {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise ConfigError(f"the folder {out.parent} cannot be written to", next_step="name a file elsewhere")


class _Columns:
    """The names of the columns: the log's own, and ours."""

    def __init__(self, retriever: Retriever) -> None:
        schema = retriever.bundle.schema
        self.user = schema.events.user
        self.pair = schema.events.pair_columns
        self.item = schema.items.item if schema.items.item != self.user else f"{schema.items.item}_recommended"
        self.is_integer = retriever.ids_are_integers
        self.names = [self.user, "rank", self.item, *self.pair, "score", "probability"]

    def rows(self, user: Any, answer: Response) -> Iterator[tuple[Any, ...]]:
        for rank, one in enumerate(answer.items, 1):
            ids = tuple(one.item_id.values()) if self.pair else (one.item_id,)
            yield (user, rank, *ids, one.score, one.probability)


class _ParquetResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.path = path
        self.columns = columns
        self.held: list[tuple[Any, ...]] = []
        self.writer: pq.ParquetWriter | None = None

    def add(self, user: Any, answer: Response) -> None:
        self.held.extend(self.columns.rows(user, answer))
        if len(self.held) >= ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        assert self.writer is not None
        self.writer.close()

    def _flush(self) -> None:
        names = self.columns.names
        item = pa.int64() if self.columns.is_integer else pa.string()
        kinds = [pa.int32(), item, *(pa.string() for _ in self.columns.pair), pa.float32(), pa.float64()]
        found = list(zip(*self.held, strict=True)) if self.held else [() for _ in names]
        if self.writer is None:
            users = pa.array(found[0]) if self.held else pa.array([], pa.string())
            schema = pa.schema(list(zip(names, [users.type, *kinds], strict=True)))
            self.writer = pq.ParquetWriter(self.path, schema, compression="zstd")
        if self.held:
            schema = self.writer.schema
            self.writer.write_table(
                pa.table([pa.array(column, kind) for column, kind in zip(found, schema.types, strict=True)], schema)
            )
        self.held = []


class _CsvResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.columns = columns
        self.file = path.open("w", encoding="utf-8", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(columns.names)

    def add(self, user: Any, answer: Response) -> None:
        self.writer.writerows(self.columns.rows(user, answer))

    def close(self) -> None:
        self.file.close()


class _JsonResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.columns = columns
        self.file = path.open("w", encoding="utf-8")

    def add(self, user: Any, answer: Response) -> None:
        self.file.write(json.dumps({self.columns.user: user, **plain(answer)}, ensure_ascii=False, default=_iso) + "\n")

    def close(self) -> None:
        self.file.close()


def plain(answer: Response) -> dict[str, Any]:
    """An answer as plain values, ready for JSON."""
    values: dict[str, Any] = {
        "items": [{"item_id": one.item_id, "score": one.score, "probability": one.probability} for one in answer.items],
        "events_used": answer.events_used,
    }
    if answer.unknown_items:
        values["unknown_items"] = list(answer.unknown_items)
    if answer.notes:
        values["notes"] = list(answer.notes)
    return values


def _iso(value: Any) -> str:
    if isinstance(value, date | datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} has no place in JSON")
