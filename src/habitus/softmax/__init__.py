"""Scores over candidates: loss, entropy, gradients, ranks and top-k, in flat memory whatever their number."""

from habitus.softmax.backend import SoftmaxBackend, choose_backend, refusal
from habitus.softmax.checks import check_scale, largest, not_finite
from habitus.softmax.extras import extras_softmax
from habitus.softmax.latch import Cause, Latch, explain
from habitus.softmax.lean_scan import LeanScan
from habitus.softmax.loss import SoftmaxResult, candidate_softmax
from habitus.softmax.negatives import (
    NUM_KEYS,
    CandidatePool,
    candidate_pool,
    negative_keys,
    sample_negatives,
    targets_among,
)
from habitus.softmax.plain_scan import SCAN_GROUP, PlainScan
from habitus.softmax.ranking import CatalogueScores, TopK, catalogue_scores, ranks, top_k
from habitus.softmax.table import CandidateTable
from habitus.softmax.tile_scan import TileScan, slots_for
from habitus.softmax.tiles import Sums, merge_sums

__all__ = [
    "NUM_KEYS",
    "SCAN_GROUP",
    "CandidatePool",
    "CandidateTable",
    "CatalogueScores",
    "Cause",
    "Latch",
    "LeanScan",
    "PlainScan",
    "SoftmaxBackend",
    "SoftmaxResult",
    "Sums",
    "TileScan",
    "TopK",
    "candidate_pool",
    "candidate_softmax",
    "catalogue_scores",
    "check_scale",
    "choose_backend",
    "explain",
    "extras_softmax",
    "largest",
    "merge_sums",
    "negative_keys",
    "not_finite",
    "ranks",
    "refusal",
    "sample_negatives",
    "slots_for",
    "targets_among",
    "top_k",
]
