"""The synthetic world that a preset is at home on, as a prepared dataset."""

from pathlib import Path

from habitus.data import Dataset, PrepareOptions, prepare_world
from habitus.events import WORLD_SCHEMA, World, WorldConfig
from habitus.sweeps.preset import Preset


def preset_dataset(preset: Preset, out: Path, *, seed: int = 0, threads: int = 1) -> Dataset:
    """The dataset of the preset's world, made where `out` does not exist yet."""
    size = preset.world
    if not out.exists():
        config = WorldConfig(
            num_users=size.num_users, num_items=size.num_items, events_per_user=size.events_per_user, seed=seed
        )
        schema = WORLD_SCHEMA.model_copy(update={"world": config})
        options = PrepareOptions(seq_len=size.seq_len, text_len=size.text_len, threads=threads)
        prepare_world(World(config), schema, out, options, lambda _what, _done: None)
    return Dataset.open(out, verify=False)
