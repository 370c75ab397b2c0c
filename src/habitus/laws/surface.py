"""The loss surface L(N, D) = E + A/N^α + B/D^β, and the best allocation under any cost.

Variable projection on (α, β) finds the least-squares start in a few milliseconds; the values then minimise
the Huber loss of log residuals. Intervals are profile likelihood on pseudo-observations: with residuals r,
their clipped form ψ and m the share that is not clipped, L·(1 + ψ/m) has the Huber fit as its least-squares
fit, and the right residual variance (Huber 1981, §7.6).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from scipy import optimize

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
from habitus.laws.separable import Curve, Curves, SeparableFit, fit_separable, project, region
from habitus.store import LEVELS, Law

FORM = "L = floor + size_coef/N^size_exponent + data_coef/D^data_exponent"
EXPONENTS = (0.02, 2.5)
VALUES = ("floor", "size_coef", "size_exponent", "data_coef", "data_exponent")
_START_GRID = 13
Cost = Callable[[np.ndarray, np.ndarray], np.ndarray]  # N, D -> FLOPs


def surface(
    N: Numbers,
    D: Numbers,
    loss: Numbers,
    delta: float | Literal["scale"] = "scale",
    bootstrap: int = 0,
    seed: int = 0,
) -> Law:
    """floor, size_coef, size_exponent, data_coef and data_exponent of the three-term law.

    `delta` is where the Huber loss of log residuals turns linear: "scale" takes 1.345 robust standard
    deviations, which loses 5% efficiency on normal noise; 1e-3 is the language-model habit. With
    `bootstrap` > 0 intervals are percentiles over that many resamplings of the points instead.
    """
    N, D, L = as_columns(N=N, D=D, loss=loss)
    check_positive(N=N, D=D, loss=L)
    check_rows_differ(N=N, D=D, loss=L)
    if delta != "scale":
        check_positive_number(delta=delta)
    if bootstrap and bootstrap < 2:
        raise FitError(f"bootstrap = {bootstrap}", expected="0 for profile likelihood, or 2 and more resamplings")
    if len(L) < 7 or num_distinct(N) < 3:
        why = f"{len(L)} points with {num_distinct(N)} sizes; five values need 7 points and 3 sizes"
        return law_without_values("surface", FORM, "too_few", len(L), why)
    if all_equal(L):
        return law_without_values("surface", FORM, "flat", len(L), "all losses are equal")
    if abs(np.corrcoef(np.log(N), np.log(D))[0, 1]) > 0.9999:
        why = "log N and log D lie on one line (a single budget?): size and data cannot be told apart"
        return law_without_values("surface", FORM, "not_identified", len(L), why)
    fitted = fit_surface(N, D, L, delta)
    gone = [f"{n} = {v:.3g}" for n, v in fitted.values.items() if "exponent" in n and not _in_bounds(v)]
    if gone:
        why = f"{', '.join(gone)} runs out of {EXPONENTS[0]}..{EXPONENTS[1]}: these runs do not show that term"
        return law_without_values("surface", FORM, "not_identified", len(L), why)
    best = pseudo_fit(N, D, L, fitted)
    status, warnings = _verdict(best)
    if bootstrap:
        intervals = _bootstrap(N, D, L, delta, bootstrap, seed)
    else:
        intervals = {level: _ranges(fitted, best, level) for level in LEVELS}
        outside = [n for n, ends in intervals[0.95].items() if not _holds(ends, fitted.values[n])]
        if outside:
            status = "not_identified"
            warnings.append(
                f"{', '.join(outside)} cannot be told from zero or from the other term: read no value alone"
            )
        intervals = widen_to_values(intervals, fitted.values)
    return Law(
        law="surface",
        form=FORM,
        status=status,
        values=fitted.values,
        intervals=make_intervals(intervals),
        residuals=residuals_of(L, evaluate(fitted.values, N, D), 5),
        warnings=tuple(warnings),
        points={"N": tuple(N), "D": tuple(D), "loss": tuple(L)},
        details={
            "delta": fitted.delta,
            "objective": fitted.objective,
            "size_law_exponent_6ND": size_exponent_6nd(fitted.values),
            "intervals_by": f"bootstrap of {bootstrap}" if bootstrap else "profile likelihood",
        },
    )


@dataclass(frozen=True)
class SurfaceFit:
    """The log-Huber fit."""

    values: dict[str, float]
    delta: float
    objective: float  # sum of Huber losses of the log residuals
    log_n: float  # what was subtracted from log N and log D before fitting
    log_d: float


@np.errstate(all="ignore")  # an exponent that the runs do not show may run away; `surface` looks at it
def fit_surface(N: np.ndarray, D: np.ndarray, L: np.ndarray, delta: float | Literal["scale"]) -> SurfaceFit:
    """The fit itself, without intervals: projected start, least squares in logarithms, then Huber."""
    log_n, log_d = float(np.log(N).mean()), float(np.log(D).mean())
    u, v = np.log(N) - log_n, np.log(D) - log_d
    low, high = (float(np.log(end)) for end in EXPONENTS)
    axis = np.linspace(low, high, _START_GRID)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), axis=-1).reshape(-1, 2)
    solved = project(Curves.stack([Curve(_surface_terms, np.stack([u, v]), L, 1 / L)]), grid)
    at = int(solved.rss[0].argmin())
    # What is not positive has no logarithm and starts near zero instead.
    start = np.concatenate([np.log(np.maximum(solved.linear[0, at], 1e-3 * float(L.min()))), grid[at]])
    p, _ = _refine(start, u, v, np.log(L), np.inf)
    r = np.log(L) - _log_model(p, u, v)
    # A floor at rounding keeps exact data from asking for a Huber loss of no width.
    deviation = max(1.4826 * float(np.median(np.abs(r - np.median(r)))), 1e-12)
    scale = 1.345 * deviation if delta == "scale" else float(delta)
    p, objective = _refine(p, u, v, np.log(L), scale)
    e, a, b, alpha, beta = (float(x) for x in np.exp(p))
    values = (e, a * float(np.exp(alpha * log_n)), alpha, b * float(np.exp(beta * log_d)), beta)
    return SurfaceFit(dict(zip(VALUES, values, strict=True)), scale, objective, log_n, log_d)


def pseudo_fit(N: np.ndarray, D: np.ndarray, L: np.ndarray, fitted: SurfaceFit) -> SeparableFit:
    """The least-squares fit of the pseudo-observations, which carries the Huber fit's uncertainty."""
    model = evaluate(fitted.values, N, D)
    r = np.log(L) - np.log(model)
    psi = np.clip(r, -fitted.delta, fitted.delta)
    unclipped = max(float((np.abs(r) <= fitted.delta).mean()), 1 / len(L))
    # Huber's correction for few points per value widens the residuals by a few per cent.
    small_sample = 1 + 5 / len(L) * (1 - unclipped) / unclipped
    x = np.stack([np.log(N) - fitted.log_n, np.log(D) - fitted.log_d])
    curve = Curve(_surface_terms, x, model * (1 + small_sample * psi / unclipped), 1 / model)
    return fit_separable([curve], (EXPONENTS, EXPONENTS))


