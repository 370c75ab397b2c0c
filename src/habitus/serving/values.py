"""Raw values of single events and items, read as preparation reads columns; what cannot be used is refused by name."""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from habitus.data import YEAR_1900_US, YEAR_2200_US, as_category
from habitus.events import TimeUnit
from habitus.serving.requests import RequestError
from habitus.typed import suggest_name

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_UNIT_US = {"s": 1_000_000, "ms": 1_000, "us": 1}
_EPOCH = datetime(1970, 1, 1)
_MICROSECOND = timedelta(microseconds=1)
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def refuse(what: str, value: Any, expected: str) -> RequestError:
    """The error for a value, shown in short."""
    try:
        told = repr(value)
    except ValueError:  # an integer of thousands of digits
        told = f"a {type(value).__name__}"
    return RequestError(f"{what} is {told if len(told) <= 60 else told[:57] + '...'}", expected=expected)


def check_names(what: str, given: Iterable[Any], known: Iterable[str]) -> None:
    """Refuse names that are not among the known ones, with the nearest of them."""
    names = set(known)
    for name in given:
        if name not in names:
            close = suggest_name(name, sorted(names)) if isinstance(name, str) and len(name) <= 200 else ""
            raise RequestError(
                f"{what} names {str(name)[:60]!r}, which is no field here" + (f" ({close})" if close else ""),
                expected=f"fields among: {', '.join(sorted(names))}",
            )


def check_mapping(what: str, value: Any) -> Mapping[str, Any]:
    """`value`, once it is known to be a mapping."""
    if not isinstance(value, Mapping):
        raise refuse(what, value, "a mapping from column to value")
    return value


def category(what: str, value: Any, longest: int) -> str | None:
    """A category's value as text, as `as_category` makes it of a column; None where it is missing."""
    if value is None or isinstance(value, str):
        return _sound(what, value, longest)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value) if abs(value) < 2**63 else _too_large(what, value)
    if isinstance(value, float):
        text: str | None = as_category(pa.array([value], pa.float64()))[0].as_py()
        return text
    raise refuse(what, value, "a text, a number or a boolean")


def number(what: str, value: Any) -> float:
    """A number as float, NaN where it is missing; NaN itself, infinity and words are refused."""
    if value is None:
        return math.nan
    if isinstance(value, str) and len(value) < 100 and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, int | float):
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if math.isfinite(found) and abs(found) <= _LARGEST_FLOAT32:
            return found
    raise refuse(what, value, "a finite number; a missing one as null")


def text(what: str, value: Any, longest: int) -> str | None:
    """A text; numbers are taken as they are written."""
    if value is None or isinstance(value, str):
        return _sound(what, value, longest)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise refuse(what, value, "a text")


def vector(what: str, value: Any, size: int) -> list[float] | None:
    """A vector of finite numbers of the given length; None where it is missing."""
    if value is None:
        return None
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list | tuple) or len(value) != size:
        length = f" of length {len(value)}" if isinstance(value, list | tuple) else ""
        raise RequestError(f"{what} is a {type(value).__name__}{length}", expected=f"a list of {size} numbers")
    entries = [number(f"{what}[{place}]", entry) for place, entry in enumerate(value)]
    if any(math.isnan(entry) for entry in entries):
        raise RequestError(f"{what} holds a missing entry", expected=f"{size} finite numbers, or null for the whole")
    return entries


def moment(what: str, value: Any, unit: TimeUnit) -> int:
    """A time as microseconds since 1970, or the plain position where the log has only those."""
    if unit == "order":
        place = value if isinstance(value, int) else number(what, value)
        if place != place or place != int(place) or abs(place) >= 2**63:
            raise refuse(what, value, "a position: a whole number")
        return int(place)
    if unit == "datetime":
        micros = (_datetime(what, value) - _EPOCH) // _MICROSECOND
    else:
        read = number(what, value)
        if math.isnan(read):
            raise refuse(what, value, f"a number of {unit}")
        micros = round(read * _UNIT_US[unit])
    if not YEAR_1900_US <= micros < YEAR_2200_US:
        raise refuse(what, value, f"a time from 1900 to 2199 (time_unit is {unit!r})")
    return micros


def iso_time(what: str, value: Any) -> str:
    """A moment as text in ISO form, in UTC."""
    return (_EPOCH + moment(what, value, "datetime") * _MICROSECOND).isoformat()


def days(what: str, value: Any) -> float:
    """A field of kind 'time' as days since 1970, NaN where it is missing."""
    if value is None:
        return math.nan
    return (_datetime(what, value) - _EPOCH) / timedelta(days=1)


def _datetime(what: str, value: Any) -> datetime:
    """A moment in UTC without its zone; times without a zone are UTC."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.strip())
        except ValueError:
            raise refuse(what, value, "a time such as 2024-05-31T12:30:00") from None
    elif isinstance(value, date) and not isinstance(value, datetime):
        value = datetime(value.year, value.month, value.day)
    if not isinstance(value, datetime):
        raise refuse(what, value, "a time such as 2024-05-31T12:30:00")
    try:
        return value.astimezone(UTC).replace(tzinfo=None) if value.tzinfo else value
    except OverflowError:
        raise refuse(what, value, "a time from 1900 to 2199") from None


def _sound(what: str, value: str | None, longest: int) -> str | None:
    """A text that can be written as UTF-8 and is not too long."""
    if value is None:
        return None
    if len(value) > longest:
        raise RequestError(f"{what} has {len(value):,} characters", expected=f"at most {longest:,}")
    if not is_unicode(value):
        raise RequestError(f"{what} holds half of a surrogate pair", expected="Unicode text")
    return value


def is_unicode(value: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    if value.isascii():
        return True
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _too_large(what: str, value: int) -> str:
    raise RequestError(f"{what} is a number of {value.bit_length()} bits", expected="at most 63 bits; or a text")
