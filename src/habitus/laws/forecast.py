"""Forecasts of the allocation axis: each budget from runs of other budgets alone, with the plan's own estimator.

Everything is fitted again without the budgets that are forecast: the rate's curve, the error from seed to seed, the
shared shape of the valleys, the weights of the optima, N*(C), L*(C) and the surface. What a forecast is held against is
measured: the best run of the budget as it ran, moved to no other rate; and for N* the optimum by all runs.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from habitus.errors import FitError
from habitus.laws.allocation_runs import AllocationRuns
from habitus.laws.cost import SIX_ND, realised_cost
from habitus.laws.frontier import SharedShape, shared_shape
from habitus.laws.power_law import predict_power_law
from habitus.laws.recipe_value import RecipeLaws
from habitus.laws.rollout import hold_against
from habitus.laws.surface import surface
from habitus.store import Forecast, NamedRollout, Rollout
from habitus.units import pluralize

_FEWEST = 3  # budgets that a law can be fitted to
_SIZE_TOLERANCE = 1.25  # of N*; beyond it the roll-out warns
GAIN_TOLERANCE = 0.15  # of the gain since the last fitted budget, likewise
_NAMES = ("size_law", "loss_law", "surface")


@dataclass(frozen=True)
class AllocationEstimate:
    """What some runs say of another budget."""

    shape: SharedShape
    laws: RecipeLaws

    def size_at(self, budget: float) -> tuple[float, float, float] | None:
        """N* and its interval; None where there is no size law."""
        return predict_power_law(self.shape.size, budget) if self.shape.size.ok else None

    def metric_at(self, reading: str, budget: float) -> tuple[float, float, float] | None:
        """The metric of the run that a plan for the budget would choose; None where the reading is not identified."""
        size = self.size_at(budget)
        if size is None or reading not in self.laws.identified:
            return None
        return self.laws.predict(reading, size[0], self.laws.cost.data(budget, size[0]))


def estimate(runs: AllocationRuns, *, with_surface: bool = True) -> AllocationEstimate:
    """The shared shape, and where the runs say how much data they saw, the realised cost and the surface."""
    values = runs.at_best_rate
    shape = shared_shape(runs.budget, runs.size, values, runs.direction, runs.error)
    cost, by_surface = SIX_ND, None  # along the frontier any cost gives the budget back
    if runs.slots is not None:
        with suppress(FitError):
            cost = realised_cost(runs.size, runs.slots, runs.budget)
        if with_surface and runs.direction == "min" and (values > 0).all():
            by_surface = surface(runs.size, runs.slots, values)
    laws = RecipeLaws(runs.direction, shape.height, shape.size, tuple(shape.optima.values()), cost, by_surface)
    return AllocationEstimate(shape, laws)


def allocation_rollouts(runs: AllocationRuns, whole: SharedShape) -> Iterator[NamedRollout]:
    """For N*, the loss law and the surface: every later budget from the lowest k, and each from all the others.

    `runs` are as measured; `whole` is the shape by all of them, whose optima forecasts of N* are held against.
    """
    budgets = np.unique(runs.budget)
    ahead: dict[str, list[Forecast]] = {name: [] for name in _NAMES}
    left_out: dict[str, list[Forecast]] = {name: [] for name in _NAMES}
    for k in range(_FEWEST, len(budgets)):
        _forecast(runs, whole, budgets[:k], budgets[k:], ahead)
    if len(budgets) > _FEWEST:
        for budget in budgets:
            _forecast(runs, whole, budgets[budgets != budget], np.array([budget]), left_out)
    for name in _NAMES:
        if ahead[name] or left_out[name] or name != "surface":
            yield NamedRollout(
                name=name,
                metric=runs.metric,
                rollout=Rollout(
                    law=name, forecasts=tuple(ahead[name]), warnings=_warnings(ahead[name], name, len(budgets))
                ),
                leave_one_out=Rollout(law=name, forecasts=tuple(left_out[name])),
            )


def _forecast(
    runs: AllocationRuns,
    whole: SharedShape,
    fitted: np.ndarray,
    others: np.ndarray,
    forecasts: dict[str, list[Forecast]],
) -> None:
    """Add what the fitted budgets alone say of the others."""
    try:
        earlier = estimate(runs.at(fitted), with_surface=bool(others.min() > fitted.max()))
    except FitError:
        return
    log_line = _log_line(runs, fitted)
    last = runs.best(float(fitted[-1]))
    for budget in (float(b) for b in others):
        size = earlier.size_at(budget)
        optimum = whole.optima.get(budget)
        if size is not None and optimum is not None and optimum.ok:
            r2 = earlier.shape.size.residuals.r2
            forecasts["size_law"].append(hold_against(float(optimum["x_opt"]), size, fitted, budget, r2))
        for reading in ("loss_law", "surface"):
            value = earlier.metric_at(reading, budget)
            observed = runs.best(budget)
            if value is None or observed == 0:
                continue
            law = earlier.laws.height if reading == "loss_law" else earlier.laws.surface
            one = hold_against(observed, value, fitted, budget, law.residuals.r2 if law else None)
            beside = {"last": last, "log_line": log_line(budget)} if budget > fitted[-1] else {}
            forecasts[reading].append(one.model_copy(update=beside))


def _log_line(runs: AllocationRuns, fitted: np.ndarray) -> Callable[[float], float]:
    """The straight line in log C through the best runs of the two largest fitted budgets."""
    before, last = (float(c) for c in fitted[-2:])
    slope = (runs.best(last) - runs.best(before)) / np.log(last / before)
    return lambda budget: float(runs.best(last) + slope * np.log(budget / last))


def _warnings(forecasts: list[Forecast], name: str, num_budgets: int) -> tuple[str, ...]:
    if not forecasts:
        if num_budgets <= _FEWEST:
            return (f"{pluralize(num_budgets, 'budget')}: a roll-out needs {_FEWEST + 1}",)
        return ("no law fitted to fewer budgets is identified: nothing was forecast",)
    warnings = []
    missed = [f for f in forecasts if not (f.low or -np.inf) <= f.observed <= (np.inf if f.high is None else f.high)]
    if missed:
        warnings.append(f"{len(missed)} of {len(forecasts)} observed values lie outside their forecast's 95% interval")
    top = max(f.budget for f in forecasts)
    latest = max((f for f in forecasts if f.budget == top), key=lambda f: len(f.fitted_budgets))
    where = f"fitted up to {latest.fitted_budgets[-1]:.3g} FLOPs, the law misses {latest.budget:.3g} by"
    if name == "size_law":
        if not 1 / _SIZE_TOLERANCE <= latest.ratio <= _SIZE_TOLERANCE:
            warnings.append(f"{where} {latest.ratio:.2f} times: expect no better of the next extrapolation")
    else:
        warnings += _gain_warning(latest, where)
    return tuple(warnings)


def _gain_warning(forecast: Forecast, where: str) -> list[str]:
    error, by_line = forecast.error_of_gain(), forecast.error_of_gain(forecast.log_line)
    if error is None or abs(error) <= GAIN_TOLERANCE:
        return []
    line = "" if by_line is None else f" (a straight line in log C by {abs(by_line):.0%})"
    return [
        f"{where} {forecast.miss:+.1%}, {abs(error):.0%} of the gain since then{line}: "
        "expect no better of the next extrapolation"
    ]
