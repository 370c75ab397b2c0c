"""Stage 2 of a plan, worked by hand: candidates as many as its parent's, and the rate of a run as short as it is."""

from dataclasses import replace

import pytest

from habitus.planning.facts import DatasetProfile, ParentMetrics, StoreFacts
from habitus.planning.shape import FixedSettings, stage1_cell
from habitus.planning.sources import laws_by_source
from habitus.planning.stage_two import StageTwoCell, stage2_cell, stage2_quantities, stage2_warnings
from habitus.sizing import Cell
from habitus.store import Quantity

# Windows of 64: a step of stage 1 has 32·64 = 2,048 slots, one of stage 2 with 16 windows 1,024.
FIXED = FixedSettings(DatasetProfile(seq_len=64, num_items=50_000), text_depth=1, optimizer="muon", precision="fp32")
C, C2 = 8e12, 2e12


@pytest.fixture(scope="module")
def parent() -> Cell:
    return stage1_cell(C, 5e5, 0.1, 32, FIXED)


@pytest.mark.parametrize(("asked", "given"), [(0, 1024), (100, 1024), (1024, 1024), (3000, 3000)])
def test_stage_two_has_no_fewer_candidates_than_its_parent(parent: Cell, asked: int, given: int) -> None:
    second = stage2_cell(C2, parent, asked, 16, FIXED)
    assert (second.as_stage1, second.cell.num_negatives) == (1024, given)
    assert ("raised" in second.moved) == (asked < given)
    assert stage2_warnings(second) == []
    assert stage2_cell(C2, parent, 0, 32, FIXED).cell.num_negatives == 0  # as many windows as its parent has


def test_a_catalogue_smaller_than_that_is_enough(parent: Cell) -> None:
    small = replace(FIXED, dataset=replace(FIXED.dataset, num_items=700))
    second = stage2_cell(C2, parent, 0, 16, small)
    assert second.cell.num_negatives == 700
    assert stage2_warnings(second) == []


def test_a_budget_that_pays_too_few_is_told(parent: Cell) -> None:
    least = stage2_cell(C2, parent, 0, 16, replace(FIXED, dataset=replace(FIXED.dataset, num_items=1))).cell
    second = stage2_cell(200.5 * least.flops_per_step, parent, 5, 16, FIXED)
    assert second.cell.num_negatives < 1024 and second.cell.steps >= 200
    [told] = stage2_warnings(second)
    K = second.cell.num_negatives
    assert told.startswith(f"stage 2 has at most {1024 + K:,} candidates per step and stage 1 2,048: with fewer it")
    assert stage2_warnings(None) == []


def stage2_rate(second: StageTwoCell, measured: float | None, budget: float = C2) -> Quantity:
    K = Quantity(value=0, low=0, high=500, source="this study", how="best cell", range="tried")
    parents = {} if measured is None else {(measured * 1e10, 0.0, 0.01, 0): ParentMetrics(1e10, {}, 8)}
    quantities = stage2_quantities(
        second, K, (C, budget), FIXED, StoreFacts(stage2_batch=16, parents=parents), laws_by_source(None)
    )
    negatives = quantities["num_negatives"]
    assert (negatives.value, negatives.low, negatives.high) == (1024, 0, 1024)
    return quantities["stage2_learning_rate"]


def test_a_stage_two_with_less_compute_has_as_much_less_of_the_rate(parent: Cell) -> None:
    second = stage2_cell(C2, parent, 0, 16, FIXED)
    usual = stage2_rate(second, measured=None)
    assert usual.low is not None and usual.high is not None
    quarter = stage2_rate(second, measured=1.0)  # 2e12 of 8e12, where the runs had as much as their parents
    assert (quarter.value, quarter.low, quarter.high) == pytest.approx((usual.value / 4, usual.low / 4, usual.high / 4))
    assert "times 0.25: it has 0.25 times its parent's compute, the runs had 1" in quarter.how
    assert stage2_rate(second, measured=0.25) == usual
    assert stage2_rate(second, measured=0.1) == usual  # never more than the runs had
