"""Eight queries worked by hand, and random ones against a full sort."""

from fractions import Fraction
from math import log2

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from habitus.errors import ConfigError
from habitus.evaluation.metrics import coverage_metrics, coverages, means, mrr, ndcg, perplexity, recall
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.scores import dense_scores

RANKS = np.array([1, 2, 3, 4, 10, 11, 100, 5000])


def test_recall_of_eight_queries() -> None:
    assert recall(RANKS, 1).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert Fraction(recall(RANKS, 1).mean()) == Fraction(1, 8)
    assert Fraction(recall(RANKS, 3).mean()) == Fraction(3, 8)
    assert Fraction(recall(RANKS, 10).mean()) == Fraction(5, 8)
    assert Fraction(recall(RANKS, 100).mean()) == Fraction(7, 8)
    assert Fraction(recall(RANKS, 10**9).mean()) == 1


def test_ndcg_of_eight_queries() -> None:
    assert ndcg(RANKS, 3).tolist() == [1, 1 / log2(3), Fraction(1, 2), 0, 0, 0, 0, 0]
    assert ndcg(RANKS, 1).tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert ndcg(RANKS, 10)[4] == 1 / log2(11)


def test_mrr_of_eight_queries() -> None:
    assert Fraction(mrr(RANKS, 4).sum()).limit_denominator(1000) == 1 + Fraction(1, 2) + Fraction(1, 3) + Fraction(1, 4)
    assert Fraction(mrr(RANKS, 10)[4]).limit_denominator(100) == Fraction(1, 10)
    assert mrr(RANKS, 10)[5:].tolist() == [0, 0, 0]


def test_coverage_counts_each_item_once_and_short_lists_not_at_all() -> None:
    top = np.array([[1, 2, 3], [1, 4, 5], [2, 1, -1]])
    assert coverages(top, (1, 2, 3, 100), 10) == [0.2, 0.3, 0.5, 0.5]


def listed_queries(batch: list[int], history: list[int], pools: list[int], top: list[list[int]]) -> PerQuery:
    zeros = np.zeros(len(batch), np.int64)
    return PerQuery(batch=np.array(batch), user=zeros, event=zeros, target=zeros, history=np.array(history),
                    cold=zeros > 0, repeat=zeros > 0, rank=zeros + 1, loss=None, entropy=None, top=np.array(top),
                    candidates=np.array(pools))  # fmt: skip


def test_coverage_by_history_is_of_the_lists_of_that_history_alone() -> None:
    # Two batches with pools of 4 and 5 items, 8 items in all; the third history length has one query, the last none.
    values = listed_queries(
        batch=[0, 0, 0, 1, 1], history=[3, 3, 5, 3, 10], pools=[4, 4, 4, 5, 5],
        top=[[0, 1], [1, 2], [3, 0], [4, -1], [5, 6]],
    )  # fmt: skip
    metrics = coverage_metrics("batch", values, (1, 2), union=8, histories=(3, 5, 10, 20))
    # history 3: batch 0 lists {0, 1} at 1 and {0, 1, 2} at 2 of 4, batch 1 lists {4} of 5, once with a short list.
    three = metrics["batch/coverage@1/history=3"]
    assert (three.value, three.n) == (pytest.approx((2 / 4 + 1 / 5) / 2), 2)
    assert three.se == pytest.approx((2 / 4 - 1 / 5) / 2)  # of two batches: half their difference
    assert metrics["batch/coverage@2/history=3"].value == pytest.approx((3 / 4 + 1 / 5) / 2)
    union = metrics["batch/coverage_union@2/history=3"]
    assert (union.value, union.n) == (4 / 8, 3)
    # history 5 is in batch 0 alone: batches without such queries do not count as zero.
    five = metrics["batch/coverage@2/history=5"]
    assert (five.value, five.se, five.n) == (2 / 4, None, 1)
    assert metrics["batch/coverage_union@1/history=10"].value == 1 / 8
    assert not any("history=20" in name for name in metrics)
    # All queries together are as they were without slices.
    whole = {name: value for name, value in metrics.items() if "history" not in name}
    assert whole == coverage_metrics("batch", values, (1, 2), union=8)
    assert whole["batch/coverage@2"].value == pytest.approx((4 / 4 + 3 / 5) / 2)


@pytest.mark.parametrize("metric", [recall, ndcg, mrr])
def test_a_cutoff_of_zero_is_refused(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="k = 0"):
        metric(RANKS, 0)


def test_the_standard_error_takes_a_user_as_one_draw() -> None:
    # Two users, three queries each, all equal within a user: it is two draws, not six.
    values, users = np.array([1.0, 1, 1, 0, 0, 0]), np.array([7, 7, 7, 9, 9, 9])
    (estimate,) = means(values[None], users)
    assert estimate.value == 0.5
    assert estimate.se == pytest.approx(0.5)  # sqrt(2/1 · (1.5² + 1.5²)) / 6
    assert means(values[None], np.arange(6))[0].se == pytest.approx(values.std(ddof=1) / 6**0.5)
    assert means(np.array([[3.0]]), np.array([1]))[0].se is None
    with pytest.raises(ConfigError, match="no queries"):
        means(np.empty((1, 0)), np.empty(0))


def test_perplexity() -> None:
    assert perplexity(np.log(50.0)) == pytest.approx(50)
    assert perplexity(800) == float("inf")


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 12))
def test_dense_scores_equal_a_full_sort_with_ties_against_the_target(seed: int, num_candidates: int, k: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.integers(-2, 3, (5, num_candidates)).astype(float)  # many ties
    places = draw.integers(0, num_candidates, 5)
    scores = dense_scores(logits, places, k, None)
    for row in range(5):
        z = logits[row]
        p = np.exp(z) / np.exp(z).sum()
        assert scores.loss[row] == pytest.approx(-np.log(p[places[row]]), rel=1e-9)
        assert scores.entropy[row] == pytest.approx(-(p * np.log(p)).sum(), rel=1e-9, abs=1e-12)
        others = np.delete(z, places[row])
        assert scores.rank[row] == 1 + (others >= z[places[row]]).sum()
        expected = sorted(range(num_candidates), key=lambda j, z=z: (-z[j], j))[:k]
        assert scores.top[row][: len(expected)].tolist() == expected
        assert (scores.top[row][len(expected) :] == -1).all()


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 3000))
@settings(deadline=None, max_examples=40)
def test_coverage_counts_the_same_by_marking_and_by_sorting(seed: int, num_queries: int, num_items: int) -> None:
    draw = np.random.default_rng(seed)
    top = draw.integers(-1, num_items, (num_queries, 7)) * draw.choice([1, 1000])
    top = np.where(top < 0, -1, top)
    expected = [len({int(i) for i in top[:, :k].ravel() if i >= 0}) / num_items for k in (1, 3, 7, 50)]
    assert coverages(top, (1, 3, 7, 50), num_items) == expected
    assert coverages(top, (50, 1), num_items) == [expected[3], expected[0]]


def test_a_constant_scorer_ranks_last() -> None:
    scores = dense_scores(np.zeros((3, 100)), np.array([0, 50, 99]), 10, None)
    assert scores.rank.tolist() == [100, 100, 100]
    assert recall(scores.rank, 10).sum() == 0


def test_one_candidate() -> None:
    scores = dense_scores(np.array([[3.0]]), np.array([0]), 5, np.array([17]))
    assert (scores.rank[0], scores.loss[0], scores.entropy[0]) == (1, 0, 0)
    assert scores.top[0].tolist() == [17, -1, -1, -1, -1]
