"""Critical batch size: S(B) = S_min·(1 + B_crit/B), a straight line in 1/B.

The point estimate is ordinary least squares of S on 1/B, the paper's. Its interval must not depend on a
guess about the noise, and with six batch sizes the guess decides: a constant error in steps lets B = 64
rule the fit, a relative one does not. So both are weighed by how well they explain the points.
"""

from typing import Any

import numpy as np
from scipy import optimize, stats

from habitus.laws.checks import Numbers, all_equal, as_columns, check_positive, check_rows_differ, num_distinct
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Law

FORM = "S = s_min * (1 + b_crit / B)"
_NOISE_POWERS = (0.0, 1.0)  # the error of S grows as S^0 (constant) or S^1 (relative)


def critical_batch(batch: Numbers, steps: Numbers) -> Law:
    """b_crit, s_min and r2 from the steps each batch size needs to reach one target."""
    B, S = as_columns(batch=batch, steps=steps)
    check_positive(batch=B, steps=S)
    check_rows_differ(batch=B, steps=S)
    if num_distinct(B) < 4:
        why = f"{num_distinct(B)} distinct batch sizes; a line and its curvature need 4"
        return law_without_values("critical_batch", FORM, "too_few", len(B), why)
    if all_equal(S):
        why = "every batch size needs the same number of steps: no slope in 1/B"
        return law_without_values("critical_batch", FORM, "flat", len(B), why)
    order = np.argsort(B, kind="stable")
    B, S = B[order], S[order]
    intercept, slope = _line(1 / B, S, np.ones(len(B)))
    points = {"batch": tuple(B), "steps": tuple(S)}
    details = {"other_conventions": _other_conventions(B, S)}
    if slope <= 0:
        why = "steps do not fall as the batch grows: no critical batch size"
        law = law_without_values("critical_batch", FORM, "flat", len(B), why, **details)
        return law.model_copy(update={"points": points})
    if intercept <= 0:
        return _no_plateau(B, S, points, details)
    values = {"b_crit": slope / intercept, "s_min": intercept}
    fitted = intercept + slope / B
    residuals = residuals_of(S, fitted, 2)
    values["r2"] = residuals.r2 or 0.0
    intervals = widen_to_values(_intervals(B, S, values["r2"]), values)
    status, warnings = _verdict(values, intervals[0.95]["b_crit"], details, B)
    return Law(
        law="critical_batch",
        form=FORM,
        status=status,
        values=values,
        intervals=make_intervals(intervals),
        residuals=residuals,
        warnings=tuple(warnings),
        points=points,
        details=details,
    )


def _line(x: np.ndarray, y: np.ndarray, w: np.ndarray) -> tuple[float, float]:
    """Intercept and slope with weights 1/σ."""
    X = np.stack([np.ones_like(x), x], axis=1) * w[:, None]
    (intercept, slope), *_ = np.linalg.lstsq(X, y * w, rcond=None)
    return float(intercept), float(slope)


def _no_plateau(B: np.ndarray, S: np.ndarray, points: dict[str, Any], details: dict[str, Any]) -> Law:
    """S_min would be negative: pinned at 0, steps fall as 1/B throughout, and B_crit has no value."""
    slope = float((S / B).sum() / (1 / B**2).sum())
    residuals = residuals_of(S, slope / B, 1)
    why = (
        f"steps keep falling as fast as 1/B up to B = {B.max():g}: s_min is pinned at 0 and b_crit has no "
        f"upper end (likely above {B.max():g})"
    )
    return Law(
        law="critical_batch",
        form=FORM,
        status="not_identified",
        values={"s_min": 0.0, "r2": residuals.r2 or 0.0},
        residuals=residuals,
        warnings=(why,),
        points=points,
        details={**details, "b_crit_above": float(B.max())},
    )


def _intervals(B: np.ndarray, S: np.ndarray, r2: float) -> dict[float, dict[str, tuple[float, float]]]:
    """Quantiles of the weighed confidence distributions of b_crit and s_min; Fisher's z for r2."""
    lines = [_NoisyLine(B, S, power) for power in _NOISE_POWERS]
    support = np.array([line.log_support for line in lines])
    shares = np.exp(support - support.max())
    shares /= shares.sum()
    result = {}
    for level in LEVELS:
        tails = (0.5 - level / 2, 0.5 + level / 2)
        log_b = np.linspace(np.log(B.min()) - 12, np.log(B.max()) + 12, 4001)
        below = sum(p * line.chance_below(np.exp(log_b)) for p, line in zip(shares, lines, strict=True))
        floor = np.linspace(0.0, float(S.max()), 4001)
        floor_below = sum(p * line.floor_below(floor) for p, line in zip(shares, lines, strict=True))
        z, half = np.arctanh(np.sqrt(min(r2, 1 - 1e-15))), stats.norm.ppf(tails[1]) / np.sqrt(len(B) - 3)
        result[level] = {
            "b_crit": _between(tails, below, np.exp(log_b), open_low=0.0),
            "s_min": _between(tails, floor_below, floor, open_low=0.0),
            "r2": (float(np.tanh(max(z - half, 0.0)) ** 2), float(np.tanh(z + half) ** 2)),
        }
    return result


