"""Input files: opened, converted to Parquet where they are not, and read in order."""

import csv
import glob
import gzip
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.columns import COMMA_PATTERN
from habitus.data.remote import fetch_table, is_remote, named_as
from habitus.errors import DataError
from habitus.interrupts import hold_interrupts
from habitus.typed import suggest_name

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

CHUNK_ROWS = 1 << 16
_CORRECT_SCHEMA = "correct the name in the schema, or write one with 'habitus prepare --guess'"
_RESERVED = {"file_row_number", "file_index", "filename"}
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
class SourceTable:
    """The events or the items: their files in order, and the types of their columns."""

    role: str
    sources: tuple[Source, ...]
    types: dict[str, Any]  # of the columns that all files have; a sentence where the files disagree
    names: tuple[frozenset[str], ...]  # the columns of each file
    first_row: int = 0  # of the whole table, where these are some of its files

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    @property
    def first_rows(self) -> list[int]:
        """The row of the table at which each file begins."""
        rows = [self.first_row]
        for source in self.sources[:-1]:
            rows.append(rows[-1] + source.num_rows)
        return rows

    def pieces(self, first: int, stop: int) -> "list[SourceTable]":
        """The files that hold the rows first..stop, as tables whose rows keep their numbers.

        Whole files make one piece, and a file of which only some rows are wanted is a piece of its own.
        """
        pieces: list[SourceTable] = []
        for source, names, row in zip(self.sources, self.names, self.first_rows, strict=True):
            if source.num_rows == 0 or row >= stop or row + source.num_rows <= first:
                continue
            is_whole = first <= row and row + source.num_rows <= stop
            before = pieces[-1] if pieces else None
            if is_whole and before is not None and before.first_row >= first:
                files = (*before.sources, source), (*before.names, names)
                pieces[-1] = replace(before, sources=files[0], names=files[1])
            else:
                pieces.append(replace(self, sources=(source,), names=(names,), first_row=row))
        return pieces

    def place(self, row: int) -> str:
        """The file and the row in it, as a person would look for a row of the table."""
        number = max(i for i, first in enumerate(self.first_rows) if first <= row)
        return f"{self.sources[number].name} row {row - self.first_rows[number] + 1}"

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows in order, in chunks of one size, strings as plain strings."""
        schema = pa.schema([(name, self.types[name]) for name in columns])

        def read() -> Iterator[pa.RecordBatch]:
            for source in self.sources:
                num_rows = 0
                for batch in _read_parquet(source.parquet, source.name, columns):
                    num_rows += batch.num_rows
                    yield _cast(batch.select(columns), schema, source.name)
                if num_rows != source.num_rows:
                    raise _unreadable(source.name, f"{num_rows:,} rows where its footer says {source.num_rows:,}")

        return rechunk(read(), CHUNK_ROWS)


def open_table(
    role: str, pattern: str, con: "DuckDBPyConnection", scratch: Path, comma_columns: Collection[str] = ()
) -> SourceTable:
    """The table that a path or glob names; CSV and JSON lines are first rewritten as Parquet in `scratch`.

    So are tables with text in `comma_columns`, numbers with a decimal comma that get a point. Files of an object store
    are first copied there, too; errors name them by their URLs.
    """
    if not is_remote(pattern):
        return _open_files(role, pattern, _matching_paths(role, pattern), con, scratch, comma_columns)
    names = fetch_table(role, pattern, scratch / "fetched" / role)
    with named_as(names):
        table = _open_files(role, pattern, list(names), con, scratch, comma_columns)
    sources = zip(table.sources, names.values(), strict=True)
    return replace(table, sources=tuple(replace(source, name=name) for source, name in sources))


def _open_files(
    role: str, pattern: str, paths: list[Path], con: "DuckDBPyConnection", scratch: Path, comma_columns: Collection[str]
) -> SourceTable:
    sources, schemas = [], []
    for number, path in enumerate(paths):
        parquet = path
        if _format(path) != "parquet" or _has_texts(path, comma_columns):
            parquet = scratch / f"{role}-{number:05d}.parquet"
            _convert(path, parquet, con, comma_columns)
        schema, num_rows = _parquet_schema(path, parquet)
        _check_names(path, schema.names)
        sources.append(Source(str(path), parquet, num_rows))
        schemas.append(schema)
    if sum(source.num_rows for source in sources) == 0:
        raise DataError(f"{role}: {pattern} holds no rows", expected="at least one row")
    common = [name for name in schemas[0].names if all(name in schema.names for schema in schemas)]
    types = {name: _common_type(role, name, sources, [one.field(name).type for one in schemas]) for name in common}
    return SourceTable(role, tuple(sources), types, tuple(frozenset(schema.names) for schema in schemas))


def require_columns(table: SourceTable, columns: list[str], next_step: str | None = None) -> None:
    """Refuse a table that lacks a column, naming the file and the closest column it has."""
    for column in columns:
        for source, names in zip(table.sources, table.names, strict=True):
            if column not in names:
                hint = suggest_name(column, sorted(names))
                raise DataError(
                    f"{table.role}: column {column!r} is missing from {source.name} ({hint})",
                    expected=f"the columns that the schema names: {', '.join(dict.fromkeys(columns))}",
                    next_step=next_step or _CORRECT_SCHEMA,
                )
        if isinstance(table.types[column], str):
            raise DataError(table.types[column], expected="one type per column")


def rechunk(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.RecordBatch]:
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


def _matching_paths(role: str, pattern: str) -> list[Path]:
    if Path(pattern).exists():  # a name with brackets is a name, not a pattern
        paths = [Path(pattern)]
    else:
        matches = glob.glob(pattern, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        paths = sorted(Path(name) for name in matches)
    if not paths:
        raise DataError(f"{role}: {pattern} does not exist", expected="a file or a glob that matches some")
    for path in paths:
        if path.is_dir():
            raise DataError(
                f"{role}: {path} is a folder", expected="a file or a glob", next_step=f"try '{path}/*.parquet'"
            )
        if not path.is_file():
            raise DataError(
                f"{role}: {path} is not a regular file",
                expected="a file on a disk: tables are read more than once, and pipes cannot be",
                next_step="write the stream to a file first",
            )
        _format(path)
    return paths


def _format(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in (".gz", ".zst")]
    kind = _SUFFIXES.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise DataError(f"{path} has no known suffix", expected=", ".join(sorted(_SUFFIXES)) + " (.gz allowed)")
    return kind


def _has_texts(path: Path, columns: Collection[str]) -> bool:
    """Whether any of the columns is text in a Parquet file."""
    if not columns:
        return False
    schema, _ = _parquet_schema(path, path)
    return any(plain_type(schema.field(name).type) == pa.string() for name in columns if name in schema.names)


def _convert(path: Path, parquet: Path, con: "DuckDBPyConnection", comma_columns: Collection[str]) -> None:
    with hold_interrupts():
        import duckdb

    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty", expected="a header line and a row per event or item")
    try:
        readers = {"csv": _csv_reader, "json": _json_reader, "parquet": _parquet_reader}
        reader, name = readers[_format(path)](path), glob.escape(str(path))  # a name with brackets is no pattern
        columns = con.execute(f"DESCRIBE SELECT * FROM {reader}", {"path": name}).fetchall()
        chosen = ", ".join(_select_sql(column, kind, has_comma=column in comma_columns) for column, kind, *_ in columns)
        con.execute(
            f"COPY (SELECT {chosen} FROM {reader}) TO '{quoted_path(parquet)}' (FORMAT parquet)", {"path": name}
        )
    except (duckdb.Error, UnicodeDecodeError) as error:
        if is_disk_full(error) or isinstance(error, duckdb.OutOfMemoryException | duckdb.InterruptException):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        useful = [lines[0], *(line for line in lines[1:] if line.startswith(("Original Line", "Expected Number")))]
        raise DataError(
            f"{path} cannot be read: {'; '.join(useful)}", expected=f"valid {_format(path).upper()}"
        ) from error


def _csv_reader(path: Path) -> str:
    """Nothing is left to sniffing: it takes rows that begin with '#' for comments and trusts a sample for the rest.

    Every column stays text until the schema says what it is: '007' is an id, not seven.
    """
    with (gzip.open if path.suffix.lower() == ".gz" else open)(path, "rt", encoding="utf-8-sig", newline="") as file:
        header = file.readline()
    delimiter = max(",\t;|", key=header.count)
    _check_names(path, _csv_names(header, delimiter))
    options = {"delim": delimiter, "quote": '"', "escape": '"', "comment": "", "skip": 0}
    arguments = ", ".join(f"{name} = {value!r}" for name, value in options.items())
    arguments += f", columns = {_csv_columns(header, delimiter)}"
    return f"read_csv($path, auto_detect = false, all_varchar = true, header = true, {arguments})"


def _csv_names(header: str, delimiter: str) -> list[str]:
    return next(csv.reader([header.rstrip("\r\n")], delimiter=delimiter))


def _csv_columns(header: str, delimiter: str) -> str:
    names = _csv_names(header, delimiter)
    return "{" + ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}': 'VARCHAR'" for name in names) + "}"


def _json_reader(path: Path) -> str:
    """All rows decide the types: a sample would lose what appears late. Arrays are allowed in .json files.

    Times are those in ISO form; whether 03-04-2025 is in March, the schema says.
    """
    layout = "auto" if ".json" in (suffix.lower() for suffix in path.suffixes) else "newline_delimited"
    return f"read_json($path, format = '{layout}', sample_size = -1, dateformat = 'iso', timestampformat = 'iso')"


def _parquet_reader(path: Path) -> str:
    return "read_parquet($path, hive_partitioning = false)"


def _select_sql(name: str, kind: str, *, has_comma: bool) -> str:
    """A column without the types that have no plain Arrow form, and with decimal points."""
    column = '"' + name.replace('"', '""') + '"'
    text = {"UUID": f"CAST({column} AS VARCHAR)", "JSON": f"({column}->>'$')"}.get(kind, column)
    if has_comma and kind in ("VARCHAR", "JSON"):
        numbers = f"WHEN json_type({column}) <> 'VARCHAR' THEN {text} " if kind == "JSON" else ""  # beside texts
        # What could be read by a point, and is not meant so, is made unreadable: an error shows it as it is here.
        text = (
            f"CASE {numbers}WHEN regexp_full_match({text}, '{COMMA_PATTERN}') "
            f"THEN replace(replace({text}, '.', ''), ',', '.') "
            f"WHEN contains({text}, '.') AND TRY_CAST({text} AS DOUBLE) IS NOT NULL "
            f"THEN {text} || ' (without a decimal comma)' ELSE {text} END"
        )
    return f"{text} AS {column}"


def quoted_path(path: Path) -> str:
    return str(path).replace("'", "''")


def is_disk_full(error: BaseException) -> bool:
    text = str(error).lower()  # DuckDB calls it a lack of memory where there is no disk to spill to
    return any(words in text for words in ("no space left", "disk is full", "enospc", "max_temp_directory_size"))


def _open_parquet(path: Path) -> pq.ParquetFile:
    # INT96, as Spark writes times, holds more years than 64 bits of nanoseconds do.
    return pq.ParquetFile(path, coerce_int96_timestamp_unit="us")


def _read_parquet(path: Path, name: str, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    try:
        with _open_parquet(path) as file:
            yield from file.iter_batches(CHUNK_ROWS, columns=columns)
    except (pa.ArrowException, OSError) as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: Exception | str) -> DataError:
    return DataError(
        f"{name} cannot be read: {str(error).strip().splitlines()[0]}",
        expected="complete, undamaged tables",
        next_step="write the file again, or restore it from a copy",
    )


def explain_query_error(error: Exception, tables: dict[str, str]) -> DataError:
    """What a failed query says about its input; `tables` are the pattern of each role.

    DuckDB does not always name the file. The one that Arrow cannot read either is the damaged one.
    """
    try:
        for role, pattern in tables.items():
            for path in () if is_remote(pattern) else _matching_paths(role, pattern):
                if _format(path) == "parquet":
                    check_readable(Source(str(path), path, 0))
    except DataError as damage:
        return damage
    return _unreadable(" or ".join(tables.values()), error)


def check_readable(source: Source) -> None:
    """Refuse a file that Arrow cannot read to its end."""
    deque(_read_parquet(source.parquet, source.name), maxlen=0)


def _parquet_schema(path: Path, parquet: Path) -> tuple[pa.Schema, int]:
    try:
        with _open_parquet(parquet) as file:
            return file.schema_arrow, file.metadata.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}", expected="a complete Parquet file") from error


def _check_names(path: Path, names: list[str]) -> None:
    """Refuse column names that SQL cannot tell apart, or that reading the file uses for itself."""
    folded: dict[str, str] = {}
    for name in names:
        twin = folded.setdefault(name.casefold(), name)
        if twin != name or names.count(name) > 1:
            raise DataError(
                f"{path} has two columns {name!r}" if twin == name else f"{path} has the columns {twin!r} and {name!r}",
                expected="names that differ in more than case",
                next_step="rename or drop one of them",
            )
        if name.casefold() in _RESERVED:
            raise DataError(
                f"{path} has a column {name!r}",
                expected="another name: this one numbers rows",
                next_step="rename or drop it",
            )


def _common_type(role: str, name: str, sources: list[Source], types: list[pa.DataType]) -> Any:
    """The type of a column in all files, or a sentence that says how they disagree."""
    types = [plain_type(kind) for kind in types]
    non_null = [kind for kind in types if not pa.types.is_null(kind)] or types
    first = non_null[0]
    if all(pa.types.is_integer(kind) for kind in non_null):
        if not any(pa.types.is_uint64(kind) for kind in non_null):
            return pa.int64() if any(kind != first for kind in non_null) else first
    elif all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in non_null):
        return pa.float64() if any(kind != first for kind in non_null) else first
    elif all(pa.types.is_timestamp(kind) for kind in non_null) and len({kind.tz is None for kind in non_null}) == 1:
        return pa.timestamp("us", first.tz) if any(kind.unit != first.unit for kind in non_null) else first
    other = next((kind for kind in non_null if kind != first), None)
    if other is None:
        return first
    where = [sources[types.index(kind)].name for kind in (first, other)]
    return f"{role}: column {name!r} is {first} in {where[0]} and {other} in {where[1]}"


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


def _cast(batch: pa.RecordBatch, schema: pa.Schema, name: str) -> pa.RecordBatch:
    try:
        batch.validate(full=True)  # fails on text that is not UTF-8
        columns = [
            column.cast(field.type, safe=not (pa.types.is_timestamp(column.type) and column.type.unit == "ns"))
            for column, field in zip(batch.columns, schema, strict=True)
        ]  # of nanoseconds what no other file has is cut
        return pa.RecordBatch.from_arrays(columns, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"{name} holds values that cannot be read: {error}", expected="valid UTF-8 and types"
        ) from error
