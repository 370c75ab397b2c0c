"""Scores over candidates: loss, entropy, gradients, ranks and top-k, in flat memory whatever their number."""

from habitus.softmax.backend import SoftmaxBackend, choose_backend, refusal_reason
from habitus.softmax.cpu_scan import CpuScan
from habitus.softmax.extras import extras_softmax
from habitus.softmax.inputs import check_scale, has_nonfinite, max_abs
from habitus.softmax.latch import Cause, Latch, explain_cause
from habitus.softmax.loss import SoftmaxResult, candidate_softmax
from habitus.softmax.negatives import (
    NUM_KEYS,
    CandidatePool,
    candidate_pool,
    negative_keys,
    sample_negatives,
    targets_among,
)
from habitus.softmax.ranking import CatalogueScores, TopK, catalogue_scores, ranks, top_k
from habitus.softmax.table import CandidateTable
from habitus.softmax.tiles import Sums, merge_sums
from habitus.softmax.torch_scan import SCAN_GROUP, TorchScan
from habitus.softmax.triton_scan import TritonScan, buffer_slots

__all__ = [
    "NUM_KEYS",
    "SCAN_GROUP",
    "CandidatePool",
    "CandidateTable",
    "CatalogueScores",
    "Cause",
    "CpuScan",
    "Latch",
    "SoftmaxBackend",
    "SoftmaxResult",
    "Sums",
    "TopK",
    "TorchScan",
    "TritonScan",
    "buffer_slots",
    "candidate_pool",
    "candidate_softmax",
    "catalogue_scores",
    "check_scale",
    "choose_backend",
    "explain_cause",
    "extras_softmax",
    "has_nonfinite",
    "max_abs",
    "merge_sums",
    "negative_keys",
    "ranks",
    "refusal_reason",
    "sample_negatives",
    "targets_among",
    "top_k",
]
