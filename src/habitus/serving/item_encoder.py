"""Items from their raw fields alone: checked, encoded as preparation encodes a table, embedded."""

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from torch import Tensor

from habitus.model import EMBED_ROWS, Bundle, embed_features
from habitus.serving import values
from habitus.serving.ids import IdKind, Key
from habitus.serving.requests import Limits, RequestError

_TYPES = {
    "text": pa.string(),
    "category": pa.string(),
    "number": pa.float64(),
    "vector": pa.list_(pa.float32()),
    "time": pa.timestamp("us"),
}


class ItemEncoder:
    """Reads and embeds the items of one run."""

    def __init__(self, bundle: Bundle, kind: IdKind, limits: Limits) -> None:
        self.bundle = bundle
        self.kind = kind
        self.limits = limits
        self.kinds = bundle.encoders.item_kinds
        self.sizes = {spec.name: spec.size for spec in bundle.encoders.fields.item if spec.kind == "vector"}

    def fields_of(self, key: Key, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The item's fields as they are stored: plain values by name, missing ones absent.

        The columns of an item×field pair come from its id; where the fields repeat them, they must agree.
        """
        values.check_mapping("the item's fields", fields)
        values.check_names("the item", fields, [*self.kinds, self.kind.table_column])
        given = {name: value for name, value in fields.items() if name in self.kinds}
        if self.kind.table_column in fields and self._id_of(fields) != self._first(key):
            raise RequestError(
                f"the field {self.kind.table_column!r} is not the item's id", expected="the same id, or no such field"
            )
        for name, value in zip(self.kind.pair_columns, key[1:] if self.kind.is_pair else (), strict=True):
            if str(given.setdefault(name, value)) != value:
                raise RequestError(f"the field {name!r} is not that of the item's id", expected=f"{value!r}")
        return self._read_all(given)

    def read_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The same for an item without an id, or with one that is not looked at."""
        values.check_mapping("the item", fields)
        values.check_names("the item", fields, [*self.kinds, self.kind.table_column])
        return self._read_all({name: value for name, value in fields.items() if name in self.kinds})

    def categories_of(self, fields: Mapping[str, Any]) -> dict[str, str | None]:
        """The values that filters look at."""
        return {name: fields.get(name) for name in self.bundle.encoders.item_values}

    def embed(self, items: Sequence[Mapping[str, Any]]) -> Tensor:
        """The vectors [n, joint_dim] of items whose fields `fields_of` has read."""

        def parts() -> Any:
            for at in range(0, len(items), EMBED_ROWS):
                batch = self._batch(items[at : at + EMBED_ROWS])
                yield self.bundle.encoders.encode_items(batch, self.bundle.tokenizer)

        return embed_features(self.bundle.model, parts(), precision=self.bundle.recipe.train.precision)

    def _batch(self, items: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        columns = {}
        for name, kind in self.kinds.items():
            column = [item.get(name) for item in items]
            if kind == "time":
                column = [None if value is None else values.moment(name, value, "datetime") for value in column]
            columns[name] = pa.array(column, _TYPES[kind])
        return pa.RecordBatch.from_pydict(columns)

    def _read_all(self, given: Mapping[str, Any]) -> dict[str, Any]:
        read = {name: self._read(name, value) for name, value in given.items()}
        found = {name: value for name, value in read.items() if value is not None}
        own = set(self.kinds) - set(self.kind.pair_columns)
        if not own & found.keys():
            raise RequestError("the item has no fields", expected=f"at least one of: {', '.join(sorted(own))}")
        return found

    def _read(self, name: str, value: Any) -> Any:
        kind, what, longest = self.kinds[name], f"field {name!r}", self.limits.max_text
        if kind == "text":
            return values.text(what, value, longest)
        if kind == "category":
            return values.category(what, value, longest)
        if kind == "vector":
            return values.vector(what, value, self.sizes[name])
        if value is None:
            return None
        return values.number(what, value) if kind == "number" else values.iso_time(what, value)

    def _id_of(self, fields: Mapping[str, Any]) -> Any:
        given = fields[self.kind.table_column]
        return self._first(
            self.kind.key((given, *("x" for _ in self.kind.pair_columns)) if self.kind.is_pair else given)
        )

    def _first(self, key: Key) -> Any:
        return key[0] if self.kind.is_pair else key
