"""Columns of an input table in SQL: ids, times and places; and the types that can serve each role."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from habitus.data.kinds import KINDS, datetime_sql
from habitus.data.sources import SourceTable, quoted_path
from habitus.errors import DataError

YEAR_1900_US, YEAR_2200_US = -2_208_988_800_000_000, 7_258_118_400_000_000
TIME_UNIT_US = {"s": 1_000_000, "ms": 1_000, "us": 1}


def name_sql(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def id_sql(column: str, kind: pa.DataType, plain: bool) -> str:
    """An id in SQL; an empty text is no id, and ids of tables that differ in type meet as text."""
    name = name_sql(column)
    if pa.types.is_string(kind):
        return f"nullif({name}, '')"
    return name if plain else f"CAST({name} AS VARCHAR)"


def no_item_sql(no_item: str | int, kind: pa.DataType, plain: bool) -> str:
    """The id that stands for events without an item, in SQL, as `id_sql` has others."""
    if plain and not pa.types.is_string(kind):
        return str(no_item)
    return "'" + str(no_item).replace("'", "''") + "'"


def printable_sql(column: str, kind: pa.DataType) -> str:
    """A value that an error can show: DuckDB hands times with a zone to Python only where pytz is installed."""
    return f"CAST({column} AS VARCHAR)" if pa.types.is_timestamp(kind) or pa.types.is_date(kind) else column


def scan_sql(table: SourceTable) -> str:
    return parquet_sql([source.parquet for source in table.sources])


def parquet_sql(paths: Sequence[Path]) -> str:
    """The rows of Parquet files, as a table of a query."""
    # Names are names, not patterns; and a folder called user_id=7 says nothing about the column.
    names = (re.sub(r"([*?\[])", r"[\1]", quoted_path(path)) for path in paths)
    files = ", ".join(f"'{name}'" for name in names)
    return f"read_parquet([{files}], union_by_name = true, hive_partitioning = false)"


def origin_sql(table: SourceTable) -> str:
    """The row of the whole table, in SQL: the row of the file after all rows of the files before it."""
    if len(table.sources) == 1:
        return f"file_row_number + {table.first_row}" if table.first_row else "file_row_number"
    firsts = ", ".join(str(first) for first in table.first_rows)
    return f"[{firsts}][CAST(file_index + 1 AS BIGINT)] + file_row_number"


def are_comparable(a: pa.DataType, b: pa.DataType) -> bool:
    return a == b or (pa.types.is_integer(a) and pa.types.is_integer(b))


def time_sql(column: str, kind: pa.DataType, unit: str, time_format: str | None) -> str:
    """Microseconds since 1970 (or the plain position), null where the value cannot be read.

    Text is read in the form that the schema gives, or in ISO form.
    """
    if unit == "order":  # a cast would round 0.4 and 0.6 to positions that the log does not have
        position = f"TRY_CAST({column} AS BIGINT)"
        if pa.types.is_integer(kind):
            return position
        return f"CASE WHEN TRY_CAST({column} AS DOUBLE) = {position} THEN {position} END"
    if unit in TIME_UNIT_US:  # a double holds every microsecond to the year 2255
        return f"round(TRY_CAST({column} AS DOUBLE) * {TIME_UNIT_US[unit]})"
    if time_format is not None and pa.types.is_string(kind):
        form = time_format.replace("'", "''")
        return f"coalesce(epoch_us(try_strptime(trim({column}), '{form}')), {datetime_sql(column, kind)})"
    return datetime_sql(column, kind)


def time_in_range_sql(column: str, unit: str) -> str:
    """A time that was read as whole microseconds (or a position), null where it is out of range."""
    if unit == "order":
        return f"CAST({column} AS BIGINT)"
    return f"CASE WHEN {column} BETWEEN {YEAR_1900_US} AND {YEAR_2200_US - 1} THEN CAST({column} AS BIGINT) END"


def check_id_type(table: SourceTable, name: str) -> None:
    """Refuse a column that cannot hold ids."""
    type_ = table.types[name]
    if isinstance(type_, pa.BaseExtensionType):
        refuse_type(table, name, "an id: integers or text")
    if pa.types.is_floating(type_) or pa.types.is_decimal(type_) or pa.types.is_nested(type_):
        refuse_type(table, name, "an id: integers or text (fractions lose digits)")


def check_time_type(table: SourceTable, name: str, unit: str) -> None:
    """Refuse a column that cannot hold times of that unit."""
    type_ = table.types[name]
    has_clock = pa.types.is_timestamp(type_) or pa.types.is_date(type_)
    if unit == "datetime" and not (has_clock or pa.types.is_string(type_)):
        refuse_type(table, name, "a datetime; for numbers set time_unit to s, ms, us or order")
    if unit != "datetime" and (has_clock or pa.types.is_nested(type_)):
        refuse_type(table, name, "a number, as time_unit says; for times set it to 'datetime'")


def check_field_types(table: SourceTable, kinds: Mapping[str, str]) -> None:
    """Refuse columns that cannot be fields of their kind."""
    for name, kind in kinds.items():
        if not KINDS[kind].accepts(table.types[name]):
            refuse_type(table, name, KINDS[kind].expected)


def refuse_type(table: SourceTable, name: str, expected: str) -> NoReturn:
    raise DataError(
        f"{table.role}: column {name!r} of {table.sources[0].name} has type {table.types[name]} "
        f"in all {table.num_rows:,} rows",
        expected=expected,
        next_step="cast the column, or change its role or kind in the schema",
    )
