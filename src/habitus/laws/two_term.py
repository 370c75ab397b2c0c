"""Valleys of two opposing power laws: embedder share, number of negatives, and any iso-FLOP curve.

    sign · y(x) = a·x^α + b·x^−β + E,      x* = (bβ / (aα))^{1/(α+β)},      a, b ≥ 0

The first term punishes a large x, the second a small one. `sign` is −1 for metrics where larger is better.
"""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from scipy import stats

from habitus.errors import FitError
from habitus.laws.checks import Numbers, all_equal, as_columns, check_rows_differ, num_distinct, sign_of
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.laws.pure_error import PureError
from habitus.laws.separable import Curve, Curves, Region, SeparableFit, fit_separable, project, region
from habitus.store import LEVELS, Direction, Law

FORM = "sign*y = a*x^alpha + b*x^-beta + E;  x* = (b*beta/(a*alpha))^(1/(alpha+beta))"
EXPONENTS = (0.05, 2.0)
_VALUES = 5
Bounds = Sequence[tuple[float, float]]


def two_term(
    x: Numbers,
    y: Numbers,
    direction: Direction = "min",
    bounds: tuple[float, float] = EXPONENTS,
    interior: tuple[float, float] | None = None,
    error: PureError | None = None,
) -> Law:
    """The valley's optimum x_opt with alpha, beta, a, b and floor, or the reason why there is none.

    `bounds` limits both exponents. `interior` is the range in which an optimum counts (default: the swept
    one). A point at x = 0 (no extra negatives) has no logarithm: it is kept apart and compared. The `error` from seed
    to seed, known from other cells, is pooled with the scatter about the curve, which few points hardly show.
    """
    x, y = as_columns(x=x, y=y)
    _check_exponents(bounds)
    return _fit(x, y, direction, (bounds, bounds), interior, error=error)


def two_term_by_budget(
    budget: Numbers,
    x: Numbers,
    y: Numbers,
    direction: Direction = "min",
    bounds: tuple[float, float] = EXPONENTS,
    interior: tuple[float, float] | None = None,
    share: Literal["none", "alpha"] = "none",
    error: PureError | None = None,
) -> dict[float, Law]:
    """One valley per budget; with share = "alpha" the rising exponent is one number for all budgets.

    A shared α is chosen by the total residual over budgets; each valley is then fitted at that α, with an
    interval that lets α move through its own joint 95% interval.
    """
    budget, x, y = as_columns(budget=budget, x=x, y=y)
    _check_exponents(bounds)
    split = {float(c): (x[budget == c], y[budget == c]) for c in np.unique(budget)}
    if share == "none":
        return {c: _fit(xs, ys, direction, (bounds, bounds), interior, error=error) for c, (xs, ys) in split.items()}
    if share != "alpha":
        raise FitError(f"share = {share!r} is unknown", expected='"none" or "alpha"')
    alpha, low, high = _shared_alpha(split, sign_of(direction), bounds)
    return {c: _fit(xs, ys, direction, ((low, high), bounds), interior, alpha, error) for c, (xs, ys) in split.items()}


def _check_exponents(bounds: tuple[float, float]) -> None:
    if not 0 < bounds[0] < bounds[1] <= 10:
        raise FitError(
            f"bounds = {bounds}",
            expected="limits of the exponents, such as (0.05, 2); the range of x goes into `interior`",
        )


def valley_terms(log_theta: np.ndarray, log_x: np.ndarray) -> np.ndarray:
    """x^α and x^−β, for many (log α, log β) at once."""
    alpha, beta = np.exp(log_theta).T
    (u,) = log_x
    return np.exp(np.stack([alpha * u, -beta * u]))


