"""Where runs moved knobs only together their law is a guess, and says so; along what they moved it is asked."""

import importlib
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.laws import best_rate, best_recipe, predict_recipe, rate_of_runs, why_untold
from habitus.laws.recipe_form import COLUMNS
from habitus.laws.recipe_surface import columns_of, recipe_surface
from habitus.store import Law


@pytest.fixture(scope="module")
def planted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("planted_recipes")


def rule(row: dict[str, float]) -> float:
    """A rate of the sizes alone, twice the best one of the middle and falling more slowly than the best."""
    return float(0.06 * (row["contextualizer_params"] / 1e6) ** -0.2 * (row["embedder_params"] / 1e5) ** -0.1)


def by_rule(planted: Any, compute: float, size: float, share: float, batch: float = 64.0) -> dict[str, float]:
    row: dict[str, float] = planted.cell(compute, size, share, batch)
    return {**row, "rate_at_512": rule(row)}


def fitted(planted: Any, rows: list[dict[str, float]], draws: int = 20) -> Law:
    rng = np.random.default_rng(0)
    losses = np.array([planted.TRUTHS["scarcest decides"].loss(row) for row in rows])
    noise = 0.002 * rng.standard_normal(len(rows))
    return recipe_surface(columns_of(rows), losses + noise, np.arange(len(rows)), draws=draws)


@pytest.fixture(scope="module")
def rows(planted: Any) -> list[dict[str, float]]:
    """One batch, and rates that are a function of the size, as sweeps of one knob have them."""
    rng = np.random.default_rng(3)
    return [
        by_rule(planted, budget, usual * math.exp(rng.uniform(-1.5, 1.5)), math.exp(rng.uniform(-3.5, -0.6)))
        for budget, usual in ((1e14, 5.8e5), (3e14, 8.6e5), (1e15, 1.3e6)) for _ in range(14)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def law(planted: Any, rows: list[dict[str, float]]) -> Law:
    return fitted(planted, rows)


def one(row: dict[str, float]) -> dict[str, list[float]]:
    return {name: [row[name]] for name in COLUMNS}


def test_a_rate_that_went_with_the_size_is_told_only_with_it(planted: Any, law: Law) -> None:
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    assert why_untold(law, one(plan)) == ""
    why = why_untold(law, one({**plan, "rate_at_512": 2.1 * plan["rate_at_512"]}))
    assert why.startswith("is of runs that tell the learning rate only together with ")
    assert "the contextualizer's size" in why and "the embedder's size" in why and "the slots" not in why
    assert why.endswith(", and the plan has 2.1 times what they would")


def test_one_batch_is_named_as_such(planted: Any, law: Law) -> None:
    other = by_rule(planted, 1e16, 4e6, 0.2, batch=128.0)
    assert why_untold(law, one(other)) == "is of runs with one batch_sequences, which the plan does not have"


def test_steps_that_are_not_slots_over_the_batch_are_no_recipe_of_these_runs(planted: Any, law: Law) -> None:
    """As where a plan's windows have another length than the runs'."""
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    assert "4 times what they would" in why_untold(law, one({**plan, "steps": 4 * plan["steps"]}))


def test_runs_are_told_by_themselves_and_so_are_larger_ones(
    planted: Any, rows: list[dict[str, float]], law: Law
) -> None:
    assert not [why for row in rows if (why := why_untold(law, one(row)))]
    assert why_untold(law, one(by_rule(planted, 1e17, 1.2e7, 0.2))) == ""  # as far as one goes along what they moved


def test_the_rule_of_the_rates_is_found_again(planted: Any, law: Law) -> None:
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    assert rate_of_runs(law, one({**plan, "rate_at_512": 9.0})) == pytest.approx(plan["rate_at_512"], rel=0.01)


def test_rates_that_were_varied_follow_no_rule(planted: Any) -> None:
    spread, _ = planted.planted_rows(0)
    varied = fitted(planted, spread, draws=4)
    assert rate_of_runs(varied, one(spread[0])) is None
    plan = planted.cell(1e16, 4e6, 0.2, 128.0)
    assert why_untold(varied, one({**plan, "rate_at_512": 3 * plan["rate_at_512"]})) == ""


def test_rounding_moves_no_forecast(planted: Any, law: Law) -> None:
    """Along what nothing is known of the law is steep: a rate rounded by 2% moved a forecast by as much as it gains."""
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    at = predict_recipe(law, one(plan))
    near = predict_recipe(law, one({**plan, "rate_at_512": 1.02 * plan["rate_at_512"]}))
    for a, b in zip(at, near, strict=True):
        assert b[0] == pytest.approx(a[0], abs=2e-3)


def test_a_recipe_by_the_runs_own_rule_is_foreseen(planted: Any, rows: list[dict[str, float]], law: Law) -> None:
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    truth = planted.TRUTHS["scarcest decides"].loss(plan)
    best = min(planted.TRUTHS["scarcest decides"].loss(row) for row in rows)
    value = float(predict_recipe(law, one(plan))[0][0])
    assert abs(value - truth) < 0.3 * (best - truth)


def test_rates_that_scatter_little_about_a_rule_are_told_as_far_as_they_went(
    planted: Any, rows: list[dict[str, float]]
) -> None:
    rng = np.random.default_rng(5)
    scattered = [{**row, "rate_at_512": row["rate_at_512"] * math.exp(0.05 * rng.standard_normal())} for row in rows]
    law = fitted(planted, scattered, draws=4)
    plan = by_rule(planted, 1e16, 4e6, 0.2)
    assert why_untold(law, one({**plan, "rate_at_512": 1.08 * plan["rate_at_512"]})) == ""
    why = why_untold(law, one({**plan, "rate_at_512": 1.6 * plan["rate_at_512"]}))
    assert why.startswith("is of runs that tell the learning rate only together with ")


def test_a_best_recipe_where_runs_tell_nothing_is_refused(planted: Any, rows: list[dict[str, float]], law: Law) -> None:
    knobs = [{**row, "flops_nominal": row["compute"]} for row in rows]
    best = best_recipe(law, knobs, 1e16)
    assert best.status == "not_identified" and "the law is of runs that tell" in best.warnings[0]


def test_the_best_recipe_and_rate_of_cells_spread_over_all_knobs(planted: Any) -> None:
    spread, _ = planted.planted_rows(0)
    law = fitted(planted, spread, draws=40)
    knobs = [{**row, "flops_nominal": row["compute"], "epochs": row["slots_seen"] / 1e9} for row in spread]
    best, true = best_recipe(law, knobs, 3e15), planted.TRUTHS["scarcest decides"].best(3e15)
    size = true["embedder_params"] + true["contextualizer_params"]
    assert best.ok and best.warnings == ()
    for name, value in (
        ("params", size),
        ("share", true["embedder_params"] / size),
        ("batch", true["batch_sequences"]),
    ):
        low, high = best.interval(name)
        assert low < value < high, name
    value, low, high = best_rate(law, true["embedder_params"], true["contextualizer_params"])
    assert low < true["rate_at_512"] < high and low < value < high
    ended = best_recipe(law, [{**row, "epochs": row["slots_seen"] / 2e7} for row in knobs], 3e15)
    assert any("spends the whole pass, 20,000,000 slots" in warning for warning in ended.warnings)
    assert best_recipe(law, knobs[:1], 3e15).status == "not_identified"  # nothing gives their cost
