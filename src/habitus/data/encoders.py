"""From the values of a table to what a model reads; one implementation for preparing and for serving."""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from habitus.data.batch import ItemFeatures
from habitus.data.category_lists import split_texts
from habitus.data.columns import to_codes, to_strings
from habitus.data.fields import Field, Fields
from habitus.data.kinds import KINDS
from habitus.data.text import encode_texts, join_texts
from habitus.errors import DataError
from habitus.typed import Typed

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Encoders(Typed):
    """How fields are encoded. With the tokenizer's file, all that is needed to encode a new item or event."""

    fields: Fields
    text_columns: tuple[str, ...] = ()
    item_kinds: dict[str, str]
    item_values: dict[str, tuple[str, ...]]  # category -> its values; the code of values[i] is i + 1
    event_values: dict[str, tuple[str, ...]]
    separators: dict[str, str] | None = None  # of the item fields whose texts hold several values

    @cached_property
    def item_codes(self) -> dict[str, dict[str, int]]:
        """Category of the items -> value -> code."""
        return _number_values(self.item_values)

    @cached_property
    def event_codes(self) -> dict[str, dict[str, int]]:
        """Category of the events -> value -> code."""
        return _number_values(self.event_values)

    @cached_property
    def _item_vocabularies(self) -> dict[str, pa.Array]:
        return {name: pa.array(values, pa.string()) for name, values in self.item_values.items()}

    def up_to(self, earlier: "Encoders") -> "Encoders":
        """These encoders without the categories that `earlier` does not know yet; updates put new ones last."""

        def cut(values: dict[str, tuple[str, ...]], known: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {name: all_[: len(known.get(name, all_))] for name, all_ in values.items()}

        widths = {field.name: field.width for field in earlier.fields.item}
        return self.with_values(
            cut(self.item_values, earlier.item_values), cut(self.event_values, earlier.event_values)
        ).with_widths(widths)

    def with_widths(self, widths: Mapping[str, int | None]) -> "Encoders":
        """These encoders with other numbers of codes per item."""
        item = tuple(
            field.model_copy(update={"width": widths.get(field.name, field.width)}) if field.width else field
            for field in self.fields.item
        )
        return self.model_copy(update={"fields": self.fields.model_copy(update={"item": item})})

    def with_values(
        self, item_values: dict[str, tuple[str, ...]], event_values: dict[str, tuple[str, ...]]
    ) -> "Encoders":
        """These encoders with other values of their categories."""
        fields = self.fields.model_copy(
            update={
                "item": tuple(_resized(field, item_values) for field in self.fields.item),
                "event": tuple(_resized(field, event_values) for field in self.fields.event),
            }
        )
        return self.model_copy(update={"fields": fields, "item_values": item_values, "event_values": event_values})

    def encode_items(self, table: pa.RecordBatch, tokenizer: "Tokenizer | None") -> ItemFeatures:
        """The features of the table's rows. Unseen category values and missing ones become code 0."""
        table = split_texts(table, self.separators or {})
        tokens = None
        if self.text_columns:
            assert tokenizer is not None
            texts = join_texts([to_strings(table.column(name)) for name in self.text_columns])
            tokens = encode_texts(tokenizer, texts.to_pylist(), self.fields.text_len)
        encoded = {
            spec.name: KINDS[self.item_kinds[spec.name]].encode(
                table.column(spec.name), spec, self._item_vocabularies.get(spec.name)
            )
            for spec in self.fields.item
            if spec.kind != "text"
        }
        return ItemFeatures(tokens, encoded)

    def encode_event_texts(self, texts: Sequence[str | None], tokenizer: "Tokenizer | None") -> np.ndarray:
        """The tokens of texts of events, int32 [n, text_len]; none of a missing one."""
        assert tokenizer is not None
        cleaned = join_texts([pa.array(texts, pa.string())]).to_pylist()
        return encode_texts(tokenizer, cleaned, self.fields.text_len)


def _resized(field: Field, values: dict[str, tuple[str, ...]]) -> Field:
    """A category with a row for each of its values and one for unknown ones; other fields as they are."""
    is_category = field.kind in ("category", "categories")
    return field.model_copy(update={"size": len(values[field.name]) + 1}) if is_category else field


def encode_events(
    batch: pa.RecordBatch,
    columns: dict[str, str],
    vocabularies: dict[str, pa.Array],
    numbered: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Event fields (name -> column of the batch): codes where a field has a vocabulary, numbers of texts and vectors
    as they are, else float32."""

    def encode(name: str, column: pa.Array) -> np.ndarray:
        if name in vocabularies:
            return to_codes(column, vocabularies[name])
        values = column.to_numpy(zero_copy_only=False)
        return values if name in numbered else values.astype(np.float32)

    return {name: encode(name, batch.column(column)) for name, column in columns.items()}


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a tokenizer.json."""
    from tokenizers import Tokenizer

    if not path.exists():
        raise DataError(f"{path} does not exist", expected="the tokenizer that preparation wrote")
    return Tokenizer.from_file(str(path))


def _number_values(values: dict[str, tuple[str, ...]]) -> dict[str, dict[str, int]]:
    return {name: {value: code for code, value in enumerate(vocabulary, 1)} for name, vocabulary in values.items()}
