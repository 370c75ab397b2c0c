"""Probabilities: at any temperature those of the full distribution, bins and errors by hand, and the fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.evaluation.calibration import calibrate, expected_error, reliability_bins
from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.copy_scores import score_past
from habitus.evaluation.model_scorer import ModelScorer
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import dense_scores
from habitus.model import load_bundle
from tests.evaluation.test_copying import drawn, in_full

BATCH = EvaluateOptions(("batch",), queries=200, per_user=4, batch_sequences=8)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_scores_with_copying_at_a_temperature_are_those_of_the_full_distribution(temperature: float) -> None:
    batch, table, queries, past_weights = drawn(3, 0.0)
    expected = dense_scores(in_full(batch, table, queries, past_weights) / temperature, batch.targets, 5, None)
    windows, slots = torch.from_numpy(batch.windows), torch.from_numpy(batch.slots)
    scaled, events = queries / temperature, table[torch.from_numpy(batch.batch.items)]
    target_rows = table[torch.from_numpy(batch.targets)]
    past = score_past(batch, past_weights, scaled, events, target_rows, None, temperature)
    scores = candidate_scores(
        scaled[windows, slots], Candidates([table], 0, len(table)), target_rows, 5, ranks=Ranks(), past=past
    )
    assert scores.loss is not None and scores.entropy is not None and scores.top_log_probs is not None
    np.testing.assert_allclose(scores.loss, expected.loss, rtol=0, atol=1e-5)
    np.testing.assert_allclose(scores.entropy, expected.entropy, rtol=0, atol=1e-5)
    assert np.array_equal(scores.rank, expected.rank)
    logits = in_full(batch, table, queries, past_weights) / temperature
    full = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    listed = np.take_along_axis(full, scores.top, axis=1)
    np.testing.assert_allclose(scores.top_log_probs, listed, rtol=0, atol=1e-5)


def test_bins_and_their_error_by_hand() -> None:
    probabilities = np.array([[0.1], [0.2], [0.3], [0.8]])
    hits = np.array([[False], [True], [False], [True]])
    low, high = reliability_bins(np.log(probabilities), hits, np.arange(4), num_bins=2)
    assert (low.predicted, low.observed, low.listed) == (pytest.approx(0.15), 0.5, 2)
    assert (high.predicted, high.observed) == (pytest.approx(0.55), 0.5)
    assert low.se == pytest.approx(0.5)  # deviations -1/2 and 1/2 of two users: sqrt((1/4 + 1/4)·2)/2
    assert expected_error((low, high)) == pytest.approx((2 * 0.35 + 2 * 0.05) / 4)


def test_the_fitted_temperature_has_the_least_loss_and_undoes_a_wrong_scale(
    make_run: Callable[[int], Path], dataset: Dataset
) -> None:
    scorer = ModelScorer(load_bundle(make_run(60)), dataset)
    result = calibrate(dataset, scorer, BATCH)
    assert result.fitted_queries == 200 and result.fitted_side == "validation"
    assert abs(result.scaled.loss - result.scaled.entropy) < 2e-3
    assert result.scaled.loss <= result.plain.loss
    assert set(result.plain.expected_error) == {"1", "10"} and len(result.plain.bins) == 15
    assert scorer.temperature == 1.0
    for factor in (0.8, 1.25):
        with scorer.at_temperature(factor * result.temperature):
            other = evaluate_loss(scorer, dataset)
        assert other > result.scaled.loss


def evaluate_loss(scorer: ModelScorer, dataset: Dataset) -> float:
    from habitus.evaluation import evaluate

    return evaluate(dataset, scorer, replace(BATCH, metrics=("loss",))).metrics["batch/loss"].value


def test_an_evaluation_carries_its_calibration_and_refuses_half_a_distribution(
    make_run: Callable[[int], Path], dataset: Dataset
) -> None:
    [evaluation] = evaluate_runs([make_run(60)], dataset, BATCH, with_calibration=True)
    assert evaluation.to_values()["calibration"]["temperature"] > 0
    [plain] = evaluate_runs([make_run(60)], dataset, BATCH)
    assert "calibration" not in plain.to_values() and plain.metrics == evaluation.metrics
    with pytest.raises(ConfigError, match="over all candidates"):
        evaluate_runs([make_run(60)], dataset, replace(BATCH, exclude_history=True), with_calibration=True)
