"""laws.json: every law of a store, with all that is needed to redraw its figure."""

import math
from operator import not_
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from habitus.errors import ConfigError, FitError
from habitus.store.archive import is_archive
from habitus.store.folder import LAWS_FILE, EvaluationFiles
from habitus.store.law import Interval, Law
from habitus.typed import Sealed, Typed, suggest_name

LAWS_VERSION: Literal[1] = 1


class LawEntry(Typed):
    """One law: what it is about, for which metric, and at which budget if it belongs to one."""

    name: str  # size_optimum, size_law, share_law, ...
    axis: str
    metric: str
    budget: float | None = None
    law: Law


class Forecast(Typed):
    """One budget predicted from others."""

    fitted_budgets: tuple[float, ...]
    budget: float
    predicted: float
    low: float | None = None
    high: float | None = None
    observed: float
    ratio: float  # predicted / observed
    r2: float | None = None  # of the fit that made the prediction
    last: float | None = None  # observed at the largest fitted budget: what persistence forecasts
    log_line: float | None = None  # a straight line in log C through what the two largest fitted budgets gave

    @property
    def miss(self) -> float:
        """How far off, as a share of what was observed."""
        return self.ratio - 1

    @property
    def gain(self) -> float | None:
        """What the budget gained over the largest fitted one; absent without that, or where there was none."""
        return None if self.last is None or self.last == self.observed else self.observed - self.last

    def error_of_gain(self, forecast: float | None = None) -> float | None:
        """The error of a forecast (this one, or another of the same budget) as a share of the gain: persistence has 1.

        Positive where the forecast promises too little.
        """
        forecast = self.predicted if forecast is None else forecast
        return None if self.gain is None else (self.observed - forecast) / self.gain


class Rollout(Typed):
    """All forecasts of one law, and what they warn of."""

    law: str
    forecasts: tuple[Forecast, ...]
    warnings: tuple[str, ...] = ()

    def at(self, num_fitted: int, budget: float) -> Forecast:
        """The forecast for a budget from the lowest `num_fitted` ones."""
        for forecast in self.forecasts:
            if len(forecast.fitted_budgets) == num_fitted and math.isclose(forecast.budget, budget, rel_tol=1e-9):
                return forecast
        raise FitError(f"no forecast of {budget:g} from {num_fitted} budgets")


class NamedRollout(Typed):
    """How one law of a metric would have forecast, from earlier budgets and from all others."""

    name: str
    metric: str
    rollout: Rollout
    leave_one_out: Rollout


class FormFit(Typed):
    """One candidate equation: AICc is absent where there are too few points to compare it."""

    name: str
    num_values: int
    rss: float
    aicc: float | None = None
    weight: float | None = None  # Akaike weight among the comparable forms


class NamedForms(Typed):
    """The equations that were compared for one law, the best first."""

    name: str
    metric: str
    budget: float | None = None
    forms: tuple[FormFit, ...]


class Correlation(Typed):
    """ρ between two columns; absent where a column is constant or fewer than three rows have both."""

    first: str
    second: str
    n: int
    rho: float | None = None
    chance_low: float | None = None
    chance_high: float | None = None

    @property
    def beyond_chance(self) -> bool:
        if self.rho is None or self.chance_low is None or self.chance_high is None:
            return False
        return not self.chance_low <= self.rho <= self.chance_high


class CorrelationTable(Typed):
    """All pairs of one set of columns over one set of rows."""

    label: str
    names: tuple[str, ...]
    pairs: tuple[Correlation, ...]
    num_rows: int

    def rho(self, first: str, second: str) -> float | None:
        """ρ of two columns, in either order."""
        for pair in self.pairs:
            if {pair.first, pair.second} == {first, second}:
                return pair.rho
        raise FitError(f"no pair {first!r}, {second!r}", expected=f"two of {', '.join(self.names)}")

    def worst(self) -> Correlation | None:
        """The pair that agrees least."""
        measured = [pair for pair in self.pairs if pair.rho is not None]
        return min(measured, key=lambda pair: pair.rho or 0.0) if measured else None


class NamedTables(Typed):
    """Correlation tables of one set of runs: per budget, then pooled."""

    name: str  # stage1, stage2, or slices:<metric>
    runs: Literal["best learning rate only", "all evaluations"]
    tables: tuple[CorrelationTable, ...]


class Surrogacy(Typed):
    """How in-batch training loss ranks the K of one budget, against one metric."""

    budget: float
    metric: str
    correlation: Correlation
    spread: float  # (largest − smallest) / mean of the metric over K
    faded: bool


class RegimePairs(Typed):
    """ρ between the regimes, metric by metric, over the runs of one axis and budget."""

    axis: str
    budget: float
    pairs: tuple[Correlation, ...]


