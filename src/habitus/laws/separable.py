"""Least squares where most of the law is linear, and profile-likelihood intervals for anything it implies.

Every curved law here reads  y = E + Σ_k c_k φ_k(x; θ)  with one or two exponents θ and c_k ≥ 0. For given θ
the rest is a small linear problem (variable projection), so the whole likelihood is a function of θ
that can be evaluated at thousands of θ at once. A confidence interval for any quantity ψ(θ, E, c) is the
range of ψ over the region

    RSS(θ, E, c) ≤ RSS_min + s²·F_{1, ν}(level),        s² = RSS_min / ν,   ν = points − fitted values,

found by walking θ over a grid that is stretched along the Gauss-Newton axes, and for each θ by moving (E, c)
to the ends of its ellipsoid along the gradient of ψ. Several groups (budgets) may share θ.

Letters: G points of the grid, n observations, m terms besides the floor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from scipy import optimize, stats

Terms = Callable[[np.ndarray], np.ndarray]  # log θ [G, k] -> φ [G, n, m]
ImpliedQuantity = Callable[[np.ndarray, np.ndarray], np.ndarray]  # θ [G, k], (E, c) [G, 1+m] -> [G]

_WALK = 41  # grid points per axis of θ
_ZOOMS = 4


@dataclass(frozen=True)
class Curve:
    """The observations of one curve. A weight multiplies a residual, so it is 1/σ and not 1/σ²."""

    terms: Terms
    y: np.ndarray
    weight: np.ndarray
    floor: float | None = None  # E where it is known; otherwise it is fitted
    replicates: int = 0  # observations beyond those in y: they stand in the mean of their place
    pure_error: float = 0.0  # their RSS around it, which no curve can explain


@dataclass(frozen=True)
class Projection:
    """The linear part, solved at G values of θ."""

    rss: np.ndarray  # [G]
    linear: np.ndarray  # [G, 1+m]: E, then c
    inverse: np.ndarray  # [G, 1+m, 1+m]: inverse Gram matrix of the terms in use


@dataclass(frozen=True)
class SeparableFit:
    """The least-squares point, and all that is needed to ask for intervals."""

    groups: tuple[Curve, ...]
    bounds: np.ndarray  # [k, 2]: of θ itself
    theta: np.ndarray  # [k]
    linear: tuple[np.ndarray, ...]  # per group: E, then c
    rss: float
    dof: float
    sigma2: float  # variance of a residual of weight one
    at_bound: tuple[bool, ...]
    axes: np.ndarray = field(repr=False)  # [k, k]: one-sigma steps in log θ, as columns


def fit_separable(
    groups: Sequence[Curve],
    bounds: Sequence[tuple[float, float]],
    prior_variance: tuple[float, float] | None = None,
) -> SeparableFit:
    """The least-squares fit with each θ in its bounds and c ≥ 0.

    `prior_variance` adds what is known from elsewhere: the variance of a residual, and the degrees of freedom it
    was estimated with. The two estimates are pooled.
    """
    groups = [_merge_replicates(group, len(bounds)) for group in groups]
    box = np.asarray(bounds, dtype=np.float64)
    low, high = np.log(box).T
    num_theta = len(box)
    points = 25 if num_theta == 2 else 200
    axes = [np.linspace(a, b, points) for a, b in zip(low, high, strict=True)]
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, num_theta)
    start = grid[_total_rss(groups, grid).argmin()]
    solution = _descend(groups, start, low, high)
    log_theta = np.clip(solution.x, low, high)
    solved = [project(group, log_theta[None]) for group in groups]
    rss = float(sum(part.rss[0] for part in solved))
    dof = sum(len(group.y) + group.replicates for group in groups) - num_theta
    dof -= sum(part.linear.shape[1] - (g.floor is not None) for part, g in zip(solved, groups, strict=True))
    known_variance, known_dof = prior_variance or (0.0, 0.0)
    sigma2 = (rss + known_variance * known_dof) / max(dof + known_dof, 1)
    at_bound = tuple((log_theta - low < 1e-3) | (high - log_theta < 1e-3))
    return SeparableFit(
        groups=tuple(groups),
        bounds=box,
        theta=np.exp(log_theta),
        linear=tuple(s.linear[0] for s in solved),
        rss=rss,
        dof=dof + known_dof,
        sigma2=sigma2,
        at_bound=tuple(bool(b) for b in at_bound),
        axes=_axes(solution.jac, sigma2, float((high - low).max())),
    )


def _merge_replicates(group: Curve, num_theta: int) -> Curve:
    """The same curve with one observation for each place, the weighted mean of those there: the same least squares."""
    at_ones = group.terms(np.zeros((1, num_theta)))[0]
    _, first, place = np.unique(at_ones, axis=0, return_index=True, return_inverse=True)
    place = place.reshape(-1)
    if len(first) == len(group.y):
        return group
    precision = np.bincount(place, group.weight**2)
    mean = np.bincount(place, group.weight**2 * group.y) / precision
    return replace(
        group,
        terms=lambda log_theta: group.terms(log_theta)[:, first],
        y=mean,
        weight=np.sqrt(precision),
        replicates=group.replicates + len(group.y) - len(first),
        pure_error=group.pure_error + float((group.weight**2 * (group.y - mean[place]) ** 2).sum()),
    )


def project(group: Curve, log_theta: np.ndarray) -> Projection:
    """E and c ≥ 0 by weighted least squares at each θ."""
    phi = group.terms(log_theta)
    n, m = phi.shape[1:]
    w = group.weight
    size = float(np.linalg.norm(w))
    ones = w / size if group.floor is None else np.zeros(n)  # the direction that the floor takes care of
    wy = (group.y - (group.floor or 0.0)) * w
    scaled = phi * w[:, None]
    height = np.einsum("n,gnm->gm", ones, scaled)
    phi_c = scaled - ones[:, None] * height[:, None, :]
    y_c = wy - ones * (ones @ wy)
    gram = np.einsum("gnm,gnk->gmk", phi_c, phi_c)
    c, inner = _non_negative(gram, np.einsum("gnm,n->gm", phi_c, y_c))
    missed = y_c - np.einsum("gnm,gm->gn", phi_c, c)
    mean_phi = height / size
    floor = (group.floor or 0.0) + (ones @ wy) / size - np.einsum("gm,gm->g", mean_phi, c)
    inverse = np.zeros((len(phi), m + 1, m + 1))
    inverse[:, 1:, 1:] = inner
    cross = -np.einsum("gm,gmk->gk", mean_phi, inner)
    inverse[:, 0, 1:] = inverse[:, 1:, 0] = cross
    if group.floor is None:
        inverse[:, 0, 0] = 1 / size**2 - np.einsum("gk,gk->g", cross, mean_phi)
    return Projection((missed**2).sum(1) + group.pure_error, np.concatenate([floor[:, None], c], axis=1), inverse)


def region(best: SeparableFit, level: float) -> "Region":
    """All θ that the data allow at this level, with what the linear part may still do there."""
    slack_allowed = best.sigma2 * float(stats.f.ppf(level, 1, best.dof))
    low, high = np.log(best.bounds).T
    center, axes = np.log(best.theta), best.axes
    k = len(center)
    reach_low = np.full(k, -4.0 * np.sqrt(stats.f.ppf(level, 1, best.dof)))
    reach_high = -reach_low
    for zoom in range(_ZOOMS):
        steps = [np.linspace(a, b, _WALK) for a, b in zip(reach_low, reach_high, strict=True)]
        walk = np.stack(np.meshgrid(*steps, indexing="ij"), axis=-1).reshape(-1, k)
        walked = log_theta = np.concatenate([center[None], center + walk @ axes.T])
        inside = ((log_theta >= low - 1e-12) & (log_theta <= high + 1e-12)).all(1)
        log_theta = log_theta[inside]
        rss = _total_rss(best.groups, log_theta)
        allowed = rss - best.rss <= slack_allowed
        allowed_steps = np.concatenate([np.zeros((1, k)), walk])[inside][allowed]
        if zoom < _ZOOMS - 1:
            reach_low, reach_high = _next_window(allowed_steps, reach_low, reach_high)
    # A window wider than the box has few steps inside it: what lies beyond is looked at on the box's own edge.
    edge = np.unique(np.clip(walked[~inside], low, high), axis=0)
    log_theta = np.concatenate([log_theta[allowed], edge])
    rss = np.concatenate([rss[allowed], _total_rss(best.groups, edge)])
    allowed = rss - best.rss <= slack_allowed
    log_theta, rss = log_theta[allowed], rss[allowed]
    slack = np.clip(slack_allowed - (rss - best.rss), 0.0, None)
    touches = bool((np.abs(log_theta - low) < 0.02).any() or (np.abs(log_theta - high) < 0.02).any())
    return Region(best, np.exp(log_theta), slack, tuple(project(g, log_theta) for g in best.groups), touches)


@dataclass(frozen=True)
class Region:
    """What the data allow at one level."""

    best: SeparableFit
    theta: np.ndarray  # [G, k]
    slack: np.ndarray  # [G]: how far RSS may still rise
    solved: tuple[Projection, ...]
    touches_bounds: bool

    def range_of(self, quantity: ImpliedQuantity, group: int = 0) -> tuple[float, float]:
        """Lowest and highest value of a quantity over the region."""
        solved = self.solved[group]
        center = solved.linear
        at_center = quantity(self.theta, center)
        with np.errstate(all="ignore"):
            moves = self._steepest(quantity, at_center, group)
            ends = [at_center]
            for sign in (1.0, -1.0):
                moved = center + sign * moves
                moved[:, 1:] = np.maximum(moved[:, 1:], 1e-9 * np.abs(center[:, 1:]) + 1e-300)
                ends.append(quantity(self.theta, moved))
        values = np.concatenate(ends)
        values = values[~np.isnan(values)]
        return (float(values.min()), float(values.max())) if values.size else (-np.inf, np.inf)

    def _steepest(self, quantity: ImpliedQuantity, at_center: np.ndarray, group: int) -> np.ndarray:
        """The step to the edge of each θ's ellipsoid along which the quantity rises fastest."""
        solved = self.solved[group]
        center, inverse = solved.linear, solved.inverse
        scale = np.sqrt(np.maximum(np.einsum("gmm->gm", inverse), 0)) * np.sqrt(self.best.sigma2)
        # A difference far smaller than the ellipsoid, so that the quantity is linear over it.
        h = 1e-6 * scale + 1e-12 * np.abs(center)
        gradient = np.zeros_like(center)
        for k in range(center.shape[1]):
            nudged = center.copy()
            nudged[:, k] += h[:, k]
            step = h[:, k]
            gradient[:, k] = np.where(step > 0, (quantity(self.theta, nudged) - at_center) / step, 0.0)
        gradient = np.nan_to_num(gradient, nan=0.0, posinf=0.0, neginf=0.0)
        along = np.einsum("gmk,gk->gm", inverse, gradient)
        length = np.sqrt(np.maximum(np.einsum("gm,gm->g", gradient, along), 1e-300))
        return along / length[:, None] * np.sqrt(self.slack)[:, None]


