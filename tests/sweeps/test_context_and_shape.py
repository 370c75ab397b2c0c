"""Windows of several lengths, six knobs at once, and shares with dropout: their cells, and one of each end to end."""

import math
from dataclasses import replace

import numpy as np
import pytest

from habitus.errors import ConfigError
from habitus.sizing import TYPICAL_INPUTS, attention_term, stage1_step_flops, tokens_per_item
from habitus.store import AXES, HELD_OUT
from habitus.studies.options import StudyOptions
from habitus.sweeps.cells import DatasetFacts
from habitus.sweeps.design import design_axis
from habitus.sweeps.preset import Preset, load_preset
from habitus.sweeps.request import SweepRequest

FACTS = DatasetFacts(
    "0" * 64, TYPICAL_INPUTS, 256, 24, 1_000_000, 2_000_000,
    length_windows={32: 16_500_000}, longest_history=900, reach=430,
)  # fmt: skip


@pytest.fixture(scope="module")
def standard() -> Preset:
    return load_preset("standard")


def test_windows_of_all_lengths_cost_the_budget_with_the_same_slots_per_step(standard: Preset) -> None:
    design = design_axis("context", FACTS, standard, request=SweepRequest(budgets=(1e14,)))
    assert [p.recipe.data.seq_len for p in design.cells] == [32, 64, 128, 256, 512, 1024]
    models = {p.recipe.model for p in design.cells}
    assert len(models) == 1
    steps = []
    for planned in design.cells:
        recipe, cell = planned.recipe, planned.cell
        B, L = recipe.train.batch_sequences, recipe.data.seq_len
        assert B * L == 16 * 256  # 16 windows of 256 at 1e14
        assert recipe.train.attention_flops
        counted = cell.contextualizer_params + attention_term(recipe.model.width, recipe.model.depth, L=L)
        t = tokens_per_item(24, TYPICAL_INPUTS)
        step = stage1_step_flops(cell.embedder_params, counted, B=B, L=L, t=t, h=recipe.model.joint_dim)
        assert cell.flops == step * recipe.train.steps and abs(cell.flops - 1e14) <= step / 2
        assert recipe.evaluate.contexts == (3, 5, 10, 20, 50, 100, 200)
        assert recipe.evaluate.batch_sequences * L == 64 * 256
        assert planned.row.realised.get("seq_len", 256) == L
        steps.append(recipe.train.steps)
    assert steps == sorted(steps, reverse=True) and steps[0] > steps[-1]  # long windows pay for their attention
    assert len({p.recipe.train.learning_rate for p in design.cells}) == 1
    first = design.cells[0]
    assert first.row.realised["epochs"] == first.cell.batch_sequences * steps[0] / 16_500_000
    (left,) = design.left_out
    assert left.wanted == {"seq_len": 2048} and "windows of 1,024 hold every history already" in left.reason


def test_without_attention_all_lengths_take_as_many_steps(standard: Preset) -> None:
    preset = standard.model_copy(update={"context": standard.context.model_copy(update={"attention": False})})
    design = design_axis("context", FACTS, preset, request=SweepRequest(budgets=(1e14,)))
    assert len({p.recipe.train.steps for p in design.cells}) == 1
    assert not any(p.recipe.train.attention_flops for p in design.cells)


def test_windows_that_no_batch_holds_are_listed_and_impossible_ones_refused(standard: Preset) -> None:
    small = standard.model_copy(update={"batch_by_budget": ((1e14, 3),)})
    design = design_axis("context", FACTS, small, request=SweepRequest(budgets=(1e14,)))
    reasons = {out.wanted["seq_len"]: out.reason for out in design.left_out}
    assert reasons[512] == "a step's 768 slots are no whole number of windows"
    assert reasons[1024] == "a step holds 768 slots, fewer than one window"
    for lengths, message in (((1, 64), "seq_lens holds 1"),):
        bad = standard.model_copy(update={"context": standard.context.model_copy(update={"seq_lens": lengths})})
        with pytest.raises(ConfigError, match=message):
            design_axis("context", FACTS, bad)
    with pytest.raises(ConfigError, match=r"shortest history of the context axis has 3 events[\s\S]*reach 2"):
        design_axis("context", replace(FACTS, reach=2), standard)


