"""From the values of a table to what a model reads; one implementation for preparing and for serving."""

import json
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.batch import ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.data.text import encode_texts, joined_texts
from habitus.errors import DataError
from habitus.typed import Typed

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MICROSECONDS_PER_DAY = 86_400_000_000
_NUMBER = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"


class Encoders(Typed):
    """How fields are encoded. With the tokenizer's file, all that is needed to encode a new item or event."""

    fields: Fields
    text_columns: tuple[str, ...] = ()
    item_kinds: dict[str, str]
    item_values: dict[str, tuple[str, ...]]  # category -> its values; the code of values[i] is i + 1
    event_values: dict[str, tuple[str, ...]]

    @cached_property
    def _item_lookup(self) -> dict[str, pa.Array]:
        return {name: pa.array(values, pa.string()) for name, values in self.item_values.items()}

    def encode_items(self, table: pa.RecordBatch, tokenizer: "Tokenizer | None") -> ItemFeatures:
        """The features of the table's rows. Unseen category values and missing ones become code 0."""
        tokens = None
        if self.text_columns:
            assert tokenizer is not None
            texts = joined_texts([as_text(table.column(name)) for name in self.text_columns])
            tokens = encode_texts(tokenizer, texts.to_pylist(), self.fields.text_len)
        encoded = {}
        for spec in self.fields.item:
            if spec.kind == "category":
                encoded[spec.name] = codes(as_category(table.column(spec.name)), self._item_lookup[spec.name])
            elif spec.kind == "number":
                encoded[spec.name] = as_number(table.column(spec.name), self.item_kinds[spec.name])
            elif spec.kind == "vector":
                encoded[spec.name] = as_vectors(table.column(spec.name), spec.size)
        return ItemFeatures(tokens, encoded)


@dataclass
class Moments:
    """Running mean and spread of a number and of its signed logarithm, over what is not missing.

    Chunks are merged by their means (Chan et al., 1979): sums of squares would lose a spread of 10³ around 10⁹.
    """

    count: int = 0
    means: np.ndarray = field(default_factory=lambda: np.zeros(2))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(2))  # of the deviations from the means

    def add(self, values: np.ndarray) -> None:
        values = values[~np.isnan(values)].astype(np.float64)
        if not len(values):
            return
        both = np.stack([values, np.sign(values) * np.log1p(np.abs(values))])
        means = both.mean(axis=1)
        both -= means[:, None]
        total = self.count + len(values)
        shift = means - self.means
        self.squares += (both * both).sum(axis=1) + shift * shift * (self.count * len(values) / total)
        self.means = self.means + shift * (len(values) / total)
        self.count = total

    def describe(self, name: str) -> Field:
        """The number field with these statistics; a constant gets deviation 1, so nothing is divided by zero."""
        if not self.count:
            return Field(name=name, kind="number")
        stds = np.sqrt(self.squares / self.count)
        stds = np.where(stds > 1e-7 * np.abs(self.means), stds, 1.0)  # float32 tells no smaller spread apart
        return Field(
            name=name,
            kind="number",
            mean=float(self.means[0]),
            std=float(stds[0]),
            log_mean=float(self.means[1]),
            log_std=float(stds[1]),
        )


