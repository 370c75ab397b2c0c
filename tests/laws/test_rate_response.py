"""The learning rate as a covariate: a mistuned rate moves the valley, and the covariate moves it back."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from habitus.laws.axes import fit_allocation
from habitus.laws.rate_response import rate_response
from habitus.laws.runs import MeasuredRun

BUDGETS = (1e13, 1e14, 1e15)
CURVATURE, SIZE_POWER = 0.08, -0.35


def best_size(C: float) -> float:
    return 3e5 * (C / 1e14) ** 0.5


def run_at(C: float, N: float, rate: float, seed: int = 0) -> MeasuredRun:
    """A valley about N*, and a loss for a rate off the best one, which falls with size and compute."""
    best = 0.03 * (N / 3e5) ** SIZE_POWER * (C / 1e14) ** -0.2
    noise = 0.002 * math.sin(1e3 * (math.log(N * C) + 7 * rate + seed))
    loss = 7 + 0.3 * (C / 1e14) ** -0.1 + 0.05 * math.log(N / best_size(C)) ** 2
    loss += CURVATURE * math.log(rate / best) ** 2 + noise
    return MeasuredRun(
        "allocation", f"{N / best_size(C):.2f}", C, rate, seed, metrics={"batch/loss": loss, "train/loss": loss},
        knobs={"params": N, "slots_seen": C / (6 * N), "batch_sequences": 512.0},
    )  # fmt: skip


def sweep(top_rates: Sequence[float]) -> tuple[list[MeasuredRun], list[MeasuredRun]]:
    """Runs at the rule's rate, 0.03·(C/1e14)^-0.2, for all sizes; three sizes of the top at other rates as well."""
    chosen, every = [], []
    for C in BUDGETS:
        rule = 0.03 * (C / 1e14) ** -0.2
        for place, factor in enumerate((0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 5.0)):
            N = factor * best_size(C)
            cell = [run_at(C, N, rule)]
            if max(BUDGETS) == C and place in (0, 3, 6):
                cell += [run_at(C, N, multiple * rule) for multiple in top_rates]
            every += cell
            chosen.append(min(cell, key=lambda run: run.metrics["train/loss"]))
    return chosen, every


def test_the_curvature_and_how_the_best_rate_moves_are_recovered() -> None:
    response = rate_response(sweep((0.5, 2.0))[1], "batch/loss", "min")
    assert response is not None and response.num_cells == 3
    assert response.curvature == pytest.approx(CURVATURE, rel=0.1)
    assert response.size_power == pytest.approx(SIZE_POWER, abs=0.05)
    # At N* of 1e15 the best rate is 0.03·(9.49e5/3e5)^-0.35·10^-0.2 = 0.01264.
    assert math.exp(response.best(best_size(1e15), 1e15)) == pytest.approx(0.01264, rel=0.05)
    assert rate_response(sweep(())[1], "batch/loss", "min") is None


def test_n_star_does_not_absorb_a_rate_that_suits_one_size_only() -> None:
    """The rule is right at N = 3e5 for every budget: large sizes are mistuned, and N* of the top comes out small."""
    chosen, every = sweep((0.5, 2.0))
    plain = fit_allocation(sweep(())[0], "batch/loss")
    tuned = fit_allocation(chosen, "batch/loss", None, every)
    optima = [
        float(next(e.law for e in laws.entries if (e.name, e.budget) == ("size_optimum", 1e15))["x_opt"])
        for laws in (plain, tuned)
    ]
    assert optima[0] < 0.85 * best_size(1e15)
    assert optima[1] == pytest.approx(best_size(1e15), rel=0.1)
    (law,) = [e.law for e in tuned.entries if e.name == "rate_response"]
    assert law["budget_power"] == pytest.approx(-0.2, abs=0.02)
    assert np.allclose(law.details["tried"], [0.03 * 10**-0.2 / 2, 0.03 * 10**-0.2 * 2], rtol=0.05)
