"""One surface under two costs: N* by nominal and by executed FLOPs, side by side."""

import numpy as np
import pytest

from habitus.laws.axes import fit_allocation
from habitus.laws.runs import MeasuredRun


def test_the_optimum_moves_with_the_cost_that_is_charged(planted) -> None:
    """Executed FLOPs of 40·N^0.6·D^0.95: the exponent of N* is β/(0.95·α + 0.6·β) there, β/(α + β) by 6ND."""
    runs, rng = [], np.random.default_rng(2)
    for C in planted.budgets:
        for i, N in enumerate(planted.size(C) * np.geomspace(1 / 6, 6, 8)):
            D = C / (6 * N)
            loss = float(planted.loss(N, D)) * (1 + 2e-4 * rng.standard_normal())
            knobs = {"params": N, "slots_seen": D, "flops_executed": 40 * N**0.6 * D**0.95}
            runs.append(MeasuredRun("allocation", f"{i}", C, 1e-3, 0, knobs=knobs, metrics={"batch/loss": loss}))
    entries = {e.name: e.law for e in fit_allocation(runs, "batch/loss").entries if e.budget is None}
    nominal, executed = entries["surface_optimum_10x"], entries["surface_optimum_executed_10x"]
    alpha, beta = planted.surface["size_exponent"], planted.surface["data_exponent"]
    assert nominal["exponent"] == pytest.approx(beta / (alpha + beta), abs=0.02)
    assert executed["exponent"] == pytest.approx(beta / (0.95 * alpha + 0.6 * beta), abs=0.02)
    assert executed["exponent"] > nominal["exponent"] + 0.1
    assert executed.details["cost"].startswith("C = 40")
    bare = [MeasuredRun(**{**run.__dict__, "knobs": {k: v for k, v in run.knobs.items() if k != "flops_executed"}})
            for run in runs]  # fmt: skip
    assert "surface_optimum_executed_10x" not in {e.name for e in fit_allocation(bare, "batch/loss").entries}


def test_one_budget_has_its_best_size_and_nothing_beyond(planted) -> None:
    """FLOPs that are the same in all runs have no exponents, whatever rounding leaves of them."""
    C, rng, runs = planted.budgets[2], np.random.default_rng(3), []
    for i, N in enumerate(planted.size(C) * np.geomspace(1 / 6, 6, 14)):
        D = C / (6 * N) * (1 + 0.1 * (i % 3))  # shares differ a little, so that N and D are not one line
        loss = float(planted.loss(N, C / (6 * N))) * (1 + 2e-4 * rng.standard_normal())
        knobs = {"params": N, "slots_seen": D}
        runs.append(MeasuredRun("allocation", f"{i}", C, 1e-3, 0, knobs=knobs, metrics={"batch/loss": loss}))
    entries = {e.name: e.law for e in fit_allocation(runs, "batch/loss").entries}
    assert entries["size_optimum"]["x_opt"] == pytest.approx(planted.size(C), rel=0.2)
    assert entries["surface"].values
    beyond = entries["surface_optimum_10x"]
    assert beyond.status == "too_few" and "all runs have one budget" in beyond.warnings[0]
