"""A dataset folder put together from a stream of items and a stream of events.

`prepare` streams files through DuckDB into this; a synthetic world streams itself. The bytes are the same.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.card import write_dataset_card
from habitus.data.dataset import Dataset
from habitus.data.earlier import Earlier
from habitus.data.encoders import Encoders
from habitus.data.event_columns import EventChunk, EventPlan, write_events
from habitus.data.fields import Field
from habitus.data.item_columns import write_items
from habitus.data.item_names import DISPLAY_FILE, write_display
from habitus.data.manifest import MANIFEST_FILE, DatasetManifest, SplitCounts, list_files
from habitus.data.survey import ItemSurvey
from habitus.data.users_table import UserRows
from habitus.data.windows import pack
from habitus.events import Schema
from habitus.progress import Progress
from habitus.store import SPLIT_NAMES


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
    item_display: Callable[[], Iterable[pa.RecordBatch]]  # read where the schema displays columns
    earlier: Earlier | None = None  # the dataset that these items and events are added to
    user_rows: UserRows | None = None  # what became of the users table

    @property
    def num_items(self) -> int:
        return self.survey.stream.num_items + (self.earlier.dataset.num_items if self.earlier else 0)

    def encoders(self, event_fields: tuple[Field, ...]) -> Encoders:
        """How the fields are encoded: as the survey found, or as the dataset that is added to does."""
        if self.earlier is not None:
            return self.earlier.encoders(self.survey.stream, self.plan.all_values())
        return self.survey.encoders(event_fields, self.plan.all_values())

    def item_fields_filled(self) -> dict[str, int]:
        before = {} if self.earlier is None else self.earlier.dataset.manifest.item_fields_filled
        return {name: count + before.get(name, 0) for name, count in self.survey.filled().items()}


def assemble(parts: Assembly, chunks: Iterable[EventChunk], stage: Path, progress: Progress) -> DatasetManifest:
    """Fill `stage` with the arrays, encoders and manifest of a dataset."""
    events = write_events(chunks, parts.plan, stage)
    encoders = parts.encoders(events.fields)
    encoders = write_items(parts.survey, encoders, stage, progress, parts.earlier, events.contents)
    encoders.write(stage / "encoders.json")
    parts.schema.write(stage / "schema.toml")
    _write_ids(parts.item_ids(), stage)
    if parts.schema.items.display:
        write_display(parts.item_display(), parts.schema.items.display, stage / DISPLAY_FILE)

    progress("cutting windows", 0.0)
    users = events.users
    has_test = users.validation_lengths is not None
    sides = {
        side: SplitCounts.of(users, side, pack(users.segments(side, parts.seq_len), parts.seq_len))
        for side in SPLIT_NAMES
        if side != "test" or has_test
    }
    progress("computing checksums", 0.0)
    manifest = DatasetManifest(
        seq_len=parts.seq_len,
        seed=parts.seed,
        split=parts.plan.split,
        schema=parts.schema,
        num_users=len(users.starts),
        num_events=events.num_events,
        num_items=parts.num_items,
        time_span=events.time_span,
        train=sides["train"],
        validation=sides["validation"],
        test=sides.get("test"),
        item_fields_filled=parts.item_fields_filled(),
        event_fields_filled=events.filled,
        dropped={key: count for key, count in parts.dropped.items() if count},
        user_rows=parts.user_rows,
        versions={"tokenizers": version("tokenizers")},
        files=list_files(stage),
    ).with_checksum()
    manifest.write(stage / MANIFEST_FILE)
    if parts.schema.targets is not None:
        Dataset(stage, manifest).check_candidates()
    write_dataset_card(stage, manifest)
    return manifest


def _write_ids(batches: Iterable[pa.RecordBatch], stage: Path) -> None:
    writer = None
    for batch in batches:
        if writer is None:
            writer = pq.ParquetWriter(stage / "items" / "ids.parquet", batch.schema, compression="zstd")
        writer.write_batch(batch)
    assert writer is not None
    writer.close()
