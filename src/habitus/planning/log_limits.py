"""What a log can still give, from the law of a finite log: best size and passes, the end of compute, more users.

Letters: N parameters, U unique events, R passes; cells are a grid over the sizes and passes that were swept.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from habitus.laws import FiniteLog, Place, best_rows, open_finite_log
from habitus.store import Estimate, Law, LogLimits, MoreUsers, NextStep

LEVEL = 0.95
MORE_USERS = (2.0, 4.0, 10.0)
FLAT = 0.001  # of the metric: a change below it is none
_ROUNDING = 1e-3  # of that
_FLOPS_PER_PARAM_EVENT = 6.0
_SIZES, _PASSES = 25, 49  # of the grid

Quantity = Callable[[np.ndarray, np.ndarray], np.ndarray]


def log_limits(law: Law, metric: str) -> LogLimits:
    """The answers of a law of a finite log; those that it cannot give are absent, and a note says why."""
    if not law.points or law.status == "disagree":
        return LogLimits(metric=metric, status=law.status, notes=law.warnings)
    # What the runs had, as Equation 1 counts, for each of their parameters and events.
    answers = _Answers(open_finite_log(law), law.details.get("flops_per_param_event", _FLOPS_PER_PARAM_EVENT))
    notes = list(law.warnings)
    forecasts = law.status == "ok" and "forecast_held_out" in law.details
    return LogLimits(
        metric=metric,
        status=law.status,
        form=law.form,
        forecast_by=law.details["forecast_by"],
        events=answers.U,
        **answers.optimum(notes),
        steps=answers.steps(),
        more_users=tuple(answers.more_users(factor) for factor in MORE_USERS) if forecasts else (),
        notes=tuple(notes),
    )


@dataclass
class _Answers:
    fitted: FiniteLog
    flops_per_param_event: float

    def __post_init__(self) -> None:
        place, runs = self.fitted.runs.place, self.fitted.runs
        self.U = self.fitted.largest_events
        top = runs.where(np.flatnonzero(runs.level == runs.level.max()))
        best = top.where(best_rows(top)).middle
        self.N, self.R = float(best.N), float(best.R)  # of the best runs on the largest share
        low, high = float(place.N.min()), float(place.N.max())
        sizes = np.geomspace(low, high, _SIZES) if high > 1.01 * low else np.array([self.N])
        passes = np.geomspace(max(float(place.R.min()), 0.5), float(place.R.max()), _PASSES)
        self.sizes, self.passes = sizes, passes

    def optimum(self, notes: list[str]) -> dict[str, Estimate]:
        """Best size, passes and value, and where compute ends, each if the runs show it."""
        surface = self.fitted.surface
        if surface is None:
            return {}
        grid = self._grid(self.U)
        shape = (len(self.sizes), len(self.passes))

        def law_on_grid(theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
            phi = surface.form.terms(theta, grid, surface.runs.middle)
            return linear[:, :1] + np.einsum("gnm,gm->gn", phi, linear[:, 1:])

        def best(axis: int, ticks: np.ndarray) -> Quantity:
            return lambda theta, c: _vertex(law_on_grid(theta, c).reshape(-1, *shape).min(2 - axis), np.log(ticks))

        answers: dict[str, Estimate] = {}
        log_passes = best(1, self.passes)
        answers["best_passes"] = self._estimate(log_passes, exponential=True)
        if len(self.sizes) > 1:
            answers["best_size"] = self._estimate(best(0, self.sizes), exponential=True)
        R, N = answers["best_passes"].value, answers["best_size"].value if "best_size" in answers else self.N
        value, low, high = self.fitted.predict(N, self.U, R, LEVEL)
        answers["best_value"] = self._possible(value, low, high)
        for name, found, ticks in (("passes", R, self.passes), ("parameters", N, self.sizes)):
            if len(ticks) > 1 and not 1.02 * ticks[0] < found < ticks[-1] / 1.02:
                notes.append(f"the best number of {name} lies at the edge of what was swept, {found:.3g}")
                open_end = "high" if found > ticks[0] * 1.02 else "low"
                key = "best_passes" if ticks is self.passes else "best_size"
                answers[key] = answers[key].model_copy(update={open_end: None})
        limit = self._estimate(self._end_of_compute(law_on_grid, grid), exponential=True)
        most = self.flops_per_param_event * float((grid.N * grid.U * grid.R).max())
        if limit.value < 0.9 * most:
            answers["compute_limit"] = limit
        else:
            notes.append(f"up to the most that was swept, {most:.3g} FLOPs, compute still buys something")
        return answers

    def steps(self) -> tuple[NextStep, ...]:
        """One more pass, and twice the size, from the best runs on the largest share."""
        surface = self.fitted.surface
        if surface is None:
            return ()
        moves = {"one more pass": (self.N, self.R + 1)}
        if len(self.sizes) > 1:
            moves["twice the size"] = (2 * self.N, self.R)
        said = []
        for what, (N, R) in moves.items():
            place = Place(np.array([self.N, N]), np.array([self.U, self.U]), np.array([self.R, R]))
            difference = surface.quantity(place, np.array([-1.0, 1.0]))
            change = float(difference(surface.theta[None], surface.linear[None])[0])
            low, high = surface.range_of(difference, LEVEL)
            flat = FLAT * abs(float(surface.value(place)[0]))
            helps = "no" if low > -flat else "yes" if high < -_ROUNDING * flat else "undecided"
            ends = sorted(self.fitted.sign * end for end in (min(low, change), max(high, change)))
            estimate = Estimate(value=self.fitted.sign * change, low=ends[0], high=ends[1])
            said.append(NextStep(what=what, change=estimate, helps=helps))
        return tuple(said)

    def more_users(self, factor: float) -> MoreUsers:
        """The metric at the size of the best runs and the passes that the law prefers there."""
        U, R = factor * self.U, self.R
        surface = self.fitted.surface
        if surface is not None:
            place = Place(np.full(_PASSES, self.N), np.full(_PASSES, U), self.passes)
            R = float(self.passes[surface.value(place).argmin()])
        value, low, high = self.fitted.forecast(self.N, U, R, LEVEL)
        return MoreUsers(factor=factor, events=U, passes=R, value=self._possible(value, low, high))

    def _possible(self, value: float, low: float, high: float) -> Estimate:
        """The interval within what the metric can be: a loss is not below zero, recall and NDCG also not above one."""
        return Estimate(value=value, low=max(low, 0.0), high=high if self.fitted.sign > 0 else min(high, 1.0))

    def _grid(self, U: float) -> Place:
        N, R = (axis.ravel() for axis in np.meshgrid(self.sizes, self.passes, indexing="ij"))
        return Place(N, np.full(len(N), U), R)

    def _end_of_compute(self, law_on_grid: Quantity, grid: Place) -> Quantity:
        """log of the least FLOPs from which on nothing is gained, on the grid."""
        flops = self.flops_per_param_event * grid.N * grid.U * grid.R
        order = np.argsort(flops)

        def log_flops(theta: np.ndarray, linear: np.ndarray) -> np.ndarray:
            values = law_on_grid(theta, linear)[:, order]
            reached = np.minimum.accumulate(values, axis=1)
            near = reached <= reached[:, -1:] + FLAT * np.abs(reached[:, -1:])
            return np.asarray(np.log(flops[order][near.argmax(1)]))

        return log_flops

    def _estimate(self, quantity: Quantity, *, exponential: bool = False) -> Estimate:
        surface = self.fitted.surface
        assert surface is not None
        value = float(quantity(surface.theta[None], surface.linear[None])[0])
        low, high = surface.range_of(quantity, LEVEL)
        ends = min(low, value), value, max(high, value)
        low, value, high = (float(np.exp(end)) for end in ends) if exponential else ends
        return Estimate(value=value, low=low, high=high)


def _vertex(values: np.ndarray, ticks: np.ndarray) -> np.ndarray:
    """Where the parabola through the lowest of values [G, n] and its neighbours is lowest; the tick at an edge."""
    at = values.argmin(1)
    inner = np.clip(at, 1, values.shape[1] - 2)
    rows = np.arange(len(values))
    left, here, right = (values[rows, inner + k] for k in (-1, 0, 1))
    bend = left - 2 * here + right
    with np.errstate(all="ignore"):
        move = np.where(bend > 0, (left - right) / (2 * bend), 0.0)
    vertex = ticks[inner] + np.clip(move, -0.5, 0.5) * (ticks[1] - ticks[0])
    return np.where(at == inner, vertex, ticks[at])