def log_optimum(theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """log x* at each θ = (α, β) and (E, a, b); −∞ or +∞ where a term vanishes."""
    alpha, beta = theta.T
    with np.errstate(divide="ignore", invalid="ignore"):
        return (np.log(linear[:, 2] * beta) - np.log(linear[:, 1] * alpha)) / (alpha + beta)


def optimum_height(theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """sign·y at x*."""
    alpha, beta = theta.T
    u = log_optimum(theta, linear)
    with np.errstate(over="ignore", invalid="ignore"):
        return linear[:, 0] + linear[:, 1] * np.exp(alpha * u) + linear[:, 2] * np.exp(-beta * u)


def _fit(
    x: np.ndarray,
    y: np.ndarray,
    direction: Direction,
    bounds: Bounds,
    interior: tuple[float, float] | None,
    fixed_alpha: float | None = None,
    error: PureError | None = None,
) -> Law:
    sign = sign_of(direction)
    if (x < 0).any():
        raise FitError(f"x must not be negative, but holds {x.min():g}", expected="shares or counts ≥ 0")
    check_rows_differ(x=x, y=y)
    swept = x > 0
    at_zero = {"y_at_zero": float(np.mean(y[~swept]))} if (~swept).any() else {}
    x, y = x[swept], y[swept]
    if num_distinct(x) < _VALUES + 1:
        why = f"{num_distinct(x)} distinct positive x; five values and one point to judge them by need 6"
        return law_without_values("two_term", FORM, "too_few", len(x), why, direction=direction, **at_zero)
    if all_equal(y):
        return law_without_values(
            "two_term", FORM, "flat", len(x), "all values are equal", direction=direction, **at_zero
        )
    middle = float(np.log(x).mean())
    curve = Curve(valley_terms, np.log(x) - middle, sign * y, np.ones(len(y)))
    at = ((fixed_alpha, fixed_alpha * (1 + 1e-9)), bounds[1]) if fixed_alpha else bounds
    known = None if error is None else (error.variance(y), error.dof)
    best = fit_separable([curve], at, known)
    wide = fit_separable([curve], bounds, known) if fixed_alpha else best
    valley = _Valley(x, y, sign, middle, best, wide, interior or (float(x.min()), float(x.max())))
    return valley.law(direction, at_zero)


class _Valley:
    """A fitted valley on its way to becoming a Law."""

    def __init__(
        self,
        x: np.ndarray,
        y: np.ndarray,
        sign: float,
        middle: float,
        best: SeparableFit,
        wide: SeparableFit,
        interior: tuple[float, float],
    ) -> None:
        self.x, self.y, self.sign, self.middle, self.interior = x, y, sign, middle, interior
        self.best, self.wide = best, wide
        self.theta, self.linear = best.theta[None], best.linear[0][None]

    def law(self, direction: Direction, at_zero: dict[str, Any]) -> Law:
        details: dict[str, Any] = {"direction": direction, "interior": list(self.interior), **at_zero}
        details["best_on_grid"] = float(self.x[np.argmin(self.sign * self.y)])
        a, b = self.best.linear[0][1:]
        fitted = self._curve(self.x)
        residuals = residuals_of(self.y, fitted, _VALUES)
        points = {"x": tuple(self.x), "y": tuple(self.y)}
        flat_p = self._flat_p_value()
        details["flat_p_value"] = flat_p
        slope = self._slope() if flat_p > 0.05 else None
        if flat_p > 0.05 and slope is None:
            why = f"the curve is no better than a constant (p = {flat_p:.2f}): no optimum above the noise"
            law = law_without_values("two_term", FORM, "flat", len(self.x), why, **details)
            return law.model_copy(update={"points": points, "residuals": residuals})
        values = self._exponents()
        if slope or a <= 0 or b <= 0 or not self._within_reach():
            small = slope > 0 if slope else b <= a  # the term that is (nearly) absent decides
            side = "smallest" if small else "largest"
            why = f"the metric only improves towards the {side} x: there is no optimum inside or outside"
            if slope:
                why = f"the metric improves towards the {side} x, and no turn stands above the noise"
            details["better_edge"] = float(self.x.min() if small else self.x.max())
            return Law(
                law="two_term", form=FORM, status="monotone", values=values, residuals=residuals,
                warnings=(why,), points=points, details=details,
            )  # fmt: skip
        values = {**self._optimum(), **values}
        intervals = widen_to_values({level: self._ranges(region(self.wide, level)) for level in LEVELS}, values)
        status, warnings = self._verdict(values["x_opt"], intervals[0.95]["x_opt"])
        if "y_at_zero" in at_zero and self.sign * at_zero["y_at_zero"] < self.sign * values["y_opt"]:
            warnings.append(
                f"x = 0 reaches {at_zero['y_at_zero']:.4g}, better than the optimum's {values['y_opt']:.4g}"
            )
        return Law(
            law="two_term", form=FORM, status=status, values=values, intervals=make_intervals(intervals),
            residuals=residuals, warnings=tuple(warnings), points=points, details=details,
        )  # fmt: skip

    def _curve(self, x: np.ndarray) -> np.ndarray:
        alpha, beta = self.best.theta
        floor, a, b = self.best.linear[0]
        u = np.log(x) - self.middle
        return self.sign * (floor + a * np.exp(alpha * u) + b * np.exp(-beta * u))

    def _within_reach(self) -> bool:
        """Whether x* is a number at all: twenty e-folds beyond the sweep a term is absent, not small."""
        place = float(log_optimum(self.theta, self.linear)[0]) + self.middle
        return bool(np.log(self.x.min()) - 20 < place < np.log(self.x.max()) + 20)

    def _optimum(self) -> dict[str, float]:
        return {
            "x_opt": float(np.exp(log_optimum(self.theta, self.linear)[0] + self.middle)),
            "y_opt": self.sign * float(optimum_height(self.theta, self.linear)[0]),
        }

    def _exponents(self) -> dict[str, float]:
        alpha, beta = (float(v) for v in self.best.theta)
        floor, a, b = (float(v) for v in self.best.linear[0])
        return {
            "alpha": alpha,
            "beta": beta,
            "a": a * float(np.exp(-alpha * self.middle)),
            "b": b * float(np.exp(beta * self.middle)),
            "floor": self.sign * floor,
        }

    def _ranges(self, allowed: Region) -> dict[str, tuple[float, float]]:
        """The profile interval of every value."""
        middle, sign = self.middle, self.sign
        low, high = allowed.range_of(log_optimum)
        with np.errstate(over="ignore"):
            ranges = {"x_opt": (float(np.exp(low + middle)), float(np.exp(high + middle)))}
        for name, quantity in {"y_opt": optimum_height, "floor": lambda _, c: c[:, 0]}.items():
            ends = [sign * end for end in allowed.range_of(quantity)]
            ranges[name] = (min(ends), max(ends))
        ranges["alpha"] = allowed.range_of(lambda theta, _: theta[:, 0])
        ranges["beta"] = allowed.range_of(lambda theta, _: theta[:, 1])
        ranges["a"] = allowed.range_of(lambda theta, c: c[:, 1] * np.exp(-theta[:, 0] * middle))
        ranges["b"] = allowed.range_of(lambda theta, c: c[:, 2] * np.exp(theta[:, 1] * middle))
        return ranges

    def _flat_p_value(self) -> float:
        """The chance that noise alone makes the valley look this much better than a constant."""
        spent = _VALUES - 1
        around_mean = float(((self.y - self.y.mean()) ** 2).sum())
        gain = (around_mean - self.best.rss) / spent
        return float(stats.f.sf(gain / max(self.best.sigma2, 1e-300), spent, max(self.best.dof, 1)))

    def _slope(self) -> float | None:
        """Of sign·y on log x, where it stands above the noise: with few points a line shows what five values cannot."""
        line = stats.linregress(np.log(self.x), self.sign * self.y)
        return float(line.slope) if line.pvalue < 0.01 else None

    def _verdict(self, x_opt: float, interval: tuple[float, float]) -> tuple[Any, list[str]]:
        """Status and warnings, the one that decides first."""
        warnings = [
            f"{name} = {value:.3g} sits at its bound"
            for name, value, stuck in zip(("alpha", "beta"), self.best.theta, self.best.at_bound, strict=True)
            if stuck and not (name == "alpha" and self.best is not self.wide)
        ]
        low, high = self.interior
        swept_low, swept_high = float(self.x.min()), float(self.x.max())
        if not low <= x_opt <= high:
            edge = low if x_opt < low else high
            warnings.insert(
                0,
                f"the optimum, {x_opt:.3g}, is extrapolated beyond the swept range [{low:.3g}, {high:.3g}]: "
                f"read it as 'at or beyond {edge:.3g}' and sweep further that way",
            )
            return "boundary", warnings
        if interval[0] < swept_low or interval[1] > swept_high:
            warnings.insert(
                0,
                f"the 95% interval of the optimum leaves the swept range [{swept_low:.3g}, {swept_high:.3g}]: "
                "the curve is too flat for its noise; repeat cells with more seeds or sweep wider",
            )
            return "not_identified", warnings
        return "ok", warnings


def _shared_alpha(
    split: dict[float, tuple[np.ndarray, np.ndarray]], sign: float, bounds: tuple[float, float]
) -> tuple[float, float, float]:
    """The α that suits all budgets best, and its joint 95% interval."""
    curves = []
    for xs, ys in split.values():
        keep = xs > 0
        if num_distinct(xs[keep]) >= _VALUES:
            u = np.log(xs[keep])
            curves.append(Curve(valley_terms, u - u.mean(), sign * ys[keep], np.ones(keep.sum())))
    if not curves:
        raise FitError("no budget has five distinct positive x", expected="five or more swept values in one budget")
    stack = Curves.stack(curves)
    dof = max(stack.num_observations - 1 - 4 * len(curves), 1)
    low, high = bounds
    for _ in range(4):  # each pass looks closer, until the interval is many steps wide
        alphas = np.geomspace(low, high, 60)
        total = _best_rss(stack, alphas, bounds)
        inside = np.flatnonzero(total <= total.min() * (1 + stats.f.ppf(0.95, 1, dof) / dof))
        first, last = max(inside[0] - 1, 0), min(inside[-1] + 1, 59)
        if last - first > 12:
            break
        low, high = alphas[first], alphas[last]
    return float(alphas[total.argmin()]), float(alphas[first]), float(alphas[last])


def _best_rss(curves: Curves, alphas: np.ndarray, bounds: tuple[float, float]) -> np.ndarray:
    """The least RSS at each α, over all curves, each with the β that suits it best."""
    betas = np.log(np.geomspace(*bounds, 60))
    grid = np.stack(np.meshgrid(np.log(alphas), betas, indexing="ij"), axis=-1).reshape(-1, 2)
    return project(curves, grid).rss.reshape(-1, len(alphas), len(betas)).min(-1).sum(0)
