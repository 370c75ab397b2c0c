"""Equation 1 to the digit, worked by hand, and the paper's own table."""

import csv
from pathlib import Path

import pytest

from habitus.errors import ConfigError
from habitus.recipe import ModelRecipe, Recipe, TrainRecipe
from habitus.sizing import (
    TYPICAL_INPUTS,
    CellRequest,
    Inputs,
    attention_term,
    cell_of,
    cell_of_recipe,
    embedder_flop_share,
    item_cache_flops,
    largest_num_negatives,
    solve,
    stage1_step_flops,
    stage2_step_flops,
    steps_for,
)

# The printed table of the paper; the text depth is not printed and is what closes the totals.
ISO_FLOPS = """budget,h_emb,h_ctx,L_ctx,B,T,N,D,L_text
1e15,44,128,8,64,1645,1.8e6,27e6,4
1e16,76,232,8,128,2579,5.5e6,85e6,4
1e17,136,408,8,256,3914,16.9e6,257e6,4
1e18,188,452,24,256,14193,60.7e6,930e6,8"""
ROWS = list(csv.DictReader(ISO_FLOPS.splitlines()))


def test_one_step_of_stage_1_worked_by_hand() -> None:
    # 6·2·4·(24·10 + 100 + 3·2·4·5) = 48·(240 + 100 + 120)
    assert stage1_step_flops(10, 100, B=2, L=4, t=24, h=5) == 48 * 460


def test_one_step_of_stage_2_worked_by_hand() -> None:
    # 6·2·4·(100 + 3·(2·4 + 7)·5) = 48·(100 + 225)
    assert stage2_step_flops(100, B=2, L=4, h=5, K=7) == 48 * 325


def test_attention_joins_the_contextualizer_where_it_is_counted() -> None:
    assert attention_term(6, 3, L=4) == 72
    model = ModelRecipe(joint_dim=8, width=32, depth=3, text_depth=1)
    plain, counted = (cell_of(model, batch_sequences=2, steps=5, seq_len=4, attention=on) for on in (False, True))
    # Five steps of eight slots, each 6·4·32·3 more.
    assert counted.flops - plain.flops == 5 * 8 * 6 * 4 * 32 * 3
    assert counted.executed_flops == plain.executed_flops  # which always held it
    second = [
        cell_of(model, batch_sequences=2, steps=5, seq_len=4, stage=2, num_negatives=7, attention=on).flops
        for on in (False, True)
    ]
    assert second[1] - second[0] == 5 * 8 * 6 * 4 * 32 * 3


def test_a_recipe_says_whether_attention_is_counted() -> None:
    train = {"batch_sequences": 2, "steps": 5, "learning_rate": 0.1}
    model = ModelRecipe(joint_dim=8, width=32, depth=3, text_depth=1)
    plain = Recipe(model=model, train=TrainRecipe(**train))
    counted = Recipe(model=model, train=TrainRecipe(**train, attention_flops=True))
    assert "attention_flops" not in plain.to_values()["train"] and "contexts" not in plain.to_values()["evaluate"]
    difference = cell_of_recipe(counted).flops - cell_of_recipe(plain).flops
    assert difference == 5 * 2 * 256 * 6 * 256 * 32 * 3


def test_large_totals_lose_no_digit() -> None:
    assert stage1_step_flops(3**30, 7**20, B=1021, L=257, t=24, h=251) == 6 * 1021 * 257 * (
        24 * 3**30 + 7**20 + 3 * 1021 * 257 * 251
    )


def test_flop_share_and_cache_pass() -> None:
    assert embedder_flop_share(10, 100, B=2, L=4, t=24, h=5) == 360 / 460
    assert item_cache_flops(10, t=24, items=1000) == 2 * 1000 * 24 * 10


def test_steps_are_the_nearest_whole_number_and_at_least_one() -> None:
    assert [steps_for(budget, 100) for budget in (60, 149, 151, 1000)] == [1, 1, 2, 10]
    with pytest.raises(ConfigError, match="one step costs 100 FLOPs, more than the budget of 40"):
        steps_for(40, 100)


def test_the_largest_number_of_negatives_leaves_200_steps() -> None:
    sizes = {"B": 64, "L": 256, "h": 64}
    K = largest_num_negatives(1e16, 1_000_000, **sizes)
    assert K is not None
    assert 200 * stage2_step_flops(1_000_000, K=K, **sizes) <= 1e16
    assert 200 * stage2_step_flops(1_000_000, K=K + 1, **sizes) > 1e16
    assert largest_num_negatives(1e12, 1_000_000, **sizes) is None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["budget"])
@pytest.mark.parametrize("inputs", [TYPICAL_INPUTS, Inputs(tokens=16_384)], ids=["typical", "text-only"])
def test_the_printed_cells_cost_their_budget_within_four_per_cent(row: dict[str, str], inputs: Inputs) -> None:
    width = int(row["h_ctx"])
    model = ModelRecipe(
        joint_dim=int(row["h_emb"]),
        text_depth=int(row["L_text"]),
        width=width,
        depth=int(row["L_ctx"]),
        head_dim=4,
    )
    cell = cell_of(model, batch_sequences=int(row["B"]), steps=int(row["T"]), inputs=inputs)
    assert cell.flops == pytest.approx(float(row["budget"]), rel=0.04)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["budget"])
def test_the_solver_lands_near_the_printed_cells(row: dict[str, str]) -> None:
    budget = float(row["budget"])
    cell = solve(
        CellRequest(
            flops=budget,
            share=0.06,
            data_ratio=15,
            batch_sequences=int(row["B"]),
            text_depth=int(row["L_text"]),
        )
    )
    assert abs(cell.flops - budget) <= max(1e-4 * budget, cell.flops_per_step / 2)
    assert cell.params == pytest.approx(float(row["N"]), rel=0.10)
    assert cell.slots_seen == pytest.approx(float(row["D"]), rel=0.10)


def test_the_table_above_is_the_shared_one_where_that_is_at_hand() -> None:
    path = Path(__file__).parents[3] / "shared" / "paper" / "tables" / "iso_flops.csv"
    if not path.exists():
        pytest.skip("the paper's tables lie outside the repository")
    columns = "budget h_emb h_ctx L_ctx B T N D".split()
    printed = [[row[c] for c in columns] for row in csv.DictReader(path.read_text().splitlines())]
    assert printed == [[row[c] for c in columns] for row in ROWS]
