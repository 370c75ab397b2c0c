"""benchmarks/train.py and several_gpus.py reach into captured steps: they should notice when those change."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from habitus.data import Dataset
from habitus.model import BehaviorModel
from habitus.softmax import negative_keys
from habitus.training.cuda_graph import CapturedStage2
from habitus.training.device_batches import DeviceEvents
from tests.training.test_train_feeding import CPU, at_step, device_batch


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("several_gpus")


def test_stage_2_draws_from_a_table_with_more_rows_than_there_are_items(
    dataset: Dataset, recipe_of: Callable[..., Any], benchmark: Any
) -> None:
    recipe, names = recipe_of(stage=2, parent="p", num_negatives=dataset.num_items), DeviceEvents(dataset, CPU).names
    model, table = BehaviorModel(dataset.fields, recipe.model).freeze(), torch.randn(5000, recipe.model.joint_dim)
    stage = CapturedStage2(model, dataset, recipe, table, names)
    benchmark.draw_from_table(stage, len(table), 2000)
    batch, keys, latch = device_batch(dataset, recipe, 0), negative_keys(0, 0), at_step(0)
    drawn = stage._draw(keys)
    assert len(drawn.unique()) == 2000 and dataset.num_items < drawn.max() < len(table)
    losses = stage.losses(batch, keys, (300, 0), latch)
    assert 2000 < int(losses.num_candidates) <= 2000 + 2 * dataset.num_items
    assert bool(latch.ok) and bool(torch.isfinite(losses.loss))
