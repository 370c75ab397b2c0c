"""A ranking metric where no law of its own is identified: as the runs say that it follows the loss."""

import math
from collections.abc import Sequence

from scipy import stats

from habitus.laws import RECIPE_AXES, loss_link
from habitus.store import Prediction, RunRow

_LEAST_SLOPE = 3.0  # standard errors: a metric that hardly moves with the loss is not told by it
_FEWEST_RUNS = 24


def follows_loss(
    runs: Sequence[RunRow], metric: str, loss: Prediction, batch: float, rate_at_512: float
) -> Prediction | str:
    """The metric of a run whose loss is predicted; else why the loss does not tell it.

    By the better half of the runs, log metric = c0 + c1·loss + c2·log B + c3·log r. The interval holds the loss's own,
    the link's error and the scatter of one more run.
    """
    cells = [r for r in runs if r.axis in RECIPE_AXES and {metric, loss.metric} <= set(r.metrics)]
    cells = [r for r in cells if "batch_sequences" in r.knobs and r.metrics[metric] > 0]
    if len(cells) < _FEWEST_RUNS:
        return f"{len(cells)} runs do not say how it follows {loss.metric}"
    batches = [r.knobs["batch_sequences"] for r in cells]
    rates = [r.learning_rate / math.sqrt(B / 512) for r, B in zip(cells, batches, strict=True)]
    link = loss_link([r.metrics[loss.metric] for r in cells], batches, rates, [r.metrics[metric] for r in cells])
    slope, error = float(link.coefficients[1]), math.sqrt(float(link.covariance[1, 1]))
    if slope > -_LEAST_SLOPE * error:
        return f"it does not follow {loss.metric} ({slope:+.2g} ± {error:.2g} of its logarithm per nat)"
    value, se = link.at(loss.value, batch, rate_at_512)
    half = float(stats.t.ppf(0.975, link.n - len(link.coefficients))) * se
    # The better end of the metric is that of the lower loss.
    ends = [math.inf if end is None else abs(slope * (end - loss.value)) for end in (loss.high, loss.low)]
    low, high = (math.exp(value + sign * math.hypot(half, end)) for sign, end in zip((-1, 1), ends, strict=True))
    how = (
        f"as it follows {loss.metric} over the better half of {len(cells)} runs, {slope:+.2f} ± {error:.2f} of its "
        f"logarithm per nat, at a predicted loss of {loss.value:.4g}"
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