class BestRate(Typed):
    """The best rate of one size on its grid."""

    size: float
    learning_rate: float
    loss: float
    bracketed: bool  # strictly worse rates stand on both sides: a verified minimum, not an edge
    vertex: float | None = None  # of the parabola in log rate through the best and its two neighbours


class RateDrift(Typed):
    """How the best learning rate moves with size, for one initialisation."""

    best: tuple[BestRate, ...]
    span_decades: float  # log10 of largest over smallest best rate on the grid
    vertex_span_decades: float | None = None
    warnings: tuple[str, ...] = ()


class BootstrapIntervals(Typed):
    """Percentile intervals of every number that a pipeline gives."""

    times: int
    failed: int  # resamplings from which the pipeline could not answer
    values: dict[str, float]  # from the runs as they are
    intervals: dict[str, dict[str, Interval]]


class NamedBootstrap(Typed):
    metric: str
    result: BootstrapIntervals


class RateLoss(Typed):
    """The mean training loss of one learning rate of a cell."""

    learning_rate: float
    loss: float
    num_seeds: int


class RateChoice(Typed):
    """Which learning rate stands for a cell, with the losses of all that were tried."""

    axis: str
    budget: float
    cell_id: str
    learning_rate: float
    tried: tuple[RateLoss, ...]
    at_edge: bool  # the best of several stands first or last: the grid should be extended


class Exclusion(Typed):
    """A run that no law is fitted to."""

    axis: str
    budget: float
    cell_id: str
    learning_rate: float
    seed: int
    reason: str


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


class LawGroup(Typed):
    """The laws of the runs of another optimizer or init than the main ones of a store."""

    optimizer: str
    init: str
    entries: tuple[LawEntry, ...] = ()
    rollouts: tuple[NamedRollout, ...] = ()
    runs: tuple[RunRow, ...] = ()

    @property
    def name(self) -> str:
        """'adamw/plain', as `habitus fit --group` takes it."""
        return f"{self.optimizer or 'any'}/{self.init}"


class Laws(Sealed):
    """Everything that `habitus fit` gives."""

    schema_version: Literal[1] = LAWS_VERSION
    source: str
    seed: int
    metrics: tuple[str, ...]
    definitions: dict[str, str] = Field(default_factory=dict)
    evaluation: EvaluationFiles | None = Field(
        None, description="What all runs of the store were evaluated on; absent where they differ or do not say."
    )
    entries: tuple[LawEntry, ...] = ()
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
    groups: tuple[LawGroup, ...] = Field((), exclude_if=not_)
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = Field(default_factory=dict)

    @property
    def unsealed(self) -> str:
        """What to say of laws whose runs have no seals, as those of a flat CSV; empty for those of a store."""
        if not self.source.lower().endswith(".csv"):
            return ""
        return f"unsealed: the runs come from {self.source}, where nothing shows whether a number was changed"

    def find(self, name: str, metric: str, budget: float | None = None) -> Law:
        """The law of that name, metric and budget."""
        for entry in self.entries:
            if (entry.name, entry.metric, entry.budget) == (name, metric, budget):
                return entry.law
        names = sorted({entry.name for entry in self.entries})
        where = "" if budget is None else f" at {budget:.3g} FLOPs"
        hint = suggest_name(name, names) if name not in names else f"not for metric {metric!r}{where}"
        raise FitError(f"no law {name!r} for {metric!r}{where} ({hint})", expected=f"one of {', '.join(names)}")

    def warnings(self) -> list[str]:
        """All warnings, each with the law it belongs to."""
        lines = []
        for entry in self.entries:
            where = f"{entry.name} of {entry.metric}"
            where += "" if entry.budget is None else f" at {entry.budget:.3g}"
            lines += [f"{where}: {warning}" for warning in entry.law.warnings]
        for item in self.rollouts:
            lines += [f"roll-out of {item.name} for {item.metric}: {w}" for w in item.rollout.warnings]
        for init, drift in self.learning_rate_drift.items():
            lines += [f"learning rates of {init}: {w}" for w in drift.warnings]
        return lines


def find_laws(source: str | Path) -> Path:
    """The laws.json that is meant: of a store its own, else the file itself."""
    source = Path(source)
    if is_archive(source):
        fitted = source.with_suffix(f".{LAWS_FILE}")
        raise ConfigError(
            f"{source} holds runs, no laws",
            expected="a laws.json, or the store that holds it",
            next_step=f"pass {fitted}" if fitted.exists() else f"`habitus fit {source}` writes {fitted}: pass that",
        )
    path = source / LAWS_FILE if source.is_dir() else source
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist",
            expected="a laws.json, or the store that holds it",
            next_step="`habitus fit STORE` writes it; or plan by the published laws",
        )
    return path
