"""The retriever: parity with evaluation, filters, probabilities, and requests that are refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.evaluate import EvaluateOptions, Handling, evaluate_runs
from habitus.evaluate.per_query import PerQuery
from habitus.serve import Request, Retriever

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def retriever(trained_run: Path) -> Retriever:
    return Retriever.open(trained_run, device="cpu", read_only=True)


def history_of(log: Log, dataset: Dataset, query_event: int) -> tuple[int, tuple[dict[str, Any], ...]]:
    """The user's raw events up to a row of the prepared log."""
    place = int(np.searchsorted(dataset.user_offsets, query_event, "right")) - 1
    user = dataset.user_ids()[place].as_py()
    return user, tuple(log[user][: query_event - int(dataset.user_offsets[place]) + 1])


def test_ranks_and_losses_equal_those_of_evaluate(retriever: Retriever, dataset: Dataset, log: Log) -> None:
    kept: list[PerQuery] = []
    options = EvaluateOptions(regimes=("catalogue",), queries=600, cutoffs=(10,))
    evaluate_runs([retriever.bundle.run_path], dataset, options, Handling(), keep=lambda _, __, v: kept.append(v))
    values = kept[0]
    requests, targets, chosen = [], [], []
    for query, event in enumerate(values.event.tolist()):
        user, history = history_of(log, dataset, event)
        if len(history) == values.history[query]:  # evaluation saw no less than the retriever will
            requests.append(Request(history, k=300))
            targets.append(log[user][len(history)]["item_id"])
            chosen.append(query)
    assert len(chosen) > 300
    ranks, losses, best = [], [], []
    for answer, target in zip(retriever.recommend(requests), targets, strict=True):
        assert len(answer.items) == 300
        own = next(one for one in answer.items if one.item_id == target)
        ranks.append(sum(one.score >= own.score for one in answer.items))
        losses.append(-np.log(own.probability))
        best.append([one.item_id for one in answer.items[:10]])
    assert ranks == values.rank[chosen].tolist()
    assert best == values.top[chosen].tolist()  # in a world, an item's id is its row
    assert values.loss is not None
    np.testing.assert_allclose(losses, values.loss[chosen], atol=2e-6)
