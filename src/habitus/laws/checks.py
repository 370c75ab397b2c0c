"""Arrays that a law may be fitted to, or one clear error."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.store import Direction
from habitus.units import pluralize

Numbers = Sequence[float] | np.ndarray
LARGEST = 1e150  # squares of larger numbers, and of smaller ones than 1/LARGEST, leave what a float can hold


def as_columns(**named: Numbers) -> tuple[np.ndarray, ...]:
    """The arrays as float64, equally long and finite; the error names the column and the first bad row."""
    arrays: dict[str, np.ndarray] = {}
    for name, values in named.items():
        try:
            array = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise FitError(f"{name} holds something that is not a number: {values!r}") from None
        if array.ndim != 1:
            raise FitError(f"{name} has shape {array.shape}", expected="one number per point, in one row")
        bad = np.flatnonzero(~np.isfinite(array))
        if bad.size:
            raise FitError(
                f"{name} holds {pluralize(int(bad.size), 'value')} not finite; "
                f"the first is {array[bad[0]]} in row {bad[0]}",
                expected="finite numbers",
                next_step="leave runs without a value out, and say so; a missing value is never a number",
            )
        size = np.abs(array)
        bad = np.flatnonzero((size > LARGEST) | ((size > 0) & (size < 1 / LARGEST)))
        if bad.size:
            raise FitError(
                f"{name} holds {array[bad[0]]:g} in row {bad[0]}",
                expected=f"numbers between {1 / LARGEST:g} and {LARGEST:g} in size, or zero",
                next_step="measure it in another unit",
            )
        arrays[name] = array
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise FitError(f"columns differ in length: {given}", expected="one entry per point in each")
    return tuple(arrays.values())


def check_positive(**named: np.ndarray) -> None:
    """Refuse sizes, budgets and counts that are zero or negative."""
    for name, array in named.items():
        bad = np.flatnonzero(array <= 0)
        if bad.size:
            raise FitError(
                f"{name} must be positive, but row {bad[0]} holds {array[bad[0]]:g} "
                f"({pluralize(int(bad.size), 'such row')})",
                expected="numbers above zero, since the law is fitted in their logarithm",
            )


def check_rows_differ(**named: np.ndarray) -> None:
    """Refuse rows that repeat to the last digit: the same run counted twice narrows every interval."""
    rows = np.stack(list(named.values()), axis=1)
    unique, counts = np.unique(rows, axis=0, return_counts=True)
    if (counts > 1).any():
        first = ", ".join(f"{n} = {v:g}" for n, v in zip(named, unique[counts > 1][0], strict=True))
        raise FitError(
            f"{pluralize(int((counts > 1).sum()), 'row')} given more than once; the first is {first}",
            expected="each run once (several seeds of one cell differ in the metric)",
            next_step="drop the repeated rows",
        )


def check_positive_number(**named: float) -> None:
    """Refuse a single number that is no number, not finite, zero or negative."""
    for name, value in named.items():
        try:
            known = 0 < float(value) < np.inf
        except (TypeError, ValueError):
            known = False
        if not known:
            raise FitError(f"{name} = {value!r}", expected="a positive, finite number")


def num_distinct(values: np.ndarray) -> int:
    """How many values differ by more than rounding."""
    ordered = np.sort(values)
    apart = np.diff(ordered) > 1e-9 * np.abs(ordered[1:])
    return int(apart.sum()) + 1 if len(ordered) else 0


def as_pairs(rows: Iterable[Any], what: str) -> tuple[np.ndarray, np.ndarray]:
    """The two columns of pairs, or one clear error."""
    try:
        pairs = np.asarray(list(rows), dtype=np.float64)
    except (TypeError, ValueError):
        raise FitError(f"{what} hold something that is not a pair of numbers", expected="pairs of numbers") from None
    if pairs.ndim != 2 or pairs.shape[1] != 2:
        raise FitError(f"{what} of shape {pairs.shape}", expected="pairs of numbers")
    return pairs[:, 0], pairs[:, 1]


def sign_of(direction: Direction) -> float:
    """+1 where smaller is better, -1 where larger is."""
    if direction not in ("min", "max"):
        raise FitError(f"direction {direction!r} is unknown", expected='"min" or "max"')
    return 1.0 if direction == "min" else -1.0


def all_equal(values: np.ndarray) -> bool:
    """Whether the values differ by no more than rounding."""
    return bool(np.ptp(values) <= 1e-12 * max(1e-300, float(np.abs(values).max())))
