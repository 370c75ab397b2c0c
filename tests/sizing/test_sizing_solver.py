"""The solver gives the nearest buildable cell; a twin that searches everything says so."""

import math
from dataclasses import replace

import pytest

from habitus.errors import ConfigError
from habitus.recipe import ModelRecipe
from habitus.sizing import (
    TYPICAL_INPUTS,
    CellRequest,
    Inputs,
    breakdown,
    ladder_batch_sequences,
    solve,
    stage1_step_flops,
)

SHARES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.10, 0.20, 0.27, 0.50)
ASPECT, RATIO_WEIGHT = 40.0, 10.0
# How far from 32, and what a head is padded to, in powers of two: 24 becomes 32, 40 to 56 become 64, 4 and 8 become 16.
PADDED = {4: 16, 8: 16, 16: 16, 24: 32, 32: 32, 40: 64, 48: 64, 56: 64, 64: 64}


def brute_force(request: CellRequest, inputs: Inputs, *, max_h: int, max_width: int) -> tuple[int, ...]:
    """(joint_dim, width, depth, head_dim, steps) by looking at every buildable cell up to those sizes."""
    assert request.flops and request.share and request.data_ratio
    B, L = request.batch_sequences, request.seq_len
    best: tuple[float, tuple[int, ...]] = (math.inf, ())
    for h in [*range(4, 64, 4), *range(64, max_h + 1, 8)]:
        shapes: list[tuple[float, int, int, float, int, int]] = []
        for head_dim in PADDED:
            for width in range(head_dim, max_width + 1, head_dim):
                for depth in range(1, 200):
                    model = ModelRecipe(
                        joint_dim=h, width=width, depth=depth, head_dim=head_dim, text_depth=request.text_depth
                    )
                    parts = breakdown(model, inputs)
                    counted = parts.contextualizer_params + (L * width * depth if request.attention else 0)
                    step = stage1_step_flops(parts.embedder_params, counted, B=B, L=L, t=24, h=h)
                    steps = round(request.flops / step)
                    ratio = steps * B * L / parts.params
                    if ratio < request.data_ratio / 1.05:
                        break  # deeper only takes more away from the data
                    if ratio > request.data_ratio * 1.05:
                        continue
                    cost = abs(math.log(width / depth / ASPECT))
                    cost += RATIO_WEIGHT * abs(math.log(ratio / request.data_ratio))
                    cost += abs(math.log2(32 / head_dim)) + math.log2(PADDED[head_dim] / head_dim)
                    shapes.append((cost, width, head_dim, parts.share, depth, steps))
        if shapes:
            _, width, head_dim, share, depth, steps = min(shapes)
            found = (abs(math.log(share / request.share)), (h, width, depth, head_dim, steps))
            best = min(best, found)
    return best[1]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(
    "flops", (1e13, pytest.param(1e14, marks=pytest.mark.slow), pytest.param(1e15, marks=pytest.mark.slow))
)
def test_a_search_of_everything_finds_no_nearer_cell(flops: float, share: float) -> None:
    request = CellRequest(flops=flops, share=share, data_ratio=15, batch_sequences=ladder_batch_sequences(flops))
    model = (cell := solve(request)).model
    found = (model.joint_dim, model.width, model.depth, model.head_dim, cell.steps)
    assert found == brute_force(request, TYPICAL_INPUTS, max_h=96, max_width=200 if flops < 3e13 else 560)


@pytest.mark.parametrize("seq_len", (256, 1024))
@pytest.mark.parametrize("share", (0.02, 0.10))
def test_a_search_of_everything_finds_no_nearer_cell_where_attention_is_counted(share: float, seq_len: int) -> None:
    request = CellRequest(
        flops=1e13, share=share, data_ratio=15, batch_sequences=4096 // seq_len, seq_len=seq_len, attention=True
    )
    model = (cell := solve(request)).model
    found = (model.joint_dim, model.width, model.depth, model.head_dim, cell.steps)
    assert found == brute_force(request, TYPICAL_INPUTS, max_h=96, max_width=200)
    assert cell.params < solve(replace(request, attention=False)).params  # the same budget, with more to pay


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("exponent", range(13, 19))
def test_every_share_at_every_budget_is_within_tolerance(exponent: int, share: float) -> None:
    budget = 10.0**exponent
    batch = ladder_batch_sequences(budget)
    cell = solve(CellRequest(flops=budget, share=share, data_ratio=15, batch_sequences=batch))
    assert abs(cell.flops - budget) <= max(1e-4 * budget, cell.flops_per_step / 2)
    assert cell.data_ratio == pytest.approx(15, rel=0.05)
    assert cell.model.width % cell.model.head_dim == 0
    h = cell.model.joint_dim
    assert h % (4 if h < 64 else 8) == 0
    assert cell.wanted["embedder_share"] == share
    # One step of joint_dim up or down moves the share by more than what is missing here.
    step = 4 if h < 64 else 8
    assert abs(math.log(cell.embedder_share / share)) < 2 * math.log((h + step) / h) + 0.03


def test_the_share_is_realised_down_to_half_a_per_cent_from_1e15() -> None:
    for exponent in range(15, 19):
        budget = 10.0**exponent
        batch = ladder_batch_sequences(budget)
        cell = solve(CellRequest(flops=budget, share=0.005, data_ratio=15, batch_sequences=batch))
        assert 0.004 < cell.embedder_share < 0.006


