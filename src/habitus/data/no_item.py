"""Events without an item, such as searches: a row of the catalogue without fields stands for what they lack."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.sources import Source, SourceTable, require_columns
from habitus.data.sql import name_sql, scan_sql
from habitus.errors import ConfigError
from habitus.events import Schema

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


def add_no_item(items: SourceTable, schema: Schema, con: "DuckDBPyConnection", scratch: Path) -> SourceTable:
    """The items and, where the schema names one, what stands for no item; the table may have its row already."""
    no_item, column = schema.events.no_item, schema.items.item
    if no_item is None:
        return items
    require_columns(items, [column])
    type_ = items.types[column]
    if pa.types.is_integer(type_) and not str(no_item).lstrip("-").isdigit():
        raise ConfigError(
            f"events.no_item is {no_item!r}, and the item ids of {items.sources[0].name} are integers",
            expected="an integer that no item has, such as -1",
            next_step="correct events.no_item in the schema",
        )
    name = name_sql(column)
    found = con.execute(f"SELECT count(*) FROM {scan_sql(items)} WHERE CAST({name} AS VARCHAR) = ?", [str(no_item)])
    if (found.fetchone() or (0,))[0]:
        return items
    types = {one: kind for one, kind in items.types.items() if isinstance(kind, pa.DataType)}
    row = {one: pa.nulls(1, kind) for one, kind in types.items()}
    row[column] = pa.array([int(no_item) if pa.types.is_integer(type_) else str(no_item)]).cast(type_)
    path = scratch / "no-item.parquet"
    pq.write_table(pa.table(row), path)
    extra = Source("events.no_item of the schema", path, 1)
    return replace(items, sources=(*items.sources, extra), names=(*items.names, frozenset(types)))
