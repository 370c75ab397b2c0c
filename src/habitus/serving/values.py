"""Raw ids and single values of requests: each is read as the log has it, or refused with the name of its place.

Values are read as `habitus.data` reads a column.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from habitus.data import (
    COMMA_PATTERN,
    MICROSECONDS_PER_DAY,
    NUMBER_PATTERN,
    TIME_UNIT_US,
    YEAR_1900_US,
    YEAR_2200_US,
    to_categories,
)
from habitus.events import Schema, TimeUnit
from habitus.serving.schemas import RequestError, invalid_value
from habitus.typed import suggest_name

Key = Any  # of an item: int | str, or a tuple of it and the pair's texts
_NUMBER, _COMMA_NUMBER = re.compile(NUMBER_PATTERN), re.compile(COMMA_PATTERN)
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


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
        if not isinstance(value, str) or not 0 < len(value) <= 1_000 or not _is_unicode(value):
            raise invalid_value(what, value, "an id: a text of 1 to 1,000 characters, as in the log")
        return value


def check_names(what: str, names: Iterable[Any], allowed: Iterable[str]) -> None:
    """Refuse names that are not allowed, with the nearest that is."""
    allowed = set(allowed)
    for name in names:
        if name not in allowed:
            hint = f" ({suggest_name(name, sorted(allowed))})" if isinstance(name, str) and len(name) <= 200 else ""
            raise RequestError(
                f"{what} names {str(name)[:60]!r}, which is not a field here{hint}",
                expected=f"fields among: {', '.join(sorted(allowed))}",
            )


def read_category(what: str, value: Any, longest: int) -> str | None:
    """A category's value as text, as `to_categories` reads a column; None if it is missing."""
    if value is None:
        return None
    if isinstance(value, str):
        return _check_text(what, value, longest)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        if abs(value) >= 2**63:
            raise RequestError(
                f"{what} is an integer of {value.bit_length()} bits", expected="at most 63 bits, or text"
            )
        return str(value)
    if isinstance(value, float):
        text: str | None = to_categories(pa.array([value], pa.float64()))[0].as_py()
        return text
    raise invalid_value(what, value, "a text, a number or a boolean")


def read_number(what: str, value: Any, *, comma: bool = False) -> float:
    """A number, NaN if it is missing; NaN itself, infinity and words are refused. `comma`: text has a decimal comma."""
    if value is None:
        return math.nan
    if comma and isinstance(value, str):
        if len(value) >= 100 or not _COMMA_NUMBER.match(value):
            raise invalid_value(what, value, "a number, or a text with a decimal comma as 12,50; a missing one as null")
        value = value.replace(".", "").replace(",", ".")
    if isinstance(value, str) and len(value) < 100 and _NUMBER.match(value):
        value = float(value)
    if isinstance(value, int | float):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number) and abs(number) <= _MAX_FLOAT32:
            return number
    raise invalid_value(what, value, "a finite number; a missing one as null")


def read_time(what: str, value: Any, unit: TimeUnit, time_format: str | None = None) -> int:
    """A time in microseconds since 1970, or the plain position if the log has only those.

    Text may be in the form of the log's own times, or in ISO form.
    """
    if unit == "order":
        position = value if isinstance(value, int) else read_number(what, value)
        if position != position or position != int(position) or abs(position) >= 2**63:
            raise invalid_value(what, value, "a position: an integer")
        return int(position)
    if unit == "datetime":
        time_us = _read_datetime_us(what, value, time_format)
    else:
        number = read_number(what, value)
        if math.isnan(number):
            raise invalid_value(what, value, f"a number of {unit}")
        time_us = round(number * TIME_UNIT_US[unit])
    if not YEAR_1900_US <= time_us < YEAR_2200_US:
        raise invalid_value(what, value, f"a time from 1900 to 2199 (time_unit is {unit!r})")
    return time_us


def read_days(what: str, value: Any) -> float:
    """A field of kind 'time' in days since 1970, NaN if it is missing."""
    return math.nan if value is None else float(_read_datetime_us(what, value)) / MICROSECONDS_PER_DAY


def read_value(what: str, kind: str, value: Any) -> float:
    """A number, or a time in days, as the catalogue holds it: float32, NaN if it is missing."""
    return float(np.float32((read_number if kind == "number" else read_days)(what, value)))


def read_range(what: str, kind: str, ends: tuple[Any, Any]) -> tuple[float, float]:
    """The lowest and the highest value of a range; None leaves an end open."""
    low, high = (read_value(f"{what}[{place}]", kind, end) for place, end in enumerate(ends))
    low, high = (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)
    if low > high or (math.isinf(low) and math.isinf(high)):
        raise invalid_value(what, list(ends), "[lowest, highest], of which one may be null")
    return low, high


def in_range(value: float | None, low: float, high: float) -> bool:
    """Whether a number lies in a range; a missing one lies in none."""
    return value is not None and low <= value <= high


def read_text(what: str, value: Any, longest: int) -> str:
    """A text; numbers are taken as they are written."""
    if isinstance(value, str):
        return _check_text(what, value, longest)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise invalid_value(what, value, "a text")


def read_vector(what: str, value: Any, size: int) -> list[float]:
    """A vector of finite numbers of the given length."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != size:
        length = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
        raise RequestError(f"{what} is a {type(value).__name__}{length}", expected=f"a list of {size} numbers")
    entries = [read_number(f"{what}[{place}]", entry) for place, entry in enumerate(value)]
    if any(math.isnan(entry) for entry in entries):
        raise RequestError(
            f"{what} has a missing entry", expected=f"{size} finite numbers, or null for the whole vector"
        )
    return entries


def to_moment(time_us: int) -> datetime:
    """The moment of a time in microseconds since 1970."""
    return _EPOCH + time_us * _MICROSECOND


def _read_datetime_us(what: str, value: Any, time_format: str | None = None) -> int:
    """A moment in microseconds since 1970; times without a zone are UTC."""
    moment = value
    if isinstance(value, str):
        moment = _parse_datetime(value.strip(), time_format)
        if moment is None:
            form = f", or in the form {time_format}" if time_format is not None else ""
            raise invalid_value(what, value, f"a time such as 2024-05-31T12:30:00{form}")
    elif isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime(value.year, value.month, value.day)
    if not isinstance(moment, datetime):
        raise invalid_value(what, value, "a time such as 2024-05-31T12:30:00")
    try:
        moment = moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
    except OverflowError:
        raise invalid_value(what, value, "a time from 1900 to 2199") from None
    return (moment - _EPOCH) // _MICROSECOND


def _parse_datetime(text: str, time_format: str | None) -> datetime | None:
    if time_format is not None:
        with suppress(ValueError):
            return datetime.strptime(text, time_format)
    with suppress(ValueError):
        return datetime.fromisoformat(text)
    return None


def _check_text(what: str, value: str, longest: int) -> str:
    """A text that can be written as UTF-8 and is not too long."""
    if len(value) > longest:
        raise RequestError(f"{what} has {len(value):,} characters", expected=f"at most {longest:,}")
    if not _is_unicode(value):
        raise RequestError(f"{what} holds half of a surrogate pair", expected="Unicode text")
    return value


def _is_unicode(value: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
