"""What the page is about: laws, runs, Records and plan of one store, read once."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from habitus.errors import ConfigError, FitError
from habitus.laws import MeasuredRun, fit, predict_saturating, published_laws, read_runs
from habitus.planning import log_limits
from habitus.reporting.format import join_words
from habitus.reporting.tally import Tally
from habitus.store import (
    LAWS_FILE,
    LOG_AXIS,
    TEST_TABLE_FILE,
    Law,
    Laws,
    LogLimits,
    Plan,
    RegisteredPlan,
    RunRow,
    SweepManifest,
    TestTable,
    manifest_paths,
)


@dataclass(frozen=True)
class Study:
    """One store as the figures see it."""

    name: str
    laws: Laws
    runs: tuple[MeasuredRun, ...]  # every row of every manifest, failed and missing ones included
    tally: Tally = field(default_factory=Tally)
    plan: Plan | None = None
    manifests: tuple[SweepManifest, ...] = ()
    laws_source: str = ""  # whether the laws were read or fitted for this page
    next_command: str | None = None  # trains the plan's recipe
    test_table: TestTable | None = None

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return self.laws.metrics

    @cached_property
    def metric(self) -> str:
        """The metric shown first: the plan's, or the first fitted."""
        if self.plan is not None and self.plan.metric in self.metrics:
            return self.plan.metric
        return self.metrics[0] if self.metrics else ""

    @cached_property
    def budgets(self) -> tuple[float, ...]:
        """Budgets of the sweeps; runs of the log axis spend whatever their passes cost."""
        budgets = {run.budget for run in self.runs if run.axis != LOG_AXIS} or {run.budget for run in self.runs}
        return tuple(sorted(budgets))

    @cached_property
    def published(self) -> Laws:
        return published_laws()

    @cached_property
    def _entries(self) -> dict[tuple[str, str], dict[float | None, Law]]:
        entries: dict[tuple[str, str], dict[float | None, Law]] = {}
        for e in self.laws.entries:
            entries.setdefault((e.name, e.metric), {})[e.budget] = e.law
        return entries

    @cached_property
    def _chosen(self) -> dict[str, dict[float, list[RunRow]]]:
        """Runs at their cell's best learning rate, by axis and budget."""
        chosen: dict[str, dict[float, list[RunRow]]] = {}
        for row in self.laws.runs:
            if row.chosen:
                chosen.setdefault(row.axis, {}).setdefault(row.budget, []).append(row)
        return chosen

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {id(row): i for i, row in enumerate(self.laws.runs)}

    def index(self, row: RunRow) -> int:
        """The position of a run among the runs of the laws."""
        return self._positions[id(row)]

    def colour(self, budget: float) -> str:
        """The colour name of a budget; one scale for the whole page."""
        return f"b{self.budgets.index(budget)}" if budget in self.budgets else "main"

    def law(self, name: str, metric: str, budget: float | None = None) -> Law | None:
        return self._entries.get((name, metric), {}).get(budget)

    def laws_by_budget(self, name: str, metric: str) -> dict[float, Law]:
        """The laws of that name and metric that belong to a budget, in order of budgets."""
        laws = self._entries.get((name, metric), {})
        return {budget: laws[budget] for budget in sorted(b for b in laws if b is not None)}

    def frontier(self, metric: str) -> list[tuple[float, float, float, float]]:
        """Compute, L* and its 95% interval from the smallest budget up to the plan's, or to ten times the largest."""
        if metric not in self._frontiers:
            law, budgets = self.law("loss_law", metric), list(self.laws_by_budget("size_optimum", metric))
            grid: list[float] = []
            if law is not None and law.values and budgets:
                far = 10 * budgets[-1] if self.plan is None else max(self.plan.flops, 1.1 * budgets[-1])
                grid = [*np.geomspace(budgets[0], budgets[-1], 12)[:-1], *np.geomspace(budgets[-1], far, 5)]
            self._frontiers[metric] = [(float(x), *predict_saturating(law, float(x))) for x in grid] if law else []
        return self._frontiers[metric]

    def log_limits(self, metric: str) -> LogLimits:
        """What the law of a finite log answers for a metric; nothing where there is none."""
        if metric not in self._limits:
            law = self.law("finite_log", metric)
            none = LogLimits(metric=metric, status="too_few")
            self._limits[metric] = none if law is None else log_limits(law, metric)
        return self._limits[metric]

    @cached_property
    def _limits(self) -> dict[str, LogLimits]:
        return {}

    @cached_property
    def _frontiers(self) -> dict[str, list[tuple[float, float, float, float]]]:
        return {}

    def paper_law(self, name: str, metric: str, budget: float | None = None) -> Law | None:
        """The paper's law of that name, if it is printed."""
        try:
            return self.published.find(name, metric, budget)
        except FitError:
            return None

    def best_rate_runs(self, axis: str, budget: float | None = None, needs: Iterable[str] = ()) -> list[RunRow]:
        """The runs at their cell's best learning rate that hold the knobs or metrics named."""
        by_budget = self._chosen.get(axis, {})
        rows = [row for b in by_budget for row in by_budget[b] if budget is None or b == budget]
        return [row for row in rows if all(name in row.knobs or name in row.metrics for name in needs)]

    @cached_property
    def left_out(self) -> list[tuple[str, float, str]]:
        """Cells that a sweep asked for and did not run: axis, budget, reason."""
        return [(m.axis, cell.flops_budget, cell.reason) for m in self.manifests for cell in m.left_out]

    def fitted_metrics(self, axis: str, knob: str = "") -> list[str]:
        """The metrics that this axis's runs hold, in the order of the laws."""
        rows = self.best_rate_runs(axis, needs=[knob] if knob else [])
        return [m for m in self.metrics if any(m in row.metrics for row in rows)]