def evaluate(values: dict[str, Any], N: np.ndarray, D: np.ndarray) -> np.ndarray:
    """The law's loss at N and D."""
    e, a, alpha, b, beta = (values[name] for name in VALUES)
    return e + a * N**-alpha + b * D**-beta


def predict_surface(law: Law, N: float, D: float, level: float = 0.95) -> tuple[float, float, float]:
    """(value, low, high) of the surface at one size and amount of data; the interval is that of the surface."""
    if law.law != "surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted surface")
    check_positive_number(N=N, D=D)
    sizes, slots, losses = (np.asarray(law.points[name]) for name in ("N", "D", "loss"))
    fitted = fit_surface(sizes, slots, losses, law.details["delta"])
    u, v = float(np.log(N)) - fitted.log_n, float(np.log(D)) - fitted.log_d
    low, high = region(pseudo_fit(sizes, slots, losses, fitted), level).range_of(
        lambda t, c: c[:, 0] + c[:, 1] * np.exp(-t[:, 0] * u) + c[:, 2] * np.exp(-t[:, 1] * v)
    )
    value = float(evaluate(law.values, np.array([N]), np.array([D]))[0])
    return value, min(low, value), max(high, value)


def size_exponent_6nd(values: dict[str, Any]) -> float:
    """N* ∝ C^{β/(α+β)} where C = 6ND."""
    return values["data_exponent"] / (values["size_exponent"] + values["data_exponent"])


