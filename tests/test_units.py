"""Seconds and bytes: one way to write each."""

import pytest

from habitus.errors import ConfigError
from habitus.units import format_bytes, format_seconds, parse_bytes


def test_seconds_are_written_with_two_or_three_digits() -> None:
    seconds = (0, 0.04, 9.44, 45.4, 99.7, 133.9, 1800, 3600, 12276, 98_280, 4_000_000)
    assert [format_seconds(value) for value in seconds] == (
        "0 s, 0.04 s, 9.4 s, 45 s, 100 s, 2.2 min, 30 min, 1 h, 3.41 h, 27.3 h, 1,111 h".split(", ")
    )


def test_bytes_are_written_in_powers_of_1024() -> None:
    counts = (0, 512, 1023, 44 * 2**20, 50.2 * 2**30, 1000 * 2**20, 3 * 2**40)
    assert [format_bytes(value) for value in counts] == (
        ["0 B", "512 B", "1,023 B", "44 MiB", "50.2 GiB", "1,000 MiB", "3 TiB"]
    )


def test_bytes_are_read_with_or_without_a_unit() -> None:
    texts = ("4GiB", "500MB", "1e9", " 64 mib ", "1.5G")
    assert [parse_bytes(text) for text in texts] == [4 * 2**30, 500 * 2**20, 10**9, 64 * 2**20, 3 * 2**29]


@pytest.mark.parametrize(("text", "problem"), [("lots", "is not a size"), ("1KiB", "out of range")])
def test_other_sizes_are_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_bytes(text)
