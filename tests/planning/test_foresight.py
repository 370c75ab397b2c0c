"""What roll-outs missed, worked by hand."""

import math

import pytest

from habitus.planning.foresight import Foreseen, allowance, error_of_gain, share_missed, widened


def test_errors_are_shares_of_the_gain_and_misses_of_the_promise() -> None:
    # From 5 to 4 where 4.5 was forecast: half of the gain, and all of what was promised.
    half = Foreseen(5.0, 4.5, 4.0)
    assert error_of_gain([half]) == pytest.approx(0.5) and share_missed([half]) == pytest.approx(1.0)
    # Twice what came: all of the gain, and half of what was promised.
    twice = Foreseen(5.0, 3.0, 4.0)
    assert error_of_gain([twice]) == pytest.approx(1.0) and share_missed([twice]) == pytest.approx(0.5)
    assert error_of_gain([half, twice]) == pytest.approx(math.sqrt((0.25 + 1) / 2))
    assert share_missed([half, twice]) == pytest.approx(math.sqrt((0.25 + 1) / (0.25 + 4)))


def test_a_roll_out_that_was_right_by_luck_does_not_make_a_law_exact() -> None:
    lucky = Foreseen(5.0, 4.0, 4.0)
    assert error_of_gain([lucky]) == 0.0 and share_missed([lucky]) == 0.15
    assert error_of_gain([]) is None and share_missed([]) == 0.15


def test_a_law_that_promised_nothing_where_something_came_has_no_ends() -> None:
    assert share_missed([Foreseen(5.0, 5.0, 4.0)]) == math.inf
    assert error_of_gain([Foreseen(5.0, 4.0, 5.0)]) is None


def test_what_may_be_missed_grows_with_the_reach_beyond_ten_times_the_largest_budget() -> None:
    half = Foreseen(5.0, 4.5, 4.0)
    assert [allowance([half], reach)[0] for reach in (0.5, 8, 10, 100, 1000)] == pytest.approx([1, 1, 1, 2, 3])
    assert allowance([], 8)[1] == "the interval holds twice 15% of the one promised now"
    assert allowance([], 100)[1].endswith(", times 2.0 since it lies 100 times beyond the largest budget")


def test_an_interval_is_widened_on_both_sides_by_its_own() -> None:
    assert widened(10.0, 7.0, 22.0, 4.0) == pytest.approx((5.0, 10 + math.hypot(12, 4)))
