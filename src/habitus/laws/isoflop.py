"""The best size on one iso-FLOP line: a parabola in log N, with a spline and a cubic to check it by.

sign · y = c0 + c1·u + c2·u²,   u = log x,      x* = exp(−c1 / 2c2)
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import interpolate, optimize, stats

from habitus.laws.checks import (
    Numbers,
    all_equal,
    as_columns,
    check_positive,
    check_positive_number,
    check_rows_differ,
    num_distinct,
    sign_of,
)
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of
from habitus.laws.pure_error import PureError
from habitus.store import LEVELS, Direction, Law

FORM = "sign*y = c0 + c1*log(x) + c2*log(x)^2;  x* = exp(-c1/(2*c2))"
FLAT_TOLERANCE = 0.001  # of the best value: sizes that nobody can tell apart


def isoflop_optimum(size: Numbers, metric: Numbers, direction: Direction = "min") -> Law:
    """x_opt, y_opt and flat_range (all sizes within 0.1% of the best) of one budget's curve."""
    return _parabola("isoflop_optimum", size, metric, direction)


def depth_optimum(
    share: Numbers, metric: Numbers, direction: Direction = "min", at: float = 0.02, error: PureError | None = None
) -> Law:
    """The same in log share for the depth axis, with `gap`: what choosing the share `at` instead costs.

    The `error` from seed to seed, known from other cells, is pooled with the scatter about the curve.
    """
    check_positive_number(at=at)
    law = _parabola("depth_optimum", share, metric, direction, error)
    if "x_opt" not in law.values:
        return law
    c2 = law.details["coefficients"][2]
    gap = c2 * float(np.log(at / law["x_opt"])) ** 2
    return law.model_copy(update={"details": {**law.details, "gap_at": at, "gap": gap}})


def _parabola(name: str, x: Numbers, y: Numbers, direction: Direction, error: PureError | None = None) -> Law:
    x, y = as_columns(size=x, metric=y)
    check_positive(size=x)
    check_rows_differ(size=x, metric=y)
    sign = sign_of(direction)
    distinct = num_distinct(x)
    if distinct < 4:
        why = f"{distinct} distinct sizes; a parabola and one point to judge it by need 4"
        return law_without_values(name, FORM, "too_few", len(x), why, direction=direction)
    if all_equal(y):
        return law_without_values(name, FORM, "flat", len(x), "all values are equal", direction=direction)
    curve = _Curve.fit(np.log(x), sign * y, error)
    details: dict[str, Any] = {
        "direction": direction,
        "coefficients": list(curve.in_log_x()),
        "best_on_grid": float(x[np.argmin(sign * y)]),
        "curvature_p_value": curve.curvature_p_value(),
        "cubic_p_value": curve.cubic_p_value(),
        "spline_x_opt": spline_optimum(np.log(x), sign * y),
    }
    points = {"x": tuple(x), "y": tuple(y)}
    residuals = residuals_of(y, sign * curve.at(curve.u), 3)
    if details["curvature_p_value"] > 0.05:
        why = (
            f"the curvature is not above its error (p = {details['curvature_p_value']:.2f}): "
            "the curve is flat or one-sided here, so there is no optimum to read"
        )
        law = law_without_values(name, FORM, "flat", len(x), why, **details)
        return law.model_copy(update={"points": points, "residuals": residuals})
    values, intervals = curve.readout(sign)
    status, warnings = _verdict(x, values, intervals[0.95]["x_opt"], details)
    return Law(
        law=name,
        form=FORM,
        status=status,
        values=values,
        intervals=make_intervals(intervals),
        residuals=residuals,
        warnings=tuple(warnings),
        points=points,
        details=details,
    )


def spline_optimum(u: np.ndarray, v: np.ndarray) -> float | None:
    """exp(u) at the minimum of a smoothing spline inside the swept range; None with fewer than five sizes."""
    knots, inverse = np.unique(u, return_inverse=True)
    if len(knots) < 5:
        return None
    counts = np.bincount(inverse)
    means = np.bincount(inverse, weights=v) / counts
    # Centred and scaled, because the automatic choice of smoothness looks at absolute sizes.
    level, scale = means.mean(), max(float(np.ptp(means)), 1e-300)
    span = float(np.ptp(knots))
    spline = interpolate.make_smoothing_spline(
        (knots - knots[0]) / span, (means - level) / scale, w=counts.astype(float)
    )
    fine = np.linspace(0, 1, 400)
    start = fine[np.argmin(spline(fine))]
    step = fine[1]
    minimum = optimize.minimize_scalar(
        spline, bounds=(max(0.0, start - step), min(1.0, start + step)), method="bounded"
    )
    return float(np.exp(knots[0] + span * minimum.x))


