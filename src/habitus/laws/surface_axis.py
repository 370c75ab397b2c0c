"""Cells spread over size, share, batch and rate at once: the law of a recipe, its optima by both costs, its roll-out.

Runs of this axis are not sweeps of one knob: what the paper shows knob by knob are slices of one law here, everything
else at its best.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from habitus.errors import FitError
from habitus.laws.axes import AxisLaws
from habitus.laws.checks import sign_of
from habitus.laws.law_builders import law_without_values
from habitus.laws.pure_error import PureError
from habitus.laws.recipe_cost import SlotCost, executed_cost, slot_cost
from habitus.laws.recipe_form import FORM
from habitus.laws.recipe_optimum import (
    OPTIMUM,
    Budget,
    recipe_exponents,
    recipe_optimum,
    recipe_slice,
)
from habitus.laws.recipe_surface import COLUMNS, misfit, predict_recipe, recipe_surface
from habitus.laws.recipe_value import RunValue
from habitus.laws.rollout import hold_against
from habitus.laws.runs import MeasuredRun
from habitus.laws.told_knobs import why_untold
from habitus.store import SURFACE_AXIS, TRAIN, Direction, Forecast, Law, LawEntry, NamedRollout, Rollout, direction_of

_SLICE_PLACES, _SLICE_REFITS = 9, 40
NEEDED_KNOBS = (*COLUMNS[:5], "flops_nominal")
_COST_KNOBS = ("joint_dim", "seq_len")  # of Equation 1
_WHOLE_PASS = 0.98  # of its slots
_FOREMOST = 3  # cells of a budget, by which it is judged


def fit_surface(runs: Sequence[MeasuredRun], metric: str, _error: PureError | None = None) -> AxisLaws:
    """The law of a recipe, the best recipe of each budget by nominal and executed FLOPs, how it moves, a roll-out."""
    if metric.startswith(f"{TRAIN}/"):
        return AxisLaws()  # batches of other sizes have other candidates
    cells = SurfaceRuns(
        [run for run in runs if metric in run.metrics and all(k in run.knobs for k in NEEDED_KNOBS)], metric
    )
    if not cells.runs:
        raise FitError(f"no run of the surface has {metric!r} and its knobs", expected="runs that measured it")
    law = cells.law()
    entries = [LawEntry(name="recipe_surface", axis=SURFACE_AXIS, metric=metric, law=law)]
    if not law.values:
        return AxisLaws(tuple(entries))
    cost, budgets = cells.cost(), cells.budgets
    for budget in budgets:
        best = _with_slices(recipe_optimum(law, budget, cost, cells.most_slots), law, budget, cost, cells.most_slots)
        try:
            by_executed = cells.executed_optimum(law, best, budget)
        except FitError as error:  # the nominal one stands without it
            by_executed, best = None, best.with_warnings(f"no optimum by executed FLOPs: {error.problem}")
        entries.append(LawEntry(name="recipe_optimum", axis=SURFACE_AXIS, metric=metric, budget=budget, law=best))
        if by_executed is not None:
            entries.append(LawEntry(name="recipe_optimum_executed", axis=SURFACE_AXIS, metric=metric, budget=budget,
                                    law=by_executed))  # fmt: skip
    if len(budgets) > 1:
        optima = [e.law for e in entries if e.name == "recipe_optimum"]
        moves = _exponents(law, budgets, optima, cost, cells.most_slots)
        entries.append(LawEntry(name="recipe_exponents", axis=SURFACE_AXIS, metric=metric, law=moves))
    none = Rollout(law="recipe_surface", forecasts=(), warnings=())
    told = Rollout(law="recipe_surface", forecasts=tuple(cells.forecasts()), warnings=())
    rollouts = (NamedRollout(name="recipe_surface", metric=metric, rollout=told, leave_one_out=none),)
    return AxisLaws(tuple(entries), rollouts if told.forecasts else ())


def _exponents(law: Law, budgets: Sequence[float], optima: Sequence[Law], cost: SlotCost, most_slots: float) -> Law:
    """How the best recipe moves over the budgets that do not spend the whole pass: beyond them size takes all."""
    within = [c for c, best in zip(budgets, optima, strict=True) if best["slots"] < _WHOLE_PASS * most_slots]
    why = f"the best recipe spends the whole pass, {most_slots:,.0f} slots, at all budgets but {len(within)}"
    if len(within) < 2:
        return law_without_values("recipe_exponents", FORM, "too_few", law.residuals.n, why)
    moves = recipe_exponents(law, within[0], within[-1], cost, most_slots)
    return moves if len(within) == len(budgets) else moves.with_warnings(f"{why}: exponents are of these")


class SurfaceRuns:
    """Runs as columns, for one metric. Where they are of several axes, budgets are those of `sized`."""

    def __init__(self, runs: Sequence[MeasuredRun], metric: str, draws: int = 200, sized: str = "") -> None:
        self.runs, self.metric, self.draws, self.sized = list(runs), metric, draws, sized

    @property
    def direction(self) -> Direction:
        return direction_of(self.metric)

    @property
    def budgets(self) -> list[float]:
        return sorted({run.budget for run in self.runs if self.sized in ("", run.axis)})

    @property
    def table(self) -> dict[str, np.ndarray]:
        rows = [recipe_columns(run) for run in self.runs]
        return {name: np.array([row[name] for row in rows]) for name in rows[0]}

    @property
    def values(self) -> np.ndarray:
        return np.array([run.metrics[self.metric] for run in self.runs])

    @property
    def cells(self) -> np.ndarray:
        """A number for each cell; its seeds share it, and so do runs of one recipe that two axes asked for."""
        names: dict[tuple[float, ...], str] = {}
        for run in self.runs:
            names.setdefault(recipe_of(run), f"{run.axis} {run.budget} {run.cell_id} {run.learning_rate}")
        return np.unique([names[recipe_of(run)] for run in self.runs], return_inverse=True)[1]

    @property
    def most_slots(self) -> float:
        """Slots of one pass."""
        passes = [run.knobs["slots_seen"] / run.knobs["epochs"] for run in self.runs if run.knobs.get("epochs")]
        return float(np.median(passes)) if passes else math.inf

    def law(self) -> Law:
        law = recipe_surface(self.table, self.values, self.cells, self.direction, draws=self.draws)
        return law.with_warnings(why) if (why := misfit(law)) else law

    def cost(self) -> SlotCost:
        return slot_cost(self.table)

    def executed_optimum(self, law: Law, best: Law, budget: float) -> Law | None:
        """The best recipe for the executed FLOPs that the nominal optimum takes; None where runs do not say them."""
        table = self.table
        if "executed" not in table:
            return None
        cost = executed_cost(table)
        N, s = best["params"], best["share"]
        C = cost.of(budget, s * N, (1 - s) * N, best["batch"])
        law = recipe_optimum(law, C, cost, self.most_slots)
        return law.model_copy(update={"details": {**law.details, "nominal": budget}})

    def below(self, budget: float) -> "SurfaceRuns":
        runs = [run for run in self.runs if run.budget < 0.9 * budget]
        return SurfaceRuns(runs, self.metric, self.draws, self.sized)

    def foremost(self, law: Law, budget: float) -> tuple[RunValue, float]:
        """What a law says of the cells of a budget that it expects most of, and what they measured, means of a few.

        Nothing measured chooses them: the best of many cells is partly the luckiest, and a forecast that is held
        against it looks too poor. Cells with a knob that the law's runs never moved are left out.
        """
        numbers, sign = self.cells, sign_of(self.direction)
        at = {int(numbers[k]): run for k, run in enumerate(self.runs)
              if run.budget == budget and self.sized in ("", run.axis)}  # fmt: skip
        rows = {number: {name: [v] for name, v in recipe_columns(run).items()} for number, run in at.items()}
        told = {
            number: RunValue(*(float(v[0]) for v in predict_recipe(law, row)))
            for number, row in rows.items()
            if not why_untold(law, row)
        }
        chosen = sorted(told, key=lambda number: sign * told[number].value)[:_FOREMOST]
        if not chosen:
            raise FitError(f"no cell of {budget:g} FLOPs that the law of smaller budgets can tell")
        measured = [float(self.values[numbers == number].mean()) for number in chosen]
        return RunValue(*np.mean([told[number] for number in chosen], axis=0).tolist()), float(np.mean(measured))

    def forecasts(self) -> list[Forecast]:
        """Every budget from the third up by the law of those below alone, at the cells that it expects most of."""
        made = []
        for budget in self.budgets[2:]:
            below = self.below(budget)
            if len(below.budgets) < 2 or not (law := below.law()).values:
                continue
            (far_c, near_c), fitted = below.budgets[-2:], np.array(below.budgets)
            try:
                (told, observed), (_, near), (_, far) = (self.foremost(law, c) for c in (budget, near_c, far_c))
            except FitError:
                continue
            line = near + (near - far) * math.log(budget / near_c) / math.log(near_c / far_c)
            forecast = hold_against(observed, told, fitted, budget, law.residuals.r2)
            made.append(forecast.model_copy(update={"last": near, "log_line": line}))
        return made


def recipe_columns(run: MeasuredRun) -> dict[str, float]:
    """The knobs of a run as the law names them."""
    knobs = run.knobs
    batch = knobs["batch_sequences"]
    row = {name: knobs[name] for name in (*COLUMNS[:5], *_COST_KNOBS) if name in knobs}
    row |= {"rate_at_512": run.learning_rate / math.sqrt(batch / 512), "compute": knobs["flops_nominal"]}
    return row | ({"executed": knobs["flops_executed"]} if "flops_executed" in knobs else {})


def recipe_of(run: MeasuredRun) -> tuple[float, ...]:
    """What the law knows of a run: all seeds of a cell have the same."""
    columns = recipe_columns(run)
    return (run.budget, *(columns[name] for name in COLUMNS))


def _with_slices(best: Law, law: Law, budget: float, cost: SlotCost, most_slots: float) -> Law:
    """The optimum with the metric over each knob, the others at their best."""
    fewer = law.model_copy(update={"details": {**law.details, "draws": law.details["draws"][:_SLICE_REFITS]}})
    ends = Budget(law, budget, cost, most_slots).ends
    slices: dict[str, Any] = {}
    for name, (low, high) in zip(OPTIMUM, ends, strict=False):
        places = sorted({*map(float, np.exp(np.linspace(low, high, _SLICE_PLACES))), float(best[name])})
        rows = recipe_slice(fewer, budget, cost, name, places, most_slots)
        low95, high95 = np.quantile(rows[1:], [0.025, 0.975], axis=0)
        slices[name] = {"x": places, "y": rows[0].tolist(), "low": np.minimum(low95, rows[0]).tolist(),
                        "high": np.maximum(high95, rows[0]).tolist()}  # fmt: skip
    return best.model_copy(update={"details": {**best.details, "slices": slices}})
