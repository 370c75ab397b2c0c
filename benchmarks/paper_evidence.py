"""What a study measured of the paper's findings: numbers with 95% intervals, from its laws and its Records."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean

import numpy as np
from scipy.stats import t

from habitus.laws import MeasuredRun
from habitus.laws.cell_scatter import cell_means
from habitus.laws.recipe_optimum import recipe_slice
from habitus.laws.surface_axis import SurfaceRuns
from habitus.record import Record
from habitus.store import SURFACE_AXIS, Correlation, Law, Laws, RunRow

LOSS = "batch/loss"
INFINITE = math.inf
COMPARED_AXES = ("share", "allocation", SURFACE_AXIS)  # of architectures at tuned rates, or of cells over all knobs
LEAST_CELLS = 5  # of a budget that counts as swept
LEAST_RELIABLE = 0.5  # a correlation that noise hides by more is refused, not corrected
Z = 1.96


@dataclass(frozen=True)
class Measured:
    """A number with its 95% interval, from n points."""

    value: float
    low: float
    high: float
    n: int
    note: str = ""
    figure: str = ""  # of report.html, where it is another than the finding's

    @property
    def smallest_effect(self) -> float:
        """Half the width of the interval: a smaller difference from the claim could not have been seen."""
        return (self.high - self.low) / 2

    def verdict(self, low: float, high: float) -> str:
        if low <= self.low and self.high <= high:
            return "confirmed"
        return "refuted" if self.high < low or self.low > high else "not decided"


class NotMeasuredError(Exception):
    """Why the store says nothing about a finding."""


class Evidence:
    """What a store measured: its laws, and the Records that no law reads."""

    def __init__(self, laws: Laws, records: Sequence[Record]) -> None:
        self.laws, self.records = laws, list(records)

    def recipe_law(self, metric: str) -> Law:
        """The law of a metric over all knobs of a recipe; refused with its reason where there is none."""
        law = self.law("recipe_surface", metric)
        if "draws" not in law.details:
            raise NotMeasuredError(f"the recipe's law of {metric} has no refits")
        return law

    def recipe_optima(self, metric: str) -> dict[float, Law]:
        """The best recipe of each budget whose size and share lie inside what was tried, and which leaves some of the
        pass: the paper's log does not end."""
        found = {
            c: law for c, law in self.optima("recipe_optimum", metric).items()
            if law["slots"] < 0.98 * self.surface_runs.most_slots and self.is_swept(c)
        }  # fmt: skip
        if not found:
            raise NotMeasuredError(f"no optimum of {metric} over all knobs of a recipe")
        return found

    @cached_property
    def surface_runs(self) -> SurfaceRuns:
        """Runs of the surface as the law of a recipe sees them."""
        runs = [
            MeasuredRun(run.axis, run.cell_id, run.budget, run.learning_rate, run.seed, knobs=run.knobs,
                        metrics=run.metrics)
            for run in self.runs(SURFACE_AXIS)
        ]  # fmt: skip
        return SurfaceRuns(runs, LOSS)

    def slices(self, budget: float, shares: Sequence[float]) -> np.ndarray:
        """The loss at shares, all else at its best, by the fit and by each refit [1 + refits, n]."""
        runs = self.surface_runs
        return recipe_slice(self.recipe_law(LOSS), budget, runs.cost(), "share", shares, runs.most_slots)

    def optima(self, name: str, metric: str) -> dict[float, Law]:
        """Identified optima by budget."""
        found = {e.budget: e.law for e in self.laws.entries if e.name == name and e.metric == metric and e.law.ok}
        return {budget: found[budget] for budget in sorted(b for b in found if b is not None)}

    def law(self, name: str, metric: str) -> Law:
        """An identified law over budgets; refused with its reason where there is none."""
        for entry in self.laws.entries:
            if entry.name == name and entry.metric == metric and entry.budget is None:
                if not entry.law.ok:
                    reason = entry.law.warnings[0] if entry.law.warnings else ""
                    raise NotMeasuredError(f"{name} of {metric} is {entry.law.status.replace('_', ' ')}: {reason}")
                return entry.law
        raise NotMeasuredError(f"no {name} of {metric}")

    def cells(self, axis: str, metric: str, knob: str) -> dict[float, dict[float, float]]:
        """By budget, the metric over the knob: the mean over seeds at each cell's chosen rate."""
        found: dict[float, dict[float, list[float]]] = {}
        for run in self.runs(axis):
            if metric in run.metrics and knob in run.knobs:
                found.setdefault(run.budget, {}).setdefault(run.knobs[knob], []).append(run.metrics[metric])
        return {c: {x: mean(values) for x, values in sorted(by_x.items())} for c, by_x in sorted(found.items())}

    def is_swept(self, budget: float) -> bool:
        """Whether enough architectures were compared at a budget: the runs of a forecast are no sweep."""
        cells = {run.cell_id for axis in COMPARED_AXES for run in self.runs(axis)
                 if abs(math.log(run.budget / budget)) < 0.01}  # fmt: skip
        return len(cells) >= LEAST_CELLS

    def num_seeds(self, axis: str, metric: str, knob: str, budget: float, x: float) -> int:
        """Of the cell of a budget whose knob is x."""
        return sum(metric in r.metrics and r.knobs.get(knob) == x for r in self.runs(axis) if r.budget == budget)

    def runs(self, axis: str) -> list[RunRow]:
        return [run for run in self.laws.runs if run.axis == axis and run.chosen]

    def seed_error(self, metric: str, stage: int | None = None) -> tuple[float, int]:
        """Half the 95% interval of one run from seed to seed, by the cells with several; and its degrees of freedom.

        By Student's t: few seeds know their own spread badly. Of one stage where it is named: runs of stage 2 share
        their parent, and differ by less.
        """
        cells: dict[str, list[float]] = {}
        for record in self.records:
            if stage is not None and record.recipe.train.stage != stage:
                continue
            if record.status == "done" and metric in record.metrics and not record.recipe.evaluate.every:
                same = record.recipe.model_copy(update={"train": record.recipe.train.model_copy(update={"seed": 0})})
                cells.setdefault(same.to_json(), []).append(record.metrics[metric].value)
        several = [values for values in cells.values() if len(values) > 1]
        dof = sum(len(values) - 1 for values in several)
        if dof < 2:
            raise NotMeasuredError(f"fewer than three seeds of {metric} to judge a difference by")
        return float(t.ppf(0.975, dof)) * math.sqrt(sum(float(np.var(v) * len(v)) for v in several) / dof), dof

    def reliability(self, metric: str) -> float:
        """The share of a metric's variance between cells of a budget that is no noise from seed to seed.

        Seeds of one rate only: rates of a cell differ by more than noise.
        """
        cells: dict[tuple[float, str], list[float]] = {}
        for run in (run for axis in COMPARED_AXES for run in self.runs(axis)):
            if run.metrics.get(metric, 0.0) > 0:
                cells.setdefault((run.budget, run.cell_id), []).append(math.log(run.metrics[metric]))
        dof = sum(len(values) - 1 for values in cells.values())
        if not dof:
            return 1.0
        noise = sum(float(np.var(values) * len(values)) for values in cells.values()) / dof
        by_budget = [[mean(v) for (b, _), v in cells.items() if b == c] for c in {budget for budget, _ in cells}]
        by_budget = [m for m in by_budget if len(m) >= LEAST_CELLS] or [m for m in by_budget if len(m) > 1]
        spread = mean(float(np.var(means, ddof=1)) for means in by_budget)
        return max(0.05, 1 - noise / spread)

    def correlation(self, name: str, first: str, second: str) -> dict[str, Correlation]:
        """ρ of two metrics by the label of the budget, at the best rate of each cell."""
        tables = [table for named in self.laws.correlations if named.name == name and named.runs.startswith("best")
                  for table in named.tables]  # fmt: skip
        pairs = {table.label: p for table in tables for p in table.pairs if {p.first, p.second} == {first, second}}
        return {label: pair for label, pair in pairs.items() if pair.rho is not None}

    def is_of_sweep(self, label: str) -> bool:
        """Whether a table of correlations is of one budget at which architectures were compared."""
        return label[:1].isdigit() and self.is_swept(float(label))

    def regimes(self, axis: str, metric: str) -> dict[float, Correlation]:
        """ρ of a metric between its two regimes, by budget."""
        return {
            row.budget: pair
            for row in self.laws.regimes if row.axis == axis
            for pair in row.pairs if pair.first == f"batch/{metric}" and pair.rho is not None
        }  # fmt: skip


