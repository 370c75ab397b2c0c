"""Input files: found, brought to Parquet where they are not, and read in order."""

import glob
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.errors import DataError
from habitus.typed import nearest

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

CHUNK_ROWS = 1 << 16
_SUFFIXES = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".json": "json",
}


@dataclass(frozen=True)
class Source:
    """One input file: the name the user knows, and the Parquet file to read."""

    name: str
    parquet: Path
    num_rows: int


@dataclass(frozen=True)
class Table:
    """The events or the items: their files in order, and the types of their columns."""

    role: str
    sources: tuple[Source, ...]
    types: dict[str, pa.DataType]

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def first_rows(self) -> list[int]:
        """The row of the whole table at which each file begins."""
        rows = [0]
        for source in self.sources[:-1]:
            rows.append(rows[-1] + source.num_rows)
        return rows

    def place(self, row: int) -> str:
        """Where a row of the whole table stands, as a person would look for it."""
        number = max(i for i, first in enumerate(self.first_rows) if first <= row)
        return f"{self.sources[number].name} row {row - self.first_rows[number] + 1}"

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows in order, in chunks of one size, strings as plain strings."""
        schema = pa.schema([(name, self.types[name]) for name in columns])

        def read() -> Iterator[pa.RecordBatch]:
            for source in self.sources:
                with pq.ParquetFile(source.parquet) as file:
                    for batch in file.iter_batches(CHUNK_ROWS, columns=columns):
                        yield _plain(batch.select(columns), schema, source.name)

        return rechunked(read(), CHUNK_ROWS)


def open_table(role: str, pattern: str, con: "DuckDBPyConnection", scratch: Path) -> Table:
    """The table that a path or glob names; CSV and JSON lines are first rewritten as Parquet in `scratch`."""
    sources = []
    for number, path in enumerate(_found(role, pattern)):
        parquet = path
        if _format(path) != "parquet":
            parquet = scratch / f"{role}-{number:05d}.parquet"
            _convert(path, parquet, con)
        sources.append((str(path), parquet, _parquet_schema(path, parquet)))
    table = Table(
        role,
        tuple(Source(name, parquet, pq.read_metadata(parquet).num_rows) for name, parquet, _ in sources),
        _agreed_types(role, [(name, schema) for name, _, schema in sources]),
    )
    if table.num_rows == 0:
        raise DataError(f"{role}: {pattern} holds no rows", expected="at least one row")
    return table


def require_columns(table: Table, columns: list[str]) -> None:
    """Refuse a table that lacks a column, naming the file and the closest column it has."""
    for column in columns:
        if column not in table.types:
            raise DataError(
                f"{table.role}: column {column!r} is missing from {table.sources[0].name} "
                f"({nearest(column, list(table.types))})",
                expected=f"the columns that the schema names: {', '.join(columns)}",
                next_step="correct the name in the schema, or write one with 'habitus prepare --guess'",
            )


def rechunked(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
    """The same rows in batches of exactly `size`, so that what is summed does not depend on the file's layout."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if not held and batch.num_rows == size:
            yield batch
            continue
        held.append(batch)
        rows += batch.num_rows
        while rows >= size:
            table = pa.Table.from_batches(held).combine_chunks()
            yield from table.slice(0, size).to_batches()
            held = table.slice(size).to_batches()
            rows -= size
    if rows:
        yield from pa.Table.from_batches(held).combine_chunks().to_batches()


def _found(role: str, pattern: str) -> list[Path]:
    matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
    paths = sorted(Path(name) for name in matches) or [Path(pattern)]
    for path in paths:
        if not path.exists():
            raise DataError(f"{role}: {pattern} does not exist", expected="a file or a glob that matches some")
        if path.is_dir():
            raise DataError(
                f"{role}: {path} is a folder",
                expected="a file or a glob",
                next_step=f"try '{path}/*.parquet'",
            )
        _format(path)
    return paths


def _format(path: Path) -> str:
    suffixes = [suffix for suffix in path.suffixes if suffix not in (".gz", ".zst")]
    kind = _SUFFIXES.get(suffixes[-1].lower() if suffixes else "")
    if kind is None:
        raise DataError(f"{path} has no known suffix", expected=", ".join(sorted(_SUFFIXES)) + " (.gz allowed)")
    return kind


def _convert(path: Path, parquet: Path, con: "DuckDBPyConnection") -> None:
    import duckdb

    # Every CSV column stays text until the schema says what it is: '007' is an id, not seven.
    reader = "read_csv($path, all_varchar = true, header = true)"
    if _format(path) == "json":
        reader = "read_json($path, format = 'newline_delimited')"
    try:
        con.execute(f"COPY (SELECT * FROM {reader}) TO '{quoted_path(parquet)}' (FORMAT parquet)", {"path": str(path)})
    except duckdb.Error as error:
        if is_disk_full(error):
            raise
        first_line = str(error).splitlines()[0]
        raise DataError(f"{path} cannot be read: {first_line}", expected=f"valid {_format(path).upper()}") from error


def quoted_path(path: Path) -> str:
    return str(path).replace("'", "''")


def is_disk_full(error: BaseException) -> bool:
    text = str(error).lower()
    return "no space left" in text or "disk is full" in text or "enospc" in text


def _parquet_schema(path: Path, parquet: Path) -> pa.Schema:
    try:
        return pq.read_schema(parquet)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}", expected="a whole Parquet file") from error


def _agreed_types(role: str, schemas: list[tuple[str, pa.Schema]]) -> dict[str, pa.DataType]:
    """Column types of the first file, once every file is known to have the same columns of the same family."""
    first_name, first = schemas[0]
    for name, schema in schemas[1:]:
        for wanted in first:
            if wanted.name not in schema.names:
                raise DataError(f"{role}: {name} lacks the column {wanted.name!r}, which {first_name} has")
            if _family(schema.field(wanted.name).type) != _family(wanted.type):
                raise DataError(
                    f"{role}: column {wanted.name!r} is {wanted.type} in {first_name} "
                    f"and {schema.field(wanted.name).type} in {name}",
                    expected="one type per column",
                )
    return {wanted.name: plain_type(wanted.type) for wanted in first}


def _family(kind: pa.DataType) -> str:
    kind = plain_type(kind)
    if pa.types.is_integer(kind):
        return "integer"
    if pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        return "float"
    if pa.types.is_timestamp(kind):
        return "timestamp"
    if is_list(kind):
        return "list"
    return str(kind)


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type without the layouts that differ from file to file: dictionaries, long and fixed-size forms."""
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_fixed_size_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_type)
    return kind


def _plain(batch: pa.RecordBatch, schema: pa.Schema, name: str) -> pa.RecordBatch:
    try:
        batch.validate(full=True)  # text that is not UTF-8 is found here
        return batch.cast(schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{name} holds values that cannot be read: {error}", expected="valid UTF-8 and types"
        ) from error
