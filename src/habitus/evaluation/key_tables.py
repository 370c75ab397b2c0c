"""A Parquet file with a row per user, item or event: its key is found by the names that the schema gives them."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from habitus.data import TIME_UNIT_US, Dataset, read_form
from habitus.errors import ConfigError, DataError
from habitus.evaluation.per_query import PerQuery


class KeyTable:
    """The columns of a file by key. Its key columns are those that the schema calls user, item and timestamp.

    With all of them, or with user and timestamp, a row is an event; with one, it is a user or an item. A time alone is
    no key. Rows that share a key must agree in the column that is read.
    """

    def __init__(self, path: Path, dataset: Dataset) -> None:
        self.path = path
        self.dataset = dataset
        try:
            schema = pq.read_schema(path)
        except (OSError, pa.ArrowException) as error:
            first = str(error).splitlines()[0]
            raise DataError(f"{path} cannot be read as Parquet: {first}", expected="a Parquet file") from None
        events, items = dataset.schema.events, dataset.schema.items
        roles = {"user": (events.user,), "item": (events.item_column, items.item), "time": (events.timestamp,)}
        self.keys = {role: name for role, names in roles.items() for name in reversed(names) if name in schema.names}
        if not {"user", "item"} & set(self.keys):
            raise ConfigError(
                f"{path} has none of the columns {', '.join(dict.fromkeys([events.user, *roles['item']]))}",
                expected="a row per user, item or event, with the key named as in the log",
                next_step=f"rename its key; its columns are {', '.join(schema.names[:20])}",
            )
        self.columns = [name for name in schema.names if name not in self.keys.values()]

    @property
    def source(self) -> str:
        return f"{self.path.name} by {', '.join(self.keys.values())}"

    def lookup(self, column: str, values: PerQuery) -> np.ndarray:
        """The column's value for every query: float64 with NaN, or object with None where the file has no row."""
        table = self._read(column)
        place_of_row, place_of_query, num_places = self._match(table, values)
        matched = np.flatnonzero(place_of_row >= 0)
        if not len(matched):
            raise ConfigError(
                f"no query of {len(values.user):,} has a row in {self.path}",
                expected=f"rows with the {', '.join(self.keys.values())} of the log",
                next_step="compare how the ids are written here and there",
            )
        present, labels = _plain_values(table[column], column)
        self._refuse_contradictions(place_of_row[matched], present[matched], column)
        by_place = np.full(num_places, np.nan if present.dtype.kind == "f" else None, present.dtype)
        by_place[place_of_row[matched]] = present[matched]
        found = by_place[place_of_query]
        if labels is None:
            return found
        return np.array([None if np.isnan(code) else labels[int(code)] for code in found], object)

    def _read(self, column: str) -> pa.Table:
        try:
            return pq.read_table(self.path, columns=[*self.keys.values(), column])
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{self.path} cannot be read: {str(error).splitlines()[0]}") from None

    def _match(self, table: pa.Table, values: PerQuery) -> tuple[np.ndarray, np.ndarray, int]:
        """A number for every key that queries have: that of each row (-1 where no query has it), and of each query."""
        rows, queries = np.zeros(table.num_rows, np.int64), np.zeros(len(values.user), np.int64)
        for role, name in self.keys.items():
            ids, of_query = self._query_ids(role, values)
            form = self.dataset.schema.events.time_format if role == "time" else None
            of_row = _places_among(read_form(table[name], form), ids, self.path, name)
            rows = np.where((rows < 0) | (of_row < 0), -1, rows * len(ids) + of_row)
            queries = queries * len(ids) + of_query
            # Numbers stay below the number of queries, however many keys are combined.
            distinct, queries = np.unique(queries, return_inverse=True)
            place = np.minimum(np.searchsorted(distinct, rows), len(distinct) - 1)
            rows = np.where(distinct[place] == rows, place, -1)
        return rows, queries, int(queries.max()) + 1

    def _query_ids(self, role: str, values: PerQuery) -> tuple[pa.Array, np.ndarray]:
        """The distinct ids that queries have in a role, and which of them each query has."""
        if role == "time":
            times, place = np.unique(self.dataset.times[values.event + 1], return_inverse=True)
            return self._times_as_given(times), place
        rows, place = np.unique(values.user if role == "user" else values.target, return_inverse=True)
        ids = self._ids[role].take(pa.array(rows)).dictionary_encode()  # items of item×value pairs come several times
        return ids.dictionary, ids.indices.to_numpy()[place]

    @cached_property
    def _ids(self) -> dict[str, Any]:
        items = self.dataset.item_ids()
        return {"user": self.dataset.user_ids(), "item": items.column(0).combine_chunks()}

    def _times_as_given(self, times: np.ndarray) -> pa.Array:
        unit = self.dataset.schema.events.time_unit
        if unit == "datetime":
            return pa.array(times, pa.timestamp("us"))
        return pa.array(times if unit == "order" else times // TIME_UNIT_US[unit])

    def _refuse_contradictions(self, places: np.ndarray, present: np.ndarray, column: str) -> None:
        order = np.argsort(places, kind="stable")
        places, present = places[order], present[order]
        differs = (places[1:] == places[:-1]) & (present[1:] != present[:-1])
        differs &= ~(np.isnan(present[1:]) & np.isnan(present[:-1]))
        if differs.any():
            raise ConfigError(
                f"{self.path} has several values of {column!r} for {len(np.unique(places[1:][differs])):,} keys "
                f"({', '.join(self.keys.values())})",
                expected="one value per key",
                next_step="keep one row per key, or add the columns that tell them apart",
            )


def _places_among(column: pa.ChunkedArray, ids: pa.Array, path: Path, name: str) -> np.ndarray:
    """Where each value of a key column stands among ids, -1 where it does not."""
    kind = column.type
    try:
        if pa.types.is_timestamp(ids.type):
            moments = column.cast(pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else ids.type, safe=False)
            places = pc.index_in(moments.cast(pa.int64()), ids.cast(pa.int64()))
        elif pa.types.is_integer(kind) and pa.types.is_integer(ids.type):
            places = pc.index_in(column.cast(pa.int64()), ids.cast(pa.int64()))
        else:
            places = pc.index_in(column.cast(pa.string()), ids.cast(pa.string()))
    except pa.ArrowException as error:
        raise ConfigError(
            f"column {name!r} of {path} is {kind}: {str(error).splitlines()[0]}",
            expected=f"values that compare with the log's, which are {ids.type}",
        ) from None
    return np.asarray(pc.fill_null(places, -1).combine_chunks().to_numpy(zero_copy_only=False)).astype(np.int64)


def _plain_values(column: pa.ChunkedArray, name: str) -> tuple[np.ndarray, list[str] | None]:
    """Numbers as float64, anything else as codes (float64 too) with their labels; NaN where null."""
    kind = column.type
    if pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind):
        numbers = column.cast(pa.float64(), safe=False)
        return np.asarray(numbers.to_numpy(), np.float64), None
    if pa.types.is_nested(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        raise ConfigError(f"column {name!r} holds {kind}", expected="texts, numbers, truth values or dates")
    texts = pc.dictionary_encode(column.cast(pa.string())).combine_chunks()
    texts = texts.chunk(0) if isinstance(texts, pa.ChunkedArray) else texts
    codes = np.asarray(pc.cast(texts.indices, pa.float64()).to_numpy(zero_copy_only=False), np.float64)
    return codes, texts.dictionary.to_pylist()
