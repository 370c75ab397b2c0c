"""What estimators build a Law from: residuals, intervals; and the Law that says why it has no values."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from habitus.store import Interval, Law, LawStatus, Residuals, level_key


def make_intervals(
    by_level: Mapping[float, Mapping[str, tuple[float, float]]],
) -> dict[str, dict[str, Interval]]:
    """Intervals as a Law stores them, from {level: {name: (low, high)}}."""
    return {
        level_key(level): {name: Interval(low=low, high=high) for name, (low, high) in named.items()}
        for level, named in by_level.items()
    }


def widen_to_values(
    by_level: Mapping[float, Mapping[str, tuple[float, float]]], values: Mapping[str, float]
) -> dict[float, dict[str, tuple[float, float]]]:
    """The intervals, each wide enough to hold its value: estimate and interval can rest on different weights."""
    return {
        level: {name: (min(low, values[name]), max(high, values[name])) for name, (low, high) in named.items()}
        for level, named in by_level.items()
    }


def law_without_values(law: str, form: str, status: LawStatus, n: int, why: str, **details: Any) -> Law:
    """A law without values that says why there are none."""
    return Law(
        law=law,
        form=form,
        status=status,
        residuals=Residuals(n=n, dof=0),
        warnings=(why,),
        details=details,
    )


def residuals_of(observed: np.ndarray, fitted: np.ndarray, num_values: int) -> Residuals:
    """Residual statistics of a fit with `num_values` fitted numbers."""
    missed = observed - fitted
    spread = float(((observed - observed.mean()) ** 2).sum())
    return Residuals(
        n=len(observed),
        dof=len(observed) - num_values,
        rmse=float(np.sqrt((missed**2).mean())),
        r2=1 - float((missed**2).sum()) / spread if spread > 0 else None,
        largest=float(np.abs(missed).max()),
    )
