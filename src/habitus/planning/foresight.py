"""What roll-outs missed, and by how much a forecast of the same estimator may therefore be off."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from habitus.store import NamedRollout

# A study has one roll-out or two, which can be right by luck: on planted studies intervals failed where they were.
_LEAST_MISS = 0.15
_KNOWN_REACH = 10.0  # times the largest budget: so far forecasts were seen to hold, at a hundred times not all did


class Foreseen(NamedTuple):
    """What was measured at the largest fitted budget, what was forecast of the next one and what that measured."""

    last: float
    forecast: float
    measured: float


def foreseen_by(rollouts: Sequence[NamedRollout], reading: str, metric: str) -> list[Foreseen]:
    """The forecasts of the next budget by one law, from every number of budgets that was tried."""
    found = []
    for item in rollouts:
        if (item.name, item.metric) == (reading, metric):
            nearest: dict[int, tuple[float, Foreseen]] = {}
            for f in item.rollout.forecasts:
                k = len(f.fitted_budgets)
                if f.last is not None and f.gain is not None and f.budget < nearest.get(k, (math.inf, None))[0]:
                    nearest[k] = f.budget, Foreseen(f.last, f.predicted, f.observed)
            found += [foreseen for _, foreseen in nearest.values()]
    return found


def error_of_gain(rollouts: Sequence[Foreseen]) -> float | None:
    """Root mean square of the errors as shares of what each budget gained: persistence has 1. None without a gain."""
    errors = [(r.measured - r.forecast) / (r.measured - r.last) for r in rollouts if r.measured != r.last]
    return math.sqrt(math.fsum(e * e for e in errors) / len(errors)) if errors else None


def share_missed(rollouts: Sequence[Foreseen]) -> float:
    """What roll-outs missed, of what they promised; no less than chance would show in a better law.

    Of what they promised, since what is known of the next run is a promise: of a law that promised a third of each gain
    the next gain is three times what it promises. All together, for one that promised next to nothing.
    """
    missed = math.fsum((r.measured - r.forecast) ** 2 for r in rollouts)
    promised = math.fsum((r.forecast - r.last) ** 2 for r in rollouts)
    if not promised:
        return math.inf if missed else _LEAST_MISS
    return max(_LEAST_MISS, math.sqrt(missed / promised))


def allowance(rollouts: Sequence[Foreseen], reach: float) -> tuple[float, str]:
    """The share of the promised gain by twice which an interval is widened, at `reach` times the largest budget; and
    how that came about."""
    share, growth = share_missed(rollouts), max(1.0, math.log(reach, _KNOWN_REACH))
    why = f"the interval holds twice {share:.0%} of the one promised now"
    if growth > 1:
        why += f", times {growth:.1f} since it lies {reach:.0f} times beyond the largest budget"
    return share * growth, why


def widened(value: float, low: float, high: float, miss: float) -> tuple[float, float]:
    """The ends of an interval with one more error, as far to either side."""
    return value - math.hypot(value - low, miss), value + math.hypot(high - value, miss)
