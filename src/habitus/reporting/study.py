"""What the page is about: laws, runs, Records and plan of one store, read once."""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from habitus.errors import ConfigError, FitError
from habitus.laws import Run, fit, published_laws, read_runs
from habitus.record import Record
from habitus.store import Law, Laws, RunRow


@dataclass(frozen=True)
class Study:
    """One store as the figures see it."""

    name: str
    laws: Laws
    runs: tuple[Run, ...]  # every row of every manifest, failed and missing ones included
    records: tuple[Record, ...] = ()
    plan: dict[str, Any] | None = None
    store: dict[str, Any] = field(default_factory=dict)  # store.json
    manifests: tuple[dict[str, Any], ...] = ()  # with cells that were asked for and not run, and why
    told: tuple[str, ...] = ()  # how this page came to be
    next_command: str | None = None  # trains the plan's recipe

    @cached_property
    def metrics(self) -> tuple[str, ...]:
        return self.laws.metrics

    @cached_property
    def metric(self) -> str:
        """The metric shown first: the plan's, or the first fitted."""
        asked = str((self.plan or {}).get("metric", ""))
        return asked if asked in self.metrics else self.metrics[0]

    @cached_property
    def budgets(self) -> tuple[float, ...]:
        return tuple(sorted({run.budget for run in self.runs}))

    @cached_property
    def published(self) -> Laws:
        return published_laws()

    @cached_property
    def _entries(self) -> dict[tuple[str, str, float | None], Law]:
        return {(e.name, e.metric, e.budget): e.law for e in self.laws.entries}

    @cached_property
    def _places(self) -> dict[int, int]:
        return {id(row): i for i, row in enumerate(self.laws.runs)}

    def index(self, row: RunRow) -> int:
        """The place of a run among the runs of the laws."""
        return self._places[id(row)]

    def colour(self, budget: float) -> str:
        """The colour name of a budget; one scale for the whole page."""
        return f"b{self.budgets.index(budget)}"

    def law(self, name: str, metric: str, budget: float | None = None) -> Law | None:
        return self._entries.get((name, metric, budget))

    def by_budget(self, name: str, metric: str) -> dict[float, Law]:
        """The laws of that name and metric that belong to a budget, in order of budgets."""
        found = {b: law for (n, m, b), law in self._entries.items() if (n, m) == (name, metric) and b is not None}
        return dict(sorted(found.items()))

    def paper(self, name: str, metric: str, budget: float | None = None) -> Law | None:
        """The paper's law of that name, if it is printed."""
        try:
            return self.published.find(name, metric, budget)
        except FitError:
            return None

    def chosen(self, axis: str, budget: float | None = None, needs: Iterable[str] = ()) -> list[RunRow]:
        """The runs at their cell's best learning rate that hold the knobs or metrics named."""
        return [
            row
            for row in self.laws.runs
            if row.axis == axis
            and row.chosen
            and (budget is None or row.budget == budget)
            and all(name in row.knobs or name in row.metrics for name in needs)
        ]

    @cached_property
    def left_out(self) -> list[tuple[str, float, str]]:
        """Cells that a sweep asked for and did not run: axis, budget, reason."""
        return [
            (str(m.get("axis")), float(out["flops_budget"]), str(out.get("reason", "")))
            for m in self.manifests
            for out in m.get("left_out") or ()
        ]

    def fitted_metrics(self, axis: str, knob: str = "") -> list[str]:
        """The metrics that this axis's chosen runs hold, in the order of the laws."""
        rows = self.chosen(axis, needs=[knob] if knob else [])
        return [m for m in self.metrics if any(m in row.metrics for row in rows)]


def read_study(store: Path, plan: Path | None = None) -> Study:
    """The study of a store folder or a flat CSV. Laws come from laws.json, or are fitted where it is missing or old."""
    runs = read_runs(store)
    laws, told = _laws(store)
    if not laws.metrics:
        raise FitError(f"{store}: its laws name no metric", expected="a laws.json written by `habitus fit`")
    return Study(
        name=_name(store.resolve()),
        laws=laws,
        runs=tuple(runs),
        records=_records(store, runs),
        plan=_plan(store, plan),
        store=_json(store / "store.json") if (store / "store.json").is_file() else {},
        manifests=_manifests(store),
        told=(told,),
    )


def _name(store: Path) -> str:
    """What the page is called: the store's folder, and the study's where the store has no name of its own."""
    return f"{store.parent.name}/{store.name}" if store.name == "store" and store.parent.name else store.name


def _laws(store: Path) -> tuple[Laws, str]:
    path = store / "laws.json" if store.is_dir() else store.with_suffix(".laws.json")
    old = Laws.read(path) if path.is_file() else None
    if old is not None and path.stat().st_mtime >= _newest(store):
        return old, f"laws read from {path.name}"
    # What an earlier fit was asked for is asked for again.
    repeats = old is not None and any(row.knobs.get("epochs", 0.0) > 1.001 for row in old.runs)
    why = "no laws.json yet" if old is None else "laws.json is older than the newest Record"
    found = fit(store, allow_repeats=repeats)
    more = [] if old is None else [m for m in old.metrics if m not in found.metrics]
    if more:
        found = fit(store, [*found.metrics, *more], allow_repeats=repeats)
    return found, f"laws fitted for this page ({why})"


def _newest(store: Path) -> float:
    files = [*store.glob("cells/*/record.json"), *store.glob("sweeps/*.json")] if store.is_dir() else [store]
    return max((path.stat().st_mtime for path in files), default=0.0)


def _records(store: Path, runs: list[Run]) -> tuple[Record, ...]:
    hashes = sorted({run.recipe_hash for run in runs if run.recipe_hash and run.status != "missing"})
    paths = [store / "cells" / digest / "record.json" for digest in hashes]
    return tuple(Record.read(path) for path in paths if path.is_file())


def _manifests(store: Path) -> tuple[dict[str, Any], ...]:
    return tuple(_json(path) for path in sorted(store.glob("sweeps/*.json"))) if store.is_dir() else ()


def _plan(store: Path, plan: Path | None) -> dict[str, Any] | None:
    if plan is not None:
        if not plan.is_file():
            raise ConfigError(
                f"--plan {plan} does not exist", expected="a plan in JSON, as `habitus plan --json` prints"
            )
        return _json(plan)
    path = store / "plan.json"
    return _json(path) if path.is_file() else None


def _json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", expected="a file in JSON") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}", expected="a JSON object")
    return values
