"""Seconds, bytes and counts as people write and read them."""

import re

from habitus.errors import ConfigError

MAX_THREADS = 1024  # that a command may be asked to start; far more than help, and systems still grant them
_BYTES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BYTES_TEXT = re.compile(r"\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*([KMGT]?)(?:i?B)?\s*", re.IGNORECASE)


def format_seconds(seconds: float) -> str:
    """A duration: 9.4 s, 45 s, 2.2 min, 3.41 h."""
    if seconds < 100:
        return f"{_digits(seconds, 2)} s"
    if seconds < 3600:
        return f"{_digits(seconds / 60, 2)} min"
    return f"{_digits(seconds / 3600, 3)} h"


def format_bytes(count: float) -> str:
    """A size in powers of 1024: 512 B, 44 MiB, 50.2 GiB."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{_digits(value, 3)} {unit}"
        value /= 1024
    return f"{_digits(value, 3)} TiB"


def pluralize(n: int, word: str) -> str:
    """'1 run', '3 runs'."""
    return f"{n:,} {word}{'s' * (n != 1)}"


def parse_bytes(text: str) -> int:
    """The bytes of working memory that '4GiB', '500MB' or '1e9' stands for; every unit is a power of 1024."""
    match = _BYTES_TEXT.fullmatch(text)
    if not match:
        raise ConfigError(f"memory {text!r} is not a size", expected="a size such as 4GiB")
    size = int(float(match[1]) * _BYTES[match[2].upper()])
    if not 64 * 2**20 <= size < 2**60:
        raise ConfigError(f"memory {text!r} is out of range", expected="at least 64MiB and less than 1024PiB")
    return size


def _digits(value: float, digits: int) -> str:
    """So many significant digits, but no exponent, and all digits of the integer part."""
    return f"{value:.{digits}g}" if 1e-4 <= value < 10**digits - 0.5 else f"{value:,.0f}"