def as_text(column: pa.Array) -> pa.Array:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def as_category(column: pa.Array) -> pa.Array:
    """The category's values as strings; 3.0 is '3', as integers with gaps come out of data frames."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # missing, as data frames write it
        whole = pc.and_(pc.less(pc.abs(column), 2.0**63), pc.equal(column, pc.trunc(column)))
        integers = pc.if_else(whole, column, None).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.if_else(whole, integers, column.cast(pa.string()))
    return as_text(column)


def codes(column: pa.Array, values: pa.Array) -> np.ndarray:
    """The code of each value, int32: its place among `values` plus one, and 0 where it is not among them."""
    if pa.types.is_dictionary(column.type):  # look up each distinct value once
        lookup = np.append(codes(as_category(column.dictionary), values), np.int32(0))
        indices = pc.fill_null(column.indices, len(column.dictionary)).to_numpy(zero_copy_only=False)
        return lookup[indices]
    found = pc.index_in(as_category(column), value_set=values, skip_nulls=True)
    return (pc.fill_null(found, -1).to_numpy(zero_copy_only=False) + 1).astype(np.int32)


def as_number(column: pa.Array, kind: str) -> np.ndarray:
    """The numbers as float32, NaN where missing or unreadable; a time becomes days since 1970."""
    if kind == "time":
        micros = _as_timestamps(column).cast(pa.int64()).cast(pa.float64(), safe=False)
        numbers = pc.divide(micros, float(MICROSECONDS_PER_DAY)).to_numpy(zero_copy_only=False)
    else:
        if pa.types.is_string(column.type):
            readable = pc.match_substring_regex(column, _NUMBER)
            column = pc.if_else(readable, pc.utf8_trim_whitespace(column), None)
        numbers = column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):  # beyond float32 is infinite, which preparation refuses
        return np.asarray(numbers, np.float64).astype(np.float32)


def _as_timestamps(column: pa.Array) -> pa.Array:
    if not pa.types.is_string(column.type):
        return column.cast(pa.timestamp("us"), safe=False)  # nanoseconds are cut
    try:
        return column.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:  # some value cannot be read: find out which, one by one
        return pa.array([_timestamp(value) for value in column.to_pylist()], pa.timestamp("us"))


def _timestamp(value: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if value is not None else None
    except ValueError:
        return None
    return moment.astimezone(UTC).replace(tzinfo=None) if moment is not None and moment.tzinfo else moment


def as_list(column: pa.Array) -> pa.Array:
    """The vectors as lists of float32; text is read as JSON, and what cannot be read is an empty list."""
    if pa.types.is_null(column.type):
        return column.cast(pa.list_(pa.float32()))
    if pa.types.is_string(column.type):
        return pa.array([_list(value) for value in column.to_pylist()], pa.list_(pa.float32()))
    return column


def _list(value: str | None) -> list[float] | None:
    if value is None:
        return None
    try:
        return [float(entry) for entry in json.loads(value)]
    except (ValueError, TypeError, OverflowError):
        return []


def as_vectors(column: pa.Array, size: int) -> np.ndarray:
    """The vectors as float32 [n, size], rows of NaN where missing."""
    column = as_list(column)
    vectors = np.full((len(column), size), np.nan, np.float32)
    present = column.is_valid().to_numpy(zero_copy_only=False)
    vectors[present] = as_float32(pc.list_flatten(column)).reshape(-1, size)
    return vectors


def as_float32(values: pa.Array) -> np.ndarray:
    """The numbers as float32; beyond its range they are infinite, and nulls are NaN."""
    with np.errstate(over="ignore"):
        return np.asarray(values.to_numpy(zero_copy_only=False), np.float32)


def vector_lengths(column: pa.Array) -> np.ndarray:
    """The length of each vector, 0 where missing."""
    return pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)


def load_tokenizer(path: Path) -> "Tokenizer":
    """The tokenizer of a tokenizer.json."""
    from tokenizers import Tokenizer

    if not path.exists():
        raise DataError(f"{path} does not exist", expected="the tokenizer that preparation wrote")
    return Tokenizer.from_file(str(path))


def encoded_events(
    batch: pa.RecordBatch, columns: dict[str, str], values: dict[str, pa.Array]
) -> dict[str, np.ndarray]:
    """Event fields (name -> column of the batch): codes where `values` knows the field, else float32."""
    return {
        name: codes(batch.column(column), values[name])
        if name in values
        else batch.column(column).to_numpy(zero_copy_only=False).astype(np.float32)
        for name, column in columns.items()
    }