# Estimates with intervals -------------------------------------------------------------------------------------------


def of_law(law: Law, name: str, note: str = "") -> Measured:
    low, high = law.interval(name)
    return Measured(float(law[name]), low, high, law.residuals.n, note)


def of_refits(rows: np.ndarray, n: int, note: str = "") -> Measured:
    """The fit's own value, with the 95% interval of its refits."""
    low, high = np.quantile(rows[1:], [0.025, 0.975])
    return Measured(float(rows[0]), float(min(low, rows[0])), float(max(high, rows[0])), n, note)


def spanning(optima: Iterable[tuple[float, Law]], name: str, what: str) -> Measured:
    """An optimum that is asked for at every budget: the interval spans those of all of them."""
    rows = [(c, float(law[name]), *law.interval(name), law.residuals.n) for c, law in optima]
    if not rows:
        raise NotMeasuredError(f"{what} is identified at no budget")
    note = "; ".join(f"{c:.0e}: {value:.3g}" for c, value, *_ in rows)
    value = math.exp(mean(math.log(row[1]) for row in rows))
    return Measured(value, min(row[2] for row in rows), max(row[3] for row in rows), sum(row[4] for row in rows), note)


def share_curve(law: Law, first: float, second: float) -> tuple[float, float, int]:
    """How much higher the fitted curve of a share sweep lies at the first share than at the second, its standard error
    and degrees of freedom: by all cells of the budget, whose scatter about the curve is the error."""
    x, y = cell_means(np.asarray(law.points["x"]), np.asarray(law.points["y"]))
    level = float(np.abs(y).mean())
    floor, a, b, alpha, beta = (float(law[name]) for name in ("floor", "a", "b", "alpha", "beta"))

    def tangents(at: np.ndarray) -> np.ndarray:
        rise, fall, u = a * at**alpha, b * at**-beta, np.log(at)
        return np.stack([np.ones_like(u), rise, fall, rise * u, fall * u], axis=1)

    def curve(at: float) -> float:
        return floor + a * at**alpha + b * at**-beta

    missed, dof = y - np.array([curve(v) for v in x]), max(1, len(x) - 5)
    scatter = law.details.get("cell_scatter")
    sigma = level * scatter if scatter else math.sqrt(float(missed @ missed) / dof)
    between = np.subtract(*tangents(np.array([first, second])))
    inverse = np.linalg.pinv(tangents(x).T @ tangents(x))
    dof = int(law.details.get("cell_scatter_dof", dof))
    return curve(first) - curve(second), sigma * math.sqrt(float(between @ inverse @ between)), dof


