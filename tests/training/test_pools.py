"""Pools of a fixed size: a batch of several is the mean of as many batches of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation import Ranks
from habitus.model import BehaviorModel
from habitus.recipe import TrainRecipe
from habitus.record import Record
from habitus.training import TrainOptions, train
from habitus.training.batches import HostBatches
from habitus.training.step import EagerStage1

CPU = torch.device("cpu")


def gradients(dataset: Dataset, recipe: Any, step: int) -> tuple[float, int, dict[str, torch.Tensor], int]:
    """Loss, queries and gradients of one step of a fresh model, and how many scores it computed."""
    dataset = dataset.training_view(recipe.data)
    model = BehaviorModel(dataset.fields, recipe.model, seed=0)
    batches = HostBatches(dataset, recipe, CPU, Ranks(), 1)
    stage = EagerStage1(model, dataset, recipe, batches)
    losses = stage.backward(step)
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return float(losses.loss), batches.read(step).num_queries, found, stage.work.scores


def test_a_batch_of_three_pools_has_the_mean_gradient_of_three_batches(
    dataset: Dataset, recipe_of: Callable[..., Any]
) -> None:
    common = {"log_q": True, "model": {"copying": True}}
    loss, queries, grads, scores = gradients(dataset, recipe_of(batch_sequences=12, pool_sequences=4, **common), 0)
    singles = [gradients(dataset, recipe_of(batch_sequences=4, **common), step) for step in range(3)]
    assert queries == sum(single[1] for single in singles)
    assert scores == sum(single[3] for single in singles)
    assert loss * queries == pytest.approx(sum(single[0] * single[1] for single in singles), rel=1e-5)
    for name, gradient in grads.items():
        expected = sum(single[2][name] * single[1] for single in singles if name in single[2])
        torch.testing.assert_close(gradient * queries, torch.as_tensor(expected), rtol=2e-3, atol=2e-3, msg=name)
    whole, *_ = gradients(dataset, recipe_of(batch_sequences=12, **common), 0)
    assert whole > loss + 0.1  # more candidates are harder


def test_pool_sequences_is_absent_from_recipes_without_it_and_must_divide_the_batch() -> None:
    plain = TrainRecipe(batch_sequences=8, steps=1, learning_rate=0.1)
    assert "pool_sequences" not in plain.to_values()
    assert TrainRecipe(batch_sequences=8, pool_sequences=2, steps=1, learning_rate=0.1).pool_sequences == 2
    for pool in (3, 8, 16):
        with pytest.raises(ValueError, match="does not divide"):
            TrainRecipe(batch_sequences=8, pool_sequences=pool, steps=1, learning_rate=0.1)
    with pytest.raises(ValueError, match="is of stage 1"):
        TrainRecipe(batch_sequences=8, pool_sequences=2, steps=1, learning_rate=0.1, stage=2, parent="0" * 64)


def test_a_run_with_pools_of_a_fixed_size_trains_and_refuses_parts(
    dataset: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(batch_sequences=4, pool_sequences=2, steps=2)
    train(recipe, dataset, tmp_path / "run", options=TrainOptions(device="cpu", threads=1))
    assert Record.read(tmp_path / "run" / "record.json").recipe.train.pool_sequences == 2
    with pytest.raises(ConfigError, match="pool_sequences is 2"):
        train(recipe, dataset, tmp_path / "parts", options=TrainOptions(device="cpu", threads=1, accumulate=2))
