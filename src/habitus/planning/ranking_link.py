"""A ranking metric where no law of its own is identified: as the runs say that it follows the loss."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from habitus.laws import LossLink, loss_link
from habitus.planning.foresight import Foreseen, allowance, error_of_gain
from habitus.planning.measured import PLANNED_AXES, SIZED_AXES
from habitus.store import Prediction, RunRow

_LEAST_SLOPE = 3.0  # standard errors: a metric that hardly moves with the loss is not told by it
_FEWEST_RUNS = 24


def follows_loss(
    runs: Sequence[RunRow], metric: str, loss: Prediction, batch: float, rate_at_512: float, flops: float
) -> Prediction | str:
    """The metric of a run of so many FLOPs whose loss is predicted; else why the loss does not tell it.

    By the better half of the runs, log metric = c0 + c1·loss + c2·log B + c3·log r. The interval holds the loss's own,
    the link's error, the scatter of one more run and twice what the link missed in roll-outs: metrics rise faster or
    slower the better runs are, and they move with compute beside the loss.
    """
    cells = [r for r in runs if r.axis in PLANNED_AXES and {metric, loss.metric} <= set(r.metrics)]
    cells = [r for r in cells if "batch_sequences" in r.knobs and r.metrics[metric] > 0]
    if len(cells) < _FEWEST_RUNS:
        return f"{len(cells)} runs do not say how it follows {loss.metric}"
    if _is_untold(batch, cells):
        known = cells[0].knobs["batch_sequences"]
        return f"runs of one batch, {known:g}, do not say how it follows {loss.metric} at {batch:g}"
    link = _link(cells, metric, loss.metric)
    slope, error = float(link.coefficients[1]), math.sqrt(float(link.covariance[1, 1]))
    if slope > -_LEAST_SLOPE * error:
        return f"it does not follow {loss.metric} ({slope:+.2g} ± {error:.2g} of its logarithm per nat)"
    rollouts = _rollouts(cells, metric, loss.metric)
    missed = error_of_gain(rollouts)
    if missed is None or missed >= 1:
        return f"as it follows {loss.metric} no budget was foreseen better than by the one before"
    value, se = link.at(loss.value, batch, rate_at_512)
    half = float(stats.t.ppf(0.975, link.n - len(link.coefficients))) * se
    largest = _budgets(cells)[-1]
    share, allowed = allowance(rollouts, flops / largest)
    miss = 2 * share * abs(value - _level(largest, cells, metric, loss.metric))
    # The better end of the metric is that of the lower loss.
    ends = [math.inf if end is None else abs(slope * (end - loss.value)) for end in (loss.high, loss.low)]
    low, high = (_exp(value + sign * math.hypot(half, end, miss)) for sign, end in zip((-1, 1), ends, strict=True))
    how = (
        f"as it follows {loss.metric} over the better half of {len(cells)} runs, {slope:+.2f} ± {error:.2f} of its "
        f"logarithm per nat, at a predicted loss of {loss.value:.4g}; roll-outs missed {missed:.0%} of the gain, and "
        f"{allowed}"
    )
    return Prediction(
        metric=metric,
        stage=1,
        value=math.exp(value),
        low=low if low > 0 else None,
        high=high if math.isfinite(high) else None,
        source=loss.source,
        how=how,
    )


def _exp(log: float) -> float:
    """Infinite where no float is as large."""
    return math.exp(log) if log < 700 else math.inf


def _link(cells: Sequence[RunRow], metric: str, loss: str) -> LossLink:
    batches, rates = zip(*map(_batch_and_rate, cells), strict=True)
    return loss_link([r.metrics[loss] for r in cells], batches, rates, [r.metrics[metric] for r in cells])


def _batch_and_rate(run: RunRow) -> tuple[float, float]:
    """The batch of a run, and its learning rate at 512 windows per step."""
    batch = run.knobs["batch_sequences"]
    return batch, run.learning_rate / math.sqrt(batch / 512)


def _is_untold(batch: float, cells: Sequence[RunRow]) -> bool:
    """Whether the runs have one batch and this is another."""
    batches = {r.knobs["batch_sequences"] for r in cells}
    return len(batches) == 1 and not math.isclose(batch, *batches, rel_tol=0.05)


def _budgets(cells: Sequence[RunRow]) -> list[float]:
    """Those whose sizes were compared."""
    return sorted({r.budget for r in cells if r.axis in SIZED_AXES})


def _rollouts(cells: Sequence[RunRow], metric: str, loss: str) -> list[Foreseen]:
    """log metric of every budget from the third up by the runs below, at the losses that the better half measured."""
    made = []
    for budget in _budgets(cells)[2:]:
        below = [r for r in cells if r.budget < 0.9 * budget]
        if len(below) < _FEWEST_RUNS or not _budgets(below):
            continue
        runs = _better_half(budget, cells, loss)
        if any(_is_untold(r.knobs["batch_sequences"], below) for r in runs):
            continue
        link = _link(below, metric, loss)
        at = [link.at(r.metrics[loss], *_batch_and_rate(r))[0] for r in runs]
        last = _level(_budgets(below)[-1], cells, metric, loss)
        made.append(Foreseen(last, float(np.mean(at)), _level(budget, cells, metric, loss)))
    return made


def _level(budget: float, cells: Sequence[RunRow], metric: str, loss: str) -> float:
    """Mean log metric of the better half of a budget: of one run it would be mostly noise."""
    return float(np.mean([math.log(r.metrics[metric]) for r in _better_half(budget, cells, loss)]))


def _better_half(budget: float, cells: Sequence[RunRow], loss: str) -> list[RunRow]:
    runs = [r for r in cells if r.axis in SIZED_AXES and r.budget == budget]
    return sorted(runs, key=lambda r: r.metrics[loss])[: math.ceil(len(runs) / 2)]
