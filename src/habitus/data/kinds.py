"""The kinds of fields that a schema may name, one class each: which columns can be one, how it is surveyed and encoded.

A new kind is a class here, its name in `habitus.events.schema`, and a reader of single values in serving. Where it is
encoded as one of the kinds of `fields.py`, as times are encoded as numbers, the model knows it already.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.category_lists import CategoryListSurvey, to_code_rows
from habitus.data.column_surveys import (
    CategorySurvey,
    ColumnSurvey,
    Fault,
    NumberSurvey,
    TextSurvey,
    VectorSurvey,
)
from habitus.data.columns import (
    is_present,
    to_codes,
    to_days,
    to_lists,
    to_numbers,
    to_vectors,
    vector_lengths,
)
from habitus.data.fields import EncodedKind, Field
from habitus.data.sources import is_list

_MAX_EVENT_VALUES = 5_000  # more distinct values than this in a sample look like ids, not like a category
_WORDS = r"\p{L}{2,}\s+\p{L}"  # one word and the beginning of another
_COUNTS = ("quantity", "qty", "count", "amount", "price", "num_", "age", "year")


@dataclass(frozen=True)
class ColumnSample:
    """The first values of a column, from which its kind is guessed."""

    name: str
    values: pa.ChunkedArray
    of_events: bool

    @property
    def type(self) -> pa.DataType:
        return self.values.type

    @cached_property
    def distinct(self) -> int:
        return int(pc.count_distinct(self.values).as_py())


class FieldKind:
    """Everything that preparation knows about one kind of field."""

    encoded_as: EncodedKind
    expected: str  # of a column, as an error says it
    arrow_type: pa.DataType  # of values that come one by one, as in a request

    def accepts(self, type_: pa.DataType) -> bool:
        """Whether a column of that type can be such a field."""
        raise NotImplementedError

    def looks_like(self, sample: ColumnSample) -> bool:
        """Whether a sample looks like such a field, once the kinds before it in the table have been tried."""
        raise NotImplementedError

    def survey(self) -> ColumnSurvey:
        """A survey of one column, before its first chunk."""
        raise NotImplementedError

    def encode(self, column: pa.Array, spec: Field, vocabulary: pa.Array | None) -> np.ndarray:
        """The values of an item column as a model reads them."""
        raise NotImplementedError

    def is_unusable(self, column: pa.Array, spec: Field) -> np.ndarray:
        """Which values of a new item column cannot be encoded; what is merely missing can."""
        return np.zeros(len(column), bool)

    def expected_values(self, spec: Field) -> str:
        """What `is_unusable` asks of values."""
        return self.expected

    def event_sql(self, column: str, type_: pa.DataType) -> str | None:
        """SQL that reads an event column as FLOAT; None where its values are kept and numbered afterwards."""
        return None


class Text(FieldKind):
    encoded_as: EncodedKind = "text"
    expected = "a text: text, integers or booleans"
    arrow_type = pa.string()

    def accepts(self, type_: pa.DataType) -> bool:
        return _is_plain(type_) and not _is_opaque(type_)

    def looks_like(self, sample: ColumnSample) -> bool:
        if not pa.types.is_string(sample.type) or sample.distinct <= 50:
            return False
        if sample.of_events:  # few events may have one, and what differs without being words is an id or a time
            num_filled = len(sample.values) - sample.values.null_count
            has_words = pc.mean(pc.match_substring_regex(sample.values, _WORDS).cast(pa.int8())).as_py()
            return sample.distinct > 0.3 * num_filled and bool(has_words > 0.3)
        return sample.distinct > 0.3 * len(sample.values)

    def survey(self) -> ColumnSurvey:
        return TextSurvey()


class Category(FieldKind):
    encoded_as: EncodedKind = "category"
    expected = 'a category: text, integers or booleans (a list of them is of kind "categories")'
    arrow_type = pa.string()

    def accepts(self, type_: pa.DataType) -> bool:
        return _is_plain(type_) and not _is_opaque(type_)

    def looks_like(self, sample: ColumnSample) -> bool:
        if _is_opaque(sample.type):
            return False
        if sample.of_events:
            return 1 < sample.distinct <= _MAX_EVENT_VALUES
        return sample.distinct > 0 or pa.types.is_integer(sample.type)

    def survey(self) -> ColumnSurvey:
        return CategorySurvey()

    def encode(self, column: pa.Array, spec: Field, vocabulary: pa.Array | None) -> np.ndarray:
        return to_codes(column, vocabulary)


class CategoryList(Category):
    """Several categories of an item, as a list column has them or a text that a separator divides."""

    encoded_as: EncodedKind = "categories"
    expected = "a list of categories: text, integers or booleans"
    arrow_type = pa.list_(pa.string())

    def accepts(self, type_: pa.DataType) -> bool:
        return pa.types.is_null(type_) or (is_list(type_) and super().accepts(type_.value_type))

    def looks_like(self, sample: ColumnSample) -> bool:
        if not is_list(sample.type) or pa.types.is_floating(sample.type.value_type):
            return False
        has_one_length = pc.count_distinct(pc.list_value_length(sample.values)).as_py() <= 1
        return self.accepts(sample.type) and not (_is_number_list(sample.type) and has_one_length)

    def survey(self) -> ColumnSurvey:
        return CategoryListSurvey()

    def encode(self, column: pa.Array, spec: Field, vocabulary: pa.Array | None) -> np.ndarray:
        return to_code_rows(column, vocabulary, *spec.row_shape(0))


class Number(FieldKind):
    encoded_as: EncodedKind = "number"
    expected = "a number"
    arrow_type = pa.float64()
    fault = Fault(
        "NaN, infinite or unreadable numbers",
        'finite numbers as 12.50, or as 12,50 by decimal = "," in the schema; missing values as nulls',
        "makes bad numbers missing",
    )

    def accepts(self, type_: pa.DataType) -> bool:
        return _is_number(type_) or pa.types.is_string(type_) or pa.types.is_boolean(type_) or pa.types.is_null(type_)

    def looks_like(self, sample: ColumnSample) -> bool:
        if pa.types.is_integer(sample.type):
            return not _is_code(sample)
        return _is_number(sample.type)

    def read(self, column: pa.Array) -> np.ndarray:
        """The values as float32, NaN where missing or unreadable."""
        return to_numbers(column)

    def survey(self) -> ColumnSurvey:
        return NumberSurvey(self.read, self.fault)

    def encode(self, column: pa.Array, spec: Field, vocabulary: pa.Array | None) -> np.ndarray:
        return self.read(column)

    def is_unusable(self, column: pa.Array, spec: Field) -> np.ndarray:
        return is_present(column) & ~np.isfinite(self.read(column))

    def expected_values(self, spec: Field) -> str:
        return self.fault.expected

    def event_sql(self, column: str, type_: pa.DataType) -> str | None:
        return f"TRY_CAST({column} AS FLOAT)"


class Time(Number):
    """A moment, encoded as days since 1970."""

    expected = "a time: a timestamp, a date or text in ISO form"
    arrow_type = pa.timestamp("us")
    fault = Fault("times that cannot be read", "times in ISO form; missing values as nulls", "makes bad times missing")

    def accepts(self, type_: pa.DataType) -> bool:
        return _is_moment(type_) or pa.types.is_string(type_) or pa.types.is_null(type_)

    def looks_like(self, sample: ColumnSample) -> bool:
        return _is_moment(sample.type)

    def read(self, column: pa.Array) -> np.ndarray:
        return to_days(column)

    def event_sql(self, column: str, type_: pa.DataType) -> str | None:
        return f"CAST({datetime_sql(column, type_)} / 86400e6 AS FLOAT)"


class Vector(FieldKind):
    encoded_as: EncodedKind = "vector"
    expected = "a vector: a list of numbers"
    arrow_type = pa.list_(pa.float32())

    def accepts(self, type_: pa.DataType) -> bool:
        return _is_number_list(type_) or pa.types.is_string(type_) or pa.types.is_null(type_)

    def looks_like(self, sample: ColumnSample) -> bool:
        return _is_number_list(sample.type)

    def survey(self) -> ColumnSurvey:
        return VectorSurvey()

    def encode(self, column: pa.Array, spec: Field, vocabulary: pa.Array | None) -> np.ndarray:
        return to_vectors(column, spec.size)

    def is_unusable(self, column: pa.Array, spec: Field) -> np.ndarray:
        return is_present(column) & (vector_lengths(to_lists(column)) != spec.size)

    def expected_values(self, spec: Field) -> str:
        return f"vectors of length {spec.size}, as in training; missing ones as nulls"


# In the order in which a guess tries them: a category is what nothing else is.
KINDS: dict[str, FieldKind] = {
    "categories": CategoryList(),
    "vector": Vector(),
    "time": Time(),
    "number": Number(),
    "text": Text(),
    "category": Category(),
}


def datetime_sql(column: str, type_: pa.DataType) -> str:
    """SQL of a moment as microseconds since 1970; null where text cannot be read."""
    if pa.types.is_string(type_):
        return f"epoch_us(TRY_CAST({column} AS TIMESTAMPTZ))"
    if pa.types.is_date(type_):
        return f"epoch_us(TRY_CAST({column} AS TIMESTAMP))"  # null for days beyond the last timestamp
    if type_.tz is not None:  # DuckDB has no epoch_us of nanoseconds with a time zone
        return f"epoch_us(CAST({column} AS TIMESTAMPTZ))"
    return f"epoch_us({column})"


def _is_plain(type_: pa.DataType) -> bool:
    """Whether values can be written as text at all."""
    odd = isinstance(type_, pa.BaseExtensionType) or pa.types.is_time(type_) or pa.types.is_duration(type_)
    return not odd


def _is_opaque(type_: pa.DataType) -> bool:
    return bool(pa.types.is_nested(type_) or pa.types.is_binary(type_))


def _is_number(type_: pa.DataType) -> bool:
    return bool(pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_decimal(type_))


def _is_moment(type_: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(type_) or pa.types.is_date(type_))


def _is_number_list(type_: pa.DataType) -> bool:
    return is_list(type_) and bool(pa.types.is_floating(type_.value_type) or pa.types.is_integer(type_.value_type))


def _is_code(sample: ColumnSample) -> bool:
    """Whether integers label rather than count, by their name or their range."""
    name = sample.name.lower()
    if any(word in name for word in _COUNTS):
        return False
    has_few_values = sample.distinct <= 50 and (pc.min(sample.values).as_py() or 0) >= 0
    return name.endswith(("_id", "_code", "_no", "zip")) or has_few_values
