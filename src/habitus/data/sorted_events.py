"""The events of a log in order: sorted at once or in parts, then read back and encoded, in chunks of one size."""

from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.connection import connect, duckdb_memory
from habitus.data.encoders import encode_events
from habitus.data.event_columns import EVENT_CHUNK_ROWS, EventChunk, EventPlan
from habitus.data.log import EventLog
from habitus.data.options import PrepareOptions
from habitus.data.partitions import choose_bounds, count_parts, rows_within, sort_part, sort_parts, write_parts
from habitus.data.ray_prepare import RayEventLog
from habitus.data.sources import rechunk
from habitus.events import Schema
from habitus.progress import Progress

_SORTED_FILE = "sorted.parquet"


def bring_into_order(log: EventLog, options: PrepareOptions, scratch: Path, progress: Progress) -> int:
    """Sort the events where they fit into the memory, else write them in parts; returns how many parts there are."""
    if isinstance(log, RayEventLog):
        return log.write_parts()
    events = log.usable_events()
    rows_in_memory = rows_within(duckdb_memory(options.memory), len(events.columns) + 1)
    num_parts = options.parts or count_parts(log.num_rows, rows_in_memory)
    if num_parts == 1:
        progress("sorting events", 0.0)
        sort_part(log.con, events, scratch / _SORTED_FILE)
        return 1
    progress("partitioning events", 0.0)
    bounds = choose_bounds(log.con, log.all_users(), log.num_rows, num_parts)
    write_parts(log.con, events, bounds, scratch / "parts", rows_in_memory=rows_in_memory)
    return len(bounds) + 1


def sorted_files(log: EventLog, num_parts: int, options: PrepareOptions, scratch: Path) -> Iterator[Path]:
    """The sorted events: one file, or a file for each part, which is gone when the next one comes."""
    if isinstance(log, RayEventLog):
        yield from log.sorted_files()
        return
    if (scratch / _SORTED_FILE).exists():
        yield scratch / _SORTED_FILE
        return
    columns = log.usable_events().columns
    # A connection of its own, so that the catalogue takes no memory.
    with connect(scratch, options.memory, options.threads, lambda phase, done: None) as con:
        yield from sort_parts(con, [scratch / "parts"], num_parts, columns, scratch / _SORTED_FILE)


def encode_sorted(
    files: Iterable[Path], total: int, schema: Schema, plan: EventPlan, progress: Progress
) -> Generator[EventChunk, None, None]:
    """The sorted events, encoded, in chunks of one size."""
    columns = {name: f"f_{number}" for number, name in enumerate(schema.event_fields)}
    vocabularies = plan.vocabularies()
    numbered = {content.name for content in plan.contents}
    done = 0
    with closing(_read_files(files, [columns[name] for name in vocabularies])) as batches:
        for batch in rechunk(batches, EVENT_CHUNK_ROWS):
            yield EventChunk(
                batch.column("u"),
                batch.column("t").to_numpy(),
                batch.column("item_row").to_numpy(),
                _with_codes(batch, encode_events(batch, columns, vocabularies, numbered), columns),
                batch.column("w").to_numpy() if schema.targets else None,
            )
            done += batch.num_rows
            progress("writing events", done / total)


def _read_files(files: Iterable[Path], categories: list[str]) -> Generator[pa.RecordBatch, None, None]:
    """The rows of Parquet files, with texts of categories as dictionaries."""
    for path in files:
        with pq.ParquetFile(path, read_dictionary=_dictionary_columns(path, categories)) as file:
            for batch in file.iter_batches(EVENT_CHUNK_ROWS):
                for name in categories:
                    if pa.types.is_string(batch.schema.field(name).type):
                        place = batch.schema.get_field_index(name)
                        batch = batch.set_column(place, name, batch.column(name).dictionary_encode())
                yield batch


def _dictionary_columns(path: Path, names: list[str]) -> list[str]:
    """Which columns are dictionaries throughout: Arrow can read no other as one."""
    metadata = pq.read_metadata(path)
    groups = (metadata.row_group(group) for group in range(metadata.num_row_groups))
    chunks = (group.column(place) for group in groups for place in range(group.num_columns))
    others = {chunk.path_in_schema for chunk in chunks if "DELTA_LENGTH_BYTE_ARRAY" in chunk.encodings}
    return [name for name in names if name not in others]


def _with_codes(batch: pa.RecordBatch, fields: dict[str, np.ndarray], columns: dict[str, str]) -> dict[str, np.ndarray]:
    """The fields with the codes of events that come from an earlier dataset."""
    for name, column in columns.items():
        codes = column.replace("f_", "k_")
        if codes in batch.schema.names:
            earlier = batch.column(codes)
            known = earlier.is_valid().to_numpy(zero_copy_only=False)
            fields[name][known] = earlier.drop_null().to_numpy()
    return fields


def read_ahead(chunks: Iterator[EventChunk]) -> Generator[EventChunk, None, None]:
    """The same chunks; the next one is read and encoded while the caller is at work on this one."""
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(next, chunks, None)
        while (chunk := upcoming.result()) is not None:
            upcoming = reader.submit(next, chunks, None)
            yield chunk
