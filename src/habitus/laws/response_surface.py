"""One surface over several knobs at once: size, share, batch and rate from the same runs, not from laws measured apart.

    sign·y = quadratic in log C  +  Σ_k (linear + linear·log C + quadratic) of log knob k  +  Σ_{k<l} log k · log l

by least squares on cells that are spread over all knobs (a Latin hypercube, say). The best knobs of a budget solve a
linear system; their intervals are those of coefficients drawn from the fit's own distribution, which is what makes
them joint.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, check_positive_number, sign_of
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of
from habitus.store import LEVELS, Direction, Law, Residuals

FORM = "sign*y = second-order polynomial in log C and the logs of the knobs"
_DRAWS = 2000
_CURVED = 0.95  # of the draws must have a minimum


def response_surface(
    knobs: Mapping[str, Numbers], compute: Numbers, metric: Numbers, direction: Direction = "min"
) -> Law:
    """The fitted surface; `response_optimum` asks it for the best knobs of a budget."""
    names = tuple(knobs)
    columns = as_columns(compute=compute, metric=metric, **knobs)
    C, y, *x = columns
    check_positive(compute=C, **dict(zip(names, x, strict=True)))
    points = {"compute": tuple(C), "metric": tuple(y), **{n: tuple(v) for n, v in zip(names, x, strict=True)}}
    X = _terms(np.log(C), np.log(np.stack(x, axis=1)), *_centres(points, names))
    dof = len(y) - X.shape[1]
    if dof < 3 or np.linalg.matrix_rank(X) < X.shape[1]:
        why = (
            f"{len(y)} runs; {X.shape[1]} coefficients and three runs to judge them by are needed, on no line or plane"
        )
        return law_without_values("response_surface", FORM, "too_few", len(y), why)
    sign = sign_of(direction)
    coefficients, *_ = np.linalg.lstsq(X, sign * y, rcond=None)
    return Law(
        law="response_surface",
        form=FORM,
        status="ok",
        values={"curvatures_above_zero": _share_with_minimum(coefficients[None], len(names))},
        residuals=residuals_of(y, sign * (X @ coefficients), X.shape[1]),
        points=points,
        details={"knobs": list(names), "direction": direction, "coefficients": coefficients.tolist()},
    )


def response_optimum(law: Law, compute: float, seed: int = 0) -> Law:
    """The best of every knob at a budget, and the metric there, with intervals that let all of them move together."""
    if law.law != "response_surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted response surface")
    check_positive_number(compute=compute)
    names, sign = tuple(law.details["knobs"]), sign_of(law.details["direction"])
    centre_c, centre = _centres(law.points, names)
    logs = np.log(np.stack([np.asarray(law.points[n]) for n in names], axis=1))
    X = _terms(np.log(np.asarray(law.points["compute"])), logs, centre_c, centre)
    y = sign * np.asarray(law.points["metric"])
    coefficients = np.asarray(law.details["coefficients"])
    dof = len(y) - X.shape[1]
    missed = y - X @ coefficients
    covariance = np.linalg.inv(X.T @ X) * float(missed @ missed) / dof
    rng = np.random.default_rng(seed)
    scale = np.sqrt(dof / rng.chisquare(dof, _DRAWS))[:, None]  # Student's t rather than normal
    draws = coefficients + rng.multivariate_normal(np.zeros(len(coefficients)), covariance, _DRAWS) * scale
    c = float(np.log(compute)) - centre_c
    places, heights = _optima(draws, c, len(names))
    has_minimum = np.isfinite(heights)
    (best,), (height,) = _optima(coefficients[None], c, len(names))
    share = float(has_minimum.mean())
    if not np.isfinite(height) or share < _CURVED:
        why = f"{share:.0%} of what the runs allow has a minimum in all knobs: no joint optimum"
        return law_without_values("response_optimum", FORM, "not_identified", len(y), why, compute=compute)
    values = {
        **{n: float(np.exp(v)) for n, v in zip(names, best + centre, strict=True)},
        "metric": sign * float(height),
    }
    by_level: dict[float, dict[str, tuple[float, float]]] = {}
    for level in LEVELS:
        ends = np.quantile(places[has_minimum], [0.5 - level / 2, 0.5 + level / 2], axis=0) + centre
        by_level[level] = {n: (float(np.exp(a)), float(np.exp(b))) for n, a, b in zip(names, *ends, strict=True)}
        low, high = sorted(sign * np.quantile(heights[has_minimum], [0.5 - level / 2, 0.5 + level / 2]))
        by_level[level]["metric"] = (float(low), float(high))
    outside = [
        n for n, v, column in zip(names, best + centre, logs.T, strict=True) if not column.min() < v < column.max()
    ]
    warnings = [f"the best {', '.join(outside)} lies outside what was tried"] if outside else []
    return Law(
        law="response_optimum",
        form=FORM,
        status="boundary" if outside else "ok",
        values=values,
        intervals=make_intervals(by_level),
        residuals=Residuals(n=len(y), dof=dof),
        warnings=tuple(warnings),
        details={"compute": compute, "share_with_minimum": share},
    )


def _centres(points: Mapping[str, Any], names: tuple[str, ...]) -> tuple[float, np.ndarray]:
    """What is subtracted from log C and from the logs of the knobs."""
    return float(np.mean(np.log(points["compute"]))), np.array([np.mean(np.log(points[n])) for n in names])


def _terms(log_c: np.ndarray, logs: np.ndarray, centre_c: float, centre: np.ndarray) -> np.ndarray:
    """1, c, c²; then for each knob u, u·c, u²; then the products of pairs."""
    c, u = log_c - centre_c, logs - centre
    columns = [np.ones_like(c), c, c**2]
    for k in range(u.shape[1]):
        columns += [u[:, k], u[:, k] * c, u[:, k] ** 2]
    columns += [u[:, k] * u[:, m] for k, m in combinations(range(u.shape[1]), 2)]
    return np.stack(columns, axis=1)


def _parts(coefficients: np.ndarray, c: float, knobs: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Level [G], slope [G, K] and Hessian [G, K, K] in the knobs, at one log C."""
    level = coefficients[:, 0] + coefficients[:, 1] * c + coefficients[:, 2] * c**2
    per_knob = coefficients[:, 3 : 3 + 3 * knobs].reshape(-1, knobs, 3)
    slope = per_knob[:, :, 0] + per_knob[:, :, 1] * c
    hessian = np.einsum("gk,kl->gkl", 2 * per_knob[:, :, 2], np.eye(knobs))
    for place, (k, m) in enumerate(combinations(range(knobs), 2)):
        hessian[:, k, m] = hessian[:, m, k] = coefficients[:, 3 + 3 * knobs + place]
    return level, slope, hessian


def _optima(coefficients: np.ndarray, c: float, knobs: int) -> tuple[np.ndarray, np.ndarray]:
    """Centred log knobs [G, K] and heights [G] at the minimum; not finite where there is none."""
    level, slope, hessian = _parts(coefficients, c, knobs)
    curved = np.linalg.eigvalsh(hessian).min(-1) > 0
    solvable = np.where(curved[:, None, None], hessian, np.eye(knobs))
    best = -np.linalg.solve(solvable, slope[..., None])[..., 0]
    height = level + 0.5 * np.einsum("gk,gk->g", slope, best)
    return best, np.where(curved, height, np.inf)


def _share_with_minimum(coefficients: np.ndarray, knobs: int) -> float:
    return float(np.isfinite(_optima(coefficients, 0.0, knobs)[1]).mean())