def _total_rss(groups: Sequence[Curve], log_theta: np.ndarray) -> np.ndarray:
    return np.sum([project(group, log_theta).rss for group in groups], axis=0)


def _descend(groups: Sequence[Curve], start: np.ndarray, low: np.ndarray, high: np.ndarray) -> optimize.OptimizeResult:
    def missed(log_theta: np.ndarray) -> np.ndarray:
        parts = []
        for group in groups:
            solved = project(group, log_theta[None])
            phi = group.terms(log_theta[None])[0]
            parts.append((group.y - solved.linear[0, 0] - phi @ solved.linear[0, 1:]) * group.weight)
        return np.concatenate(parts)

    # The box is opened by a hair, since the solver wants its start strictly inside.
    return optimize.least_squares(missed, start, bounds=(low - 1e-9, high + 1e-9), xtol=1e-12, ftol=1e-14, gtol=1e-14)


def _axes(jacobian: np.ndarray, sigma2: float, width: float) -> np.ndarray:
    """One-sigma steps of log θ as columns; never longer than the box and never exactly zero."""
    information = jacobian.T @ jacobian / max(sigma2, 1e-300)
    curvature, directions = np.linalg.eigh(information)
    lengths = 1 / np.sqrt(np.maximum(curvature, 1e-300))
    return directions * np.clip(lengths, 1e-9, width / 4)


