"""Ranking metrics that follow the loss, worked by hand."""

import math

import numpy as np
import pytest

from habitus.planning.ranking_link import follows_loss
from habitus.store import Prediction, RunRow

RECALL, LOSS = "catalogue/recall@10", "catalogue/loss"
TOLD = Prediction(metric=LOSS, stage=1, value=6.5, low=6.4, high=6.7, source="this study", how="")
FLOPS = 6.4e12
BUDGETS = {1e11: 7.4, 2e11: 7.2, 4e11: 7.0, 8e11: 6.8}  # and the lowest loss of each


def rows(
    slope: float,
    noise: float = 0.0,
    num: int = 15,
    axis: str = "allocation",
    by_compute: float = 0.0,
    bend: float = 0.0,
) -> list[RunRow]:
    """Recall 0.2 at a loss of 7, so many of its logarithm per nat, per nat² and per logarithm of compute.

    One batch and one rate; the runs of a budget are spread over 0.4 nats.
    """
    rng = np.random.default_rng(0)
    made = []
    for budget, lowest in BUDGETS.items():
        for k, loss in enumerate(np.linspace(lowest, lowest + 0.4, num)):
            moved = slope * (loss - 7) + bend * (loss - 7) ** 2 + by_compute * math.log(budget / 4e11)
            recall = 0.2 * math.exp(moved + noise * rng.standard_normal())
            made.append(
                RunRow(axis=axis, budget=budget, cell_id=f"c{k}", learning_rate=0.01, seed=0, init="", chosen=True,
                       knobs={"batch_sequences": 8.0}, metrics={RECALL: recall, LOSS: float(loss)})
            )  # fmt: skip
    return made


def test_the_metric_moves_with_the_predicted_loss_and_its_interval() -> None:
    told = follows_loss(rows(-0.5), RECALL, TOLD, 8.0, 0.08, FLOPS)
    assert isinstance(told, Prediction) and told.low is not None and told.high is not None
    # Half a nat below 7 at half a logarithm per nat.
    assert told.value == pytest.approx(0.2 * math.exp(0.25))
    # The better eight runs of the largest budget have a mean loss of 6.9: 0.2 of the logarithm are promised, of which
    # roll-outs missed nothing, so that twice 15% count. The ends of the loss are 0.2 and 0.1 nats away.
    assert told.low == pytest.approx(0.2 * math.exp(0.25 - math.hypot(0.10, 0.06)), rel=1e-4)
    assert told.high == pytest.approx(0.2 * math.exp(0.25 + math.hypot(0.05, 0.06)), rel=1e-4)
    # A hundred times beyond the largest budget, twice as much of the promise counts.
    far = follows_loss(rows(-0.5), RECALL, TOLD, 8.0, 0.08, 8e13)
    assert isinstance(far, Prediction) and far.value == told.value
    assert far.low == pytest.approx(0.2 * math.exp(0.25 - math.hypot(0.10, 0.12)), rel=1e-4)
    noisy = follows_loss(rows(-0.5, 0.02), RECALL, TOLD, 8.0, 0.08, FLOPS)
    assert isinstance(noisy, Prediction) and noisy.low is not None
    assert noisy.low < told.low and "of its logarithm per nat" in noisy.how


def test_a_loss_that_may_be_anything_leaves_the_metric_open() -> None:
    wide = TOLD.model_copy(update={"low": -4000.0, "high": None})
    told = follows_loss(rows(-0.5), RECALL, wide, 8.0, 0.08, FLOPS)
    assert isinstance(told, Prediction) and told.low is None and told.high is None


def test_a_metric_that_does_not_follow_the_loss_is_not_told_by_it() -> None:
    flat = follows_loss(rows(0.0, 0.02), RECALL, TOLD, 8.0, 0.08, FLOPS)
    assert isinstance(flat, str) and flat.startswith("it does not follow catalogue/loss (")
    few = follows_loss([*rows(-0.5, num=5), *rows(-0.5, axis="negatives")], RECALL, TOLD, 8.0, 0.08, FLOPS)
    assert few == "20 runs do not say how it follows catalogue/loss"


@pytest.mark.parametrize("bend", [-0.2, -0.1, 0.1, 0.2])
def test_a_link_that_bends_beyond_the_runs_is_in_the_interval(bend: float) -> None:
    """Recall rises faster or slower the better runs are; roll-outs have seen it, though the link is straight."""
    known = TOLD.model_copy(update={"low": 6.5, "high": 6.5})
    told = follows_loss(rows(-0.5, bend=bend), RECALL, known, 8.0, 0.08, FLOPS)
    true = 0.2 * math.exp(0.25 + bend * 0.25)
    assert isinstance(told, Prediction) and told.low is not None and told.high is not None
    assert told.low < true < told.high and (told.value < true) == (bend > 0)


def test_a_metric_that_follows_the_loss_within_budgets_only_is_not_told_by_it() -> None:
    # From budget to budget the loss falls by 0.2 nats and recall stays.
    level = rows(-0.5, noise=0.001, num=60, by_compute=-0.1 / math.log(2))
    told = follows_loss(level, RECALL, TOLD, 8.0, 0.08, FLOPS)
    assert told == "as it follows catalogue/loss no budget was foreseen better than by the one before"
    one = [row.model_copy(update={"budget": 1e11}) for row in rows(-0.5)]
    assert follows_loss(one, RECALL, TOLD, 8.0, 0.08, FLOPS) == told


def test_runs_of_one_batch_do_not_tell_another() -> None:
    told = follows_loss(rows(-0.5), RECALL, TOLD, 64.0, 0.08, FLOPS)
    assert told == "runs of one batch, 8, do not say how it follows catalogue/loss at 64"
    # Nor are budgets of another batch what the link is judged by: those above the first two.
    grown = [
        row.model_copy(update={"knobs": {"batch_sequences": 8.0 if row.budget < 3e11 else 16.0}}) for row in rows(-0.5)
    ]
    untried = [row for row in grown if row.budget < 8e11]
    assert isinstance(follows_loss(grown, RECALL, TOLD, 16.0, 0.08, FLOPS), Prediction)
    told = follows_loss(untried, RECALL, TOLD, 16.0, 0.08, FLOPS)
    assert isinstance(told, str) and told.startswith("as it follows catalogue/loss no budget was foreseen")
