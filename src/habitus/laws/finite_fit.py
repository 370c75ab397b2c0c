"""One form of a finite log's law, fitted: least squares with parts of the users as a random effect, and its region.

At a given θ the law is linear, so all that the runs say is a function of θ. It is evaluated at some thousand θ, drawn
around those that the runs allow, and an interval of anything is its range over

    Q(θ, c) ≤ Q_min + s²·F_{1, ν}(level),        Q = RSS + s²·Σ ((log θ − log expected) / log factor)²,

as for the other laws (`separable`), with weakly expected exponents, since three sizes of a log hardly show one. Runs on
the same part of the users miss alike: their common miss has a variance of its own, and residuals are whitened by it.

Letters: G values of θ, n runs, m terms besides the floor.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

import numpy as np
from scipy import optimize, stats

from habitus.laws.finite_forms import FiniteForm, Place

Quantity = Callable[[np.ndarray, np.ndarray], np.ndarray]  # θ [G, k], (floor, c) [G, 1+m] -> [G]

_STARTS, _DRAWN, _ROUNDS = 2, 800, 3
_MOST_PART_VARIANCE = 30.0  # of a part, times that of a run


@dataclass(frozen=True)
class LogRuns:
    """What a law is fitted to: y falls where the metric improves. Runs of one part saw the same users."""

    place: Place
    y: np.ndarray
    part: np.ndarray  # [n] ids
    level: np.ndarray  # [n] ids of the share of the users

    def where(self, rows: np.ndarray) -> "LogRuns":
        return LogRuns(Place(*(column[rows] for column in self.place)), self.y[rows], self.part[rows], self.level[rows])

    @cached_property
    def part_means(self) -> tuple[np.ndarray, np.ndarray]:
        """[parts, n] that takes means over parts, and [n, parts] that hands them back to runs."""
        spread = (self.part[:, None] == np.unique(self.part)).astype(float)
        return spread.T / spread.sum(0)[:, None], spread

    @cached_property
    def middle(self) -> Place:
        return Place(*(np.exp(np.log(column).mean()) for column in self.place))


@dataclass(frozen=True)
class Solved:
    """The linear part at G values of θ."""

    rss: np.ndarray  # [G]
    linear: np.ndarray  # [G, 1+m]
    inverse: np.ndarray  # [G, 1+m, 1+m]: of the Gram matrix, zero for terms that vanish


@dataclass
class FiniteFit:
    """A form fitted to runs."""

    form: FiniteForm
    runs: LogRuns
    start: np.ndarray | None = None  # log θ to begin from, where a fit of nearly the same runs is known
    part_share: float = field(init=False)  # variance of a part's common miss, times that of a run
    log_theta: np.ndarray = field(init=False)  # [k]
    linear: np.ndarray = field(init=False)  # [1+m]: floor, then c
    sigma2: float = field(init=False)  # variance of a run, its part's miss apart

    def __post_init__(self) -> None:
        self.part_share = 0.0
        self.log_theta, self.linear, self.sigma2 = self._descend(
            self._starts() if self.start is None else self.start[None]
        )
        # The parts' common misses are judged by that first fit, which ignores them.
        missed = self.runs.y - self.value(self.runs.place)
        # Half of the values or so are spent between parts, the others within.
        self.part_share = part_variance(missed, self.runs.part, spent=0.5 * self.num_values)
        if self.part_share:
            self.log_theta, self.linear, self.sigma2 = self._descend(self.log_theta[None])

    @property
    def num_values(self) -> int:
        return 1 + len(self.form.coefs) + len(self.form.exponents)

    @property
    def theta(self) -> np.ndarray:
        return np.exp(self.log_theta)

    @property
    def dof(self) -> float:
        """Residuals less values. Parts count where their common miss dominates: two runs of one are hardly two."""
        n, parts = len(self.runs.y), len(np.unique(self.runs.part))
        worth = (n + self.part_share * parts) / (1 + self.part_share)
        return max(worth - self.num_values, 1.0)

    @cached_property
    def _cloud(self) -> tuple[np.ndarray, np.ndarray]:
        return self._draw()

    def at(self, place: Place, log_theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
        """The law at places, for one θ."""
        phi = self.form.terms(np.exp(log_theta)[None], place, self.runs.middle)[0]
        return linear[0] + phi @ linear[1:]

    def value(self, place: Place) -> np.ndarray:
        return self.at(place, self.log_theta, self.linear)

    def common_miss(self, part: np.ndarray) -> np.ndarray:
        """What runs of each of these parts are expected to miss by, from those of the part that were fitted."""
        missed = self.runs.y - self.value(self.runs.place)
        expected = np.zeros(len(part))
        for name in np.unique(part):
            own = missed[self.runs.part == name]
            if len(own):
                weight = self.part_share * len(own) / (1 + self.part_share * len(own))
                expected[part == name] = weight * own.mean()
        return expected

    def quantity(self, place: Place, weight: np.ndarray) -> Quantity:
        """Σ weight·law over the places, as a function of θ and c."""

        def total(theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
            phi = self.form.terms(theta, place, self.runs.middle)
            return weight.sum() * linear[:, 0] + np.einsum("n,gnm,gm->g", weight, phi, linear[:, 1:])

        return total

    def predict(self, place: Place, level: float, *, new_runs: float = 0.0) -> tuple[float, float, float]:
        """(value, low, high) of y at one place; with `new_runs` that of a mean over so many runs, each its own part."""
        value = float(self.value(place)[0])
        low, high = self.range_of(self.quantity(place, np.ones(1)), level)
        noise = 0.0
        if new_runs:
            noise = stats.t.ppf(0.5 + level / 2, self.dof) * np.sqrt(self.sigma2 * (1 + self.part_share) / new_runs)
        return value, value - float(np.hypot(value - low, noise)), value + float(np.hypot(high - value, noise))

    def range_of(self, quantity: Quantity, level: float) -> tuple[float, float]:
        """Lowest and highest value of a quantity over all laws that the runs allow."""
        log_theta, solved, slack = self._allowed(level)
        theta, center = np.exp(log_theta), solved.linear
        at_center = quantity(theta, center)
        scale = np.sqrt(np.maximum(np.einsum("gmm->gm", solved.inverse), 0.0) * self.sigma2)
        step = 1e-6 * scale + 1e-12 * np.abs(center)
        gradient = np.zeros_like(center)
        with np.errstate(all="ignore"):
            for k in range(center.shape[1]):
                nudged = center.copy()
                nudged[:, k] += step[:, k]
                gradient[:, k] = np.where(step[:, k] > 0, (quantity(theta, nudged) - at_center) / step[:, k], 0.0)
            gradient = np.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
            along = np.einsum("gmk,gk->gm", solved.inverse, gradient)
            length = np.sqrt(np.maximum(np.einsum("gm,gm->g", gradient, along), 1e-300))
            move = along / length[:, None] * np.sqrt(slack)[:, None]
            ends = [at_center]
            for sign in (1.0, -1.0):
                moved = center + sign * move
                moved[:, 1:] = np.maximum(moved[:, 1:], 0.0)
                ends.append(quantity(theta, moved))
        values = np.concatenate(ends)
        values = values[np.isfinite(values)]
        return (float(values.min()), float(values.max())) if values.size else (-np.inf, np.inf)

    def _allowed(self, level: float) -> tuple[np.ndarray, Solved, np.ndarray]:
        log_theta, objective = self._cloud
        room = self.sigma2 * float(stats.f.ppf(level, 1, self.dof))
        excess = objective - objective.min()
        inside = excess <= room
        return log_theta[inside], self._solve(log_theta[inside]), room - excess[inside]

    def _descend(self, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        """The best log θ, its linear part, and the variance of a run that it leaves."""
        low, high = self.form.log_bounds()
        sigma2 = self._variance(float(self._solve(starts).rss.min()))
        solutions = [
            optimize.least_squares(
                self._misses, np.clip(start, low + 1e-6, high - 1e-6), bounds=(low, high), args=(sigma2,),
                xtol=1e-6, ftol=1e-8, max_nfev=60,
            )
            for start in starts
        ]  # fmt: skip
        best = min(solutions, key=lambda solution: float(solution.cost)).x
        solved = self._solve(best[None])
        return best, solved.linear[0], self._variance(float(solved.rss[0]))

    def _starts(self) -> np.ndarray:
        """The best points of a coarse grid over θ."""
        low, high = self.form.log_bounds()
        per_axis = {1: 60, 2: 25, 3: 11, 4: 6}.get(len(low), 4)
        grid = np.array(list(product(*(np.linspace(a, b, per_axis) for a, b in zip(low, high, strict=True)))))
        rss = self._solve(grid).rss
        expected = rss + self._variance(float(rss.min())) * self._surprise(grid)
        return grid[np.argsort(expected)[:_STARTS]]

    def _misses(self, log_theta: np.ndarray, sigma2: float) -> np.ndarray:
        """Whitened residuals and surprises in units of a run's deviation: half their squares is Q/(2s²)."""
        linear = self._solve(log_theta[None]).linear[0]
        missed = self._whitened(self.runs.y - self.at(self.runs.place, log_theta, linear))
        return np.concatenate([missed / np.sqrt(sigma2), self._surprises(log_theta)])

    def _draw(self) -> tuple[np.ndarray, np.ndarray]:
        """Values of log θ around the best, as far as the runs allow and beyond, and their Q."""
        low, high = self.form.log_bounds()
        k, rng = len(low), np.random.default_rng(0)
        jacobian = optimize.approx_fprime(self.log_theta, self._misses, 1e-5, self.sigma2)
        spread = np.linalg.inv(jacobian.T @ jacobian + 1e-9 * np.eye(k))
        tried, objective = self.log_theta[None], np.array([self._objective(self.log_theta[None])[0]])
        for _ in range(_ROUNDS):
            fresh = rng.multivariate_normal(self.log_theta, 4.0 * spread, _DRAWN, method="eigh")
            fresh = np.clip(fresh, low, high)
            tried = np.concatenate([tried, fresh])
            objective = np.concatenate([objective, self._objective(fresh)])
            near = tried[objective - objective.min() <= 6 * self.sigma2] - self.log_theta
            spread = near.T @ near / len(near) + 1e-12 * np.eye(k)
        return tried, objective

    def _objective(self, log_theta: np.ndarray) -> np.ndarray:
        return self._solve(log_theta).rss + self.sigma2 * self._surprise(log_theta)

    def _variance(self, rss: float) -> float:
        return max(rss / max(len(self.runs.y) - self.num_values, 1.0), 1e-14 * float((self.runs.y**2).mean()))

    def _surprise(self, log_theta: np.ndarray) -> np.ndarray:
        return (self._surprises(log_theta) ** 2).sum(-1)

    def _surprises(self, log_theta: np.ndarray) -> np.ndarray:
        expected = np.array([np.log(e.expected) for e in self.form.exponents])
        factor = np.array([np.log(e.factor) for e in self.form.exponents])
        return (log_theta - expected) / factor

    def _whitened(self, columns: np.ndarray) -> np.ndarray:
        """Columns [..., n, m] or [n], less what the runs of a part have in common and its variance explains."""
        if not self.part_share:
            return columns
        means, spread = self.runs.part_means
        counts = 1 / means.max(1)
        common = spread * (1 - 1 / np.sqrt(1 + self.part_share * counts))
        return columns - common @ (means @ columns)

    def _solve(self, log_theta: np.ndarray) -> Solved:
        """Floor and c ≥ 0 by least squares at each θ: the best of all sets of terms whose c are positive."""
        phi = self.form.terms(np.exp(log_theta), self.runs.place, self.runs.middle)
        columns = np.concatenate([np.ones((*phi.shape[:2], 1)), phi], axis=-1)
        X, y = self._whitened(columns), self._whitened(self.runs.y)
        size = np.sqrt((X**2).sum(1))
        size = np.where(size > 0, size, 1.0)
        X = X / size[:, None]
        gram, rhs = np.einsum("gnm,gnk->gmk", X, X), np.einsum("gnm,n->gm", X, y)
        groups, p = rhs.shape
        solved = Solved(np.full(groups, np.inf), np.zeros((groups, p)), np.zeros((groups, p, p)))
        left = np.arange(groups)  # where a c would be negative with all terms
        for used in product((True, False), repeat=p - 1):
            at = np.array([0, *(k + 1 for k, use in enumerate(used) if use)])
            inverse = np.linalg.inv(gram[left][:, at[:, None], at] + 1e-12 * np.eye(len(at)))
            c = np.einsum("gmk,gk->gm", inverse, rhs[left][:, at])
            rss = ((y - np.einsum("gnm,gm->gn", X[left][:, :, at], c)) ** 2).sum(1)
            good = (c[:, 1:] >= 0).all(1) & (rss < solved.rss[left])
            rows, scale = left[good], size[left[good]][:, at]
            solved.rss[rows] = rss[good]
            solved.linear[rows], solved.inverse[rows] = 0.0, 0.0
            solved.linear[rows[:, None], at] = c[good] / scale
            solved.inverse[rows[:, None, None], at[:, None], at] = inverse[good] / scale[:, :, None] / scale[:, None, :]
            if all(used):
                left = left[~good]
            if not len(left):
                break
        return solved


def part_variance(missed: np.ndarray, part: np.ndarray, spent: float = 1.0) -> float:
    """The variance of what runs of one part miss in common, times that of a single run (one-way analysis).

    `spent` are the values of the fit that took up differences between parts.
    """
    _, at, counts = np.unique(part, return_inverse=True, return_counts=True)
    groups, n = len(counts), len(missed)
    if groups == n or groups < 3:
        return 0.0
    means = np.bincount(at, missed) / counts
    within = float(((missed - means[at]) ** 2).sum()) / (n - groups)
    between = float((counts * (means - missed.mean()) ** 2).sum()) / max(groups - max(spent, 1.0), 1.0)
    typical = (n - (counts**2).sum() / n) / (groups - 1)
    if within <= 0:
        return _MOST_PART_VARIANCE
    return float(np.clip((between / within - 1) / typical, 0.0, _MOST_PART_VARIANCE))
