"""`habitus size`: a table for people, JSON for machines, one clear message for a mistake."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.errors import ConfigError
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.sizing import CellRequest, solve, stage2_step_flops

RECIPE = """
[model]
joint_dim = 64
width = 128
depth = 4
[train]
stage = 2
parent = "abc"
num_negatives = 1000
batch_sequences = 64
steps = 500
learning_rate = 0.001
"""


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["size", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_json_is_the_cell() -> None:
    output = run("--flops", "1e15", "--share", "0.06", "--data-ratio", "15", "--batch-sequences", "64", "--json")
    cell = solve(CellRequest(flops=1e15, share=0.06, data_ratio=15, batch_sequences=64))
    assert json.loads(output) == cell.to_values()


def test_the_table_names_everything_that_was_promised() -> None:
    output = run("--flops", "1e15", "--share", "0.06", "--data-ratio", "15")
    for name in (
        "joint_dim text_depth width depth steps params embedder_params contextualizer_params slots_seen flops "
        "executed_flops bytes"
    ).split():
        assert any(line.startswith(name + " ") for line in output.splitlines()), name
    assert "requested 0.06" in output


def test_a_recipe_is_sized_by_the_formula_of_its_stage(tmp_path: Path) -> None:
    path = tmp_path / "stage2.toml"
    path.write_text(RECIPE)
    cell = json.loads(run(str(path), "--json"))
    step = stage2_step_flops(cell["contextualizer_params"], B=64, L=256, h=64, K=1000)
    assert cell["flops"] == 500 * step
    assert "num_negatives" in run(str(path))


def test_a_dataset_decides_fields_lengths_and_the_cache(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=200, num_items=80, events_per_user=10, max_events_per_user=32))
    options = PrepareOptions(seq_len=32, text_len=12, test_share=0)
    prepare_world(world, schema_of(world), tmp_path / "dataset", options, lambda _what, _share: None)
    request = ("--flops", "1e13", "--share", "0.06", "--data-ratio", "15", "--dataset", str(tmp_path / "dataset"))
    cell = json.loads(run(*request, "--json"))
    h = cell["model"]["joint_dim"]
    assert (cell["seq_len"], cell["model"]["text_len"]) == (32, 12)
    assert cell["bytes"]["item_cache"] == 80 * h * 2
    assert cell["flops_item_cache"] == 2 * 80 * 12 * cell["embedder_params"]
    assert cell["breakdown"]["embedder.vectors"] == (16 + 1) * h  # the world's image-like vector
    assert "flops_item_cache" in run(*request)


def test_an_unknown_key_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("joint_dim", "join_dim"))
    with pytest.raises(ConfigError, match=r"unknown key 'model.join_dim' .did you mean 'joint_dim'"):
        run(str(path))


def test_a_width_that_heads_do_not_fill_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("width = 128", "width = 100"))
    with pytest.raises(ConfigError, match="width 100 is not a multiple of head_dim 32; the nearest is 96"):
        run(str(path))


def test_a_recipe_and_a_request_together_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError, match="--flops, --batch-sequences given"):
        run(str(path), "--flops", "1e15", "--batch-sequences", "64")