class _NoisyLine:
    """S = c0 + c1/B with an error that grows as S^power: confidence distributions of c1/c0 and c0."""

    def __init__(self, B: np.ndarray, S: np.ndarray, power: float) -> None:
        x, w = 1 / B, np.ones(len(B))
        for _ in range(4 if power else 1):
            c0, c1 = _line(x, S, w)
            fitted = np.maximum(c0 + c1 * x, 0.2 * S)  # a negative plateau must not make infinite weights
            w = fitted**-power
        c0, c1 = _line(x, S, w)
        X = np.stack([np.ones_like(x), x], axis=1) * w[:, None]
        gram = X.T @ X
        self.c = np.array([c0, c1])
        self.dof = len(B) - 2
        rss = max(float((((S - c0 - c1 * x) * w) ** 2).sum()), (1e-12 * float((S * w).max())) ** 2)
        self.cov = np.linalg.inv(gram) * rss / self.dof
        # Marginal likelihood with a flat line and an unknown scale, to weigh the noise models by.
        self.log_support = float(np.log(w).sum() - 0.5 * np.linalg.slogdet(gram)[1] - 0.5 * self.dof * np.log(rss))

    def chance_below(self, b: np.ndarray) -> np.ndarray:
        """Confidence that c1/c0 lies below b (Fieller's statistic)."""
        c0, c1 = self.c
        error = np.sqrt(self.cov[1, 1] - 2 * b * self.cov[0, 1] + b * b * self.cov[0, 0])
        return stats.t.cdf((b * c0 - c1) / error, self.dof)

    def floor_below(self, s_min: np.ndarray) -> np.ndarray:
        return stats.t.cdf((s_min - self.c[0]) / np.sqrt(self.cov[0, 0]), self.dof)


def _between(tails: tuple[float, float], chance: Any, grid: np.ndarray, open_low: float) -> tuple[float, float]:
    """The two quantiles of a rising chance on a grid; open where the chance never gets there."""
    chance = np.maximum.accumulate(np.asarray(chance))
    low = open_low if chance[0] >= tails[0] else float(np.interp(tails[0], chance, grid))
    if chance[-1] < tails[0]:
        return float(grid[-1]), np.inf
    high = np.inf if chance[-1] < tails[1] else float(np.interp(tails[1], chance, grid))
    return low, high


def _other_conventions(B: np.ndarray, S: np.ndarray) -> dict[str, float | None]:
    """B_crit by other defensible readings of the same points; None where a reading has no plateau."""

    def ratio(intercept: float, slope: float) -> float | None:
        return slope / intercept if intercept > 0 and slope > 0 else None

    def log_misfit(log_b: float) -> float:
        shape = np.log1p(np.exp(log_b) / B)
        return float(np.var(np.log(S) - shape))

    edges = (np.log(B.min()) - 7, np.log(B.max()) + 7)
    minimum = optimize.minimize_scalar(log_misfit, bounds=edges, method="bounded", options={"xatol": 1e-9})
    interior = edges[0] + 0.01 < minimum.x < edges[1] - 0.01
    return {
        "log_space": float(np.exp(minimum.x)) if interior else None,
        "without_largest_batch": ratio(*_line(1 / B[:-1], S[:-1], np.ones(len(B) - 1))),
        "without_smallest_batch": ratio(*_line(1 / B[1:], S[1:], np.ones(len(B) - 1))),
    }


def _verdict(
    values: dict[str, float], interval: tuple[float, float], details: dict[str, Any], B: np.ndarray
) -> tuple[Any, list[str]]:
    warnings = []
    b_crit = values["b_crit"]
    others = details["other_conventions"]
    far = {k: v for k, v in others.items() if v is None or not 1 / 1.5 <= v / b_crit <= 1.5}
    if far:
        readings = ", ".join(
            f"{'no plateau' if v is None else format(v, '.0f')} {k.replace('_', ' ')}" for k, v in far.items()
        )
        warnings.append(f"b_crit = {b_crit:.0f} depends on the convention: {readings}")
    if not np.isfinite(interval[1]):
        warnings.append("the 95% interval of b_crit is open above: the plateau is not separated from zero")
        return "not_identified", warnings
    if not B.min() <= b_crit <= B.max():
        warnings.append(f"b_crit = {b_crit:.0f} lies outside the batch sizes tried, {B.min():g} to {B.max():g}")
        return "boundary", warnings
    return "ok", warnings
