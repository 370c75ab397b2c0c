"""A small world, prepared, and bundles made by a ten-line training loop."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from habitus.data import Dataset, PrepareOptions
from habitus.data.from_world import prepare_world
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.bundle import save_bundle
from habitus.recipe import Recipe


@pytest.fixture(scope="session")
def world() -> World:
    return World(WorldConfig(num_users=900, num_items=300, events_per_user=24, seed=2))


@pytest.fixture(scope="session")
def dataset(world: World, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("world") / "dataset"
    schema = WORLD_SCHEMA.model_copy(update={"world": world.config})
    options = PrepareOptions(seq_len=32, text_len=6, vocabulary_size=400, validation_share=0.3, test_share=0, threads=1)
    prepare_world(world, schema, path, options, lambda *_: None)
    return Dataset.open(path)


def small_recipe(steps: int = 60, seed: int = 0) -> Recipe:
    model = {"joint_dim": 16, "text_len": 6, "text_depth": 1, "width": 32, "depth": 2, "head_dim": 16}
    train = {"batch_sequences": 16, "steps": steps, "learning_rate": 3e-3, "precision": "fp32", "seed": seed}
    return Recipe.parse({"data": {"seq_len": 32}, "model": model, "train": train}, "test")


def trained(dataset: Dataset, recipe: Recipe) -> BehaviorModel:
    """A model after a plain loop over in-batch softmax; zero steps give an untrained one."""
    model = BehaviorModel(dataset.fields, recipe.model, seed=recipe.train.seed)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.train.learning_rate)
    for step in range(recipe.train.steps - 1):
        batch = dataset.batch("train", recipe.train.batch_sequences, position=step)
        rows, places = np.unique(
            np.concatenate([batch.items.ravel(), batch.targets[batch.targets >= 0]]), return_inverse=True
        )
        vectors = model.embed_items(item_tensors(dataset.item_features(rows), recipe.model))
        tensors = batch_tensors(batch)
        events = vectors[torch.from_numpy(places[: batch.items.size].reshape(batch.items.shape))]
        queries = model.queries(tensors, events)[tensors.targets >= 0]
        loss = torch.nn.functional.cross_entropy(queries @ vectors.T, torch.from_numpy(places[batch.items.size :]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="session")
def make_run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """A run folder with the bundle of a model trained for some steps; each number of steps is trained once."""
    made: dict[int, Path] = {}

    def make(steps: int) -> Path:
        if steps not in made:
            folder = tmp_path_factory.mktemp(f"run-{steps}")
            recipe = small_recipe(steps)
            save_bundle(trained(dataset, recipe), recipe, dataset, folder / "bundle")
            made[steps] = folder
        return made[steps]

    return make


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    return small_recipe


@pytest.fixture(scope="session")
def train() -> Callable[[Dataset, Recipe], BehaviorModel]:
    return trained
