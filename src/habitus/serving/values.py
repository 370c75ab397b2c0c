"""Single values of requests: each is read as `habitus.data` reads a column, or refused with the name of its place."""

import math
import re
from collections.abc import Iterable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from habitus.data import (
    MICROSECONDS_PER_DAY,
    NUMBER_PATTERN,
    TIME_UNIT_US,
    YEAR_1900_US,
    YEAR_2200_US,
    to_categories,
)
from habitus.events import TimeUnit
from habitus.serving.ids import is_unicode
from habitus.serving.schemas import RequestError, invalid_value
from habitus.typed import suggest_name

_NUMBER = re.compile(NUMBER_PATTERN)
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_MAX_FLOAT32 = float(np.finfo(np.float32).max)


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


def read_number(what: str, value: Any) -> float:
    """A number, NaN if it is missing; NaN itself, infinity and words are refused."""
    if value is None:
        return math.nan
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


def read_time(what: str, value: Any, unit: TimeUnit) -> int:
    """A time in microseconds since 1970, or the plain position if the log has only those."""
    if unit == "order":
        position = value if isinstance(value, int) else read_number(what, value)
        if position != position or position != int(position) or abs(position) >= 2**63:
            raise invalid_value(what, value, "a position: an integer")
        return int(position)
    if unit == "datetime":
        time_us = _read_datetime_us(what, value)
    else:
        number = read_number(what, value)
        if math.isnan(number):
            raise invalid_value(what, value, f"a number of {unit}")
        time_us = round(number * TIME_UNIT_US[unit])
    if not YEAR_1900_US <= time_us < YEAR_2200_US:
        raise invalid_value(what, value, f"a time from 1900 to 2199 (time_unit is {unit!r})")
    return time_us


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


def to_moment(time_us: int) -> datetime:
    """The moment of a time in microseconds since 1970."""
    return _EPOCH + time_us * _MICROSECOND


def in_range(value: float | None, low: float, high: float) -> bool:
    """Whether a number lies in a range; a missing one lies in none."""
    return value is not None and low <= value <= high


def read_days(what: str, value: Any) -> float:
    """A field of kind 'time' in days since 1970, NaN if it is missing."""
    return math.nan if value is None else float(_read_datetime_us(what, value)) / MICROSECONDS_PER_DAY


def _read_datetime_us(what: str, value: Any) -> int:
    """A moment in microseconds since 1970; times without a zone are UTC."""
    moment = value
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            raise invalid_value(what, value, "a time such as 2024-05-31T12:30:00") from None
    elif isinstance(value, date) and not isinstance(value, datetime):
        moment = datetime(value.year, value.month, value.day)
    if not isinstance(moment, datetime):
        raise invalid_value(what, value, "a time such as 2024-05-31T12:30:00")
    try:
        moment = moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
    except OverflowError:
        raise invalid_value(what, value, "a time from 1900 to 2199") from None
    return (moment - _EPOCH) // _MICROSECOND


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


def _check_text(what: str, value: str, longest: int) -> str:
    """A text that can be written as UTF-8 and is not too long."""
    if len(value) > longest:
        raise RequestError(f"{what} has {len(value):,} characters", expected=f"at most {longest:,}")
    if not is_unicode(value):
        raise RequestError(f"{what} holds half of a surrogate pair", expected="Unicode text")
    return value