def _holds(ends: tuple[float, float], value: float) -> bool:
    """Whether an interval holds a value, give or take a thousandth of it: exact data leave only rounding."""
    return bool(ends[0] - 1e-3 * abs(value) <= value <= ends[1] + 1e-3 * abs(value))


def _in_bounds(exponent: float) -> bool:
    return bool(EXPONENTS[0] <= exponent <= EXPONENTS[1])


def _surface_terms(log_theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """N^−α and D^−β, for many (log α, log β) at once."""
    alpha, beta = np.exp(log_theta).T
    u, v = x
    return np.exp(np.stack([-alpha * u, -beta * v]))


def _log_model(p: np.ndarray, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    e, a, b, alpha, beta = p[0], p[1], p[2], np.exp(p[3]), np.exp(p[4])
    return np.logaddexp(e, np.logaddexp(a - alpha * u, b - beta * v))


def _refine(
    p: np.ndarray, u: np.ndarray, v: np.ndarray, log_loss: np.ndarray, delta: float
) -> tuple[np.ndarray, float]:
    """The minimum of Σ Huber_δ(log L − log f) near p; plain least squares for an infinite δ."""

    def missed(p: np.ndarray) -> np.ndarray:
        return _log_model(p, u, v) - log_loss

    def slopes(p: np.ndarray) -> np.ndarray:
        alpha, beta = np.exp(p[3]), np.exp(p[4])
        log_f = _log_model(p, u, v)
        from_size, from_data = np.exp(p[1] - alpha * u - log_f), np.exp(p[2] - beta * v - log_f)
        return np.stack(
            [np.exp(p[0] - log_f), from_size, from_data, -from_size * alpha * u, -from_data * beta * v], axis=1
        )

    robust = {"loss": "huber", "f_scale": delta} if np.isfinite(delta) else {}
    solution = optimize.least_squares(
        missed, p, jac=slopes, x_scale="jac", xtol=1e-12, ftol=1e-12, gtol=1e-12, **robust
    )
    return solution.x, float(solution.cost)


def _ranges(fitted: SurfaceFit, best: SeparableFit, level: float) -> dict[str, tuple[float, float]]:
    """The profile interval of every value."""
    allowed = region(best, level)
    log_n, log_d = fitted.log_n, fitted.log_d
    return {
        "floor": allowed.range_of(lambda _, c: c[:, 0]),
        "size_coef": allowed.range_of(lambda t, c: c[:, 1] * np.exp(t[:, 0] * log_n)),
        "size_exponent": allowed.range_of(lambda t, _: t[:, 0]),
        "data_coef": allowed.range_of(lambda t, c: c[:, 2] * np.exp(t[:, 1] * log_d)),
        "data_exponent": allowed.range_of(lambda t, _: t[:, 1]),
    }


def _verdict(best: SeparableFit) -> tuple[Any, list[str]]:
    if best.linear[0][1] <= 0 or best.linear[0][2] <= 0:
        side = "size" if best.linear[0][1] <= 0 else "data"
        return "not_identified", [f"the {side} term vanishes: the loss does not depend on it in these runs"]
    stuck = [
        f"{name} = {value:.3g} sits at its bound"
        for name, value, at in zip(("size_exponent", "data_exponent"), best.theta, best.at_bound, strict=True)
        if at
    ]
    return ("not_identified" if stuck else "ok"), stuck


def _bootstrap(
    N: np.ndarray, D: np.ndarray, L: np.ndarray, delta: Any, times: int, seed: int
) -> dict[float, dict[str, tuple[float, float]]]:
    """Percentiles of the values over resampled points."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(times):
        rows = rng.integers(0, len(L), len(L))
        if len(np.unique(N[rows])) < 3:
            continue
        values = fit_surface(N[rows], D[rows], L[rows], delta).values
        drawn.append([values[name] for name in VALUES])
    table = np.array(drawn)
    result = {}
    for level in LEVELS:
        low, high = np.quantile(table, [0.5 - level / 2, 0.5 + level / 2], axis=0)
        result[level] = {name: (float(a), float(b)) for name, a, b in zip(VALUES, low, high, strict=True)}
    return result
