from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from habitus.data import Dataset, prepare
from habitus.data.from_world import prepare_world
from habitus.errors import HabitusError
from habitus.events.schema import Schema
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import write_world

from .tables import SMALL


def quiet(_: str, __: float) -> None:
    pass


@pytest.mark.parametrize("split", ["user", "time", "last"])
def test_a_world_prepared_directly_is_byte_identical_to_preparing_its_files(tmp_path: Path, split: str) -> None:
    world = World(WorldConfig(num_users=300, num_items=150, events_per_user=20, seed=4))
    write_world(world, tmp_path / "files", threads=1, progress=quiet)
    schema = Schema.read(tmp_path / "files" / "schema.toml")
    options = replace(SMALL, seq_len=32, split=split)
    prepare(
        f"{tmp_path}/files/events.parquet", f"{tmp_path}/files/items.parquet", schema, tmp_path / "via_files", options
    )
    prepare_world(world, schema, tmp_path / "directly", options, quiet)
    via_files, directly = Dataset.open(tmp_path / "via_files"), Dataset.open(tmp_path / "directly")
    assert directly.manifest == via_files.manifest
    assert directly.checksum == via_files.checksum
    assert World.read(directly.path).config == world.config


def test_values_that_never_occur_are_in_neither_vocabulary(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=2, num_items=20, events_per_user=5, min_events_per_user=5, length_spread=0))
    write_world(world, tmp_path / "files", threads=1, progress=quiet)
    schema = Schema.read(tmp_path / "files" / "schema.toml")
    prepare(f"{tmp_path}/files/events.parquet", f"{tmp_path}/files/items.parquet", schema, tmp_path / "a", SMALL)
    prepare_world(world, schema, tmp_path / "b", SMALL, quiet)
    assert Dataset.open(tmp_path / "a").checksum == Dataset.open(tmp_path / "b").checksum


def test_an_item_s_id_can_be_a_category_too_and_nothing_else(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=50, num_items=12, events_per_user=10, seed=4))
    write_world(world, tmp_path / "files", threads=1, progress=quiet)
    values = Schema.read(tmp_path / "files" / "schema.toml").to_values()
    values["items"]["fields"]["item_id"] = "category"
    schema = Schema.parse(values, "schema")
    prepare(f"{tmp_path}/files/events.parquet", f"{tmp_path}/files/items.parquet", schema, tmp_path / "a", SMALL)
    prepare_world(world, schema, tmp_path / "b", SMALL, quiet)
    dataset = Dataset.open(tmp_path / "a")
    assert dataset.checksum == Dataset.open(tmp_path / "b").checksum
    codes = dataset.item_features(np.arange(12)).fields["item_id"]
    names = [dataset.encoders.item_values["item_id"][code - 1] for code in codes]
    assert names == [str(item) for item in dataset.item_ids()["item_id"].to_pylist()]
    values["items"]["fields"]["item_id"] = "text"
    with pytest.raises(HabitusError, match="only be a category, not text"):
        Schema.parse(values, "schema")
