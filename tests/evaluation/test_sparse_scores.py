"""Scores of a background with a few additions, against the same weights written out."""

from collections.abc import Callable

import numpy as np
import pytest

from habitus.data import Dataset
from habitus.evaluation import EvaluateOptions, query_set
from habitus.evaluation.baselines import Popularity, RecentPopularity, Repeat, Transitions
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.scores import DenseScorer
from habitus.evaluation.sparse_scores import SparseScorer


class WrittenOut(DenseScorer):
    """The same scorer with a row of weights per query."""

    def __init__(self, scorer: SparseScorer) -> None:
        self.scorer, self.num_items = scorer, scorer.num_items

    def log_probs(self, queries: QueryBatch, chosen: slice, candidates: np.ndarray | None) -> np.ndarray:
        queries_chosen = range(len(queries.targets))[chosen]
        weights = np.repeat(self.scorer.background[None], len(queries_chosen), axis=0)
        for row, query in enumerate(queries_chosen):
            items, added = self.scorer.additions(queries, query)
            weights[row, items] += added
        return np.log(weights if candidates is None else weights[:, candidates])


@pytest.mark.parametrize("kind", [Popularity, RecentPopularity, Repeat, Transitions])
@pytest.mark.parametrize("subset", [False, True])
def test_ranks_losses_entropies_and_lists_are_those_of_the_rows_written_out(
    dataset: Dataset, kind: Callable[[Dataset], SparseScorer], subset: bool
) -> None:
    scorer = kind(dataset)
    batch = next(iter(query_set(dataset, EvaluateOptions(queries=700))))
    candidates = batch.pool if subset else None
    # A list longer than the candidates ends in -1.
    for k in (0, 7, dataset.num_items + 5):
        sparse, dense = scorer.score(batch, candidates, k), WrittenOut(scorer).score(batch, candidates, k)
        assert np.array_equal(sparse.rank, dense.rank)
        assert np.array_equal(sparse.top, dense.top)
        assert sparse.loss is not None and sparse.entropy is not None
        assert dense.loss is not None and dense.entropy is not None
        np.testing.assert_allclose(sparse.loss, dense.loss, rtol=1e-12)
        np.testing.assert_allclose(sparse.entropy, dense.entropy, rtol=1e-11)
    assert len(np.unique(sparse.rank)) > 5


def test_equal_weights_count_against_the_target_and_lower_places_come_first(dataset: Dataset) -> None:
    batch = next(iter(query_set(dataset, EvaluateOptions(queries=50))))
    scores = SparseScorer(np.ones(dataset.num_items)).score(batch, None, 4)
    assert (scores.rank == dataset.num_items).all()
    assert (scores.top == np.arange(4)).all()
    assert scores.loss == pytest.approx(np.log(dataset.num_items))
