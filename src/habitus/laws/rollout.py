"""What a law would have said earlier: fit the lowest budgets, predict the rest; and leave each one out.

A law's own R² does not know the future: the paper's training losses up to 10^18 are fitted with R² = .999 and
still miss its 10^19 by 7.6%.
"""

from collections.abc import Callable, Iterable

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import as_columns, as_pairs, check_positive
from habitus.laws.power_law import power_law, predict_power_law
from habitus.laws.saturating import predict_saturating, saturating
from habitus.store import Forecast, Law, Rollout
from habitus.units import pluralize

_LAWS: dict[str, tuple[Callable[..., Law], Callable[..., tuple[float, float, float]], int]] = {
    "power_law": (power_law, predict_power_law, 3),
    "saturating": (saturating, predict_saturating, 3),
}


def rollout(records: Iterable[tuple[float, float]], law: str) -> Rollout:
    """Forecasts of every later budget from the lowest k, for every k that the law can be fitted to.

    `records` are (compute, value) pairs, one per budget; `law` is "power_law" (N*, D*, s*, K*) or "saturating" (L*).
    """
    C, y = _sorted(records)
    fit, predict, least = _law_functions(law)
    forecasts = []
    for k in range(least, len(C)):
        earlier = fit(C[:k], y[:k])
        if not earlier.values:
            continue
        forecasts += [_forecast(earlier, predict, C[:k], float(c), float(v)) for c, v in zip(C[k:], y[k:], strict=True)]
    return Rollout(law=law, forecasts=tuple(forecasts), warnings=tuple(_warnings(forecasts, law, len(C), least)))


def leave_one_out(records: Iterable[tuple[float, float]], law: str) -> Rollout:
    """Each budget predicted from all the others."""
    C, y = _sorted(records)
    fit, predict, least = _law_functions(law)
    if len(C) <= least:
        why = f"{len(C)} budgets: leaving one out leaves too few for a {law}"
        return Rollout(law=law, forecasts=(), warnings=(why,))
    forecasts = []
    for i in range(len(C)):
        others = np.arange(len(C)) != i
        rest = fit(C[others], y[others])
        if rest.values:
            forecasts.append(_forecast(rest, predict, C[others], float(C[i]), float(y[i])))
    return Rollout(law=law, forecasts=tuple(forecasts), warnings=tuple(_outside(forecasts)))


def _forecast(
    law: Law, predict: Callable[..., tuple[float, float, float]], fitted: np.ndarray, budget: float, observed: float
) -> Forecast:
    return hold_against(observed, predict(law, budget), fitted, budget, law.residuals.r2)


def hold_against(
    observed: float, value: tuple[float, float, float], fitted: np.ndarray, budget: float, r2: float | None
) -> Forecast:
    """A value and its interval, forecast from some budgets, beside what was observed at another."""
    predicted, low, high = value
    return Forecast(
        fitted_budgets=tuple(float(c) for c in fitted),
        budget=budget,
        predicted=predicted,
        low=low if np.isfinite(low) else None,
        high=high if np.isfinite(high) else None,
        observed=observed,
        ratio=predicted / observed,
        r2=r2,
    )


def _warnings(forecasts: list[Forecast], law: str, n: int, least: int) -> list[str]:
    if not forecasts:
        return [f"{pluralize(n, 'budget')}: a roll-out of a {law} needs {least + 1}"]
    warnings = _outside(forecasts)
    next_one = [f for f in forecasts if f.budget == max(g.budget for g in forecasts)]
    latest = max(next_one, key=lambda f: len(f.fitted_budgets))
    tolerance = 0.02 if law == "saturating" else 0.25
    if abs(latest.miss) > tolerance:
        quality = "" if latest.r2 is None else f" although its own R² was {latest.r2:.3f}"
        how = f"{latest.miss:+.1%}" if law == "saturating" else f"{latest.ratio:.2f} times"
        warnings.append(
            f"fitted up to {latest.fitted_budgets[-1]:.3g} FLOPs, the law misses {latest.budget:.3g} by {how}"
            f"{quality}: expect no better of the next extrapolation"
        )
    return warnings


def _outside(forecasts: list[Forecast]) -> list[str]:
    missed = [
        f
        for f in forecasts
        if (f.low is not None and f.observed < f.low) or (f.high is not None and f.observed > f.high)
    ]
    if not missed:
        return []
    return [f"{len(missed)} of {len(forecasts)} observed values lie outside their forecast's 95% interval of the curve"]


def _law_functions(law: str) -> tuple[Callable[..., Law], Callable[..., tuple[float, float, float]], int]:
    if law not in _LAWS:
        raise FitError(f"law {law!r} is unknown here", expected=f"one of {', '.join(_LAWS)}")
    return _LAWS[law]


def _sorted(records: Iterable[tuple[float, float]]) -> tuple[np.ndarray, np.ndarray]:
    compute, value = as_pairs(records, "records")
    C, y = as_columns(compute=compute, value=value)
    check_positive(compute=C)
    if (y == 0).any():
        raise FitError(
            "a value is zero", expected="values other than zero, since a miss is a share of what was observed"
        )
    if len(np.unique(C)) < len(C):
        raise FitError("a budget stands twice in the records", expected="one value per budget")
    order = np.argsort(C)
    return C[order], y[order]
