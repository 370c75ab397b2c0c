"""What presets begin with: the best recipes that a study found, and seeds by which every law's misfit is known."""

import math
from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.laws import fit
from habitus.store import Laws, open_store
from habitus.sweeps.cells import DatasetFacts, PlannedRun
from habitus.sweeps.design import design_axis
from habitus.sweeps.preset import Preset, load_preset, preset_names
from tests.sweeps.test_sweep_design import LARGE, own_world

STUDY = Path(__file__).parents[2] / "docs" / "studies" / "paper-range" / "runs.store.xz"
SWEPT = (1e14, 3e14, 1e15)  # budgets of the surface


@pytest.fixture(scope="module")
def found() -> Laws:
    with open_store(STUDY) as folder:
        return fit(folder, ["batch/loss"])


@pytest.mark.slow
def test_standard_begins_with_the_recipe_that_the_paper_range_study_found(found: Laws) -> None:
    standard = load_preset("standard")
    centres = dict(standard.allocation.centres)
    for budget in SWEPT:
        best = found.find("recipe_optimum", "batch/loss", budget=budget)
        begins = {
            "rate": standard.rule_rate(512, budget),
            "batch": standard.batch_sequences(budget),
            "share": standard.common.share,
            "params": centres[budget],
        }
        for name, value in begins.items():
            low, high = best.interval(name)
            assert low <= value <= high, (
                f"{name} at {budget:g}: {value:g}, the study's {best[name]:g} [{low:g}, {high:g}]"
            )
            assert value == pytest.approx(best[name], rel=0.3), f"{name} at {budget:g}"


def test_standard_compares_batches_at_equal_compute_around_the_one_it_takes() -> None:
    standard = load_preset("standard")
    cells = design_axis("batch_size", own_world(standard), standard).cells
    for budget in SWEPT:
        batches = [p.cell.batch_sequences for p in cells if p.row.flops_budget == budget]
        usual = standard.batch_sequences(budget)
        assert sorted(batches) == [usual // 2, usual, 2 * usual, 4 * usual, 8 * usual]
        assert all(math.isclose(p.cell.flops, p.row.flops_budget, rel_tol=0.02) for p in cells)


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("axis", ["allocation", "negatives"])
def test_every_preset_repeats_cells_of_both_stages(name: str, axis: str, dataset: Dataset) -> None:
    preset = load_preset(name)
    facts = {"tiny": DatasetFacts.of(dataset), "paper": LARGE}.get(name) or own_world(preset)
    cells = design_axis(axis, facts, preset).cells
    assert {p.recipe.train.stage for p in cells} == {1 if axis == "allocation" else 2}
    assert degrees_of_freedom(cells) >= 9  # as docs/sweep.md says


def test_seeds_are_at_the_rule_s_rate_and_end_where_they_cost_too_much() -> None:
    paper = load_preset("paper")
    for axis in ("allocation", "negatives"):
        seeded = [p for p in design_axis(axis, LARGE, paper).cells if p.row.seed]
        assert {p.row.flops_budget for p in seeded} == {1e15, 1e16, 1e17}
        assert all(is_at_rule(paper, planned) for planned in seeded)
        assert degrees_of_freedom(seeded_cells(axis, paper, 1e18)) == 0


def seeded_cells(axis: str, preset: Preset, budget: float) -> list[PlannedRun]:
    return [p for p in design_axis(axis, LARGE, preset).cells if p.row.flops_budget == budget]


def is_at_rule(preset: Preset, planned: PlannedRun) -> bool:
    rule = preset.rule_rate(planned.cell.batch_sequences, planned.row.flops_budget)
    return math.isclose(planned.row.learning_rate, rule, rel_tol=1e-6)


def degrees_of_freedom(cells: "list[PlannedRun] | tuple[PlannedRun, ...]") -> int:
    """Of pure error: seeds beyond the first of a cell at one rate."""
    runs = {(p.row.cell_id, p.row.learning_rate, p.row.seed) for p in cells}
    return len(runs) - len({(cell, rate) for cell, rate, _ in runs})
