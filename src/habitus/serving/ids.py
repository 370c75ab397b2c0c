"""Raw item ids: the form in which the log has them, and the catalogue row of each."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from habitus.events import Schema
from habitus.serving.schemas import invalid_value

Key = Any  # int | str, or a tuple of it and the pair's texts


@dataclass(frozen=True)
class IdFormat:
    """How items are named: by an integer or a text, and by further columns if item×field pairs are predicted."""

    item_column: str  # of the log
    table_column: str  # of the item table, and of answers
    pair_columns: tuple[str, ...]
    is_integer: bool

    @staticmethod
    def from_schema(schema: Schema, ids: pa.Table) -> "IdFormat":
        is_integer = pa.types.is_integer(ids.schema.field(schema.items.item).type)
        return IdFormat(schema.events.item_column, schema.items.item, schema.events.pair_columns, is_integer)

    @property
    def is_pair(self) -> bool:
        return bool(self.pair_columns)

    def keys(self, ids: pa.Table) -> Sequence[Key]:
        """The keys of a table of ids, in its order."""
        columns = [ids.column(name).to_pylist() for name in (self.table_column, *self.pair_columns)]
        return list(zip(*columns, strict=True)) if self.is_pair else columns[0]

    def event_key(self, event: Mapping[str, Any], what: str) -> Key:
        """The key of an event's item."""
        return self._key([event.get(name) for name in (self.item_column, *self.pair_columns)], what)

    def key(self, item_id: Any, what: str = "item id") -> Key:
        """The key of an id as a client gives it: a plain value, or for pairs a mapping or a list in order.

        For a pair it may also be a text that holds such a mapping or list as JSON, as in the path of a URL.
        """
        if not self.is_pair:
            return self._key([item_id], what)
        names = (self.table_column, *self.pair_columns)
        expected = f"a mapping with {', '.join(names)}, or a list of their values"
        if isinstance(item_id, str):
            try:
                item_id = json.loads(item_id)
            except (ValueError, RecursionError):
                raise invalid_value(what, item_id, expected) from None
        if isinstance(item_id, Mapping):
            if set(item_id) != set(names):
                raise invalid_value(what, sorted(map(str, item_id)), expected)
            return self._key([item_id[name] for name in names], what)
        if isinstance(item_id, list | tuple) and len(item_id) == len(names):
            return self._key(list(item_id), what)
        raise invalid_value(what, item_id, expected)

    def to_id(self, key: Key) -> Any:
        """The id of a key, as responses give it."""
        return dict(zip((self.table_column, *self.pair_columns), key, strict=True)) if self.is_pair else key

    def _key(self, values: list[Any], what: str) -> Key:
        first, *rest = values
        item = self._integer(first, what) if self.is_integer else self._text(first, what)
        if not rest:
            return item
        pair = zip(rest, self.pair_columns, strict=True)
        return (item, *(self._text(value, f"{what}, {name}") for value, name in pair))

    def _integer(self, value: Any, what: str) -> int:
        if isinstance(value, str) and len(value) < 25:
            body = value.strip().removeprefix("-")
            value = int(value) if body.isascii() and body.isdigit() else value
        if isinstance(value, float) and value == value and abs(value) < 2**53 and value == int(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= 2**63:
            raise invalid_value(what, value, "an id: an integer, as in the log")
        return value

    def _text(self, value: Any, what: str) -> str:
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int) and abs(value) < 2**64:
            return str(value)
        if not isinstance(value, str) or not 0 < len(value) <= 1_000 or not is_unicode(value):
            raise invalid_value(what, value, "an id: a text of 1 to 1,000 characters, as in the log")
        return value


class IdLookup:
    """From keys to catalogue rows: sorted 64-bit hashes and their rows, 16 bytes per item whatever the ids are."""

    def __init__(self, id_format: IdFormat, ids: pa.Table) -> None:
        self.id_format = id_format
        self.ids = ids
        hashes = np.fromiter(map(hash, _iterate_keys(id_format, ids)), np.int64, ids.num_rows)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """The catalogue row of each key, -1 where there is none."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        low = np.searchsorted(self._hashes, hashes, "left")
        counts = np.searchsorted(self._hashes, hashes, "right") - low
        places = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        matches = self._order[places]  # rows of equal hash: nearly always one or none per key
        match_keys = self.id_format.keys(self.ids.take(pa.array(matches)))
        numbers = np.repeat(np.arange(len(keys)), counts).tolist()
        rows = [-1] * len(keys)
        for number, row, key in zip(numbers, matches.tolist(), match_keys, strict=True):
            if key == keys[number]:
                rows[number] = row
        return rows


def _iterate_keys(id_format: IdFormat, ids: pa.Table) -> Iterator[Key]:
    for start in range(0, ids.num_rows, 1 << 18):  # as Python objects, ids take ten times their size
        yield from id_format.keys(ids.slice(start, 1 << 18))


def is_unicode(value: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