def read_study(store: Path, plan: Plan | str | Path | None = None, metrics: Sequence[str] = ()) -> Study:
    """The study of a store folder or a flat CSV. Laws come from laws.json, or are fitted where it is missing or old.

    With `metrics` they are fitted, to these alone: a study that still runs is read often.
    """
    tally = Tally()
    runs = read_runs(store, tally.add)
    laws, laws_source = _fit_some(store, metrics, runs) if metrics else _read_or_fit_laws(store)
    if not laws.metrics:
        raise FitError(f"{store}: its laws name no metric", expected="a laws.json written by `habitus fit`")
    return Study(
        name=study_name(store.resolve()),
        laws=laws,
        runs=tuple(runs),
        tally=tally,
        plan=plan if isinstance(plan, Plan) else _read_plan(store, plan),
        manifests=tuple(SweepManifest.read(path) for path in manifest_paths(store)),
        laws_source=laws_source,
        test_table=TestTable.read(table) if (table := store / TEST_TABLE_FILE).is_file() else None,
    )


def _fit_some(store: Path, metrics: Sequence[str], runs: Iterable[MeasuredRun]) -> tuple[Laws, str]:
    """Laws of those of the metrics that some run has; of all that there are where no run has one."""
    measured = {metric for run in runs for metric in run.metrics}
    laws = fit(store, [metric for metric in metrics if metric in measured], allow_repeats=True)
    return laws, f"laws of {join_words(laws.metrics)} fitted for this page while the study runs"


def study_name(store: Path) -> str:
    """The name of the store's folder; of the study's and the store's where that is just 'store'."""
    return f"{store.parent.name}/{store.name}" if store.name == "store" and store.parent.name else store.name


def _read_or_fit_laws(store: Path) -> tuple[Laws, str]:
    """The laws, and where they come from in words."""
    path = store / LAWS_FILE if store.is_dir() else store.with_suffix(f".{LAWS_FILE}")
    old = Laws.read(path) if path.is_file() else None
    if old is not None and path.stat().st_mtime >= _newest_change(store):
        return old, f"laws read from {path.name}"
    # Fit with the options of the earlier fit.
    allow_repeats = old is not None and any(row.knobs.get("epochs", 0.0) > 1.001 for row in old.runs)
    why = "no laws.json yet" if old is None else "laws.json is older than the newest Record"
    laws = fit(store, allow_repeats=allow_repeats)
    more = [] if old is None else [m for m in old.metrics if m not in laws.metrics]
    if more:
        laws = fit(store, [*laws.metrics, *more], allow_repeats=allow_repeats)
    return laws, f"laws fitted for this page ({why})"


def _newest_change(store: Path) -> float:
    files = [*store.glob("cells/*/record.json"), *manifest_paths(store)] if store.is_dir() else [store]
    return max((path.stat().st_mtime for path in files), default=0.0)


def _read_plan(store: Path, plan: str | Path | None) -> Plan | None:
    """The plan given, or the one in the store, registered or not."""
    path = store / "plan.json" if plan is None else Path(plan)
    if not path.is_file():
        if plan is None:
            return None
        raise ConfigError(f"--plan {path} does not exist", expected="a plan in JSON, as `habitus plan --json` prints")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", expected="a plan in JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}", expected="a plan, which is a JSON object")
    kind = RegisteredPlan if "registered_hash" in values else Plan
    return kind.parse(values, str(path))
