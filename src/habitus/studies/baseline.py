"""The best baseline on the validation users: what the first line of a study has to be compared with."""

from typing import cast

from habitus.data import Dataset
from habitus.recipe import Regime
from habitus.store import direction_of
from habitus.studies.state import Baseline
from habitus.sweeps import EvaluationSettings

_ORACLE = "oracle"  # of a synthetic world: the best possible, not a baseline


def best_baseline(dataset: Dataset, metric: str, settings: EvaluationSettings) -> Baseline | None:
    """The baseline with the best value of the metric, on the queries that runs are chosen by."""
    from habitus.evaluation import EvaluateOptions, evaluate_runs

    options = EvaluateOptions(
        regimes=(cast(Regime, metric.partition("/")[0]),),
        queries=settings.queries,
        batch_sequences=settings.batch_sequences,
        catalogue_items=settings.catalogue_items,
        metrics=("loss", "ranking"),
        seed=settings.seed,
    )
    evaluations = evaluate_runs([], dataset, options, with_baselines=True)
    values = [
        Baseline(scorer=one.scorer, value=one.metrics[metric].value)
        for one in evaluations
        if metric in one.metrics and one.scorer != _ORACLE
    ]
    sign = 1.0 if direction_of(metric) == "max" else -1.0
    return max(values, key=lambda one: sign * one.value, default=None)
