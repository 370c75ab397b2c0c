"""Tables in memory where a path is meant: pandas, polars and Arrow tables become Parquet files during a call."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.errors import DataError


@runtime_checkable
class ArrowStream(Protocol):
    """What offers its columns through Arrow's C stream interface: pandas and polars frames, Arrow tables, DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Table = str | Path | ArrowStream


@contextmanager
def table_path(table: Table, name: str, folder: Path) -> Iterator[str]:
    """A path or glob as it is; a table in memory as a Parquet file in `folder`, removed afterwards."""
    if isinstance(table, str | Path):
        yield str(table)
        return
    path = folder / f"{name}.parquet"
    pq.write_table(to_arrow(table, name), path)
    try:
        yield str(path)
    finally:
        path.unlink()


def to_arrow(table: Any, name: str) -> pa.Table:
    """The table as Arrow, without a frame's index."""
    if isinstance(table, pa.Table):
        return table
    if type(table).__module__.partition(".")[0] == "pandas":
        return pa.Table.from_pandas(table, preserve_index=False)
    if isinstance(table, ArrowStream):
        arrow = pa.table(table)
        return pa.table({field.name: _plain_strings(arrow[field.name]) for field in arrow.schema})
    raise DataError(
        f"{name} is a {type(table).__name__}",
        expected="a path or glob, or a pandas, polars or Arrow table",
        next_step="pass a file, or convert it with pyarrow.table(...)",
    )


def _plain_strings(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """String views, which polars hands out and Parquet's writer does not take inside dictionaries, as strings."""
    if pa.types.is_dictionary(column.type) and pa.types.is_string_view(column.type.value_type):
        chunks = [
            pa.DictionaryArray.from_arrays(chunk.indices, chunk.dictionary.cast(pa.string())) for chunk in column.chunks
        ]
        return pa.chunked_array(chunks, pa.dictionary(column.type.index_type, pa.string()))
    return column.cast(pa.string()) if pa.types.is_string_view(column.type) else column
