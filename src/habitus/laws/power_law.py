"""Power laws x*(C) = a·C^b, for N*, D*, s* and K*: straight lines in logarithms.

The error of the slope comes from the scatter about the line with n − 2 degrees of freedom, and intervals use
Student's t: with five budgets ±1 standard error covers 61%, and ±2 covers 86%, not 95%.
"""

from typing import Any, Literal

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws.checks import (
    Numbers,
    all_equal,
    as_columns,
    check_positive,
    check_positive_number,
    check_rows_differ,
    num_distinct,
)
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Law

FORM = "y = coefficient * x^exponent"
NO_TREND = "no trend above its error"


def power_law(x: Numbers, y: Numbers, weights: Numbers | None = None, common: np.ndarray | None = None) -> Law:
    """coefficient, exponent and exponent_se of y = coefficient·x^exponent, by least squares in logarithms.

    `weights` are proportional to 1/variance of log y. `common` is a covariance of log y (n × n) that the
    scatter about the line cannot show, because it moves all points together; it widens the intervals.
    """
    x, y = as_columns(x=x, y=y)
    check_positive(x=x, y=y)
    check_rows_differ(x=x, y=y)
    n = len(x)
    if num_distinct(x) < 3:
        why = f"{num_distinct(x)} distinct x; a line and its error need 3"
        return law_without_values("power_law", FORM, "too_few", n, why)
    w = np.ones(n) if weights is None else as_columns(weights=weights)[0]
    if len(w) != n:
        raise FitError(f"{len(w)} weights for {n} points", expected="one weight per point")
    check_positive(weights=w)
    line = _Line(np.log(x), np.log(y), w, np.zeros((n, n)) if common is None else np.asarray(common))
    return line.law(x, y)


def predict_power_law(law: Law, x: float, level: float = 0.95) -> tuple[float, float, float]:
    """(value, low, high) of the line at x. The interval is that of the line, not of one more sweep."""
    if law.law != "power_law" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted power law")
    check_positive_number(x=x)
    u, v, w = (np.asarray(law.points[name]) for name in ("log_x", "log_y", "weights"))
    line = _Line(u, v, w, _common_of(law))
    center, low, high = line.at(float(np.log(x)), level)
    with np.errstate(over="ignore"):
        return float(np.exp(center)), float(np.exp(low)), float(np.exp(high))


def trend(law: Law) -> Literal["rises", "falls", "none", "unknown"]:
    """Which way the law goes, by the 95% interval of its exponent: 'none' where the interval holds zero."""
    interval = law.intervals.get("0.95", {}).get("exponent")
    if interval is None or "exponent" not in law.values:
        return "unknown"
    low, high = interval.ends()
    return "rises" if low > 0 else "falls" if high < 0 else "none"


class _Line:
    """A weighted straight line v = p + b·(u − ū) and the variance of anything linear in it."""

    def __init__(self, u: np.ndarray, v: np.ndarray, w: np.ndarray, common: np.ndarray) -> None:
        self.u, self.v, self.w, self.common = u, v, w / w.mean(), common
        self.n = len(u)
        self.middle = float((self.w @ u) / self.w.sum())
        sum_of_squares = float(self.w @ (u - self.middle) ** 2)
        self.to_level = self.w / self.w.sum()  # v -> p
        self.to_slope = self.w * (u - self.middle) / sum_of_squares  # v -> b
        self.level, self.slope = float(self.to_level @ v), float(self.to_slope @ v)
        missed = v - self.fitted(u)
        self.scatter2 = float(self.w @ missed**2) / (self.n - 2)

    def fitted(self, u: np.ndarray) -> np.ndarray:
        return self.level + self.slope * (u - self.middle)

    def error(self, combination: np.ndarray) -> tuple[float, float]:
        """Standard error and degrees of freedom of combination·v (Welch-Satterthwaite)."""
        from_scatter = self.scatter2 * float((combination**2 / self.w).sum())
        from_common = float(combination @ self.common @ combination)
        total = from_scatter + from_common
        if from_scatter <= 0 or total <= 0:
            return float(np.sqrt(max(total, 0.0))), float(self.n - 2)
        return float(np.sqrt(total)), (self.n - 2) * (total / from_scatter) ** 2

    def at(self, u: float, level: float) -> tuple[float, float, float]:
        combination = self.to_level + self.to_slope * (u - self.middle)
        se, dof = self.error(combination)
        half = float(stats.t.ppf(0.5 + level / 2, dof)) * se
        center = float(combination @ self.v)
        return center, center - half, center + half

    def law(self, x: np.ndarray, y: np.ndarray) -> Law:
        se, dof = self.error(self.to_slope)
        log_a, *_ = self.at(0.0, 0.95)
        # The coefficient is the line at x = 1, often far outside the data: kept below what a float can hold.
        values = {"coefficient": float(np.exp(np.clip(log_a, -700, 700))), "exponent": self.slope, "exponent_se": se}
        warnings = []
        if all_equal(self.v):
            warnings.append("all y are equal: the exponent is zero to rounding and has no scatter to judge it by")
        if self.n < 5:
            warnings.append(
                f"only {self.n} points: the interval rests on {self.n - 2} degree{'s' * (self.n > 3)} of freedom"
            )
        return Law(
            law="power_law",
            form=FORM,
            status="flat" if all_equal(self.v) else "ok",
            values=values,
            intervals=make_intervals(
                widen_to_values({level: self._ranges(level, se, dof) for level in LEVELS}, values)
            ),
            residuals=residuals_of(self.v, self.fitted(self.u), 2),
            warnings=tuple(warnings),
            points={
                "x": tuple(x),
                "y": tuple(y),
                "log_x": tuple(self.u),
                "log_y": tuple(self.v),
                "weights": tuple(self.w),
            },
            details=self._details(),
        )

    def _ranges(self, level: float, se: float, dof: float) -> dict[str, tuple[float, float]]:
        half = float(stats.t.ppf(0.5 + level / 2, dof)) * se
        _, low, high = self.at(0.0, level)
        # The standard error is itself an estimate: s² follows a scaled chi-square.
        ends = stats.chi2.ppf([0.5 + level / 2, 0.5 - level / 2], dof)
        with np.errstate(over="ignore"):
            return {
                "coefficient": (float(np.exp(low)), float(np.exp(high))),
                "exponent": (self.slope - half, self.slope + half),
                "exponent_se": (se * float(np.sqrt(dof / ends[0])), se * float(np.sqrt(dof / ends[1]))),
            }

    def _details(self) -> dict[str, Any]:
        return {"common": self.common.tolist()} if self.common.any() else {}


def _common_of(law: Law) -> np.ndarray:
    n = len(law.points["log_x"])
    return np.asarray(law.details.get("common", np.zeros((n, n))))
