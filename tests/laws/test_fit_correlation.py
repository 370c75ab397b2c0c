"""Rank correlations, worked by hand and against scipy."""

import numpy as np
import pytest
from scipy import stats

from habitus.laws import correlation_by_budget, paired_regimes, slice_agreement, spearman_matrix, surrogacy


def test_rho_with_ties_agrees_with_scipy() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 4, 30).astype(float), rng.integers(0, 4, 30).astype(float)
    table = spearman_matrix({"a": a, "b": b})
    assert table.rho("b", "a") == pytest.approx(stats.spearmanr(a, b).statistic)
    assert table.pairs[0].n == 30


def test_rho_by_hand() -> None:
    # Ranks 1 2 3 4 against 2 1 4 3: 1 − 6·4/(4·15) = 0.6.
    assert spearman_matrix({"a": [1, 2, 3, 4], "b": [2, 1, 4, 3]}).rho("a", "b") == pytest.approx(0.6)


def test_missing_values_drop_their_rows_and_constants_have_no_rank() -> None:
    table = spearman_matrix({"a": [1, 2, np.nan, 4], "b": [4, 3, 2, 1], "c": [1, 1, 1, 1]})
    assert table.rho("a", "b") == pytest.approx(-1)
    assert next(p for p in table.pairs if p.second == "b").n == 3
    assert table.rho("a", "c") is None
    assert not next(p for p in table.pairs if p.second == "c").beyond_chance


def test_the_permutation_interval_holds_chance_and_not_agreement() -> None:
    x = np.arange(20.0)
    strong = spearman_matrix({"a": x, "b": x**2}).pairs[0]
    assert strong.beyond_chance
    rng = np.random.default_rng(1)
    outside = sum(
        spearman_matrix({"a": rng.random(15), "b": rng.random(15)}).pairs[0].beyond_chance for _ in range(100)
    )
    assert outside <= 12


def test_pooling_can_hide_what_budgets_say() -> None:
    # Within a budget the metrics oppose each other; compute lifts both.
    budget = [1, 1, 1, 2, 2, 2]
    table = {"a": [1, 2, 3, 11, 12, 13], "b": [3, 2, 1, 13, 12, 11]}
    first, second, pooled = correlation_by_budget(budget, table)
    assert first.rho("a", "b") == second.rho("a", "b") == pytest.approx(-1)
    assert pooled.label == "pooled"
    assert (pooled.rho("a", "b") or 0) > 0


def test_slice_agreement_names_the_worst_pair() -> None:
    slices = {"all": [1, 2, 3, 4], "history=3": [2, 1, 4, 3], "history=100": [1, 2, 4, 3]}
    (table,) = slice_agreement([5, 5, 5, 5], slices)
    worst = table.worst()
    assert worst is not None
    assert {worst.first, worst.second} == {"all", "history=3"}
    assert worst.rho == pytest.approx(0.6)


def test_surrogacy_fades_where_the_metric_hardly_moves() -> None:
    found = surrogacy(
        [1e18] * 4,
        [1.0, 1.1, 1.2, 1.3],
        {"recall@10": [0.1, 0.12, 0.14, 0.16], "mrr@10": [0.2, 0.2001, 0.2002, 0.2003]},
    )
    recall, mrr = found
    assert recall.correlation.rho == pytest.approx(1)
    assert not recall.faded
    assert mrr.faded
    assert recall.spread == pytest.approx(0.06 / 0.13)


def test_paired_regimes_can_disagree() -> None:
    (loss, ndcg) = paired_regimes(
        {"loss": [1, 2, 3, 4], "ndcg@10": [1, 2, 3, 4]}, {"loss": [4, 3, 2, 1], "ndcg@10": [1, 2, 3, 4]}
    )
    assert loss.rho == pytest.approx(-1)
    assert ndcg.rho == pytest.approx(1)
    assert loss.first == "batch/loss"