@dataclass(frozen=True)
class _Curve:
    """A least-squares parabola in centred log x."""

    u: np.ndarray
    v: np.ndarray
    middle: float
    c: np.ndarray  # c0, c1, c2
    inverse: np.ndarray  # inverse Gram matrix
    s2: float
    dof: int  # of s2, which may be known from elsewhere too
    rss: float
    own_dof: int

    @classmethod
    def fit(cls, u: np.ndarray, v: np.ndarray, error: PureError | None = None) -> "_Curve":
        middle = float(u.mean())
        X = np.vander(u - middle, 3, increasing=True)
        inverse = np.linalg.inv(X.T @ X)
        c, *_ = np.linalg.lstsq(X, v, rcond=None)
        dof = len(u) - 3
        missed = v - X @ c
        # Rounding of the input is a floor for the noise, so that an exact parabola still has an error.
        rss = max(float(missed @ missed), dof * (1e-15 * float(np.abs(v).max())) ** 2)
        known, known_dof = (0.0, 0) if error is None else (error.variance(v), error.dof)
        s2 = (rss + known * known_dof) / (dof + known_dof)
        return cls(u, v, middle, c, inverse, s2, dof + known_dof, rss, dof)

    def at(self, u: np.ndarray) -> np.ndarray:
        return np.vander(u - self.middle, 3, increasing=True) @ self.c

    def in_log_x(self) -> np.ndarray:
        """c0, c1, c2 for u = log x as it is."""
        c0, c1, c2 = (float(v) for v in self.c)
        return np.array([c0 - c1 * self.middle + c2 * self.middle**2, c1 - 2 * c2 * self.middle, c2])

    def curvature_p_value(self) -> float:
        """The chance of a curvature this large when there is none (one-sided)."""
        return float(stats.t.sf(self.c[2] / np.sqrt(self.s2 * self.inverse[2, 2]), self.dof))

    def cubic_p_value(self) -> float | None:
        """The chance of a cubic term this large when the curve is a parabola; None without points to spare."""
        if len(np.unique(self.u)) < 5:
            return None
        X = np.vander(self.u - self.middle, 4, increasing=True)
        c, *_ = np.linalg.lstsq(X, self.v, rcond=None)
        rss, dof = float(((self.v - X @ c) ** 2).sum()), self.own_dof - 1
        gain = self.rss - rss
        return float(stats.f.sf(max(gain, 0.0) / max(rss / dof, 1e-300), 1, dof))

    def vertex_range(self, level: float) -> tuple[float, float]:
        """Where the slope c1 + 2·c2·v may be zero (Fieller): exact for a parabola with normal noise."""
        q = float(stats.t.ppf(0.5 + level / 2, self.dof)) ** 2 * self.s2
        (v11, v12), (_, v22) = self.inverse[1:, 1:] * q
        _, c1, c2 = self.c
        a, b, c = 4 * (c2**2 - v22), 4 * (c1 * c2 - v12), c1**2 - v11
        if a <= 0:
            return -np.inf, np.inf
        root = np.sqrt(max(b * b - 4 * a * c, 0.0))  # below zero only by rounding
        return float((-b - root) / (2 * a)), float((-b + root) / (2 * a))

    def readout(self, sign: float) -> tuple[dict[str, Any], dict[float, dict[str, tuple[float, float]]]]:
        """Values and intervals of the optimum."""
        c0, c1, c2 = (float(v) for v in self.c)
        vertex = -c1 / (2 * c2)
        y_opt = c0 - c1 * c1 / (4 * c2)
        half = float(np.sqrt(FLAT_TOLERANCE * abs(y_opt) / c2))
        x_opt = float(np.exp(vertex + self.middle))
        values: dict[str, Any] = {
            "x_opt": x_opt,
            "y_opt": sign * y_opt,
            "flat_range": (x_opt * float(np.exp(-half)), x_opt * float(np.exp(half))),
        }
        slope = np.array([1.0, vertex, vertex**2])  # d y_opt / d c
        se = float(np.sqrt(self.s2 * slope @ self.inverse @ slope))
        intervals = {}
        with np.errstate(over="ignore"):
            for level in LEVELS:
                low, high = self.vertex_range(level)
                t = float(stats.t.ppf(0.5 + level / 2, self.dof))
                intervals[level] = {
                    "x_opt": (float(np.exp(low + self.middle)), float(np.exp(high + self.middle))),
                    "y_opt": (sign * y_opt - t * se, sign * y_opt + t * se),
                    "flat_range": (
                        float(np.exp(low + self.middle - half)),
                        float(np.exp(high + self.middle + half)),
                    ),
                }
        return values, intervals


def _verdict(
    x: np.ndarray, values: dict[str, Any], interval: tuple[float, float], details: dict[str, Any]
) -> tuple[Any, list[str]]:
    low, high, x_opt = float(x.min()), float(x.max()), values["x_opt"]
    warnings = []
    cubic = details["cubic_p_value"]
    if cubic is not None and cubic < 0.05:
        warnings.append(
            f"the curve is lopsided (a cubic term is needed, p = {cubic:.3f}): the parabola's optimum is biased "
            "towards the wider side; compare the spline and the shared-shape optimum"
        )
    spline = details["spline_x_opt"]
    if spline is not None and not 1 / 1.5 <= spline / x_opt <= 1.5:
        warnings.append(f"parabola {x_opt:.3g} and spline {spline:.3g} disagree by more than 1.5 times")
    if not low < x_opt < high:
        warnings.append(
            f"the parabola's optimum, {x_opt:.3g}, lies outside the swept range [{low:.3g}, {high:.3g}]: "
            "extend the grid that way"
        )
        return "boundary", warnings
    if interval[0] < low or interval[1] > high:
        warnings.append(
            f"the 95% interval of the optimum leaves the swept range [{low:.3g}, {high:.3g}]: "
            "add seeds or widen the grid"
        )
        return "not_identified", warnings
    return "ok", warnings
