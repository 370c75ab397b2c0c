"""laws.json: every law of a store, with all that is needed to redraw its figure."""

from typing import Any, Literal

from pydantic import Field

from habitus.errors import FitError
from habitus.laws.bootstrap import Bootstrapped
from habitus.laws.checks import Direction
from habitus.laws.correlation import Correlation, CorrelationTable, Surrogacy
from habitus.laws.forms import Form
from habitus.laws.learning_rate import RateDrift
from habitus.laws.result import Law
from habitus.laws.rollout import Rollout
from habitus.laws.selection import Exclusion, RateChoice
from habitus.typed import Typed, nearest

LAWS_VERSION: Literal[1] = 1
_LARGER_IS_BETTER = ("recall", "ndcg", "mrr", "coverage", "coverage_union")
_SMALLER_IS_BETTER = ("loss", "perplexity", "entropy", "in_batch_loss", "extra_loss")


class Entry(Typed):
    """One law: what it is about, for which metric, and at which budget if it belongs to one."""

    name: str  # size_optimum, size_law, share_law, ...
    axis: str
    metric: str
    budget: float | None = None
    law: Law


class NamedRollout(Typed):
    name: str
    metric: str
    rollout: Rollout
    leave_one_out: Rollout


class NamedForms(Typed):
    name: str
    metric: str
    budget: float | None = None
    forms: tuple[Form, ...]


class NamedTables(Typed):
    """Correlation tables of one set of runs: per budget, then pooled."""

    name: str  # stage1, stage2, or slices:<metric>
    runs: Literal["best learning rate only", "all evaluations"]
    tables: tuple[CorrelationTable, ...]


class RegimePairs(Typed):
    axis: str
    budget: float
    pairs: tuple[Correlation, ...]


class NamedBootstrap(Typed):
    metric: str
    result: Bootstrapped


class RunRow(Typed):
    """One run as the figures need it."""

    axis: str
    budget: float
    cell_id: str
    learning_rate: float
    seed: int
    init: str
    chosen: bool
    knobs: dict[str, float]
    metrics: dict[str, float]
    trajectory: tuple[tuple[float, str, float], ...] = ()


class LawsFile(Typed):
    """Everything `habitus fit` found."""

    schema_version: Literal[1] = LAWS_VERSION
    source: str
    seed: int
    metrics: tuple[str, ...]
    definitions: dict[str, str] = Field(default_factory=dict)
    entries: tuple[Entry, ...] = ()
    rollouts: tuple[NamedRollout, ...] = ()
    forms: tuple[NamedForms, ...] = ()
    correlations: tuple[NamedTables, ...] = ()
    surrogacy: tuple[Surrogacy, ...] = ()
    regimes: tuple[RegimePairs, ...] = ()
    learning_rate_drift: dict[str, RateDrift] = Field(default_factory=dict)
    bootstrap: tuple[NamedBootstrap, ...] = ()
    learning_rates: tuple[RateChoice, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    runs: tuple[RunRow, ...] = ()
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)

    def find(self, name: str, metric: str, budget: float | None = None) -> Law:
        """The law of that name, metric and budget."""
        for entry in self.entries:
            if (entry.name, entry.metric, entry.budget) == (name, metric, budget):
                return entry.law
        names = sorted({entry.name for entry in self.entries})
        where = "" if budget is None else f" at {budget:.3g} FLOPs"
        hint = nearest(name, names) if name not in names else f"not for metric {metric!r}{where}"
        raise FitError(f"no law {name!r} for {metric!r}{where} ({hint})", expected=f"one of {', '.join(names)}")

    def warnings(self) -> list[str]:
        """All warnings, each with the law it belongs to."""
        told = []
        for entry in self.entries:
            where = f"{entry.name} of {entry.metric}"
            where += "" if entry.budget is None else f" at {entry.budget:.3g}"
            told += [f"{where}: {warning}" for warning in entry.law.warnings]
        for item in self.rollouts:
            told += [f"roll-out of {item.name} for {item.metric}: {w}" for w in item.rollout.warnings]
        for init, drift in self.learning_rate_drift.items():
            told += [f"learning rates of {init}: {w}" for w in drift.warnings]
        return told


def direction_of(metric: str) -> Direction:
    """Whether smaller or larger is better: losses, perplexity and entropy fall, ranking metrics rise."""
    bare = (metric.split("/")[1] if "/" in metric else metric).split("@")[0]
    if bare not in (*_SMALLER_IS_BETTER, *_LARGER_IS_BETTER):
        raise FitError(
            f"whether {metric!r} should fall or rise is not known ({nearest(bare, list(_LARGER_IS_BETTER))})",
            expected=f"one of {', '.join((*_SMALLER_IS_BETTER, *_LARGER_IS_BETTER))}, with a regime in front",
            next_step="give the column the name of the metric it holds, or call the law with a direction",
        )
    return "min" if bare in _SMALLER_IS_BETTER else "max"
