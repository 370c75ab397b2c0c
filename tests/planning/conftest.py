"""Laws with a planted truth, stores of Records beside them, and a small dataset."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from habitus.data.dataset import Dataset
from habitus.data.from_world import prepare_world
from habitus.data.prepare import PrepareOptions
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import schema_of
from habitus.laws import fit
from tests.sealing import seal_store

from .planted import example_recipe, record_of, rows


@pytest.fixture(scope="session")
def laws_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """laws.json of the planted runs, in a folder of its own without a store."""
    folder = tmp_path_factory.mktemp("laws")
    table = rows()
    names = list(dict.fromkeys(key for row in table for key in row))
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(table)
    metrics = ["batch/loss", "batch/recall@10", "catalogue/recall@10"]
    fit(folder / "runs.csv", metrics).write(folder / "laws.json")
    return folder / "laws.json"


@pytest.fixture
def store(tmp_path: Path, laws_path: Path) -> Callable[..., Path]:
    """Makes a store with the planted laws, a store.json and one Record of 1e13 FLOPs in 100 s."""

    def make(checksum: str) -> Path:
        folder = tmp_path / "store"
        record = record_of(example_recipe(), checksum)
        cell = folder / "cells" / record.recipe_hash
        cell.mkdir(parents=True)
        (folder / "laws.json").write_text(laws_path.read_text())
        record.write(cell / "record.json")
        return seal_store(folder, checksum)

    return make


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A prepared world of 120 items and windows of 32."""
    world = World(WorldConfig(num_users=200, num_items=120, events_per_user=20, num_brands=20, num_groups=5))
    folder = tmp_path_factory.mktemp("data") / "dataset"
    prepare_world(
        world, schema_of(world), folder, PrepareOptions(seq_len=32, text_len=8, test_share=0), lambda *_: None
    )
    return Dataset.open(folder)
