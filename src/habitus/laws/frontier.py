"""The compute-optimal frontier: one valley per budget, all of one shape, and the laws N*(C) and L*(C).

A parabola in log N is biased when the valley is lopsided, and a lopsided valley is what L(N, D) with α ≠ β
gives on every iso-FLOP line: E_C + a_C·N^β + b_C·N^−α. That is a two-term valley whose exponents do not
depend on the budget. So the budgets share (α, β), keep their own floor, depth and place, and are fitted
together; the parabolas are given too, as the paper's reading.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy import stats

from habitus.laws.cell_scatter import LEAST_DOF, cell_means, cell_scatter
from habitus.laws.checks import Numbers, all_equal, as_columns, check_positive, check_rows_differ, num_distinct, sign_of
from habitus.laws.isoflop import FLAT_TOLERANCE, isoflop_optimum
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of
from habitus.laws.power_law import power_law
from habitus.laws.pure_error import PureError, judge_fit
from habitus.laws.saturating import saturating
from habitus.laws.separable import Curve, Region, SeparableFit, fit_separable, region
from habitus.laws.two_term import EXPONENTS, log_optimum, optimum_height, valley_terms
from habitus.store import LEVELS, Direction, Law

FORM = "sign*y = E_C + a_C*x^alpha + b_C*x^-beta, alpha and beta shared by all budgets"
_EXACT = 1e-6  # of the variance by all runs: curves through the means of cells
_CELLS = 4  # distinct sizes a budget must have to lend its weight to the shared shape


@dataclass(frozen=True)
class SharedShape:
    """The optima of all budgets in valleys of one shape, and the laws through them."""

    optima: dict[float, Law]  # budget -> x_opt, y_opt, flat_range
    size: Law  # power law of x_opt over interior budgets
    height: Law  # saturating law of y_opt over interior budgets


@dataclass(frozen=True)
class Frontier(SharedShape):
    """The same beside the paper's reading."""

    parabolas: dict[float, Law]  # by budget
    size_by_parabola: Law


def frontier(
    budget: Numbers,
    size: Numbers,
    metric: Numbers,
    direction: Direction = "min",
    error: PureError | None = None,
) -> Frontier:
    """Every budget's optimum with the shared shape and by parabola, and N*(C) and L*(C) through them.

    With the `error` from seed to seed, valleys that miss their points by more than that are refused, unless what they
    miss is small and goes with no place in the valley: then it is noise of cells (cell_scatter.py).
    """
    split = _by_budget(budget, size, metric)
    parabolas = {c: judge_fit(isoflop_optimum(xs, ys, direction), error) for c, (xs, ys) in split.items()}
    shared = _shared_shape(split, direction, error, LEVELS)
    by_parabola = _through_parabolas(parabolas, shared.optima)
    return Frontier(shared.optima, shared.size, shared.height, parabolas, by_parabola)


def shared_shape(
    budget: Numbers,
    size: Numbers,
    metric: Numbers,
    direction: Direction = "min",
    error: PureError | None = None,
) -> SharedShape:
    """The frontier without parabolas, and with intervals at 95% only: what a forecast takes of it, in half the time."""
    return _shared_shape(_by_budget(budget, size, metric), direction, error, LEVELS[-1:])


Split = dict[float, tuple[np.ndarray, np.ndarray]]  # budget -> sizes and metric


def _by_budget(budget: Numbers, size: Numbers, metric: Numbers) -> Split:
    C, x, y = as_columns(budget=budget, size=size, metric=metric)
    check_positive(budget=C, size=x)
    check_rows_differ(budget=C, size=x, metric=y)
    return {float(c): (x[c == C], y[c == C]) for c in np.unique(C)}


def _shared_shape(split: Split, direction: Direction, error: PureError | None, levels: Sequence[float]) -> SharedShape:
    valleys, shape = _shared_valleys(split, direction, levels)
    optima = {c: judge_fit(law, error) for c, law in valleys.items()}
    scatter = cell_scatter(optima, shared=True)
    if scatter is not None:
        split = {c: cell_means(*rows) for c, rows in split.items()}
        valleys, shape = _shared_valleys(split, direction, levels, scatter.error.dof)
        optima = {c: scatter.noted(law) for c, law in valleys.items()}
    interior = [c for c, law in optima.items() if law.status == "ok"]
    of_sizes = _common_of_sizes({c: split[c] for c in interior}, optima) if scatter else 0.0
    size = _through(interior, optima, shape, of_sizes)
    return SharedShape(optima, size, _height(interior, optima, shape, direction))


