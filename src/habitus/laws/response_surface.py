"""One surface over several knobs at once: size, share, batch and rate from the same runs, not from laws measured apart.

    sign·y = quadratic in log C  +  Σ_k (linear + linear·log C + quadratic) of log knob k  +  Σ_{k<l} log k · log l

by least squares on cells that are spread over all knobs (a Latin hypercube, say). The best knobs of a budget solve a
linear system; their intervals are those of coefficients drawn from the fit's own distribution, which is what makes
them joint. With one budget the terms of log C are left out.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, check_positive_number, sign_of
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Direction, Law, Residuals

FORM = "sign*y = second-order polynomial in log C and the logs of the knobs"
_DRAWS = 2000
_CURVED = 0.95  # of the draws must have a minimum
_AT_END = 1e-6  # of a logarithm: a knob so near to an end of its range is at it
IN_REGION = 0.05  # p value above which a point belongs to the region of the optimum


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
    used = np.asarray(X.any(axis=0))
    dof = len(y) - int(used.sum())
    if dof < 3 or np.linalg.matrix_rank(X[:, used]) < used.sum():
        why = (
            f"{len(y)} runs; {used.sum()} coefficients and three runs to judge them by are needed, on no line or plane"
        )
        return law_without_values("response_surface", FORM, "too_few", len(y), why)
    sign = sign_of(direction)
    coefficients = np.zeros(len(used))
    coefficients[used] = np.linalg.lstsq(X[:, used], sign * y, rcond=None)[0]
    return Law(
        law="response_surface",
        form=FORM,
        status="ok",
        values={"curvatures_above_zero": _share_with_minimum(coefficients[None], len(names))},
        residuals=residuals_of(y, sign * (X @ coefficients), int(used.sum())),
        points=points,
        details={"knobs": list(names), "direction": direction, "coefficients": coefficients.tolist()},
    )


def response_optimum(law: Law, compute: float, seed: int = 0) -> Law:
    """The best of every knob at a budget, and the metric there, with intervals that let all of them move together."""
    if law.law != "response_surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted response surface")
    check_positive_number(compute=compute)
    fitted = fitted_coefficients(law)
    names, sign, logs, centre, dof = fitted.names, fitted.sign, fitted.logs, fitted.centre, fitted.dof
    draws = draw_coefficients(fitted, seed)
    y = law.points["metric"]
    c = float(np.log(compute)) - fitted.centre_c
    places, heights = _optima(draws, c, len(names))
    has_minimum = np.isfinite(heights)
    (best,), (height,) = _optima(fitted.coefficients[None], c, len(names))
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


class FittedCoefficients(NamedTuple):
    """The coefficients of a surface with their covariance; zero where a term was left out."""

    names: tuple[str, ...]
    sign: float
    logs: np.ndarray  # [n, K] of the knobs
    centre_c: float
    centre: np.ndarray  # [K], subtracted from the logs
    coefficients: np.ndarray
    covariance: np.ndarray
    dof: int


def fitted_coefficients(law: Law) -> FittedCoefficients:
    """What was fitted, from the points that the law keeps."""
    names, sign = tuple(law.details["knobs"]), sign_of(law.details["direction"])
    centre_c, centre = _centres(law.points, names)
    logs = np.log(np.stack([np.asarray(law.points[n]) for n in names], axis=1))
    X = _terms(np.log(np.asarray(law.points["compute"])), logs, centre_c, centre)
    used = np.asarray(X.any(axis=0))
    coefficients = np.asarray(law.details["coefficients"])
    missed = sign * np.asarray(law.points["metric"]) - X @ coefficients
    dof = len(missed) - int(used.sum())
    covariance = np.zeros((len(used), len(used)))
    covariance[np.ix_(used, used)] = np.linalg.inv(X[:, used].T @ X[:, used]) * float(missed @ missed) / dof
    return FittedCoefficients(names, sign, logs, centre_c, centre, coefficients, covariance, dof)


def draw_coefficients(fitted: FittedCoefficients, seed: int = 0) -> np.ndarray:
    """Coefficients [_DRAWS, P] as the runs allow them: Student's t rather than normal."""
    rng = np.random.default_rng(seed)
    scale = np.sqrt(fitted.dof / rng.chisquare(fitted.dof, _DRAWS))[:, None]
    size = len(fitted.coefficients)
    return fitted.coefficients + rng.multivariate_normal(np.zeros(size), fitted.covariance, _DRAWS) * scale


def predict_response(law: Law, knobs: Mapping[str, Numbers], compute: Numbers) -> np.ndarray:
    """The metric that a surface gives for knobs at budgets."""
    fitted = fitted_coefficients(law)
    logs = np.log(np.stack([np.atleast_1d(np.asarray(knobs[n], float)) for n in fitted.names], axis=1))
    X = _terms(np.log(np.atleast_1d(np.asarray(compute, float))), logs, fitted.centre_c, fitted.centre)
    return np.asarray(fitted.sign * (X @ fitted.coefficients))


