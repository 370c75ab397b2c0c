"""Scores over candidates: loss, entropy, gradients, ranks and top-k, in flat memory whatever their number."""

from habitus.softmax import topk
from habitus.softmax.backend import SoftmaxBackend, choose_backend
from habitus.softmax.extras import extras_softmax
from habitus.softmax.inputs import has_nonfinite
from habitus.softmax.latch import Latch, explain_cause
from habitus.softmax.loss import SoftmaxResult, candidate_softmax
from habitus.softmax.negatives import (
    NUM_KEYS,
    candidate_pool,
    negative_keys,
    sample_negatives,
    targets_among,
)
from habitus.softmax.plain import fast_softmax
from habitus.softmax.ranking import catalogue_scores, ranks, top_k
from habitus.softmax.scan import MEMORY_BYTES, CandidateScan
from habitus.softmax.table import CandidateTable
from habitus.softmax.tiles import Sums, merge_sums

__all__ = [
    "MEMORY_BYTES",
    "NUM_KEYS",
    "CandidateScan",
    "CandidateTable",
    "Latch",
    "SoftmaxBackend",
    "SoftmaxResult",
    "Sums",
    "candidate_pool",
    "candidate_softmax",
    "catalogue_scores",
    "choose_backend",
    "explain_cause",
    "extras_softmax",
    "fast_softmax",
    "has_nonfinite",
    "merge_sums",
    "negative_keys",
    "ranks",
    "sample_negatives",
    "targets_among",
    "top_k",
    "topk",
]