def _common_of_sizes(split: Split, optima: dict[float, Law]) -> np.ndarray:
    """Covariance of the log optima that comes from sizes with an effect of their own at every budget: a jackknife that
    leaves out one size at a time, at the fitted exponents."""
    moved = []
    for left_out in np.unique(np.concatenate([xs for xs, _ in split.values()])) if split else ():
        places = []
        for c, (xs, ys) in split.items():
            law, kept = optima[c], xs != left_out
            alpha, beta, best = law.details["alpha"], law.details["beta"], law["x_opt"]
            u = np.log(xs[kept] / best)
            terms = np.stack([np.ones_like(u), np.exp(alpha * u), np.exp(-beta * u)], axis=1)
            linear, *_ = np.linalg.lstsq(terms, sign_of(law.details["direction"]) * ys[kept], rcond=None)
            places.append(float(log_optimum(np.array([[alpha, beta]]), linear[None])[0]) if kept.sum() >= 3 else 0.0)
        moved.append(places)
    rows = np.array(moved)
    # A valley that needs a size to turn at all has moved to the end of what was tried, or farther.
    ends = [np.log([xs.min() / optima[c]["x_opt"], xs.max() / optima[c]["x_opt"]]) for c, (xs, _) in split.items()]
    for k, (low, high) in enumerate(ends):
        rows[:, k] = np.clip(np.nan_to_num(rows[:, k], nan=high, posinf=high, neginf=low), low, high)
    if len(rows) < 2:
        return np.zeros((len(split), len(split)))
    return np.asarray((len(rows) - 1) * np.cov(rows, rowvar=False, bias=True).reshape(len(split), len(split)))


def _through(
    interior: list[float], optima: dict[float, Law], shape: "_Shape | None", of_sizes: np.ndarray | float
) -> Law:
    """The power law through the interior optima; budgets left out are named.

    With a shared shape each optimum counts by its own error: valleys flatten as compute grows, so the
    largest budget, which an extrapolation leans on most, is known least.
    """
    sizes = [optima[c]["x_opt"] for c in interior]
    left_out = [c for c in optima if c not in interior]
    if shape is None or not interior:
        law = power_law(interior, sizes)
    else:
        weights = [optima[c].details["log_x_opt_se"] ** -2.0 for c in interior]
        law = power_law(interior, sizes, weights, common=shape.common(interior) + of_sizes)
    if left_out:
        named = ", ".join(f"{c:.3g} ({optima[c].status.replace('_', ' ')})" for c in left_out)
        law = law.with_warnings(f"budgets without an interior optimum are left out: {named}")
    return law


def _through_parabolas(parabolas: dict[float, Law], optima: dict[float, Law]) -> Law:
    """The paper's law through the parabolas' optima, unweighted.

    Where the valleys are lopsided all parabolas are off to the same side, which the scatter about the line cannot
    show. Their distance from the shared-shape optima is counted as an error they have in common.
    """
    inside = [c for c, law in parabolas.items() if law.ok]
    sizes = [parabolas[c]["x_opt"] for c in inside]
    if not all("x_opt" in optima[c].values for c in inside):
        return power_law(inside, sizes)
    off = np.array([np.log(n / optima[c]["x_opt"]) for c, n in zip(inside, sizes, strict=True)])
    law = power_law(inside, sizes, common=np.outer(off, off))
    mean = float(np.exp(off.mean())) if len(off) else 1.0
    if not 1 / 1.05 <= mean <= 1.05:
        law = law.with_warnings(
            f"parabolas place the optimum {mean:.2f} times where the shared shape does: the valleys are lopsided, "
            "and the parabola's vertex is drawn to the wider side"
        )
    return law


def _height(interior: list[float], optima: dict[float, Law], shape: "_Shape | None", direction: Direction) -> Law:
    """L*(C) through the interior optima; their measured noise is pooled with the scatter about the curve."""
    heights = [optima[c]["y_opt"] for c in interior]
    if shape is None or len(interior) < 3:
        return saturating(interior, heights, direction=direction)
    errors = [optima[c].details["y_opt_se"] for c in interior]
    return saturating(interior, heights, direction=direction, se=errors, se_dof=shape.best.dof)


