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
from habitus.files import staged_file
from habitus.serving import RecommendResponse, Retriever

RESULT_SUFFIXES = (".parquet", ".csv", ".jsonl")
_ROWS = 1 << 16


class Results(Protocol):
    """Takes responses one after another."""

    def add(self, user: Any, response: RecommendResponse) -> None: ...

    def close(self) -> None: ...


@contextmanager
def open_results(out: Path, retriever: Retriever, *, replace: bool) -> Iterator[Results]:
    """A file of the kind that its suffix names, written under a temporary name and renamed when the block ends well."""
    check_output(out, RESULT_SUFFIXES, replace=replace)
    columns = _Columns(retriever)
    with staged_file(out) as partial:
        results: Results
        if out.suffix == ".parquet":
            results = _ParquetResults(partial, columns)
        else:
            results = _CsvResults(partial, columns) if out.suffix == ".csv" else _JsonResults(partial, columns)
        try:
            yield results
        finally:
            results.close()


def check_output(out: Path, suffixes: tuple[str, ...], *, replace: bool) -> None:
    """Refuse a file that cannot be written, before any work is done."""
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
        self.is_integer = retriever.id_format.is_integer
        names = [self.user, "rank", self.item, *self.pair, "score", "probability"]
        self.display = schema.items.display or ()
        self.names = [*names, *(name if name not in names else f"item_{name}" for name in self.display)]

    def rows(self, user: Any, response: RecommendResponse) -> Iterator[tuple[Any, ...]]:
        for rank, one in enumerate(response.items, 1):
            ids = tuple(one.item_id.values()) if self.pair else (one.item_id,)
            shown = one.display or {}
            yield (user, rank, *ids, one.score, one.probability, *(shown.get(name) for name in self.display))


class _ParquetResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.path = path
        self.columns = columns
        self.held: list[tuple[Any, ...]] = []
        self.writer: pq.ParquetWriter | None = None

    def add(self, user: Any, response: RecommendResponse) -> None:
        self.held.extend(self.columns.rows(user, response))
        if len(self.held) >= _ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        assert self.writer is not None
        self.writer.close()

    def _flush(self) -> None:
        names = self.columns.names
        item = pa.int64() if self.columns.is_integer else pa.string()
        kinds = [pa.int32(), item, *(pa.string() for _ in self.columns.pair), pa.float32(), pa.float64()]
        kinds += [pa.string() for _ in self.columns.display]
        columns = list(zip(*self.held, strict=True)) if self.held else [() for _ in names]
        if self.writer is None:
            users = pa.array(columns[0]) if self.held else pa.array([], pa.string())
            schema = pa.schema(list(zip(names, [users.type, *kinds], strict=True)))
            self.writer = pq.ParquetWriter(self.path, schema, compression="zstd")
        if self.held:
            schema = self.writer.schema
            self.writer.write_table(
                pa.table([pa.array(column, kind) for column, kind in zip(columns, schema.types, strict=True)], schema)
            )
        self.held = []


class _CsvResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.columns = columns
        self.file = path.open("w", encoding="utf-8", newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(columns.names)

    def add(self, user: Any, response: RecommendResponse) -> None:
        self.writer.writerows(self.columns.rows(user, response))

    def close(self) -> None:
        self.file.close()


class _JsonResults:
    def __init__(self, path: Path, columns: _Columns) -> None:
        self.columns = columns
        self.file = path.open("w", encoding="utf-8")

    def add(self, user: Any, response: RecommendResponse) -> None:
        line = {self.columns.user: user, **response_values(response)}
        self.file.write(json.dumps(line, ensure_ascii=False, default=_to_iso) + "\n")

    def close(self) -> None:
        self.file.close()


def response_values(response: RecommendResponse) -> dict[str, Any]:
    """A response as plain values for JSON, without what is empty."""
    return response.model_dump(mode="json", exclude={"model"}, exclude_defaults=True)


def _to_iso(value: Any) -> str:
    if isinstance(value, date | datetime):
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")
