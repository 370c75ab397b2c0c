"""`habitus plan` as a person types it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.errors import ConfigError
from habitus.recipe import Recipe
from habitus.store import Laws, Plan


def habitus(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_the_table_names_every_source_and_the_next_command(laws_path: Path, tmp_path: Path) -> None:
    text = habitus(
        "plan", "--flops", "1e13", "--metric", "batch/loss", "--laws", laws_path, "--recipe", tmp_path / "recipe"
    )
    assert "N  params" in text and "this study" in text
    assert "e+0" not in text.split("From:")[0].split("source")[1]  # 158k, not 1.58e+05
    assert "Where your laws and the published ones differ" in text
    assert f"next: habitus train {tmp_path}/recipe/stage1.toml {tmp_path}/recipe/stage2.toml --data DATASET" in text
    assert Recipe.read(tmp_path / "recipe" / "stage1.toml").train.stage == 1


def test_sections_in_brackets_are_printed(laws_path: Path, tmp_path: Path) -> None:
    apart = tmp_path / "laws[old].json"  # without the store that says how its runs were evaluated
    Laws.read(laws_path).model_copy(update={"evaluation": None}).write(apart)
    text = habitus("plan", "--flops", "1e13", "--metric", "batch/loss", "--laws", apart)
    assert f"Laws: {apart};" in text and "set [evaluate] of the recipes as the runs had it" in text


def test_json_is_the_plan_and_nothing_else(laws_path: Path) -> None:
    text = habitus("plan", "--flops", "1e13", "--metric", "batch/loss", "--laws", laws_path, "--json")
    made = Plan.parse(json.loads(text), "output")
    assert made.flops == 1e13


def test_hours_on_a_device_are_a_budget(tmp_path: Path) -> None:
    text = habitus("plan", "--gpu", "h200", "--gpus", 8, "--hours", 24, "--register", tmp_path / "plan.json", "--json")
    made = Plan.parse(json.loads(text), "output")
    assert made["hours"].value == pytest.approx(24, rel=0.01)
    assert made["memory_gib"].how.endswith("before 8 GPUs divide it: whether each has room stands below")
    assert json.loads((tmp_path / "plan.json").read_text())["flops"] == made.flops


def test_options_that_contradict_or_lack_are_refused(laws_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither --flops nor --hours"):
        habitus("plan")
    with pytest.raises(ConfigError, match="--hours without --gpu"):
        habitus("plan", "--hours", 2)
    with pytest.raises(ConfigError, match="--laws and --published"):
        habitus("plan", "--flops", "1e13", "--laws", laws_path, "--published")
    with pytest.raises(ConfigError, match="does not exist"):
        habitus("plan", "--flops", "1e13", "--laws", laws_path.parent / "none.json")
    with pytest.raises(ConfigError, match=r"holds runs, no laws[^`]*`habitus fit .*runs\.store\.laws\.json"):
        habitus("plan", "--flops", "1e13", "--laws", laws_path.parent / "runs.store.xz")
