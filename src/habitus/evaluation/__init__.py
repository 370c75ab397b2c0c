"""Runs and baselines on fixed queries: two regimes, one set of metrics."""

from habitus.evaluation.ageing import Ageing, age_runs, measure_ageing
from habitus.evaluation.contexts import check_contexts, evaluate_contexts
from habitus.evaluation.error_analysis import ErrorOptions, error_pages, slice_evaluations
from habitus.evaluation.evaluation import (
    EvaluateOptions,
    Evaluation,
    catalogue_subset,
    evaluate,
    horizon_queries,
    query_set,
)
from habitus.evaluation.groups import GroupOptions
from habitus.evaluation.horizon import PerUser
from habitus.evaluation.model_scorer import ModelScorer
from habitus.evaluation.paired import PairedDifference, paired_difference
from habitus.evaluation.per_query import PerQuery, PerQueryFile
from habitus.evaluation.ranks import Ranks, join_ranks, resolve_device
from habitus.evaluation.runs import (
    ComputeOptions,
    cache_folder,
    check_dataset,
    evaluate_runs,
    find_cache,
    metrics_table,
)
from habitus.evaluation.scores import Scorer, Scores

__all__ = [
    "Ageing",
    "ComputeOptions",
    "ErrorOptions",
    "EvaluateOptions",
    "Evaluation",
    "GroupOptions",
    "ModelScorer",
    "PairedDifference",
    "PerQuery",
    "PerQueryFile",
    "PerUser",
    "Ranks",
    "Scorer",
    "Scores",
    "age_runs",
    "cache_folder",
    "catalogue_subset",
    "check_contexts",
    "check_dataset",
    "error_pages",
    "evaluate",
    "evaluate_contexts",
    "evaluate_runs",
    "find_cache",
    "horizon_queries",
    "join_ranks",
    "measure_ageing",
    "metrics_table",
    "paired_difference",
    "query_set",
    "resolve_device",
    "slice_evaluations",
]
