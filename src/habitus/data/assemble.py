"""A dataset folder put together from a stream of items and a stream of events.

`prepare` streams files through DuckDB into this; a synthetic world streams itself. The bytes are the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.arrays import write_array
from habitus.data.event_columns import EventChunk, EventPlan, Users, write_events
from habitus.data.item_columns import write_items
from habitus.data.manifest import MANIFEST_FILE, DatasetManifest, SplitCounts, list_files
from habitus.data.survey import ItemSurvey
from habitus.data.windows import Windows, pack, training_segments, validation_segments
from habitus.events import Schema
from habitus.progress import Progress


@dataclass(frozen=True)
class Assembly:
    """Everything that a dataset is assembled from, before the first event is written."""

    schema: Schema
    seq_len: int
    seed: int
    survey: ItemSurvey
    item_ids: Callable[[], Iterable[pa.RecordBatch]]
    plan: EventPlan
    dropped: dict[str, int]


def assemble(parts: Assembly, chunks: Iterable[EventChunk], stage: Path, progress: Progress) -> DatasetManifest:
    """Fill `stage` with the arrays, encoders and manifest of a dataset."""
    events = write_events(chunks, parts.plan, stage)
    encoders = parts.survey.encoders(events.fields, parts.plan.all_values())
    encoders = write_items(parts.survey, encoders, stage, progress)
    encoders.write(stage / "encoders.json")
    parts.schema.write(stage / "schema.toml")
    _write_ids(parts.item_ids(), stage)

    progress("cutting windows", 0.0)
    users = events.users
    train = training_segments(users.starts, users.train_lengths, parts.seq_len)
    validation = validation_segments(users.starts, users.lengths, users.train_lengths, parts.seq_len)
    train_left_out = int(users.train_lengths.sum() - train["length"].sum())
    validation_left_out = int((users.lengths - users.train_lengths).sum()) - _num_held_out(validation, users)
    train_windows, validation_windows = pack(train, parts.seq_len), pack(validation, parts.seq_len)
    progress("computing checksums", 0.0)
    manifest = DatasetManifest(
        seq_len=parts.seq_len,
        seed=parts.seed,
        split=parts.plan.split,
        schema=parts.schema,
        num_users=len(users.starts),
        num_events=events.num_events,
        num_items=parts.survey.stream.num_items,
        time_span=events.time_span,
        train=_write_windows(stage / "train", train_windows, users.train_lengths > 0, train_left_out),
        validation=_write_windows(
            stage / "validation", validation_windows, users.lengths > users.train_lengths, validation_left_out
        ),
        item_fields_filled=parts.survey.filled(),
        event_fields_filled=events.filled,
        dropped={key: count for key, count in parts.dropped.items() if count},
        versions={"tokenizers": version("tokenizers")},
        files=list_files(stage),
    ).with_checksum()
    manifest.write(stage / MANIFEST_FILE)
    return manifest


def _num_held_out(segments: np.ndarray, users: Users) -> int:
    """How many held-out events stand in the segments; with time and last, training events do so too, as context."""
    ends = segments["start"] + segments["length"]
    first = users.starts[segments["user"]] + users.train_lengths[segments["user"]]
    return int(np.maximum(ends - np.maximum(segments["start"], first), 0).sum())


def _write_windows(folder: Path, windows: Windows, has_events: np.ndarray, left_out: int) -> SplitCounts:
    write_array(folder / "segments.npy", windows.segments)
    write_array(folder / "windows.npy", windows.offsets)
    lengths = windows.segments["length"].astype(np.int64)
    return SplitCounts(
        users=int(has_events.sum()),
        events=int(lengths.sum()),
        queries=int((lengths - windows.segments["first_target"]).sum()),
        segments=len(lengths),
        windows=len(windows.offsets) - 1,
        max_segments=int(np.diff(windows.offsets).max(initial=0)),
        left_out=left_out,
    )


def _write_ids(batches: Iterable[pa.RecordBatch], stage: Path) -> None:
    writer = None
    for batch in batches:
        if writer is None:
            writer = pq.ParquetWriter(stage / "items" / "ids.parquet", batch.schema, compression="zstd")
        writer.write_batch(batch)
    assert writer is not None
    writer.close()
