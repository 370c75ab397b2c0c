"""Ranking metrics that follow the loss, worked by hand."""

import math

import numpy as np
import pytest

from habitus.planning.ranking_link import follows_loss
from habitus.store import Prediction, RunRow

RECALL, LOSS = "catalogue/recall@10", "catalogue/loss"
TOLD = Prediction(metric=LOSS, stage=1, value=6.5, low=6.4, high=6.7, source="this study", how="")


def rows(slope: float, noise: float, num: int = 60, axis: str = "share") -> list[RunRow]:
    """Recall 0.2 at a loss of 7, and so many of its logarithm per nat; one batch and one rate."""
    rng = np.random.default_rng(0)
    made = []
    for k, loss in enumerate(np.linspace(6.8, 7.8, num)):
        recall = 0.2 * math.exp(slope * (loss - 7) + noise * rng.standard_normal())
        made.append(
            RunRow(axis=axis, budget=1e11, cell_id=f"c{k}", learning_rate=0.01, seed=0, init="", chosen=True,
                   knobs={"batch_sequences": 8.0}, metrics={RECALL: recall, LOSS: float(loss)})
        )  # fmt: skip
    return made


def test_the_metric_moves_with_the_predicted_loss_and_its_interval() -> None:
    told = follows_loss(rows(-0.5, 0.0), RECALL, TOLD, 8.0, 0.08)
    assert isinstance(told, Prediction) and told.low is not None and told.high is not None
    # Half a nat below 7 at half a logarithm per nat; the interval is the loss's alone.
    assert told.value == pytest.approx(0.2 * math.exp(0.25))
    assert told.low == pytest.approx(0.2 * math.exp(0.15), rel=1e-4)
    assert told.high == pytest.approx(0.2 * math.exp(0.30), rel=1e-4)
    noisy = follows_loss(rows(-0.5, 0.02), RECALL, TOLD, 8.0, 0.08)
    assert isinstance(noisy, Prediction) and noisy.low is not None
    assert noisy.low < told.low and "of its logarithm per nat" in noisy.how


def test_a_metric_that_does_not_follow_the_loss_is_not_told_by_it() -> None:
    flat = follows_loss(rows(0.0, 0.02), RECALL, TOLD, 8.0, 0.08)
    assert isinstance(flat, str) and flat.startswith("it does not follow catalogue/loss (")
    few = follows_loss([*rows(-0.5, 0.0, num=20), *rows(-0.5, 0.0, axis="negatives")], RECALL, TOLD, 8.0, 0.08)
    assert few == "20 runs do not say how it follows catalogue/loss"
