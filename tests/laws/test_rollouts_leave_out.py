"""Whatever a budget measured, at any rate and seed and on any axis, its own forecast stays the same to the bit."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.laws import fit
from habitus.laws.axes import fit_allocation
from habitus.laws.pure_error import pure_error
from habitus.laws.runs import MeasuredRun
from habitus.store import Forecast, NamedRollout

LOSS = "batch/loss"
BUDGETS = (1e12, 1e13, 1e14, 1e15, 1e16)
TOP = BUDGETS[-1]
PLACES = (0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 5.0)  # sizes over the best one
CURVATURE = 0.08


def best_size(C: float) -> float:
    return 3e5 * (C / 1e14) ** 0.5


def rule(C: float) -> float:
    """The rate that all sizes of a budget have; it suits those of 300,000 parameters."""
    return 0.03 * (C / 1e14) ** -0.2


def run_at(C: float, N: float, rate: float, seed: int, noise: float) -> MeasuredRun:
    loss = 6 + 0.6 * (C / 1e14) ** -0.15 + 0.05 * math.log(N / best_size(C)) ** 2
    loss += CURVATURE * math.log(rate / rule(C) / (N / 3e5) ** -0.35) ** 2 + noise
    return MeasuredRun(
        "allocation", f"{N / best_size(C):.2f}", C, rate, seed, metrics={LOSS: loss, "train/loss": loss},
        knobs={"params": N, "slots_seen": C / (6 * N), "batch_sequences": 512.0},
    )  # fmt: skip


def sweep() -> list[MeasuredRun]:
    """Seven sizes per budget, three of them with two seeds; at the two largest budgets those at three rates as well."""
    rng = np.random.default_rng(3)
    runs = []
    for C in BUDGETS:
        for place in PLACES:
            N, repeated = place * best_size(C), place in (0.35, 1.0, 3.0)
            runs += [run_at(C, N, rule(C), seed, 0.001 * rng.standard_normal()) for seed in range(1 + repeated)]
            if C in BUDGETS[-2:] and repeated:
                runs += [run_at(C, N, f * rule(C), 0, 0.001 * rng.standard_normal()) for f in (0.5, 2.0)]
    return runs


def at_the_rule(runs: Iterable[MeasuredRun]) -> list[MeasuredRun]:
    return [run for run in runs if math.isclose(run.learning_rate, rule(run.budget))]


def at(runs: Iterable[MeasuredRun], budget: float, change: Callable[[MeasuredRun, float], float]) -> list[MeasuredRun]:
    """The runs, with other losses at one budget."""
    return [
        replace(run, metrics={name: change(run, value) for name, value in run.metrics.items()})
        if run.budget == budget else run
        for run in runs
    ]  # fmt: skip


def of_budget(rollouts: Iterable[NamedRollout], budget: float) -> dict[tuple[str, int], Forecast]:
    """Every forecast of a budget from others, by law and number of budgets below; 0 is from all others."""
    told = {}
    for item in rollouts:
        for forecast in item.rollout.forecasts:
            if forecast.budget == budget:
                told[item.name, len(forecast.fitted_budgets)] = forecast
        for forecast in item.leave_one_out.forecasts:
            if forecast.budget == budget:
                told[item.name, 0] = forecast
    return told


def promises(told: dict[tuple[str, int], Forecast]) -> dict[tuple[str, int], Any]:
    """All of the forecasts but what they are held against."""
    return {name: (f.predicted, f.low, f.high, f.last, f.log_line, f.r2) for name, f in told.items()}


CHANGES: dict[str, Callable[[MeasuredRun, float], float]] = {
    "rates off the rule lose more": lambda run, y: y + 0.15 * (not math.isclose(run.learning_rate, rule(run.budget))),
    "seeds differ by more": lambda run, y: y + 0.03 * run.seed,
    "all of it": lambda run, y: 15.0 - y,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("budget", [1e14, TOP])
def test_no_forecast_of_sizes_knows_the_budget_that_it_is_of(
    budget: float, change: Callable[[MeasuredRun, float], float]
) -> None:
    runs = sweep()
    moved = at(runs, budget, change)
    before, after = (
        of_budget(fit_allocation(at_the_rule(every), LOSS, pure_error(every, LOSS), every).rollouts, budget)
        for every in (runs, moved)
    )
    told, retold = promises(before), promises(after)
    both = {name for name in told if name[0] != "size_law"}  # N* is held against an optimum, which may be gone
    if budget == TOP:
        assert {("loss_law", 4), ("surface", 4)} <= both
    assert both == {name for name in retold if name[0] != "size_law"}
    assert all(told[name] == retold[name] for name in told.keys() & retold.keys())


def best_cell(runs: Sequence[MeasuredRun], budget: float) -> float:
    cells: dict[str, list[float]] = {}
    for run in runs:
        if run.budget == budget:
            cells.setdefault(run.cell_id, []).append(run.metrics[LOSS])
    return min(float(np.mean(losses)) for losses in cells.values())


def test_a_forecast_is_held_against_runs_as_they_ran() -> None:
    """The rates of the top show what the rule costs there; the best run keeps what it measured all the same."""
    every = sweep()
    chosen = at_the_rule(every)
    laws = fit_allocation(chosen, LOSS, None, every)
    assert any(e.name == "rate_response" for e in laws.entries)
    told = of_budget(laws.rollouts, TOP)["loss_law", 4]
    assert told.observed == best_cell(chosen, TOP)
    assert told.last == best_cell(chosen, BUDGETS[-2])


def test_a_rate_that_the_budgets_below_were_tuned_by_counts_in_their_forecast() -> None:
    """Their own cells with several rates move their runs to the best rate, as a plan's would be."""
    every = sweep()
    fewer = [run for run in every if run.budget == TOP or math.isclose(run.learning_rate, rule(run.budget))]
    tuned, plain = (of_budget(fit_allocation(at_the_rule(runs), LOSS, None, runs).rollouts, TOP) for runs in
                    (every, fewer))  # fmt: skip
    assert tuned["loss_law", 4].predicted < plain["loss_law", 4].predicted


def test_a_fit_of_all_axes_forecasts_no_budget_by_its_own_runs(planted: Any, tmp_path: Path) -> None:
    """Seeds of the share axis lend their error to the sizes, which have none: not those of the budget held out."""
    rows = []
    for row in planted.rows(axes=("allocation", "share")):
        rows.append(row)
        if row["axis"] == "share" and row["cell_id"] in ("s2", "s4"):
            rows.append({**row, "seed": 1, "batch/loss": row["batch/loss"] * 1.00001, "epochs": 0.5})
    top = max(row["flops_budget"] for row in rows if row["axis"] == "share")
    moved = [
        {**row, "batch/loss": 9 - row["batch/loss"] * (1 + 0.05 * row["seed"])} if row["flops_budget"] == top else row
        for row in rows
    ]
    before, after = (
        of_budget(fit(planted.write(tmp_path / name, table), [LOSS]).rollouts, top)
        for name, table in (("before.csv", rows), ("after.csv", moved))
    )
    told, retold = promises(before), promises(after)
    assert ("loss_law", 3) in told and told.keys() & retold.keys()
    assert all(told[name] == retold[name] for name in told.keys() & retold.keys())
