"""What a run of given size and data should measure: the one estimator that plans and roll-outs share.

Two readings of the same runs. By the frontier, (N, D) cost what the runs' own batches and shares would have charged
for them, C' = k·N^p·D^q, and a run lies above L*(C') by as much as its size is off the best one:

    sign·y = sign·L*(C') + w·(r^α/α + r^−β/β − 1/α − 1/β),      r = N/N*(C'),   w = a·α·N*^α

with the valley of the largest budget. By the surface, L(N, D) itself. Intervals are for one more run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from scipy import stats

from habitus.laws.checks import sign_of
from habitus.laws.cost import RealisedCost
from habitus.laws.power_law import predict_power_law
from habitus.laws.saturating import predict_saturating
from habitus.laws.surface import predict_surface
from habitus.store import Direction, Law


class RunValue(NamedTuple):
    """The value of one more run and its 95% interval, which may be open."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RecipeLaws:
    """The laws of one metric that say what a run should measure."""

    direction: Direction
    height: Law  # L*(C)
    size: Law  # N*(C)
    optima: Sequence[Law]  # of the budgets, small to large
    cost: RealisedCost
    surface: Law | None = None

    @property
    def identified(self) -> tuple[str, ...]:
        """The readings that stand by their numbers: 'loss_law', 'surface'."""
        return (("loss_law",) if self.height.ok and self.size.ok else ()) + (
            ("surface",) if self.surface and self.surface.ok else ()
        )

    def predict(self, reading: str, N: float, D: float, level: float = 0.95) -> RunValue:
        """One more run of N parameters on D slots, by one of the readings."""
        if reading == "surface":
            assert self.surface is not None
            curve = RunValue(*predict_surface(self.surface, N, D, level))
            sd, dof = _scatter([self.surface])
        else:
            curve = self._by_height(N, D, level)
            sd, dof = _scatter([law for law in self.optima if law.ok])
        noise = sd * float(stats.t.ppf(0.5 + level / 2, dof)) if dof else 0.0
        value, low, high = curve
        return RunValue(
            value, value - float(np.hypot(value - low, noise)), value + float(np.hypot(high - value, noise))
        )

    def _by_height(self, N: float, D: float, level: float) -> RunValue:
        C = self.cost.flops(N, D)
        best, low, high = predict_saturating(self.height, C, level)
        sign = sign_of(self.direction)
        size, small, large = predict_power_law(self.size, C, level)
        at, *ends = (self._penalty(N, best_size) for best_size in (size, small, large))
        least, most = 0.0 if small <= N <= large else min(at, *ends), max(at, *ends)
        value = best + sign * at
        below, above = (at - least, most - at) if sign > 0 else (most - at, at - least)
        return RunValue(value, value - float(np.hypot(best - low, below)), value + float(np.hypot(high - best, above)))

    def _penalty(self, N: float, best: float) -> float:
        """How much worse than the optimum a size is, in the valley of the largest budget."""
        valleys = [law for law in self.optima if law.ok]
        if not valleys or not np.isfinite(best) or best <= 0:
            return 0.0
        about = valleys[-1].details
        alpha, beta = about["alpha"], about["beta"]
        width = about["a"] * alpha * valleys[-1]["x_opt"] ** alpha
        u = float(np.clip(np.log(N / best), -20, 20))
        return float(width * (np.exp(alpha * u) / alpha + np.exp(-beta * u) / beta - 1 / alpha - 1 / beta))


def _scatter(laws: Sequence[Law]) -> tuple[float, int]:
    """Standard deviation of single runs about the fitted curves, and its degrees of freedom."""
    dof = sum(max(law.residuals.dof, 0) for law in laws)
    squares = sum(law.residuals.n * (law.residuals.rmse or 0.0) ** 2 for law in laws)
    return (float(np.sqrt(squares / dof)), dof) if dof else (0.0, 0)
