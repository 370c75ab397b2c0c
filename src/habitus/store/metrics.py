"""Metrics by name: `<regime>/<metric>[@k][/<slice>]`, as in `batch/loss`, `catalogue/recall@10/history=5` or
`horizon7d/ndcg@10`."""

from dataclasses import dataclass
from typing import Literal, get_args

from habitus.errors import FitError
from habitus.recipe import HORIZON, MetricGroup, Regime
from habitus.recipe import METRIC_GROUPS as METRIC_GROUPS
from habitus.typed import suggest_name

Direction = Literal["min", "max"]
ALL_METRIC_GROUPS: tuple[MetricGroup, ...] = get_args(MetricGroup)

TRAIN = "train"  # the regime of a run's own training losses
REGIMES: tuple[Regime, ...] = get_args(Regime)
CUTOFFS = (1, 5, 10, 20, 50, 100)  # the k of recall@k and the others
HISTORIES = (3, 5, 10, 20, 50, 100)  # the lengths of the slices by history
HISTORY_SLICE = "history="
HORIZON_METRICS = ("recall", "ndcg", "map")  # of the regimes horizon7d, horizon28d_new, …
_HORIZON_REGIME = "horizon"
# Of one set of queries that all have a long history: the metric with their n newest events, what the others add to it,
# and the seconds in which one query is answered.
CONTEXT_SLICE, BEYOND_SLICE, QUERY_SECONDS = "context=", "beyond=", "query_seconds"
SLICES = ("cold", "warm", "repeat", "first")  # besides those by history


@dataclass(frozen=True)
class MetricKind:
    """One metric, whatever its regime, cut-off and slice."""

    name: str
    direction: Direction  # which way is better
    group: MetricGroup | None = None  # None: measured in training only
    at_cutoff: bool = False  # named with its k, as in recall@10
    headline: tuple[str, ...] = ()  # its names that a fit takes where the user names no metric

    def names(self, cutoffs: tuple[int, ...] = CUTOFFS) -> tuple[str, ...]:
        """Its names without a regime: once, or once per cut-off."""
        return tuple(f"{self.name}@{k}" for k in cutoffs) if self.at_cutoff else (self.name,)


# A new metric is a line here and the function in `evaluation` that measures it.
METRICS = {
    kind.name: kind
    for kind in (
        MetricKind("loss", "min", "loss", headline=("loss",)),
        MetricKind("perplexity", "min", "loss", headline=("perplexity",)),
        MetricKind("entropy", "min", "loss", headline=("entropy",)),
        MetricKind("in_batch_loss", "min"),
        MetricKind("extra_loss", "min"),
        MetricKind("recall", "max", "ranking", at_cutoff=True, headline=("recall@10", "recall@100")),
        MetricKind("ndcg", "max", "ranking", at_cutoff=True, headline=("ndcg@10", "ndcg@100")),
        MetricKind("mrr", "max", "ranking", at_cutoff=True, headline=("mrr@10",)),
        MetricKind("coverage", "max", "coverage", at_cutoff=True, headline=("coverage@10",)),
        MetricKind("coverage_union", "max", "coverage", at_cutoff=True),
        # With one target per query these are recall, recall/k and MRR under the names that other tools print.
        MetricKind("hit_rate", "max", "classic", at_cutoff=True),
        MetricKind("precision", "max", "classic", at_cutoff=True),
        MetricKind("map", "max", "classic", at_cutoff=True),
        MetricKind("auc", "max", "auc"),
        MetricKind("diversity", "max", "lists", at_cutoff=True),
        MetricKind("vector_diversity", "max", "lists", at_cutoff=True),
        MetricKind("novelty", "max", "lists", at_cutoff=True),
        MetricKind("popularity", "min", "lists", at_cutoff=True),
        MetricKind("gini", "min", "lists", at_cutoff=True),
    )
}


def direction_of(metric: str) -> Direction:
    """Whether smaller or larger is better: losses, perplexity and entropy fall, ranking metrics rise."""
    bare = (metric.split("/")[1] if "/" in metric else metric).split("@")[0]
    if bare not in METRICS:
        rising = [name for name, kind in METRICS.items() if kind.direction == "max"]
        raise FitError(
            f"it is not known whether {metric!r} should fall or rise ({suggest_name(bare, rising)})",
            expected=f"one of {', '.join(METRICS)}, with a regime in front",
            next_step="give the column the name of the metric it holds, or call the law with a direction",
        )
    return METRICS[bare].direction


def horizon_regime(horizon: str) -> str:
    """The regime of a horizon: horizon7d of 7d."""
    return f"{_HORIZON_REGIME}{horizon}"


def horizon_of(metric: str) -> str | None:
    """The horizon of a metric or regime, 7d of horizon7d/ndcg@10; None of the others."""
    regime = metric.partition("/")[0]
    horizon = regime.removeprefix(_HORIZON_REGIME)
    return horizon if horizon != regime and HORIZON.fullmatch(horizon) else None


def headline_metrics() -> tuple[str, ...]:
    """What is fitted where the user names no metric: in each regime, then the training loss."""
    names = [name for kind in METRICS.values() for name in kind.headline]
    return (*(f"{regime}/{name}" for regime in REGIMES for name in names), f"{TRAIN}/loss")


def regime_twins(metric: str) -> list[str]:
    """The metric, then the same one in the other regimes where it has one; of a horizon in the catalogue first."""
    regime, _, bare = metric.partition("/")
    has_twins = regime in REGIMES or horizon_of(metric) is not None
    return [metric, *(f"{other}/{bare}" for other in reversed(REGIMES) if has_twins and other != regime)]
