"""Roll-outs are out of sample: a forecast knows nothing of the budget that it forecasts."""

import numpy as np
import pytest

from habitus.laws import frontier
from habitus.laws.allocation_runs import AllocationRuns
from habitus.laws.cost import SIX_ND, RealisedCost, realised_cost
from habitus.laws.forecast import allocation_rollouts
from habitus.laws.recipe_value import RecipeLaws
from habitus.laws.runs import MeasuredRun
from habitus.store import Forecast, NamedRollout

BUDGETS = (1e15, 1e16, 1e17, 1e18)


def allocation_runs(planted, *, top_shape: float = 1.0) -> AllocationRuns:
    """Seven sizes around the planted optimum of each budget; `top_shape` stretches the valley of the last one."""
    rng = np.random.default_rng(1)
    C, N, L = [], [], []
    for budget in BUDGETS:
        sizes = planted.size(budget) * np.geomspace(1 / 6, 6, 7)
        heights = planted.loss(sizes, budget / (6 * sizes)) * (1 + 3e-4 * rng.standard_normal(7))
        if budget == BUDGETS[-1]:
            heights = heights.min() + top_shape * (heights - heights.min())
        C.append(np.full(7, budget)), N.append(sizes), L.append(heights)
    C, N, L = (np.concatenate(column).tolist() for column in (C, N, L))
    return AllocationRuns(
        "batch/loss",
        tuple(
            MeasuredRun("allocation", f"{n:g}", c, 0.01, 0, knobs={"params": n, "slots_seen": c / (6 * n)},
                        metrics={"batch/loss": loss})
            for c, n, loss in zip(C, N, L, strict=True)
        ),
    )  # fmt: skip


def rollouts(runs: AllocationRuns) -> dict[str, NamedRollout]:
    whole = frontier(runs.budget, runs.size, runs.measured)
    return {item.name: item for item in allocation_rollouts(runs, whole)}


def test_no_forecast_depends_on_the_budget_that_it_forecasts(planted) -> None:
    """The shape of the valleys is shared by the fitted budgets, never with the one held out."""
    plain, stretched = rollouts(allocation_runs(planted)), rollouts(allocation_runs(planted, top_shape=3.0))
    for name in ("size_law", "loss_law", "surface"):
        forecasts = [one.rollout.at(3, BUDGETS[-1]) if name != "loss_law" else one.leave_one_out.forecasts[-1]
                     for one in (plain[name], stretched[name])]  # fmt: skip
        assert forecasts[0].predicted == forecasts[1].predicted
        assert (forecasts[0].low, forecasts[0].high) == (forecasts[1].low, forecasts[1].high)


def test_a_planted_frontier_is_foreseen_to_a_few_percent_of_the_gain(planted) -> None:
    surface = rollouts(allocation_runs(planted))["surface"].rollout.at(3, BUDGETS[-1])
    assert surface.observed == allocation_runs(planted).best(BUDGETS[-1])  # a run, not a fitted height
    assert surface.error_of_gain() == pytest.approx(0, abs=0.05)
    assert abs(surface.error_of_gain(surface.log_line)) > 0.3  # the loss saturates, a straight line does not
    assert surface.error_of_gain(surface.last) == 1.0  # persistence misses all of it


def test_the_error_is_a_share_of_the_gain() -> None:
    forecast = Forecast(
        fitted_budgets=(1.0, 2.0), budget=3.0, predicted=7.718, observed=7.687, ratio=7.718 / 7.687, last=7.790,
        log_line=7.705,
    )  # fmt: skip
    assert forecast.gain == pytest.approx(-0.103)
    assert forecast.error_of_gain() == pytest.approx(0.031 / 0.103)
    assert forecast.error_of_gain(forecast.log_line) == pytest.approx(0.018 / 0.103)
    assert forecast.model_copy(update={"last": None}).error_of_gain() is None


def test_the_realised_cost_is_recovered_and_inverted() -> None:
    truth = RealisedCost(20.0, 0.8, 1.1)
    N, D = np.array([1e5, 3e5, 1e6, 1e5]), np.array([1e7, 1e8, 2e7, 3e8])
    cost = realised_cost(N, D, [truth.flops(n, d) for n, d in zip(N, D, strict=True)])
    assert cost == pytest.approx(truth)
    assert cost.data(cost.flops(1e6, 5e7), 1e6) == pytest.approx(5e7)
    assert SIX_ND.flops(2.0, 3.0) == 36.0


def test_a_size_beside_the_optimum_is_predicted_above_the_frontier(planted) -> None:
    """At four times N* the valley of the largest budget stands on top of L*(C)."""
    runs = allocation_runs(planted)
    fitted = frontier(runs.budget, runs.size, runs.measured)
    laws = RecipeLaws("min", fitted.height, fitted.size, tuple(fitted.optima.values()), SIX_ND)
    C, best = BUDGETS[-1], planted.size(BUDGETS[-1])
    on, off = (laws.predict("loss_law", f * best, C / (6 * f * best)) for f in (1.0, 4.0))
    truth = [float(planted.loss(f * best, C / (6 * f * best))) for f in (1.0, 4.0)]
    assert on.value == pytest.approx(truth[0], abs=0.01)
    assert off.value - on.value == pytest.approx(truth[1] - truth[0], rel=0.1)
    assert on.low < truth[0] < on.high and off.low < truth[1] < off.high