@dataclass(frozen=True)
class _Shape:
    """The joint fit, what it allows at 95%, and which budgets are in it."""

    best: SeparableFit
    allowed: Region
    budgets: tuple[float, ...]

    def common(self, budgets: list[float]) -> np.ndarray:
        """Covariance of the log optima that comes from the shared exponents: they move all optima at once.

        Taken from the two shapes, among those allowed at 95%, that move the optima furthest down and up.
        The exponents themselves can be almost free while this stays small, so their own covariance
        would say little.
        """
        if not budgets:
            return np.zeros((0, 0))
        rows = [self.budgets.index(c) for c in budgets]
        places = np.stack([log_optimum(self.allowed.theta, self.allowed.solved.linear[i]) for i in rows])
        level = np.where(np.isfinite(places).all(0), places.mean(0), np.nan)
        if np.isnan(level).all():
            return np.zeros((len(budgets), len(budgets)))
        furthest = places[:, np.nanargmax(level)] - places[:, np.nanargmin(level)]
        one_sigma = furthest / (2 * float(stats.t.ppf(0.975, self.best.dof)))
        return np.outer(one_sigma, one_sigma)


def _shared_valleys(
    split: Split, direction: Direction, levels: Sequence[float], most_dof: float = np.inf
) -> tuple[dict[float, Law], _Shape | None]:
    """Every budget's valley, and the joint fit; `most_dof` of its scatter, where its cells tell no more of it."""
    sign = sign_of(direction)
    usable = {c: (xs, ys) for c, (xs, ys) in split.items() if num_distinct(xs) >= _CELLS and not all_equal(ys)}
    laws = {
        c: law_without_values(
            "frontier", FORM, "too_few", len(xs),
            f"{num_distinct(xs)} distinct sizes (or all values equal); a budget needs {_CELLS}",
        )
        for c, (xs, _) in split.items()
        if c not in usable
    }  # fmt: skip
    if not usable:
        return laws, None
    middles = {c: float(np.log(xs).mean()) for c, (xs, _) in usable.items()}
    curves = [
        # Noise is taken as a share of the metric's level: a loss of 4.5 is measured no better, relatively, than
        # one of 2.3.
        Curve(valley_terms, np.log(xs) - middles[c], sign * ys, np.full(len(ys), 1 / np.abs(ys).mean()))
        for c, (xs, ys) in usable.items()
    ]
    best = _of_cells(fit_separable(curves, (EXPONENTS, EXPONENTS)))
    best = replace(best, dof=min(best.dof, most_dof))
    if best.dof < 1:
        for c, (xs, _) in usable.items():
            why = "too few cells over all budgets for a shared shape"
            laws[c] = law_without_values("frontier", FORM, "too_few", len(xs), why)
        return dict(sorted(laws.items())), None
    regions = {level: region(best, level) for level in levels}
    for i, (c, (xs, ys)) in enumerate(usable.items()):
        laws[c] = _Budget(i, c, xs, ys, sign, middles[c], best, regions).law(direction)
    return dict(sorted(laws.items())), _Shape(best, regions[0.95], tuple(usable))


def _of_cells(best: SeparableFit) -> SeparableFit:
    """The fit with the variance of cells about the curves and its degrees of freedom, where cells have several seeds.

    Two seeds are not two cells: they share what the cell has beyond its size, whether or not a test shows that. With a
    mean that counts as often as its cell has seeds,

        s² = Σ_cells seeds·(mean − curve)² / (cells − values),

    the same as by all runs where cells have nothing of their own.
    """
    num_cells = int((best.curves.weight > 0).sum())
    dof = best.dof - (best.curves.num_observations - num_cells)
    if dof == best.dof or dof < LEAST_DOF or best.sigma2 <= 0:
        return best
    sigma2 = max(best.rss - float(best.curves.pure_error.sum()), 0.0) / dof
    if sigma2 <= _EXACT * best.sigma2:
        return best
    return replace(best, dof=dof, sigma2=sigma2, axes=best.axes * float(np.sqrt(sigma2 / best.sigma2)))