def test_below_the_smallest_embedder_the_floor_is_what_comes_back() -> None:
    cell = solve(CellRequest(flops=1e12, share=0.0001, data_ratio=15, batch_sequences=8))
    assert cell.model.joint_dim == 4
    assert cell.embedder_share > 10 * cell.wanted["embedder_share"]


def test_a_given_shape_is_kept_and_the_budget_decides_the_steps() -> None:
    cell = solve(CellRequest(flops=1e15, share=0.02, width=128, depth=4, batch_sequences=64))
    assert (cell.model.width, cell.model.depth) == (128, 4)
    assert abs(cell.flops - 1e15) <= cell.flops_per_step / 2
    assert cell.embedder_share == pytest.approx(0.02, rel=0.2)


def test_a_given_depth_narrows_the_search_to_widths() -> None:
    cell = solve(CellRequest(flops=1e17, share=0.06, data_ratio=15, depth=8, batch_sequences=256))
    assert cell.model.depth == 8
    assert cell.data_ratio == pytest.approx(15, rel=0.05)


def test_budget_and_steps_give_a_model() -> None:
    cell = solve(CellRequest(flops=1e16, joint_dim=64, steps=3000, batch_sequences=128))
    assert cell.steps == pytest.approx(3000, rel=0.05)
    assert abs(cell.flops - 1e16) <= cell.flops_per_step / 2


def test_under_a_budget_with_steps_no_joint_dim_gives_a_nearer_share() -> None:
    for share in (0.01, 0.06, 0.3):
        fixed = {"flops": 1e14, "steps": 1000, "batch_sequences": 32}
        distances = {}
        for h in range(4, 60, 4):
            try:
                cell = solve(CellRequest(**fixed, joint_dim=h))  # type: ignore[arg-type]
            except ConfigError:
                continue
            distances[h] = abs(math.log(cell.embedder_share / share))
        found = solve(CellRequest(**fixed, share=share))  # type: ignore[arg-type]
        assert found.model.joint_dim == min(distances, key=lambda h: distances[h])


def test_ratio_and_steps_give_a_model_and_its_budget() -> None:
    cell = solve(CellRequest(joint_dim=64, data_ratio=20, steps=3000, batch_sequences=64))
    assert cell.steps == 3000
    assert cell.data_ratio == pytest.approx(20, rel=0.05)


def test_shape_with_a_ratio_or_with_steps_gives_a_budget() -> None:
    by_ratio = solve(CellRequest(joint_dim=64, width=256, depth=6, data_ratio=20, batch_sequences=64))
    assert by_ratio.data_ratio == pytest.approx(20, rel=0.01)
    by_steps = solve(CellRequest(joint_dim=64, width=256, depth=6, steps=by_ratio.steps, batch_sequences=64))
    assert by_steps.flops == by_ratio.flops


def test_a_model_without_text_counts_each_embedder_weight_once_per_item() -> None:
    inputs = Inputs(item_categories=(100,), item_vectors=(64,))
    cell = solve(CellRequest(flops=1e15, share=0.02, data_ratio=15, batch_sequences=64), inputs)
    p_e, p, h = cell.embedder_params, cell.contextualizer_params, cell.model.joint_dim
    assert cell.flops_per_step == stage1_step_flops(p_e, p, B=64, L=256, t=1, h=h)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"flops": 1e15, "share": 0.0, "data_ratio": 15}, "share = 0 is not a share"),
        ({"flops": 1e15, "share": 1.0, "data_ratio": 15}, "share = 1 is not a share"),
        ({"flops": 1e15, "data_ratio": 15}, "neither of share and joint_dim"),
        ({"flops": 1e15, "share": 0.1, "joint_dim": 8, "data_ratio": 15}, "both of share and joint_dim"),
        ({"flops": 1e15, "share": 0.1}, "only flops given"),
        ({"share": 0.1}, "neither a budget nor a size"),
        ({"flops": 1e15, "share": 0.1, "data_ratio": 15, "steps": 10}, "leave nothing to solve"),
        ({"flops": -1.0, "share": 0.1, "data_ratio": 15}, "flops = -1 is not positive"),
        ({"flops": 1e15, "joint_dim": 2, "data_ratio": 15}, "joint_dim = 2 is too small"),
        ({"flops": 1e15, "share": 0.1, "width": 100, "depth": 2, "head_dim": 32}, "not a multiple of head_dim"),
        ({"flops": 1e15, "share": 0.1, "width": 102, "depth": 2}, "not a multiple of any head size"),
        ({"flops": 1e15, "share": 0.1, "data_ratio": 15, "head_dim": 7}, "head_dim = 7 is odd"),
        ({"flops": 1e9, "share": 0.1, "width": 64, "depth": 2}, "costs more than the budget"),
        ({"flops": 1e15, "joint_dim": 4096, "steps": 1000}, "leaves no compute for a contextualizer"),
        ({"flops": 1e15, "share": 0.06, "width": 512, "depth": 8, "data_ratio": 15}, "data_ratio = 15 cannot"),
        ({"flops": 1e15, "joint_dim": 104, "data_ratio": 15, "head_dim": 512}, "smallest buildable one has"),
    ],
)
def test_a_request_that_cannot_be_met_says_which_constraint_bites(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        solve(CellRequest(**{"batch_sequences": 64, **values}))  # type: ignore[arg-type]
    assert caught.value.expected


def test_the_ladder_of_batches() -> None:
    budgets = (1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19)
    assert [ladder_batch_sequences(b) for b in budgets] == [8, 16, 32, 64, 128, 256, 512, 512]