def _next_window(allowed_steps: np.ndarray, low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The box of the allowed steps, with a margin: wider where it was cut off, narrower where it was not."""
    cell = (high - low) / (_WALK - 1)
    margin = np.maximum(2 * cell, 0.1 * (allowed_steps.max(0) - allowed_steps.min(0)))
    cut_low, cut_high = allowed_steps.min(0) <= low + cell, allowed_steps.max(0) >= high - cell
    span = high - low
    return (
        np.where(cut_low, low - span, allowed_steps.min(0) - margin),
        np.where(cut_high, high + span, allowed_steps.max(0) + margin),
    )


def _non_negative(gram: np.ndarray, rhs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """c ≥ 0 for one or two terms, in closed form, and the inverse Gram matrix of the free terms."""
    m = rhs.shape[1]
    inverse = np.zeros_like(gram)
    if m == 1:
        g = np.maximum(gram[:, 0, 0], 1e-300)
        inverse[:, 0, 0] = 1 / g
        return np.maximum(rhs / g[:, None], 0.0), inverse
    pp, qq, pq = gram[:, 0, 0], gram[:, 1, 1], gram[:, 0, 1]
    pp, qq = np.maximum(pp, 1e-300), np.maximum(qq, 1e-300)
    det = np.maximum(pp * qq - pq**2, 1e-14 * pp * qq)
    inverse[:, 0, 0], inverse[:, 1, 1] = qq / det, pp / det
    inverse[:, 0, 1] = inverse[:, 1, 0] = -pq / det
    both = np.einsum("gmk,gk->gm", inverse, rhs)
    only = np.maximum(rhs / np.stack([pp, qq], axis=1), 0.0)  # the best with one term alone
    gain = only * rhs
    first = gain[:, 0] >= gain[:, 1]
    alone = np.where(np.stack([first, ~first], axis=1), only, 0.0)
    free = (both > 0).all(1)
    return np.where(free[:, None], both, alone), inverse
