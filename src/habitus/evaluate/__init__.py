"""Two regimes, one set of metrics."""

from habitus.evaluate.evaluation import METRIC_GROUPS, EvaluateOptions, Evaluation, evaluate
from habitus.evaluate.model_scorer import ModelScorer
from habitus.evaluate.runs import Handling, evaluate_runs, tidy
from habitus.evaluate.scores import Scorer, Scores

__all__ = [
    "METRIC_GROUPS",
    "EvaluateOptions",
    "Evaluation",
    "Handling",
    "ModelScorer",
    "Scorer",
    "Scores",
    "evaluate",
    "evaluate_runs",
    "tidy",
]