def test_the_shape_axis_fills_six_knobs_and_holds_ten_cells_out(standard: Preset) -> None:
    design = design_axis("shape", FACTS, standard, request=SweepRequest(budgets=(3e14,)))
    centre = [p for p in design.cells if p.row.cell_id.startswith("centre")]
    points = [p for p in design.cells if p.row.cell_id.startswith("point-")]
    held_out = [p for p in design.cells if p.row.cell_id.startswith(HELD_OUT)]
    assert (len(centre), len(points), len(held_out)) == (3, 60, 10)
    assert {p.row.seed for p in centre} == {0, 1, 2}
    assert len({p.hash for p in design.cells}) == 73
    middle = centre[0].recipe
    table = np.array([
        [
            p.recipe.model.joint_dim, p.recipe.model.width, p.recipe.model.depth, p.recipe.model.text_depth,
            p.recipe.train.batch_sequences, p.recipe.train.learning_rate / math.sqrt(p.recipe.train.batch_sequences),
        ]
        for p in points
    ])  # fmt: skip
    for p in points:
        assert p.recipe.model.width % p.recipe.model.head_dim == 0
        assert abs(p.cell.flops - 3e14) <= p.cell.flops_per_step / 2 and p.cell.steps >= 100
    at = [middle.model.joint_dim, middle.model.width, middle.model.depth, middle.model.text_depth]
    for column, value in zip(table.T, at, strict=False):
        assert column.min() < value < column.max() and column.min() >= value / 2.5 and column.max() <= value * 2.5
    logs = np.log(table)
    correlations = np.corrcoef(logs.T) - np.eye(6)
    assert np.abs(correlations).max() < 0.35  # knobs move apart from each other
    u = logs - logs.mean(axis=0)
    terms = [np.ones(60), *u.T, *(u**2).T, *(u[:, i] * u[:, j] for i in range(6) for j in range(i))]
    assert np.linalg.matrix_rank(np.stack(terms, axis=1)) == 28  # a quadratic can be fitted
    assert design_axis("shape", FACTS, standard).cells == design.cells  # drawn the same way every time


def test_a_centre_that_is_too_dear_is_listed_and_seeds_are_not_counted_twice(standard: Preset) -> None:
    design = design_axis("shape", FACTS, standard, request=SweepRequest(budgets=(3e14,), seeds=2))
    assert [p.row.seed for p in design.cells if p.row.cell_id.startswith("centre")] == [0, 1, 2]
    assert not design.left_out
    common = standard.common.model_copy(update={"min_steps": 2000})
    dear = design_axis("shape", FACTS, standard.model_copy(update={"common": common}))
    assert not any(p.row.cell_id.startswith("centre") for p in dear.cells)
    assert any("the centre cannot be paid for" in out.reason for out in dear.left_out)


def test_the_shape_axis_chooses_its_rates_itself(standard: Preset) -> None:
    with pytest.raises(ConfigError, match="the rate is one of its six knobs"):
        design_axis("shape", FACTS, standard, request=SweepRequest(learning_rates=3))


def test_shares_are_run_with_and_without_dropout_in_the_embedder(standard: Preset) -> None:
    design = design_axis("regularisation", FACTS, standard)
    by_share: dict[float, set[float]] = {}
    for planned in design.cells:
        train = planned.recipe.train
        assert train.token_dropout == train.field_dropout == train.item_dropout
        by_share.setdefault(planned.cell.embedder_share, set()).add(train.item_dropout)
    assert len(by_share) == 6 and all(levels == {0.0, 0.2} for levels in by_share.values())
    bad = standard.regularisation.model_copy(update={"dropouts": (0.1, 0.2)})
    with pytest.raises(ConfigError, match="0 among them"):
        design_axis("regularisation", FACTS, standard.model_copy(update={"regularisation": bad}))


def test_a_study_runs_them_only_where_they_are_named() -> None:
    on_request = {name for name, axis in AXES.items() if axis.on_request}
    assert on_request == {"context", "shape", "regularisation", "batch_size"}
    # Batch sizes at equal compute are also run where the preset has budgets for them.
    assert on_request & set(StudyOptions(preset="quick").chosen_axes()) == {"batch_size"}
    assert not on_request & set(StudyOptions(preset="paper").chosen_axes())
    named = StudyOptions(preset="quick", axes=("context", "share"))
    named.check()
    assert named.chosen_axes() == ("share", "context")
