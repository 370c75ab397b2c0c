"""Differences of two scorers on the same queries, worked by hand."""

import numpy as np
import pytest

from habitus.errors import ConfigError
from habitus.evaluation.paired import paired_difference, query_values
from habitus.evaluation.per_query import PerQuery


def per_query(ranks: list[int], users: list[int], events: list[int] | None = None) -> PerQuery:
    count = len(ranks)
    zeros = np.zeros(count, np.int64)
    return PerQuery(
        batch=zeros, user=np.array(users), event=np.array(events or range(count)), target=zeros, history=zeros,
        cold=zeros > 0, repeat=zeros > 0, rank=np.array(ranks), loss=np.log(np.array(ranks, float)), entropy=None,
        top=np.empty((count, 0), np.int64), candidates=zeros + 100,
    )  # fmt: skip


def test_a_difference_is_paired_and_its_interval_is_over_users() -> None:
    first, second = per_query([1, 1, 20, 3], [7, 7, 8, 9]), per_query([1, 20, 20, 20], [7, 7, 8, 9])
    difference = paired_difference(first, second, "recall@10")
    # Per query 0, 1, 0, 1: mean 1/2. Sums of deviations by user: (-1/2 + 1/2), -1/2, 1/2.
    assert difference.value == 0.5
    standard_error = np.sqrt((0 + 0.25 + 0.25) * 3 / 2) / 4
    assert difference.low == pytest.approx(0.5 - 1.959964 * standard_error)
    assert difference.high == pytest.approx(0.5 + 1.959964 * standard_error)


def test_ndcg_and_loss_are_paired_too() -> None:
    first, second = per_query([1, 3], [1, 2]), per_query([3, 3], [1, 2])
    assert paired_difference(first, second, "ndcg@10").value == pytest.approx((1 - 1 / 2) / 2)
    assert paired_difference(first, second, "loss").value == pytest.approx(-np.log(3) / 2)


def test_one_user_has_a_difference_and_no_interval() -> None:
    assert paired_difference(per_query([1], [1]), per_query([2], [1]), "mrr@5") == (0.5, None, None)


def test_other_queries_and_metrics_without_a_value_per_query_are_refused() -> None:
    with pytest.raises(ConfigError, match="different queries"):
        paired_difference(per_query([1], [1], [0]), per_query([1], [1], [1]), "loss")
    with pytest.raises(ConfigError, match="no value per query"):
        query_values(per_query([1], [1]), "coverage@10")
