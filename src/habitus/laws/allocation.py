"""Where a budget should go, according to a fitted surface: N*, D* and L* with intervals, under any cost."""

import numpy as np
from scipy import optimize

from habitus.errors import FitError
from habitus.laws.checks import check_positive_number
from habitus.laws.cost import SIX_ND, RealisedCost
from habitus.laws.law_builders import law_without_values, make_intervals, widen_to_values
from habitus.laws.separable import region
from habitus.laws.surface import FORM, Cost, SurfaceFit, evaluate, fit_surface, pseudo_fit
from habitus.store import LEVELS, Law

_SIZES = 400  # grid points in log N when the cost has no closed form


def surface_optimum(law: Law, compute: float, cost: Cost | RealisedCost | None = None) -> Law:
    """size, data, loss and exponent (of N* in C, at this budget) that a surface implies for one budget.

    `cost(N, D)` gives FLOPs and must rise in both; the default is 6·N·D, and a power law of both has a closed form.
    Intervals let the whole surface move within what its points allow.
    """
    if law.law != "surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted surface")
    check_positive_number(compute=compute)
    N, D, L = (np.asarray(law.points[name]) for name in ("N", "D", "loss"))
    fit = fit_surface(N, D, L, law.details["delta"])
    best = pseudo_fit(N, D, L, fit)
    line = _IsoFlopLine(compute, cost, (float(N.min()), float(N.max())))
    linear, theta = _centred(law, fit)
    size = float(np.exp(line.log_size(theta, linear, fit)[0]))
    data = line.data(size)
    if not (0 < size < np.inf and 0 < data < np.inf):
        why = f"the surface has no best size: by its terms it is {'0' if size == 0 else 'endless'} at every budget"
        return law_without_values("surface_optimum", FORM, "monotone", len(N), why, compute=compute, cost=line.name)
    values = {
        "size": size,
        "data": data,
        "loss": float(evaluate(law.values, np.array([size]), np.array([data]))[0]),
        "exponent": float(line.exponent(theta, linear, fit)[0]),
    }
    intervals = {}
    for level in LEVELS:
        allowed = region(best, level)
        low, high = allowed.range_of(lambda t, c: line.log_size(t, c, fit))
        sizes = (float(np.exp(low)), float(np.exp(high)))
        intervals[level] = {
            "size": sizes,
            "data": (line.data(sizes[1]), line.data(sizes[0])),
            "loss": allowed.range_of(lambda t, c: line.loss(t, c, fit)),
            "exponent": allowed.range_of(lambda t, c: line.exponent(t, c, fit)),
        }
    warnings = []
    spent = float(line.flops(N, D).max())
    if compute > 1.01 * spent:
        warnings.append(f"extrapolates to {compute / spent:.3g} times the largest budget that was fitted")
    return Law(
        law="surface_optimum",
        form=FORM + " at the least loss for the cost",
        status=law.status,
        values=values,
        intervals=make_intervals(widen_to_values(intervals, values)),
        residuals=law.residuals,
        warnings=(*law.warnings, *warnings),
        details={"compute": compute, "cost": line.name},
    )


