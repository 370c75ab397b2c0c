"""There is one loss: change it, and every engine changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from habitus.data import Dataset
from habitus.model import BehaviorModel
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.cuda_graph import CapturedStage1
from habitus.training.device_batches import DeviceEvents, DeviceItems
from habitus.training.journal import read_journal
from tests.training.processes import doubled_loss
from tests.training.test_train_feeding import at_step, device_batch
from tests.training.test_train_processes import launch

FULL = {"steps": 1, "log_q": True, "dropout": 0.2, "model": {"copying": True}}


def first_losses(run: Path) -> dict[str, float]:
    """Every loss in the first line of a journal."""
    line = read_journal(run / "journal.jsonl")[0]
    return {name: value for name, value in line.items() if name.endswith("loss")}


def assert_doubled(plain: dict[str, float], doubled: dict[str, float]) -> None:
    assert doubled == {name: pytest.approx(2 * value, rel=1e-5) for name, value in plain.items()}


@pytest.fixture(scope="module")
def copying_parent(dataset: Dataset, recipe_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copying") / "run"
    train(recipe_of(**FULL), dataset, folder, options=TrainOptions(device="cpu", threads=1))
    return folder


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("stage, extra_pool", [(1, "union"), (2, "union"), (2, "extras")])
def test_eager_steps_in_one_part_and_in_three(
    dataset: Dataset, recipe_of: Callable[..., Any], copying_parent: Path, tmp_path: Path, num_parts: int, stage: int,
    extra_pool: str,
) -> None:  # fmt: skip
    recipe, parent = recipe_of(**FULL), None
    if stage == 2:
        parent = copying_parent
        parent_hash = Record.read(parent / "record.json").recipe_hash
        recipe = recipe_of(**FULL, stage=2, parent=parent_hash, num_negatives=64, extra_pool=extra_pool)
    options = TrainOptions(device="cpu", threads=1, accumulate=num_parts)
    train(recipe, dataset, tmp_path / "plain", parent=parent, options=options)
    with doubled_loss():
        train(recipe, dataset, tmp_path / "doubled", parent=parent, options=options)
    assert_doubled(first_losses(tmp_path / "plain"), first_losses(tmp_path / "doubled"))


def test_two_processes(dataset: Dataset, recipe_of: Callable[..., Any], copying_parent: Path, tmp_path: Path) -> None:
    parent_hash = Record.read(copying_parent / "record.json").recipe_hash
    stage2 = recipe_of(**FULL, stage=2, parent=parent_hash, num_negatives=64)
    common = {"stage1": {"recipe": recipe_of(**FULL).to_values()}}
    common["stage2"] = {"recipe": stage2.to_values(), "parent": str(copying_parent)}
    jobs = [
        {**job, "dataset": str(dataset.path), "out": str(tmp_path / f"{name}-{doubled}"), "double_loss": doubled}
        for name, job in common.items()
        for doubled in (False, True)
    ]
    launch(2, jobs, tmp_path)
    for name in common:
        assert_doubled(first_losses(tmp_path / f"{name}-False"), first_losses(tmp_path / f"{name}-True"))


def test_what_a_captured_step_computes(dataset: Dataset, recipe_of: Callable[..., Any]) -> None:
    recipe = recipe_of(**FULL)
    model = BehaviorModel(dataset.fields, recipe.model)
    cpu = torch.device("cpu")
    items, batch = DeviceItems.of(dataset, recipe, cpu), device_batch(dataset, recipe, 0)
    stage = CapturedStage1(model, dataset, recipe, items, DeviceEvents(dataset, cpu).names)
    plain = stage.losses(batch, torch.empty(0), (300, 2000), at_step(0)).loss
    with doubled_loss():
        doubled = stage.losses(batch, torch.empty(0), (300, 2000), at_step(0)).loss
    torch.testing.assert_close(doubled, 2 * plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_captured_steps(
    dataset: Dataset, recipe_of: Callable[..., Any], copying_parent: Path, tmp_path: Path, stage: int, compiled: bool
) -> None:
    recipe, parent = recipe_of(**FULL), None
    if stage == 2:
        parent = copying_parent
        parent_hash = Record.read(parent / "record.json").recipe_hash
        recipe = recipe_of(**FULL, stage=2, parent=parent_hash, num_negatives=64)
    options = TrainOptions(device="cuda", compile=compiled)
    record = train(recipe, dataset, tmp_path / "plain", parent=parent, options=options)
    assert record.hardware["engine"] == "captured"
    with doubled_loss():
        train(recipe, dataset, tmp_path / "doubled", parent=parent, options=options)
    assert_doubled(first_losses(tmp_path / "plain"), first_losses(tmp_path / "doubled"))
