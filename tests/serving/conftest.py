"""A small world, prepared; a run made by a ten-line training loop; a fresh copy of it for tests that write."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.data.from_world import prepare_world
from habitus.events import Schema
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.bundle import load_bundle, save_bundle
from habitus.model.copying import CopyMass, copy_mass, copying_loss
from habitus.recipe import Recipe
from habitus.serving import Retriever

Log = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="session")
def world() -> World:
    return World(WorldConfig(num_users=900, num_items=300, events_per_user=24, seed=2))


@pytest.fixture(scope="session")
def dataset(world: World, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("serve-world") / "dataset"
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, validation_share=0.3, test_share=0, threads=1)
    prepare_world(world, schema_of(world), path, options, lambda *_: None)
    return Dataset.open(path)


@pytest.fixture(scope="session")
def log(world: World) -> Log:
    """The raw events by user, in order."""
    found: Log = {}
    for block in world.event_blocks():
        for event in block.to_pylist():
            found.setdefault(event["user_id"], []).append(event)
    return found


@pytest.fixture(scope="session")
def items(world: World) -> list[dict[str, Any]]:
    """The raw item table."""
    return [row for block in world.item_blocks() for row in block.to_pylist()]


def small_recipe(steps: int = 60, seq_len: int = 64, precision: str = "fp32", copying: bool = False) -> Recipe:
    model = {"joint_dim": 16, "text_len": 6, "text_depth": 1, "width": 32, "depth": 2, "head_dim": 16}
    model |= {"copying": copying}
    train = {"batch_sequences": 16, "steps": steps, "learning_rate": 3e-3, "precision": precision, "seed": 0}
    return Recipe.parse({"data": {"seq_len": seq_len}, "model": model, "train": train}, "test")


def trained(dataset: Dataset, recipe: Recipe) -> BehaviorModel:
    """A model after a plain loop over in-batch softmax."""
    model = BehaviorModel(dataset.fields, recipe.model, seed=recipe.train.seed)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.train.learning_rate)
    for step in range(recipe.train.steps):
        batch = dataset.batch("train", recipe.train.batch_sequences, position=step)
        targets = batch.targets >= 0
        both = np.concatenate([batch.items.ravel(), batch.targets[targets]])
        rows, places = np.unique(both, return_inverse=True)
        vectors = model.embed_items(item_tensors(dataset.item_features(rows), recipe.model))
        events = vectors[torch.from_numpy(places[: batch.items.size].reshape(batch.items.shape))]
        read = model.contextualize(batch_tensors(batch), events)
        queries, wanted = read.queries[torch.from_numpy(targets)], torch.from_numpy(places[batch.items.size :])
        scores = queries @ vectors.T
        loss = torch.nn.functional.cross_entropy(scores, wanted, reduction="none")
        if read.copy_scores is not None:
            mass = copy_mass(read.copy_scores, torch.from_numpy(batch.items), torch.from_numpy(batch.targets))
            heard = CopyMass(*(part[torch.from_numpy(targets)] for part in mass))
            loss = copying_loss(loss, scores.gather(1, wanted[:, None])[:, 0], None, heard)
        loss = loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


@pytest.fixture(scope="session")
def trained_run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with its bundle, catalogue and served ids; not to be written to."""
    run = tmp_path_factory.mktemp("trained") / "run"
    recipe = small_recipe()
    save_bundle(trained(dataset, recipe), recipe, dataset, run / "bundle")
    Retriever.open(run, data=dataset.path, device="cpu")
    return run


@pytest.fixture(scope="session")
def copying_run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for a model that hears the past; not to be written to."""
    run = tmp_path_factory.mktemp("copying") / "run"
    recipe = small_recipe(copying=True)
    save_bundle(trained(dataset, recipe), recipe, dataset, run / "bundle")
    Retriever.open(run, data=dataset.path, device="cpu")
    return run


MARKUP = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'


@pytest.fixture(scope="session")
def named_dataset(world: World, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The same world with names and pictures of its items, which the model does not read; each user's last event
    tests, the one before it validates."""
    folder = tmp_path_factory.mktemp("named-world")
    table = pa.concat_tables(list(world.item_blocks()))
    names = [f"Thing {row} é-{title}" for row, title in enumerate(table["title"].to_pylist())]
    names[3], names[5] = MARKUP, "Endless " * 125_000
    photos = [f"https://pictures.test/{row}.png" for row in range(len(names))]
    photos[7] = "https://elsewhere.test/7.png"
    table = table.append_column("name", pa.array(names)).append_column("photo", pa.array(photos))
    pq.write_table(table, folder / "items.parquet")
    pq.write_table(pa.concat_tables(list(world.event_blocks())), folder / "events.parquet")
    values = schema_of(world).to_values()
    values["items"]["display"] = ["name", "price", "photo"]
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, split="last", threads=1)
    tables = f"{folder}/events.parquet", f"{folder}/items.parquet"
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options)
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="session")
def named_run(copying_run: Path, named_dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that copies, over items with names; not to be written to."""
    run = tmp_path_factory.mktemp("named") / "run"
    bundle = load_bundle(copying_run)
    save_bundle(bundle.model, bundle.recipe, named_dataset, run / "bundle")
    Retriever.open(run, data=named_dataset.path, device="cpu")
    return run


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may write to."""
    return Path(shutil.copytree(trained_run, tmp_path / "run"))


@pytest.fixture(scope="session")
def train() -> Callable[[Dataset, Recipe], BehaviorModel]:
    return trained


@pytest.fixture(scope="session")
def recipe_of() -> Callable[..., Recipe]:
    return small_recipe