class _IsoFlopLine:
    """All (N, D) that cost one budget."""

    def __init__(self, compute: float, cost: Cost | RealisedCost | None, size_range: tuple[float, float]) -> None:
        self.compute = compute
        self.power = cost if isinstance(cost, RealisedCost) else SIX_ND if cost is None else None
        self.cost = None if isinstance(cost, RealisedCost) else cost
        if self.power is None:
            center = 0.5 * np.log(size_range[0] * size_range[1])
            self.grid = np.linspace(center - 12, center + 12, _SIZES)
            self.grid_data = self._solve(self.grid)
            keep = np.isfinite(self.grid_data)
            if keep.sum() < 3:
                raise FitError(
                    f"no size can be trained for {compute:g} FLOPs at this cost",
                    expected="cost(N, D) in FLOPs that rises in N and D",
                )
            self.grid, self.grid_data = self.grid[keep], self.grid_data[keep]

    @property
    def name(self) -> str:
        if self.power is None:
            return getattr(self.cost, "__name__", "cost")
        k, p, q = self.power
        return "6ND" if self.power == SIX_ND else f"C = {k:.4g} * N^{p:.4f} * D^{q:.4f}"

    def flops(self, N: np.ndarray, D: np.ndarray) -> np.ndarray:
        if self.power is None:
            assert self.cost is not None
            return self.cost(N, D)
        return self.power.k * N**self.power.p * D**self.power.q

    def log_data(self, log_size: np.ndarray) -> np.ndarray:
        if self.power is not None:
            k, p, q = self.power
            return (np.log(self.compute / k) - p * log_size) / q
        return np.interp(log_size, self.grid, self.grid_data)

    def data(self, size: float) -> float:
        with np.errstate(divide="ignore", over="ignore"):  # the size may be 0, where the surface has no size term
            return float(np.exp(self.log_data(np.log([size]))[0]))

    def log_size(self, theta: np.ndarray, linear: np.ndarray, fit: SurfaceFit) -> np.ndarray:
        """log N* of each surface."""
        alpha, beta = theta.T
        if self.power is not None:
            k, p, q = self.power
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.log(alpha * linear[:, 1]) - np.log(beta * p / q * linear[:, 2])
            room = np.log(self.compute / k) / q - fit.log_d
            return (ratio + alpha * fit.log_n + beta * room) / (alpha + beta * p / q)
        size_term = np.exp(-alpha[:, None] * (self.grid - fit.log_n))
        data_term = np.exp(-beta[:, None] * (self.grid_data - fit.log_d))
        heights = linear[:, 1:2] * size_term + linear[:, 2:3] * data_term
        at = np.clip(heights.argmin(1), 1, len(self.grid) - 2)
        rows = np.arange(len(at))
        left, mid, right = heights[rows, at - 1], heights[rows, at], heights[rows, at + 1]
        bend = np.maximum(left - 2 * mid + right, 1e-300)
        return self.grid[at] + 0.5 * np.clip((left - right) / bend, -1, 1) * (self.grid[1] - self.grid[0])

    def loss(self, theta: np.ndarray, linear: np.ndarray, fit: SurfaceFit) -> np.ndarray:
        alpha, beta = theta.T
        u = self.log_size(theta, linear, fit)
        v = self.log_data(u)
        with np.errstate(over="ignore", invalid="ignore"):
            size_term = linear[:, 1] * np.exp(-alpha * (u - fit.log_n))
            return linear[:, 0] + size_term + linear[:, 2] * np.exp(-beta * (v - fit.log_d))

    def exponent(self, theta: np.ndarray, linear: np.ndarray, fit: SurfaceFit) -> np.ndarray:
        """d log N* / d log C: β/(qα + pβ) for k·N^p·D^q, a difference quotient for another cost."""
        if self.power is not None:
            _, p, q = self.power
            return theta[:, 1] / (q * theta[:, 0] + p * theta[:, 1])
        h = 0.5  # half an e-fold of compute on each side: wide enough to step over the grid
        up, down = (
            _IsoFlopLine(
                self.compute * np.exp(s), self.cost, (float(np.exp(self.grid[0])), float(np.exp(self.grid[-1])))
            )
            for s in (h, -h)
        )
        return (up.log_size(theta, linear, fit) - down.log_size(theta, linear, fit)) / (2 * h)

    def _solve(self, log_size: np.ndarray) -> np.ndarray:
        """log D that spends the budget at each size; not finite where even one slot costs more."""
        assert self.cost is not None
        cost, target = self.cost, np.log(self.compute)

        def over(v: float, u: float) -> float:
            return float(np.log(cost(np.exp(u), np.exp(v)))) - target

        log_data = np.full(len(log_size), np.nan)
        for i, u in enumerate(log_size):
            if over(0.0, u) < 0 < over(90.0, u):
                log_data[i] = optimize.brentq(over, 0.0, 90.0, args=(u,))
        return log_data


def _centred(law: Law, fit: SurfaceFit) -> tuple[np.ndarray, np.ndarray]:
    """The law's values in the centred units of the fit."""
    theta = np.array([[law["size_exponent"], law["data_exponent"]]])
    a = law["size_coef"] * np.exp(-theta[0, 0] * fit.log_n)
    b = law["data_coef"] * np.exp(-theta[0, 1] * fit.log_d)
    return np.array([[law["floor"], a, b]]), theta
