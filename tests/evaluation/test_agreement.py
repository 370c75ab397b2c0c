"""Recall, NDCG and MRR against torchmetrics on random scores; `benchmarks/metrics.py` does the same against ranx."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from habitus.evaluation.metrics import mrr, ndcg, recall
from habitus.evaluation.scores import dense_scores

retrieval = pytest.importorskip("torchmetrics.functional.retrieval")


@given(st.integers(0, 10**6), st.integers(1, 80), st.sampled_from([1, 5, 10, 20, 50, 100]))
def test_random_scores_agree_with_torchmetrics(seed: int, num_candidates: int, k: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.permutation(num_candidates)[None] / 16  # distinct in float32 too, which torchmetrics works in
    place = int(draw.integers(num_candidates))
    rank = dense_scores(logits, np.array([place]), 1, None).rank
    positive = torch.from_numpy(logits[0] + 1)  # torchmetrics takes scores of 0 and below for 'not retrieved'
    relevant = torch.zeros(num_candidates, dtype=torch.long)
    relevant[place] = 1
    assert recall(rank, k)[0] == pytest.approx(float(retrieval.retrieval_recall(positive, relevant, top_k=k)), abs=1e-9)
    reciprocal = retrieval.retrieval_reciprocal_rank(positive, relevant, top_k=k)
    # Their quotients are float32: 1/3 is only known to 1e-8 there.
    assert mrr(rank, k)[0] == pytest.approx(float(reciprocal), abs=3e-8)
    gain = retrieval.retrieval_normalized_dcg(positive, relevant, top_k=k)
    # Theirs is a difference of float32 cumulative sums, which grow with k.
    assert ndcg(rank, k)[0] == pytest.approx(float(gain), abs=2e-6)
