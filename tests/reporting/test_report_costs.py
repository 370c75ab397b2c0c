"""Optima by nominal and by executed FLOPs stand side by side, from laws and runs that were put there."""

import numpy as np
import pytest

from habitus.laws import MeasuredRun, saturating
from habitus.reporting.costs import both_costs
from habitus.reporting.study import Study
from habitus.store import Interval, Law, LawEntry, Laws, LawStatus, Residuals, RunRow

LOSS, BUDGETS = "batch/loss", (1e14, 1e15)
SHARES = (0.02, 0.04, 0.08, 0.12, 0.2, 0.3, 0.5)
FLOOR, COEFFICIENT, EXPONENT = 2.0, 300.0, 0.15


def reached(compute: float) -> float:
    return FLOOR + COEFFICIENT * compute**-EXPONENT


def share_run(budget: float, share: float, seed: int = 0, **knobs: float) -> RunRow:
    """A small embedder executes less of its nominal FLOPs: by executed ones shares of 20% are best, at any budget."""
    executed = 0.4 * budget * (share / 0.1) ** -0.25
    u = share / 0.2
    loss = reached(executed / 0.4) + 0.5 * (u**0.5 + u**-0.5 - 2)
    return RunRow(
        axis="share", budget=budget, cell_id=f"s{share}-{seed}", learning_rate=1e-3, seed=seed, init="default",
        chosen=True, knobs={"embedder_share": share, "flops_executed": executed, "joint_dim": 16.0} | knobs,
        metrics={LOSS: loss},
    )  # fmt: skip


def surface_entry(name: str, size: float, exponent: float, compute: float) -> LawEntry:
    values = {"size": size, "data": 5e7, "loss": 3.0, "exponent": exponent}
    intervals = {"0.95": {key: Interval(low=value / 2, high=value * 2) for key, value in values.items()}}
    law = Law(law="surface_optimum", form="", status="ok", values=values, intervals=intervals,
              residuals=Residuals(n=8, dof=3), details={"compute": compute, "cost": "C = 6·N·D"})  # fmt: skip
    return LawEntry(name=name, metric=LOSS, axis="allocation", law=law)


def study_of(rows: list[RunRow], *names: str, more: tuple[LawEntry, ...] = (), status: LawStatus = "ok") -> Study:
    """`status` is that of L(N, D)."""
    budgets = np.geomspace(1e12, 1e15, 6)
    height = saturating(budgets, [reached(c) for c in budgets])
    entries = [
        surface_entry("surface_optimum_10x", 2e6, 0.6, 1e16),
        surface_entry("surface_optimum_executed_10x", 3e6, 0.7, 4e15),
        LawEntry(name="loss_law", metric=LOSS, axis="allocation", law=height),
        *more,
    ]
    for k in (0, 1):
        law = entries[k].law.model_copy(update={"status": status})
        entries[k] = entries[k].model_copy(update={"law": law})
    run = [MeasuredRun(axis="share", budget=b, cell_id="s", learning_rate=1e-3, seed=0) for b in BUDGETS]
    kept = tuple(entry for entry in entries if entry.name in names or not names)
    return Study("planted", Laws(source="", seed=0, metrics=(LOSS,), entries=kept, runs=tuple(rows)), tuple(run))


def test_sizes_and_shares_stand_under_both_costs() -> None:
    exhibit = both_costs(study_of([share_run(b, s) for b in BUDGETS for s in SHARES]))
    assert exhibit is not None and exhibit.views[0].table is not None
    rows = {row[1]: row[2:] for row in exhibit.views[0].table.rows}
    assert rows["N* at ten times the largest budget"] == (
        "2M [1M, 4M]\nat 10¹⁶", "3M [1.5M, 6M]\nat 4·10¹⁵",
    )  # fmt: skip
    assert rows["exponent of N* in C"] == ("0.600 [0.300, 1.20]", "0.700 [0.350, 1.40]")
    assert "N* ∝ C^b has b = 0.600 by nominal and 0.700 by executed FLOPs. s* for" in exhibit.views[0].reading
    best = {(line[2], line[3] > 2e14): line[4] for line in exhibit.sheet.rows if line[1] == "share"}
    assert best["executed", True] == pytest.approx(0.2, rel=0.05)
    # Nominal FLOPs are the same for all, and those of small embedders did more: the loss is best at a smaller share.
    assert best["nominal", True] < 0.8 * best["executed", True]
    assert len(best) == 4


def test_the_floor_of_the_embedder_and_budgets_of_few_shares_say_nothing_of_the_best() -> None:
    few = [share_run(1e14, s) for s in SHARES[:5]]
    floor = [share_run(1e15, s, joint_dim=4.0) for s in SHARES[:2]] + [share_run(1e15, s) for s in SHARES[2:]]
    exhibit = both_costs(study_of(few + floor))
    assert exhibit is not None and not [line for line in exhibit.sheet.rows if line[1] == "share"]


def test_without_executed_flops_there_is_nothing_to_compare() -> None:
    rows = [share_run(b, s) for b in BUDGETS for s in SHARES]
    bare = [row.model_copy(update={"knobs": {"embedder_share": row.knobs["embedder_share"]}}) for row in rows]
    assert both_costs(study_of(bare, "surface_optimum_10x", "loss_law")) is None


def test_two_seeds_that_agree_to_the_last_digit_are_one_row() -> None:
    rows = [share_run(b, s) for b in BUDGETS for s in SHARES]
    again = rows[2].model_copy(update={"seed": 1})
    once, twice = both_costs(study_of(rows)), both_costs(study_of([*rows, again]))
    assert once is not None and twice is not None and twice.sheet == once.sheet


def test_a_valley_that_seeds_refused_is_refused_under_both_costs() -> None:
    rows = [share_run(b, s) for b in BUDGETS for s in SHARES]
    refused = Law(law="two_term", form="", status="misfit", residuals=Residuals(n=7, dof=2))
    entry = LawEntry(name="share_optimum", metric=LOSS, axis="share", budget=1e15, law=refused)
    exhibit = both_costs(study_of(rows, more=(entry,)))
    assert exhibit is not None and exhibit.views[0].table is not None
    cells = {row[1]: row[2:] for row in exhibit.views[0].table.rows}
    assert all("(misfit)" in cell for cell in cells["s* at 10¹⁵ nominal"])
    assert not any("(misfit)" in cell for cell in cells["s* at 10¹⁴ nominal"])
    assert "s* for batch/loss at 10¹⁴ is" in exhibit.views[0].reading


def test_the_exponent_of_a_surface_that_is_not_identified_is_no_finding() -> None:
    exhibit = both_costs(study_of([], status="not_identified"))
    assert exhibit is not None and exhibit.views[0].table is not None
    cells = {row[1]: row[2:] for row in exhibit.views[0].table.rows}
    assert cells["exponent of N* in C"] == (
        "0.600 [0.300, 1.20] (not identified)", "0.700 [0.350, 1.40] (not identified)",
    )  # fmt: skip
    assert exhibit.views[0].reading.startswith("Neither N* nor s* for batch/loss is identified")
