"""Scores over candidates: loss, entropy, gradients, ranks and top-k, in flat memory whatever their number."""

from habitus.softmax.backend import SoftmaxBackend, choose_backend
from habitus.softmax.extras import extras_softmax
from habitus.softmax.latch import Cause, Latch
from habitus.softmax.loss import SoftmaxResult, candidate_softmax
from habitus.softmax.negatives import CandidatePool, candidate_pool, negative_keys, sample_negatives, targets_among
from habitus.softmax.ranking import CatalogueScores, TopK, catalogue_scores, ranks, top_k

__all__ = [
    "CandidatePool",
    "CatalogueScores",
    "Cause",
    "Latch",
    "SoftmaxBackend",
    "SoftmaxResult",
    "TopK",
    "candidate_pool",
    "candidate_softmax",
    "catalogue_scores",
    "choose_backend",
    "extras_softmax",
    "negative_keys",
    "ranks",
    "sample_negatives",
    "targets_among",
    "top_k",
]
