"""A small world, prepared, and recipes that train on it in a second or two."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train


def prepared(folder: Path, *, test_share: float = 0, **world: Any) -> Dataset:
    """The dataset of a world with windows of 32 events and texts of 6 tokens."""
    shop = World(WorldConfig(**{"num_users": 500, "num_items": 300, "events_per_user": 24, "seed": 2} | world))
    schema = WORLD_SCHEMA.model_copy(update={"world": shop.config})
    options = PrepareOptions(
        seq_len=32, text_len=6, vocabulary_size=400, validation_share=0.2, test_share=test_share, threads=1
    )
    prepare_world(shop, schema, folder, options, lambda *_: None)
    return Dataset.open(folder)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("world") / "dataset")


def small_recipe(**train: Any) -> Recipe:
    """A recipe of 24 steps of 16 windows; keyword arguments go into [train], `evaluate` and `model` into theirs."""
    model = {"joint_dim": 16, "text_len": 6, "text_depth": 1, "width": 32, "depth": 2, "head_dim": 16}
    model |= train.pop("model", {})
    evaluate = {"queries": 400, "batch_sequences": 16} | train.pop("evaluate", {})
    values = {"batch_sequences": 16, "steps": 24, "learning_rate": 3e-3, "precision": "fp32"} | train
    return Recipe.parse(
        {"data": {"seq_len": 32}, "model": model, "train": values, "evaluate": evaluate}, "the test's recipe"
    )


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    return small_recipe


@pytest.fixture(scope="session")
def parent(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stage-1 run of 40 steps, with the catalogue's metrics in its Record."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    recipe = small_recipe(steps=40, evaluate={"regimes": ["batch", "catalogue"]})
    train(recipe, dataset, folder, options=TrainOptions(device="cpu", threads=1))
    return folder
