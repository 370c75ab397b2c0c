"""Arrow columns as plain values: strings, categories, numbers, days, vectors. Missing stays missing."""

import json
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

MICROSECONDS_PER_DAY = 86_400_000_000
_LAST_IN_MICROSECONDS = {"s": (2**63 - 1) // 10**6, "ms": (2**63 - 1) // 10**3}  # later ones do not fit 64 bits
NUMBER_PATTERN = r"^\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*$"

# With a decimal comma: points stand between thousands, and only before a comma, since 1.250 may be meant either way.
COMMA_PATTERN = r"^\s*[+-]?(\d+,?\d*|,\d+|\d{1,3}(\.\d{3})+,\d*)([eE][+-]?\d+)?\s*$"


def to_strings(column: pa.Array) -> pa.Array:
    return column if pa.types.is_string(column.type) else column.cast(pa.string())


def to_categories(column: pa.Array) -> pa.Array:
    """The category's values as strings; 3.0 is '3', since data frames turn integers with gaps into floats."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column), None, column)  # missing, as data frames write it
        is_integer = pc.and_(pc.less(pc.abs(column), 2.0**63), pc.equal(column, pc.trunc(column)))
        integers = pc.if_else(is_integer, column, None).cast(pa.int64(), safe=False).cast(pa.string())
        return pc.if_else(is_integer, integers, column.cast(pa.string()))
    return to_strings(column)


def to_codes(column: pa.Array, vocabulary: pa.Array) -> np.ndarray:
    """The code of each category, int32: its place in the vocabulary plus one, or 0 where it is not in it."""
    if pa.types.is_dictionary(column.type):  # look up each distinct value once
        lookup = np.append(to_codes(to_categories(column.dictionary), vocabulary), np.int32(0))
        indices = pc.fill_null(column.indices, len(column.dictionary)).to_numpy(zero_copy_only=False)
        return lookup[indices]
    places = pc.index_in(to_categories(column), value_set=vocabulary, skip_nulls=True)
    return (pc.fill_null(places, -1).to_numpy(zero_copy_only=False) + 1).astype(np.int32)


def to_numbers(column: pa.Array) -> np.ndarray:
    """The numbers as float32, NaN where missing or unreadable."""
    if pa.types.is_string(column.type):
        readable = pc.match_substring_regex(column, NUMBER_PATTERN)
        column = pc.if_else(readable, pc.utf8_trim_whitespace(column), None)
    return to_float32(column.cast(pa.float64(), safe=False))


def to_days(column: pa.Array) -> np.ndarray:
    """Times as days since 1970, float32, NaN where missing or unreadable."""
    micros = _to_timestamps(column).cast(pa.int64()).cast(pa.float64(), safe=False)
    return to_float32(pc.divide(micros, float(MICROSECONDS_PER_DAY)))


def to_float32(values: pa.Array) -> np.ndarray:
    """The numbers as float32; beyond its range they are infinite, and nulls are NaN."""
    with np.errstate(over="ignore"):  # preparation refuses what is infinite
        return np.asarray(values.to_numpy(zero_copy_only=False), np.float32)


def to_lists(column: pa.Array) -> pa.Array:
    """The vectors as lists of numbers; text is read as JSON, and what cannot be read is an empty list."""
    if pa.types.is_null(column.type):
        return column.cast(pa.list_(pa.float32()))
    if pa.types.is_string(column.type):
        return pa.array([_parse_list(value) for value in column.to_pylist()], pa.list_(pa.float32()))
    return column


def to_vectors(column: pa.Array, size: int) -> np.ndarray:
    """The vectors as float32 [n, size], rows of NaN where missing."""
    column = to_lists(column)
    vectors = np.full((len(column), size), np.nan, np.float32)
    vectors[is_present(column)] = to_float32(pc.list_flatten(column)).reshape(-1, size)
    return vectors


def vector_lengths(lists: pa.Array) -> np.ndarray:
    """The length of each vector, 0 where missing."""
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)


def is_present(column: pa.Array) -> np.ndarray:
    """Which values are not null."""
    return column.is_valid().to_numpy(zero_copy_only=False)


def read_form(column: pa.ChunkedArray, time_format: str | None) -> pa.ChunkedArray:
    """Text as moments where all of it is in that form; any other column as it is."""
    if time_format is None or not pa.types.is_string(column.type):
        return column
    try:
        moments = [
            None if text is None else datetime.strptime(text.strip(), time_format) for text in column.to_pylist()
        ]
    except ValueError:
        return column
    return pa.chunked_array([pa.array(moments, pa.timestamp("us"))])


def _to_timestamps(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type) and column.type.unit in _LAST_IN_MICROSECONDS:
        last = pa.scalar(_LAST_IN_MICROSECONDS[column.type.unit], pa.int64())
        is_far = pc.greater(pc.abs_checked(pc.fill_null(column.cast(pa.int64()), 0)), last)
        column = pc.if_else(is_far, pa.scalar(None, column.type), column)
    if not pa.types.is_string(column.type):
        return column.cast(pa.timestamp("us"), safe=False)  # nanoseconds are cut
    try:
        return column.cast(pa.timestamp("us"))
    except pa.ArrowInvalid:  # some value cannot be read: find out which, one by one
        return pa.array([_parse_timestamp(value) for value in column.to_pylist()], pa.timestamp("us"))


def _parse_timestamp(value: str | None) -> datetime | None:
    try:
        moment = datetime.fromisoformat(value) if value is not None else None
    except ValueError:
        return None
    return moment.astimezone(UTC).replace(tzinfo=None) if moment is not None and moment.tzinfo else moment


def _parse_list(value: str | None) -> list[float] | None:
    if value is None:
        return None
    try:
        return [float(entry) for entry in json.loads(value)]
    except (ValueError, TypeError, OverflowError):
        return []