def mean_ratio(pairs: Sequence[tuple[Measured, Measured]], what: str, *, same_runs: bool = False) -> Measured:
    """The mean ratio of two numbers that were measured side by side several times; on the same runs, all err alike."""
    usable = [(a, b) for a, b in pairs if min(a.low, b.low) > 0 and max(a.high, b.high) < INFINITE]
    if not usable:
        raise NotMeasuredError(f"no budget has {what} with both ends of both intervals")
    logs = [math.log(a.value / b.value) for a, b in usable]
    squares = [sum((math.log(m.high / m.low) / 2 / Z) ** 2 for m in pair) for pair in usable]
    within = mean(map(math.sqrt, squares)) if same_runs else math.sqrt(sum(squares)) / len(usable)
    between = float(np.std(logs, ddof=1)) / math.sqrt(len(logs)) if len(logs) > 2 else 0.0
    half = Z * max(within, between)
    middle = mean(logs)
    return Measured(math.exp(middle), math.exp(middle - half), math.exp(middle + half), sum(a.n for a, _ in usable))


def of_correlation(pair: Correlation, note: str = "") -> Measured:
    """Spearman's ρ with Fisher's interval (standard error 1.03/√(n − 3) on the scale of z)."""
    assert pair.rho is not None
    if pair.n < 5:
        return Measured(pair.rho, -1.0, 1.0, pair.n, note)
    z, half = math.atanh(max(-0.9999, min(0.9999, pair.rho))), Z * 1.03 / math.sqrt(pair.n - 3)
    return Measured(pair.rho, math.tanh(z - half), math.tanh(z + half), pair.n, note)


