"""A synthetic world as a prepared dataset, without files in between and without DuckDB.

Byte for byte what `prepare` makes of the world's files, for machines where DuckDB is not installed and for worlds
whose event log nobody wants to keep.
"""

import math
from collections.abc import Iterable, Iterator
from decimal import Decimal
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa

from habitus.data.assemble import Assembly, assemble
from habitus.data.encoders import encode_events
from habitus.data.event_columns import EVENT_CHUNK_ROWS, EventChunk, EventPlan
from habitus.data.kinds import KINDS
from habitus.data.manifest import DatasetManifest
from habitus.data.options import PrepareOptions, check_options, split_of
from habitus.data.sources import CHUNK_ROWS, plain_type, rechunk
from habitus.data.survey import ItemStream, TextOptions, survey_items
from habitus.data.targets import weights_of
from habitus.events import Schema, World
from habitus.files import staged_folder
from habitus.progress import Progress


def prepare_world(
    world: World, schema: Schema, out: str | Path, options: PrepareOptions, progress: Progress
) -> DatasetManifest:
    """The manifest of the dataset written to `out`, which must not exist yet."""
    out = Path(out)
    check_options(options, out, schema)
    stream = ItemStream(
        kinds=schema.items.kinds,
        num_items=world.config.num_items,
        batches=lambda: _item_batches(world, list(schema.items.fields), options.threads),
        place=lambda row: f"item {row}",
    )
    progress("surveying items", 0.0)
    survey = survey_items(stream, TextOptions(options.text_len, options.vocabulary_size, options.seed))
    split = split_of(options).with_cuts(_EventTimes(world, options.threads).time_at)
    plan = EventPlan(
        schema.events.fields, _event_values(world, schema), schema.events.time_unit, stream.num_items, split
    )
    parts = Assembly(
        schema=schema,
        seq_len=options.seq_len,
        seed=options.seed,
        survey=survey,
        item_ids=lambda: _item_batches(world, [schema.items.item], options.threads),
        plan=plan,
        dropped={},
        item_display=lambda: _item_batches(world, list(schema.items.display or ()), options.threads),
    )
    with staged_folder(out) as stage:
        return assemble(parts, _event_chunks(world, schema, plan, options.threads, progress), stage, progress)


def _item_batches(world: World, columns: list[str], threads: int) -> Iterator[pa.RecordBatch]:
    return rechunk(_plain(world.item_blocks(threads=threads), columns), CHUNK_ROWS)


def _plain(tables: Iterable[pa.Table], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The columns with the types that they would have after a way through Parquet."""
    for table in tables:
        chosen = table.select(columns)
        schema = pa.schema([(field.name, plain_type(field.type)) for field in chosen.schema])
        yield from chosen.cast(schema).combine_chunks().to_batches()


def _event_chunks(
    world: World, schema: Schema, plan: EventPlan, threads: int, progress: Progress
) -> Iterator[EventChunk]:
    roles = schema.events
    columns = [roles.user, roles.timestamp, roles.item_column, *roles.fields]
    columns += [schema.targets.column] if schema.targets and schema.targets.column not in columns else []
    vocabularies = plan.vocabularies()
    expected = world.config.num_users * world.config.events_per_user
    done = 0
    for batch in rechunk(_plain(world.event_blocks(threads=threads), columns), EVENT_CHUNK_ROWS):
        fields = encode_events(batch, {name: name for name in roles.fields}, vocabularies)
        times = batch.column(roles.timestamp).cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
        weights = weights_of(batch.column(schema.targets.column), schema.targets) if schema.targets else None
        yield EventChunk(batch.column(roles.user), times, batch.column(roles.item_column).to_numpy(), fields, weights)
        done += batch.num_rows
        progress("writing events", min(1.0, done / expected))


def _event_values(world: World, schema: Schema) -> dict[str, tuple[str, ...]]:
    """The values of the event categories that occur; reading stops once every value of the dictionaries has."""
    names = [name for name, kind in schema.events.fields.items() if KINDS[kind].encoded_as == "category"]
    values: dict[str, set[str]] = {name: set() for name in names}
    for table in world.event_blocks():
        possible = {}
        for name in names:
            column = table[name].combine_chunks()
            values[name] |= set(column.unique().to_pylist())
            possible[name] = set(column.dictionary.to_pylist())
        if possible == values:
            break
    return {name: tuple(sorted(occurring)) for name, occurring in values.items()}


class _EventTimes:
    """The times of all events at once, generated when a cut is first needed."""

    def __init__(self, world: World, threads: int) -> None:
        self.world, self.threads = world, threads

    @cached_property
    def times(self) -> np.ndarray:
        blocks = self.world.event_blocks(threads=self.threads)
        return np.concatenate([table["timestamp"].cast(pa.int64()).to_numpy() for table in blocks])

    def time_at(self, share: float) -> int:
        """The time at which that share of the events has passed, as DuckDB's quantile_disc has it."""
        # The share as it is written, since DuckDB reads it as a decimal number: 0.8 of 5 events are exactly 4.
        place = max(math.ceil(len(self.times) * Decimal(str(share))) - 1, 0)
        return int(np.partition(self.times, place)[place])
