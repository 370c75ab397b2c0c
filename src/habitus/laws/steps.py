"""Steps to a target: how many updates each batch size needs, and which target is fair to all of them."""

from collections.abc import Mapping, Sequence

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import as_columns, as_pairs, sign_of
from habitus.store import Direction
from habitus.typed import Typed

Trajectory = Sequence[tuple[float, float]] | np.ndarray  # (step, value), in order of steps
EWMA_HALF_LIFE = 5.0  # evaluations
MARGIN = 0.01  # of the range


class IsoTarget(Typed):
    """A target that every batch size reaches, and how it was chosen."""

    target: float
    strictest: float
    limiting_batch: float
    rule: str


def steps_to_target(
    trajectory: Trajectory, target: float, direction: Direction = "min", ewma: float = EWMA_HALF_LIFE
) -> float | None:
    """The step at which the smoothed metric first reaches the target; None if never.

    `ewma` is the half-life of the smoothing, in evaluations; 0 takes the values as they are, and the step is then that
    of the evaluation itself. A mean of the past stands for a moment of the past: steps are smoothed with the same
    weights, so that a straight stretch is crossed without delay, and interpolated between evaluations.
    """
    steps, values = _split(trajectory)
    sign = sign_of(direction)
    heights, times = sign * smooth(values, ewma) - sign * target, smooth(steps, ewma)
    reached = np.flatnonzero(heights <= 0)
    if not reached.size:
        return None
    at = int(reached[0])
    if ewma <= 0 or at == 0:
        return float(times[at])
    share = heights[at - 1] / (heights[at - 1] - heights[at])
    return float(times[at - 1] + share * (times[at] - times[at - 1]))


def iso_target(
    trajectories: Mapping[float, Trajectory],
    direction: Direction = "min",
    ewma: float = EWMA_HALF_LIFE,
    margin: float = MARGIN,
) -> IsoTarget:
    """The strictest value that every batch size reaches when smoothed, loosened by a share of the range.

    The range is what the worst batch size covers between its first smoothed value and its best one.
    """
    if not trajectories:
        raise FitError("no trajectories", expected="one per batch size")
    sign = sign_of(direction)
    best, first = {}, {}
    for batch, trajectory in trajectories.items():
        values = sign * smooth(_split(trajectory)[1], ewma)
        best[batch], first[batch] = float(values.min()), float(values[0])
    limiting = max(best, key=lambda batch: best[batch])
    strictest = best[limiting]
    span = first[limiting] - strictest
    return IsoTarget(
        target=sign * (strictest + margin * span),
        strictest=sign * strictest,
        limiting_batch=limiting,
        rule=(
            f"the strictest value that every batch size reaches (EWMA, half-life {ewma:g} evaluations), "
            f"less {margin:.0%} of what the batch size that limits it covers"
        ),
    )


def smooth(values: np.ndarray, half_life: float) -> np.ndarray:
    """Exponentially weighted means of all values so far, with weights that sum to one from the start."""
    if half_life <= 0:
        return values
    keep = 0.5 ** (1 / half_life)
    result, total, weight = np.empty(len(values)), 0.0, 0.0
    for i, value in enumerate(values):
        total, weight = keep * total + value, keep * weight + 1
        result[i] = total / weight
    return result


def _split(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    step, value = as_pairs(trajectory, "the points of a trajectory")
    steps, values = as_columns(step=step, value=value)
    if (np.diff(steps) <= 0).any():
        raise FitError("the steps of a trajectory do not increase", expected="evaluations in order, each once")
    return steps, values
