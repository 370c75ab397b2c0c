"""The best baseline on the validation users: what the first line of a study has to be compared with."""

from typing import cast

from habitus.data import Dataset
from habitus.recipe import Regime
from habitus.store import direction_of, horizon_of
from habitus.studies.state import Baseline
from habitus.sweeps import EvaluationSettings

_ORACLE = "oracle"  # of a synthetic world: the best possible, not a baseline


def check_horizon(dataset: Dataset, metric: str) -> None:
    """Refuse a metric of a horizon that the dataset does not cover, before anything is spent."""
    horizon = horizon_of(metric)
    if horizon is not None:
        from habitus.evaluation import EvaluateOptions, horizon_queries

        horizon_queries(dataset, EvaluateOptions(regimes=(), horizons=(horizon,)))


def best_baseline(dataset: Dataset, metric: str, settings: EvaluationSettings) -> Baseline | None:
    """The baseline with the best value of the metric, on the queries that runs are chosen by."""
    from habitus.evaluation import EvaluateOptions, evaluate_runs

    horizon = horizon_of(metric)
    options = EvaluateOptions(
        regimes=() if horizon is not None else (cast(Regime, metric.partition("/")[0]),),
        horizons=() if horizon is None else (horizon,),
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
