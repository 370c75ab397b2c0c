"""The runs of the allocation axis for one metric, and what other runs say of their rates and their noise.

Both the rate's curve and the error from seed to seed are fitted to the runs held here, so that the runs of some budgets
alone know nothing of the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from habitus.laws.checks import sign_of
from habitus.laws.pure_error import PureError, axis_error
from habitus.laws.rate_response import RateResponse, rate_response
from habitus.laws.runs import MeasuredRun
from habitus.store import AXES, Direction, direction_of

ALLOCATION = "allocation"


@dataclass(frozen=True)
class AllocationRuns:
    """Runs with a size and the metric, at their cells' rates; beside them all usable runs, of every axis and rate."""

    metric: str
    chosen: tuple[MeasuredRun, ...]
    usable: tuple[MeasuredRun, ...] = ()

    def at(self, budgets: Sequence[float] | np.ndarray) -> "AllocationRuns":
        """What is known by the runs of some budgets."""
        kept = {float(c) for c in budgets}
        return replace(
            self,
            chosen=tuple(run for run in self.chosen if run.budget in kept),
            usable=tuple(run for run in self.usable if run.budget in kept),
        )

    @property
    def direction(self) -> Direction:
        return direction_of(self.metric)

    @cached_property
    def budget(self) -> np.ndarray:
        return np.array([run.budget for run in self.chosen])

    @cached_property
    def size(self) -> np.ndarray:
        return np.array([run.knobs[AXES[ALLOCATION].knob] for run in self.chosen])

    @cached_property
    def slots(self) -> np.ndarray | None:
        """Slots seen; None where a run does not say."""
        if not all("slots_seen" in run.knobs for run in self.chosen):
            return None
        return np.array([run.knobs["slots_seen"] for run in self.chosen])

    @cached_property
    def measured(self) -> np.ndarray:
        return np.array([run.metrics[self.metric] for run in self.chosen])

    @cached_property
    def response(self) -> RateResponse | None:
        """What cells of the axis that were run at several rates say; None where they say nothing."""
        on_axis = [run for run in self.usable if run.axis == ALLOCATION]
        return rate_response(on_axis, self.metric, self.direction)

    @cached_property
    def at_best_rate(self) -> np.ndarray:
        """The metric as it would be at each run's best rate; as measured where the best rate is not known."""
        response = self.response
        if response is None or not all("batch_sequences" in run.knobs for run in self.chosen):
            return self.measured
        return self.measured - sign_of(self.direction) * np.array([response.lost(run) for run in self.chosen])

    @cached_property
    def error(self) -> PureError | None:
        """From seed to seed."""
        return axis_error(self.usable, ALLOCATION, self.metric)

    def best(self, budget: float) -> float:
        """What the budget's best cell measured, a mean over its seeds: no curve and no other budget has touched it."""
        at = self.budget == budget
        sizes, measured = self.size[at], self.measured[at]
        means = [float(measured[sizes == size].mean()) for size in np.unique(sizes)]
        return min(means) if self.direction == "min" else max(means)
