"""A world as files: events.parquet, items.parquet, and schema.toml, whose table [world] restores the oracle."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from habitus.errors import DataError
from habitus.events.schema import EventColumns, ItemColumns, Schema
from habitus.events.targets import Targets
from habitus.events.world.world import World
from habitus.files import staged_folder
from habitus.progress import Progress

WORLD_SCHEMA = Schema(
    events=EventColumns(
        user="user_id",
        item="item_id",
        timestamp="timestamp",
        time_unit="datetime",
        fields={"event_type": "category", "price_paid": "number"},
    ),
    items=ItemColumns(
        item="item_id",
        fields={
            "title": "text",
            "category": "category",
            "brand": "category",
            "price": "number",
            "image": "vector",
        },
    ),
)


def schema_of(world: World) -> Schema:
    """The columns of a world's tables, and the world itself; where it has views, purchases are the targets."""
    targets = Targets(column="event_type", weights={"purchase": 1.0}) if world.config.views_per_purchase else None
    return WORLD_SCHEMA.model_copy(update={"world": world.config, "targets": targets})


_LABELS = ["event_type", "category", "brand"]  # few values: the only columns worth a dictionary on disk


def write_world(
    world: World, out: str | Path, *, threads: int, progress: Progress, events_per_block: int = 1 << 20
) -> int:
    """The number of events written. The folder `out` must not exist; it appears complete or not at all.

    `progress` is called with a phase and the share of it that is done. A block becomes a row group.
    """
    out = Path(out)
    if out.exists():
        raise DataError(f"{out} exists already", next_step="remove it, or name another folder")
    try:
        with staged_folder(out) as folder:
            blocks = _report(world.item_blocks(threads=threads), "items", world.config.num_items, progress)
            _write_parquet(folder / "items.parquet", blocks)
            expected = world.config.num_users * world.config.events_per_user
            blocks = world.event_blocks(events_per_block, threads)
            blocks = _report(blocks, "events", expected, progress)
            num_events = _write_parquet(folder / "events.parquet", blocks)
            schema_of(world).write(folder / "schema.toml")
    except OSError as error:
        raise DataError(
            f"{out} could not be written: {error}",
            expected="a parent folder that can be written to, and enough space on the disk",
        ) from error
    return num_events


def _report(blocks: Iterator[Any], phase: str, expected_rows: float, progress: Progress) -> Iterator[Any]:
    """The same blocks; reports each to `progress`."""
    progress(phase, 0.0)
    done = 0
    for block in blocks:
        yield block
        done += block.num_rows
        progress(phase, min(1.0, done / expected_rows))


def _write_parquet(path: Path, blocks: Iterator[Any]) -> int:
    """Write one row group per block; the number of rows."""
    first = next(blocks)
    rows = first.num_rows
    with pq.ParquetWriter(path, first.schema, use_dictionary=_LABELS) as writer:
        writer.write_table(first)
        for block in blocks:
            writer.write_table(block)
            rows += block.num_rows
    return rows