def optimum_in_range(law: Law, compute: float, seed: int = 0) -> Law:
    """The best knobs within the range of each that was tried, where a surface need not have a minimum in all of them.

    Intervals are those of the optima of drawn surfaces. Knobs whose best value is an end of their range are named.
    """
    fitted = fitted_coefficients(law)
    draws = np.concatenate([fitted.coefficients[None], draw_coefficients(fitted, seed)])
    c = float(np.log(compute)) - fitted.centre_c
    places, heights = _optima_in_box(draws, c, fitted.logs - fitted.centre)
    logs = places + fitted.centre
    by_level: dict[float, dict[str, tuple[float, float]]] = {}
    for level in LEVELS:
        quantiles = [0.5 - level / 2, 0.5 + level / 2]
        ends = np.exp(np.quantile(logs[1:], quantiles, axis=0)).T
        by_level[level] = {n: (float(a), float(b)) for n, (a, b) in zip(fitted.names, ends, strict=True)}
        low, high = sorted(fitted.sign * np.quantile(heights[1:], quantiles))
        by_level[level]["metric"] = (float(low), float(high))
    values = {n: float(v) for n, v in zip(fitted.names, np.exp(logs[0]), strict=True)}
    values["metric"] = fitted.sign * float(heights[0])
    at_end = [
        n
        for n, v, tried in zip(fitted.names, logs[0], fitted.logs.T, strict=True)
        if min(v - tried.min(), tried.max() - v) < _AT_END
    ]
    return Law(
        law="response_optimum",
        form=FORM,
        status="boundary" if at_end else "ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=Residuals(n=len(fitted.logs), dof=fitted.dof),
        warnings=(f"the best {', '.join(at_end)} is an end of what was tried",) if at_end else (),
        details={"compute": compute, "at_end": at_end},
    )


def compare_with_optimum(law: Law, knobs: Mapping[str, float], compute: float, seed: int = 0) -> dict[str, float]:
    """How much worse the metric is at these knobs than at the best of the tried range, with a 95% interval; and the
    p value of an F test that the surface is level there: the knobs for which it is not small are the optimum's region.

    Knobs at an end of the range beyond which alone the metric would gain are not asked to be level. Every drawn surface
    has its best point elsewhere, however near, so that no draw loses nothing: within the region the interval begins at
    zero.
    """
    from scipy.stats import f

    fitted = fitted_coefficients(law)
    K, c = len(fitted.names), float(np.log(compute)) - fitted.centre_c
    u = np.log([float(knobs[n]) for n in fitted.names]) - fitted.centre
    draws = np.concatenate([fitted.coefficients[None], draw_coefficients(fitted, seed)])
    level, slope, hessian = _parts(draws, c, K)
    here = level + slope @ u + 0.5 * np.einsum("k,gkl,l->g", u, hessian, u)
    tried = np.concatenate([fitted.logs - fitted.centre, u[None]])
    lost = here - _optima_in_box(draws, c, tried)[1]
    low, high = np.quantile(lost[1:], [0.025, 0.975])
    gradient = _gradient_terms(u, c)
    slope_here = gradient @ fitted.coefficients
    outward = np.where(slope_here > 0, u - tried.min(axis=0), tried.max(axis=0) - u) < _AT_END
    gradient, slope_here = gradient[~outward], slope_here[~outward]
    p_value = 1.0
    if len(slope_here):
        statistic = float(slope_here @ np.linalg.solve(gradient @ fitted.covariance @ gradient.T, slope_here))
        p_value = float(f.sf(statistic / len(slope_here), len(slope_here), fitted.dof))
    return {
        "lost": float(lost[0]),
        "low": 0.0 if p_value > IN_REGION else min(float(low), float(lost[0])),
        "high": max(float(high), float(lost[0])),
        "p_value": p_value,
    }


def _optima_in_box(coefficients: np.ndarray, c: float, tried: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centred log knobs [G, K] and heights [G] of the lowest point between the ends of what was tried [n, K].

    From the best tried point downhill, one knob at a time, each to its own minimum.
    """
    level, slope, hessian = _parts(coefficients, c, tried.shape[1])
    low, high = tried.min(axis=0), tried.max(axis=0)

    def heights(points: np.ndarray) -> np.ndarray:
        return np.asarray(
            level + np.einsum("gk,gk->g", slope, points) + 0.5 * np.einsum("gk,gkl,gl->g", points, hessian, points)
        )

    every = level[:, None] + slope @ tried.T + 0.5 * np.einsum("nk,gkl,nl->gn", tried, hessian, tried)
    best = tried[every.argmin(axis=1)].copy()
    for _ in range(50):
        for k in range(tried.shape[1]):
            curvature = hessian[:, k, k]
            pull = slope[:, k] + np.einsum("gl,gl->g", hessian[:, k], best) - curvature * best[:, k]
            rise = pull * (high[k] - low[k]) + curvature / 2 * (high[k] ** 2 - low[k] ** 2)
            ends = np.where(rise < 0, high[k], low[k])
            inside = np.clip(-pull / np.where(curvature > 0, curvature, 1.0), low[k], high[k])
            best[:, k] = np.where(curvature > 0, inside, ends)
    return best, heights(best)


def _gradient_terms(u: np.ndarray, c: float) -> np.ndarray:
    """[K, P]: the derivative of every term by every centred log knob."""
    K = len(u)
    pairs = list(combinations(range(K), 2))
    rows = np.zeros((K, 3 + 3 * K + len(pairs)))
    for k in range(K):
        rows[k, 3 + 3 * k : 6 + 3 * k] = 1, c, 2 * u[k]
    for place, (k, m) in enumerate(pairs, 3 + 3 * K):
        rows[k, place], rows[m, place] = u[m], u[k]
    return rows


def _centres(points: Mapping[str, Any], names: tuple[str, ...]) -> tuple[float, np.ndarray]:
    """What is subtracted from log C and from the logs of the knobs."""
    return float(np.mean(np.log(points["compute"]))), np.array([np.mean(np.log(points[n])) for n in names])


def _terms(log_c: np.ndarray, logs: np.ndarray, centre_c: float, centre: np.ndarray) -> np.ndarray:
    """1, c, c²; then for each knob u, u·c, u²; then the products of pairs."""
    c, u = log_c - centre_c, logs - centre
    c = np.where(np.abs(c) < 1e-9, 0.0, c)  # of one budget, whose mean is off by a rounding
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