@dataclass(frozen=True)
class _Budget:
    """One budget's valley within the joint fit."""

    index: int
    budget: float
    x: np.ndarray
    y: np.ndarray
    sign: float
    middle: float
    best: SeparableFit
    regions: dict[float, Region]  # from the narrowest level to the widest

    def law(self, direction: Direction) -> Law:
        theta, linear = self.best.theta[None], self.best.linear[self.index][None]
        floor, a, b = (float(v) for v in linear[0])
        alpha, beta = (float(v) for v in self.best.theta)
        u = np.log(self.x) - self.middle
        fitted = self.sign * (floor + a * np.exp(alpha * u) + b * np.exp(-beta * u))
        residuals = residuals_of(self.y, fitted, 3)
        details: dict[str, Any] = {
            "direction": direction,
            "budget": self.budget,
            "best_on_grid": float(self.x[np.argmin(self.sign * self.y)]),
            "alpha": alpha,
            "beta": beta,
            "a": a * float(np.exp(-alpha * self.middle)),
            "b": b * float(np.exp(beta * self.middle)),
            "floor": self.sign * floor,
        }
        points = {"x": tuple(self.x), "y": tuple(self.y)}
        place = float(log_optimum(theta, linear)[0])
        # Twenty e-folds beyond the sweep a term is absent, not small.
        if a <= 0 or b <= 0 or not u.min() - 20 < place < u.max() + 20:
            side = "smallest" if b <= a else "largest"
            why = f"at {self.budget:.3g} FLOPs the metric only improves towards the {side} size swept"
            law = law_without_values("frontier", FORM, "monotone", len(self.x), why, **details)
            return law.model_copy(update={"points": points, "residuals": residuals})
        values: dict[str, Any] = {
            "x_opt": float(np.exp(place + self.middle)),
            "y_opt": self.sign * float(optimum_height(theta, linear)[0]),
            "flat_range": self._flat_range(place),
        }
        intervals: dict[float, dict[str, tuple[float, float]]] = {}
        for level in self.regions:
            ranges = self._ranges(level, values)
            for narrower in intervals.values():
                # In a region with far-off islands the wider level's grid may step over one that the narrower's met.
                ranges = {n: (min(low, narrower[n][0]), max(high, narrower[n][1])) for n, (low, high) in ranges.items()}
            intervals[level] = ranges
        details.update(self._errors())
        status, warnings = self._verdict(values["x_opt"], intervals[0.95]["x_opt"])
        return Law(
            law="frontier", form=FORM, status=status, values=values, intervals=make_intervals(intervals),
            residuals=residuals, warnings=tuple(warnings), points=points, details=details,
        )  # fmt: skip

    def _flat_range(self, place: float) -> tuple[float, float]:
        """All sizes within 0.1% of the best value, on the fitted curve."""
        alpha, beta = self.best.theta
        floor, a, b = self.best.linear[self.index]
        u = np.linspace(place - 12, place + 12, 24001)
        curve = floor + a * np.exp(alpha * u) + b * np.exp(-beta * u)
        inside = u[curve <= curve.min() + FLAT_TOLERANCE * abs(curve.min())]
        return float(np.exp(inside[0] + self.middle)), float(np.exp(inside[-1] + self.middle))

    def _ranges(self, level: float, values: dict[str, Any]) -> dict[str, tuple[float, float]]:
        allowed = self.regions[level]
        place = allowed.range_of(log_optimum, self.index)
        height = sorted(self.sign * end for end in allowed.range_of(optimum_height, self.index))
        low, high = values["flat_range"]
        with np.errstate(over="ignore"):
            ends = (float(np.exp(place[0] + self.middle)), float(np.exp(place[1] + self.middle)))
        return {
            "x_opt": ends,
            "y_opt": (height[0], height[1]),
            # The flat range, carried along with the optimum to both ends of its interval.
            "flat_range": (ends[0] * low / values["x_opt"], ends[1] * high / values["x_opt"]),
        }

    def _errors(self) -> dict[str, float]:
        """Standard errors of log x_opt and y_opt at the fitted shape.

        With d = dy/du at the optimum, du* = −d/curvature, and by the envelope theorem dy* is linear in (E, a, b).
        """
        alpha, beta = self.best.theta
        linear = self.best.linear[self.index]
        u = float(log_optimum(self.best.theta[None], linear[None])[0])
        rise, fall = float(np.exp(alpha * u)), float(np.exp(-beta * u))
        _, a, b = linear
        bend = a * alpha**2 * rise + b * beta**2 * fall
        to_place = np.array([0.0, alpha * rise, -beta * fall]) / bend
        to_height = np.array([1.0, rise, fall])
        variance = self.best.sigma2 * self.best.inverse[self.index]
        return {
            "log_x_opt_se": max(float(np.sqrt(max(to_place @ variance @ to_place, 0.0))), 1e-12),
            "y_opt_se": max(float(np.sqrt(max(to_height @ variance @ to_height, 0.0))), 1e-15),
        }

    def _verdict(self, x_opt: float, interval: tuple[float, float]) -> tuple[Any, list[str]]:
        low, high = float(self.x.min()), float(self.x.max())
        if not low < x_opt < high:
            return "boundary", [
                f"at {self.budget:.3g} FLOPs the optimum, {x_opt:.3g}, lies outside the sizes swept "
                f"[{low:.3g}, {high:.3g}]: extend the grid that way"
            ]
        if interval[0] <= 0 or interval[1] / interval[0] > high / low:
            return "not_identified", [
                f"at {self.budget:.3g} FLOPs the 95% interval of the optimum is wider than the sizes swept: "
                "no valley above the noise"
            ]
        return "ok", []