def mean_correlation(pairs: Sequence[Correlation], what: str) -> Measured:
    """The mean of ρ over budgets on the scale of z, those with more runs counting for more."""
    usable = [pair for pair in pairs if pair.rho is not None and pair.n >= 5]
    if not usable:
        raise NotMeasuredError(f"no budget has five runs of {what}")
    weights = [pair.n - 3 for pair in usable]
    z = [math.atanh(max(-0.9999, min(0.9999, pair.rho or 0.0))) for pair in usable]
    middle = sum(w * value for w, value in zip(weights, z, strict=True)) / sum(weights)
    half = Z * 1.03 / math.sqrt(sum(weights))
    n, note = sum(pair.n for pair in usable), f"{len(usable)} budgets"
    return Measured(math.tanh(middle), math.tanh(middle - half), math.tanh(middle + half), n, note)


def without_noise(found: Measured, reliabilities: Sequence[float]) -> Measured:
    """A correlation as it would be without noise from seed to seed, by Spearman's correction for attenuation."""
    most = math.sqrt(math.prod(reliabilities))
    if most < LEAST_RELIABLE:
        told = f"{found.value:+.2f} [{found.low:.2f}, {found.high:.2f}] ({found.note})"
        raise NotMeasuredError(f"{told}, where noise from seed to seed allows {most:.2f} at most")
    value, low, high = (max(-1.0, min(1.0, v / most)) for v in (found.value, found.low, found.high))
    note = f"{found.note}; {found.value:+.2f} before the correction for noise, which allows {most:.2f} at most"
    return replace(found, value=value, low=low, high=high, note=note)


def least_critical_batch(batches: Sequence[float], steps: Sequence[float]) -> float:
    """The lower end of the 95% interval of B_crit where steps fall as 1/B: a/b of the line S·B = a + b·B.

    Errors are a share of the steps, and so of S·B, which hardly varies there.
    """
    B, work = np.asarray(batches, float), np.asarray(batches, float) * np.asarray(steps, float)
    if len(B) < 3:
        return 0.0
    X = np.stack([np.ones(len(B)), B], axis=1)
    (a, b), *_ = np.linalg.lstsq(X, work, rcond=None)
    missed = work - X @ (a, b)
    variance = float(missed @ missed) / (len(B) - 2) * np.linalg.inv(X.T @ X)[1, 1]
    steepest = b + float(t.ppf(0.975, len(B) - 2)) * math.sqrt(variance)
    return float(max(a, 0.0) / steepest) if steepest > 0 else INFINITE


def at_share(cells: dict[float, float], share: float) -> float:
    """The loss at a share, on straight lines over log share between the cells."""
    xs = sorted(cells)
    if not xs or not xs[0] <= share <= xs[-1]:
        raise NotMeasuredError(f"no cells on both sides of a share of {share:.0%}")
    return float(np.interp(math.log(share), np.log(xs), [cells[x] for x in xs]))
