"""Two regimes, one set of metrics."""

from habitus.evaluation.evaluation import (
    EvaluateOptions,
    Evaluation,
    catalogue_subset,
    evaluate,
    query_set,
)
from habitus.evaluation.model_scorer import ModelScorer
from habitus.evaluation.per_query import PerQueryFile
from habitus.evaluation.ranks import Ranks, device_named, joined_ranks
from habitus.evaluation.runs import Handling, cache_folder, check_dataset, evaluate_runs, find_cache, tidy
from habitus.evaluation.scores import Scorer, Scores

__all__ = [
    "EvaluateOptions",
    "Evaluation",
    "Handling",
    "ModelScorer",
    "PerQueryFile",
    "Ranks",
    "Scorer",
    "Scores",
    "cache_folder",
    "catalogue_subset",
    "check_dataset",
    "device_named",
    "evaluate",
    "evaluate_runs",
    "find_cache",
    "joined_ranks",
    "query_set",
    "tidy",
]
