"""habitus train: recipes, overrides, both stages in a row, dry runs, exit codes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from habitus.cli.app import app
from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.training import TrainOptions, check_best, train
from tests.training.conftest import prepared


def habitus(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *(str(part) for part in arguments)], env={"COLUMNS": "120"})


def printed(*arguments: object) -> str:
    """What the command prints; failures are raised as they are."""
    result = habitus(*arguments, "--threads", 1, "--device", "cpu")
    if result.exception is not None:
        raise result.exception
    return result.stdout


@pytest.fixture
def recipes(recipe_of: Callable[..., Any], tmp_path: Path) -> tuple[Path, Path]:
    """stage1.toml and a stage2.toml that continues whatever came before it."""
    one = recipe_of(steps=8)
    two = recipe_of(steps=6, stage=2, parent="previous", num_negatives=32)
    one.write(tmp_path / "stage1.toml")
    two.write(tmp_path / "stage2.toml")
    return tmp_path / "stage1.toml", tmp_path / "stage2.toml"


def test_both_stages_in_one_command_and_again(dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    text = printed(*recipes, "--data", dataset.path, "--out", out, "train.steps=4")
    assert "4 steps" in text
    assert "batch/loss" in text
    one, two = (Record.read(out / stage / "record.json") for stage in ("stage1", "stage2"))
    assert (one.steps, two.steps) == (4, 4)
    assert two.recipe.train.parent == one.recipe_hash == two.parent_hash
    # Done stages are kept when the command is given again.
    before = (out / "stage2" / "record.json").stat().st_mtime_ns
    printed(*recipes, "--data", dataset.path, "--out", out, "--resume", "train.steps=4")
    assert (out / "stage2" / "record.json").stat().st_mtime_ns == before


def test_stage_2_alone_continues_a_run(
    dataset: Dataset, recipes: tuple[Path, Path], parent: Path, tmp_path: Path
) -> None:
    text = printed(recipes[1], "--data", dataset.path, "--from", parent, "--out", tmp_path / "run", "--json")
    record = Record.parse(json.loads(text), "stdout")
    assert record.parent_hash == Record.read(parent / "record.json").recipe_hash


def test_both_stages_continue_a_run(dataset: Dataset, recipes: tuple[Path, Path], parent: Path, tmp_path: Path) -> None:
    printed(*recipes, "--data", dataset.path, "--from", parent, "--out", tmp_path / "run", "train.steps=3")
    one, two = (Record.read(tmp_path / "run" / stage / "record.json") for stage in ("stage1", "stage2"))
    assert one.parent_hash == one.recipe.train.parent == Record.read(parent / "record.json").recipe_hash
    assert two.parent_hash == one.recipe_hash


def test_a_run_is_continued_without_a_recipe(dataset: Dataset, parent: Path, tmp_path: Path) -> None:
    before = Record.read(parent / "record.json")
    printed("--data", dataset.path, "--from", parent, "--out", tmp_path / "run")
    after = Record.read(tmp_path / "run" / "record.json")
    assert after.parent_hash == before.recipe_hash
    assert (after.recipe.model, after.recipe.data) == (before.recipe.model, before.recipe.data)
    assert after.steps == 12  # of 40
    assert after.recipe.train.learning_rate == before.recipe.train.learning_rate / 4
    assert after.metrics["batch/loss"].value < before.metrics["batch/loss"].value + 0.05


def test_a_dry_run_without_a_recipe_is_refused_before_anything_is_trained(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--dry-run was given and no recipe(.|\n)*stage1.toml"):
        printed("--data", dataset.path, "--out", tmp_path / "run", "--dry-run")
    assert not (tmp_path / "run").exists()


def test_a_dry_run_prints_sizes_and_writes_nothing(
    dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path
) -> None:
    text = printed(*recipes, "--data", dataset.path, "--dry-run", "train.steps=100")
    for label in ("stage 1", "stage 2", "params", "flops", "bytes", "epochs", "100"):
        assert label in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stage1.toml", "stage2.toml"]


def test_what_cannot_be_meant_is_refused(dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path) -> None:
    one, two = recipes
    data = ("--data", dataset.path)
    out = ("--out", tmp_path / "run")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((one, *out), "no --data"),
        ((one, *data), "no --out"),
        ((two, one, *data, *out), "continues the previous run, and there is none"),
        ((one, one, *data, *out), "stage 1 in place 2"),
        ((one, two, one, *data, *out), "3 recipes"),
        ((tmp_path / "absent.toml", *data, *out), "does not exist"),
        ((one, *data, *out, "train.stepz=5"), "did you mean 'steps'"),
        ((two, *data, *out, "--from", tmp_path), "holds no record.json"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            printed(*arguments)


def test_a_failed_run_exits_with_1(dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path) -> None:
    bad = ("train.learning_rate=1e30", "train.warmup=0.0", "train.clip=1e30")
    result = habitus(recipes[0], "--data", dataset.path, "--out", tmp_path / "run", "--device", "cpu", *bad)
    assert result.exit_code == 1
    assert "failed: " in result.output
    assert Record.read(tmp_path / "run" / "record.json").status == "failed"


def test_a_terminated_command_exits_with_143_and_goes_on(
    dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "habitus", "train", str(recipes[0]), "--data", str(dataset.path)]
    command += ["--out", str(out), "--threads", "1", "--device", "cpu", "train.steps=3000"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 60
    while not (out / "journal.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 143, stderr
    assert "--resume" in stderr
    assert len(list((out / "checkpoints").iterdir())) == 1


def test_what_a_run_would_only_notice_at_its_end_is_refused_at_the_start(
    dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path
) -> None:
    common = ("--data", dataset.path, "--out", tmp_path / "run")
    cases: list[tuple[tuple[object, ...], str]] = [
        ((recipes[0], "--best", "foo/bar"), "--best foo/bar is not among the metrics"),
        ((recipes[0], "--best", "batch/recall@7"), "not among the metrics"),
        ((*recipes, "--best", "batch/loss/lukewarm"), "not among the metrics"),
    ]
    for arguments, message in cases:
        with pytest.raises(ConfigError, match=message):
            printed(*arguments, *common)
    assert not (tmp_path / "run").exists()


def test_every_metric_of_a_record_may_choose_the_best_checkpoint(parent: Path) -> None:
    record = Record.read(parent / "record.json")
    assert len(record.metrics) > 50
    for metric in record.metrics:
        check_best(record.recipe, metric)


def test_the_card_comes_next_where_there_are_test_users(recipes: tuple[Path, Path], tmp_path: Path) -> None:
    data = prepared(tmp_path / "dataset", num_users=200, test_share=0.2)
    common = (recipes[0], "--data", data.path, "--device", "cpu", "--threads", 1, "train.steps=2")
    result = habitus(*common, "--out", tmp_path / "run")
    assert f"Next: habitus card {tmp_path / 'run'} --data {data.path}\n" in result.stderr
    assert "Next:" not in result.stdout + habitus(*common, "--out", tmp_path / "again", "--json").output


def test_resuming_where_there_is_nothing_says_so(dataset: Dataset, recipes: tuple[Path, Path], tmp_path: Path) -> None:
    common = (recipes[0], "--data", dataset.path, "--device", "cpu", "--resume", "train.steps=2")
    (tmp_path / "empty").mkdir()
    for name, words in (("absent", "does not exist"), ("empty", "holds no checkpoint")):
        result = habitus(*common, "--out", tmp_path / name)
        assert result.exit_code == 0
        assert f"{name} {words}: nothing to resume, so training starts at step 0" in " ".join(result.output.split())


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_trainer_holds_is_refused_at_the_start(
    dataset: Dataset, recipe_of: Callable[..., Recipe], tmp_path: Path, resume: bool
) -> None:
    recipe, refused_at = recipe_of(steps=4), []
    options = TrainOptions(device="cpu", threads=1, save_every=2)

    def second_trainer(step: int) -> None:
        if step == 2:
            with pytest.raises(RunError, match="is in use: another trainer writes to it"):
                train(recipe, dataset, tmp_path / "run", options=replace(options, resume=resume))
            refused_at.append(step)

    train(recipe, dataset, tmp_path / "run", options=options, on_save=second_trainer)
    assert refused_at == [2]
    # The folder is free again once its trainer has ended.
    again = train(recipe, dataset, tmp_path / "run", options=replace(options, resume=True))
    assert again.status == "done"
