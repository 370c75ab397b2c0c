"""Metrics beside accuracy: equal to what RecTools and scikit-learn said about the same lists, and Gini by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.evaluation.baselines import Popularity
from habitus.evaluation.evaluation import evaluate
from habitus.evaluation.list_metrics import (
    field_diversity,
    gini,
    mean_over_lists,
    self_information,
    vector_diversity,
)
from habitus.evaluation.metrics import CLASSIC_METRICS, auc
from habitus.recipe import Recipe
from habitus.training.options import check_best, evaluate_options

GOLDEN = json.loads((Path(__file__).parent / "golden" / "peer_metrics.json").read_text())
CUTOFFS = tuple(GOLDEN["cutoffs"])
TOP = np.array(GOLDEN["top"])
TARGETS = np.array(GOLDEN["targets"])
SCORES = np.array(GOLDEN["scores"])


def golden(name: str) -> np.ndarray:
    return np.array([GOLDEN["expected"][f"{name}@{k}"] for k in CUTOFFS])


def ranks() -> np.ndarray:
    """Of the targets on the lists; beyond them where a list is short or the target is not on it."""
    on_list = TARGETS[:, None] == TOP
    return np.where(on_list.any(axis=1), on_list.argmax(axis=1) + 1, 1000)


@pytest.mark.parametrize("name", list(CLASSIC_METRICS))
def test_hit_rate_precision_and_map_are_those_of_rectools(name: str) -> None:
    ours = np.stack([CLASSIC_METRICS[name](ranks(), k) for k in CUTOFFS])
    np.testing.assert_allclose(ours, golden(name), rtol=0, atol=1e-6)
    assert ours.sum() > 0


def test_auc_is_that_of_scikit_learn() -> None:
    rank = (np.take_along_axis(SCORES, TARGETS[:, None], 1) <= SCORES).sum(axis=1)
    ours = auc(rank, np.full(len(rank), SCORES.shape[1]))
    np.testing.assert_allclose(ours, GOLDEN["expected"]["auc"], rtol=0, atol=1e-6)
    assert auc(np.array([3, 1]), np.array([3, 1])).tolist() == [0.0, 1.0]  # last of three; nobody to lose against


def test_novelty_and_popularity_are_those_of_rectools() -> None:
    users, items = np.array(GOLDEN["train_users"]), np.array(GOLDEN["train_items"])
    num_items = SCORES.shape[1]
    novelty = mean_over_lists(TOP, self_information(users, items, num_items), CUTOFFS)
    np.testing.assert_allclose(novelty, golden("novelty"), rtol=0, atol=1e-6)
    shares = np.bincount(items, minlength=num_items) / len(items)
    np.testing.assert_allclose(mean_over_lists(TOP, shares, CUTOFFS), golden("popularity"), rtol=0, atol=1e-6)


def test_diversity_by_fields_and_by_vectors_is_that_of_rectools() -> None:
    codes, vectors = np.array(GOLDEN["codes"]), np.array(GOLDEN["vectors"])
    ours = field_diversity(TOP, codes, CUTOFFS)
    np.testing.assert_allclose(ours * codes.shape[1], golden("diversity"), rtol=0, atol=1e-6)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(vector_diversity(TOP, unit, CUTOFFS), golden("vector_diversity"), rtol=0, atol=1e-6)


def test_gini_by_hand() -> None:
    assert gini(np.array([5, 5, 5, 5]), 4) == 0
    # Counts 0, 0, 1, 3: (2·3 - 5)·1 + (2·4 - 5)·3 = 10, over 4·4.
    assert gini(np.array([3, 0, 1, 0]), 4) == pytest.approx(10 / 16)
    assert gini(np.array([3, 0, 1]), 4) == pytest.approx(10 / 16)  # a candidate that no list ever held
    assert gini(np.array([7]), 1000) == pytest.approx(0.999)
    assert gini(np.zeros(3), 4) == 0


def test_an_evaluation_measures_what_it_is_asked_for(dataset: Dataset) -> None:
    every = EvaluateOptions(queries=300, batch_sequences=8, metrics=("ranking", "classic", "auc", "lists"))
    metrics = evaluate(dataset, Popularity(dataset), every).metrics
    for regime in ("batch", "catalogue"):
        assert metrics[f"{regime}/hit_rate@10"] == metrics[f"{regime}/recall@10"]
        assert metrics[f"{regime}/map@10"] == metrics[f"{regime}/mrr@10"]
        assert metrics[f"{regime}/precision@10"].value == pytest.approx(metrics[f"{regime}/recall@10"].value / 10)
        assert 0.5 < metrics[f"{regime}/auc"].value < 1
    # Popularity shows everybody the same ten items: nobody else is ever shown, and no list differs from another.
    counts = dataset.item_train_counts
    first = np.argsort(-counts, kind="stable")[:10]
    assert metrics["catalogue/gini@10"].value == pytest.approx(1 - 10 / dataset.num_items)
    assert metrics["catalogue/popularity@10"].value == pytest.approx(counts[first].mean() / counts.sum())
    assert metrics["catalogue/novelty@10"].se == pytest.approx(0, abs=1e-12)
    assert 0 < metrics["catalogue/diversity@10"].value < 1 and 0 < metrics["catalogue/vector_diversity@10"].value < 2
    assert "catalogue/diversity@1" not in metrics
    standard = evaluate(dataset, Popularity(dataset), EvaluateOptions(queries=300, batch_sequences=8)).metrics
    assert not {name for name in standard if "hit_rate" in name or "gini" in name or "auc" in name}
    assert all(standard[name] == metric for name, metric in metrics.items() if name in standard)


def test_without_the_history_there_is_no_auc(dataset: Dataset) -> None:
    options = EvaluateOptions(queries=300, batch_sequences=8, metrics=("ranking", "auc"), exclude_history=True)
    [evaluation] = evaluate_runs([], dataset, options, with_baselines=True)[:1]
    assert not [name for name in evaluation.metrics if "auc" in name]


def test_a_recipe_asks_for_them_and_keeps_its_hash_where_it_does_not(recipe_of: Callable[..., Recipe]) -> None:
    plain = recipe_of()
    standard, more = (
        Recipe.parse({**plain.to_values(), "evaluate": {"metrics": groups}}, "test")
        for groups in (["loss", "ranking", "coverage"], ["loss", "lists"])
    )
    assert standard.hash("") == plain.hash("") != more.hash("")
    assert "metrics" not in plain.to_values()["evaluate"]
    assert evaluate_options(more).metrics == ("loss", "lists")
    check_best(more, "batch/gini@10")
    with pytest.raises(ConfigError, match="gini@10 is not among the metrics"):
        check_best(plain, "batch/gini@10")
