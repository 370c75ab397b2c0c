"""What estimators build Laws from: their intervals, and a Law that says why it has no values."""

from collections.abc import Mapping
from typing import Any

from habitus.store import Interval, Law, LawStatus, Residuals, level_key


def make_intervals(
    by_level: Mapping[float, Mapping[str, tuple[float, float]]],
) -> dict[str, dict[str, Interval]]:
    """Intervals as a Law stores them, from {level: {name: (low, high)}}."""
    return {
        level_key(level): {name: Interval(low=low, high=high) for name, (low, high) in named.items()}
        for level, named in by_level.items()
    }


def holding(
    by_level: Mapping[float, Mapping[str, tuple[float, float]]], values: Mapping[str, float]
) -> dict[float, dict[str, tuple[float, float]]]:
    """The intervals, each wide enough to hold its value: estimate and interval can rest on different weights."""
    return {
        level: {name: (min(low, values[name]), max(high, values[name])) for name, (low, high) in named.items()}
        for level, named in by_level.items()
    }


def refused(law: str, form: str, status: LawStatus, n: int, why: str, **details: Any) -> Law:
    """A law without values that says why there are none."""
    return Law(
        law=law,
        form=form,
        status=status,
        residuals=Residuals(n=n, dof=0),
        warnings=(why,),
        details=details,
    )
