"""A prepared dataset, opened by memory map; any batch can be produced again from (seed, epoch, position)."""

from copy import copy
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.arrays import map_array
from habitus.data.batch import Batch, ItemFeatures
from habitus.data.encoders import Encoders, load_tokenizer
from habitus.data.event_columns import EVENT_CHUNK_ROWS, ITEM, record_field
from habitus.data.event_contents import content_file, read_content, texts_file
from habitus.data.fields import Fields, item_file
from habitus.data.item_names import DISPLAY_FILE
from habitus.data.manifest import DatasetManifest, SplitCounts, require_file, verify_files
from habitus.data.remote_datasets import local_dataset
from habitus.data.slots import SegmentTable, segment_table
from habitus.data.targets import WEIGHT_FILE, TargetRows, find_candidates
from habitus.data.windows import MAX_SEQ_LEN, UserParts, Windows, pack
from habitus.display import html_table, text_table
from habitus.errors import ConfigError, DataError
from habitus.events import Schema
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.recipe import DataRecipe
from habitus.store import SplitName

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Dataset:
    """The folder that `prepare` wrote. Arrays are mapped, not read; ids are int64 throughout.

    Windows are cut when a side is first used, at `seq_len` events, which is the manifest's unless another is given.
    The training side may be that of a share of its users; the other sides are always whole.
    """

    def __init__(self, path: Path, manifest: DatasetManifest, seq_len: int | None = None) -> None:
        self.path = path
        self.manifest = manifest
        self.seq_len = _check_seq_len(manifest.seq_len if seq_len is None else seq_len)
        self.encoders = Encoders.read(path / "encoders.json")
        self.records = map_array(path / "events" / "records.npy")
        # Views of the records. Index them; .take() of a view copies the whole column first.
        self.items = self.records[ITEM]
        self.times = map_array(path / "events" / "time.npy")
        self.user_offsets = map_array(path / "users" / "offsets.npy")
        # The weight of every event as a target, float32; None: the schema has no [targets], and all count the same.
        self.target_weight = map_array(require_file(path, manifest, WEIGHT_FILE)) if self.schema.targets else None
        self.event_fields = {
            spec.name: self.records[record_field(number)] for number, spec in enumerate(self.fields.event)
        }
        # Of the fields that are texts or vectors: rows by the numbers that the events hold.
        self.event_contents = {
            spec.name: map_array(require_file(path, manifest, content_file(number)))
            for number, spec in enumerate(self.fields.event)
            if spec.rows is not None
        }
        self._item_fields = {
            spec.name: map_array(require_file(path, manifest, item_file(number)))
            for number, spec in enumerate(self.fields.item)
        }
        self.user_share, self.user_part = 1.0, 0
        self.includes_validation = False  # whether the training side holds the validation events too
        self._sides: dict[SplitName, _Side] = {}
        _keep_freed_memory()

    @classmethod
    def open(cls, path: str | Path, seq_len: int | None = None, *, verify: bool = True) -> "Dataset":
        """The dataset in a folder, in windows of `seq_len` events, or of its own length.

        `verify` hashes every file; without it only sizes are compared.
        """
        path = local_dataset(path)
        manifest = DatasetManifest.open(path)
        verify_files(path, manifest, contents=verify)
        return cls(path, manifest, seq_len)

    def with_seq_len(self, seq_len: int) -> "Dataset":
        """The same dataset in windows of `seq_len` events."""
        if seq_len == self.seq_len:
            return self
        other = copy(self)
        other.seq_len = _check_seq_len(seq_len)
        other._sides = {}
        return other

    def with_users(self, share: float, part: int = 0) -> "Dataset":
        """The same dataset with a training side of a share of the training users: `part` of the disjoint ones.

        Parts of one share are disjoint, and part 0 of a smaller share lies within that of a larger one. What was
        learnt when the log was prepared (tokens, categories, scales) stays that of all training users.
        """
        if (share, part) == (self.user_share, self.user_part):
            return self
        other = copy(self)
        other.user_share, other.user_part = share, part
        other._sides = {side: cut for side, cut in self._sides.items() if side != "train"}
        other.__dict__.pop("item_train_counts", None)
        other.__dict__.pop("item_target_counts", None)
        return other

    def with_validation(self, include: bool = True) -> "Dataset":
        """The same dataset with the validation events on the training side: a choice that was made is trained again
        on all that is known before the test."""
        if include == self.includes_validation:
            return self
        other = copy(self)
        other.includes_validation = include
        other._sides = {side: cut for side, cut in self._sides.items() if side != "train"}
        other.__dict__.pop("item_train_counts", None)
        other.__dict__.pop("item_target_counts", None)
        return other

    def with_segments(self, split: SplitName, segments: np.ndarray) -> "Dataset":
        """The same dataset with other stretches of histories (SEGMENT) on one side, such as those before a cut."""
        if not len(segments):
            raise DataError(f"{self.path}: no stretch of a history was chosen", expected="one or more")
        windows = pack(segments, self.seq_len)
        counts = SplitCounts.of(self.user_parts, split, windows)
        other = copy(self)
        other._sides = {**self._sides, split: _Side(windows, counts, segment_table(windows, self.seq_len))}
        return other

    def training_view(self, recipe: DataRecipe) -> "Dataset":
        """The dataset as a recipe trains on it: windows of its length, its share of the training users."""
        view = self.with_seq_len(recipe.seq_len).with_users(recipe.user_share, recipe.user_part)
        return view.with_validation(recipe.include_validation)

    def __repr__(self) -> str:
        return text_table(f"Dataset {self.path}", self._summary())

    def _repr_html_(self) -> str:
        return html_table(f"Dataset {self.path}", self._summary())

    def _summary(self) -> list[tuple[str, str]]:
        sides = [(name, self.counts(name)) for name in self.manifest.sides()]
        return [
            ("events", f"{self.num_events:,} of {self.num_users:,} users on {self.num_items:,} items"),
            *((name, f"{side.users:,} users, {side.windows:,} windows of {self.seq_len}") for name, side in sides),
            ("item fields", ", ".join(f"{field.name} ({field.kind})" for field in self.fields.item)),
            ("event fields", ", ".join(f"{field.name} ({field.kind})" for field in self.fields.event) or "none"),
        ]

    @property
    def fields(self) -> Fields:
        return self.encoders.fields

    @property
    def schema(self) -> Schema:
        return self.manifest.schema_

    @property
    def num_items(self) -> int:
        return self.manifest.num_items

    @property
    def num_users(self) -> int:
        return self.manifest.num_users

    @property
    def num_events(self) -> int:
        return self.manifest.num_events

    @property
    def checksum(self) -> str:
        return self.manifest.checksum

    def has_side(self, split: SplitName) -> bool:
        """Whether there is anything to predict on that side."""
        return split in self.manifest.sides() and self.counts(split).queries > 0

    def counts(self, split: SplitName) -> SplitCounts:
        """Users, events, queries and windows of a side."""
        recut = self.seq_len != self.manifest.seq_len or (split == "train" and not self._trains_as_prepared)
        if recut or split in self._sides:
            return self._side(split).counts
        sides = self.manifest.sides()
        return sides[split] if split in sides else self._refuse_side(split)

    def windows(self, split: SplitName) -> Windows:
        return self._side(split).windows

    @cached_property
    def user_parts(self) -> UserParts:
        """Where the sides of each user's history are."""
        users = self.path / "users"
        return UserParts(
            starts=self.user_offsets[:-1],
            lengths=np.diff(self.user_offsets),
            train_lengths=map_array(users / "train_length.npy"),
            validation_lengths=map_array(users / "validation_length.npy") if self.manifest.test else None,
            targets=None if self.target_weight is None else TargetRows.of(self.target_weight),
        )

    @property
    def _trains_as_prepared(self) -> bool:
        return self.user_share == 1 and not self.includes_validation

    def _training_parts(self) -> UserParts:
        users = self.user_parts.with_validation() if self.includes_validation else self.user_parts
        return users if self.user_share == 1 else users.training_share(self.user_share, self.user_part)

    def is_target(self, rows: np.ndarray) -> np.ndarray:
        """Whether these events of the log are to be predicted: all, or those of a weight above 0."""
        return np.ones(len(rows), bool) if self.target_weight is None else self.target_weight[rows] > 0

    def queries_per_segment(self, split: SplitName) -> np.ndarray:
        """How many events of each segment of a side's windows are predicted, int64."""
        return self.user_parts.count_queries(split, self.windows(split).segments)

    def _side(self, split: SplitName) -> "_Side":
        """A side's windows, cut when they are first needed."""
        if split not in self.manifest.sides():
            self._refuse_side(split)
        if split not in self._sides:
            users = self._training_parts() if split == "train" else self.user_parts
            windows = pack(users.segments(split, self.seq_len), self.seq_len)
            counts = SplitCounts.of(users, split, windows)
            self._sides[split] = _Side(windows, counts, segment_table(windows, self.seq_len))
        return self._sides[split]

    def _refuse_side(self, split: SplitName) -> NoReturn:
        raise DataError(
            f"{self.path} has no {split} side",
            expected=f"one of its sides: {', '.join(self.manifest.sides())}",
            next_step="prepare the log again with --test-share above 0",
        )

    @property
    def trained_until(self) -> int | None:
        """The time of the last training event, in microseconds since 1970; None without training events or times."""
        users = self._training_parts()
        last = (users.starts + users.train_lengths - 1)[users.train_lengths > 0]
        if not len(last) or self.schema.events.time_unit == "order":
            return None
        return int(self.times[last].max())

    @cached_property
    def item_train_counts(self) -> np.ndarray:
        """How often each item occurs among the training events, int64 [num_items]."""
        if not self._trains_as_prepared:
            return np.bincount(self.items[self._train_rows()], minlength=self.num_items)
        return map_array(self.path / "items" / "train_count.npy")

    @cached_property
    def item_target_counts(self) -> np.ndarray:
        """How often each item is a target among the training events, int64 [num_items]."""
        if self.target_weight is None:
            return self.item_train_counts
        rows = self._train_rows()
        return np.bincount(self.items[rows[self.is_target(rows)]], minlength=self.num_items)

    @property
    def item_trained_counts(self) -> np.ndarray:
        """How often training sees each item as a target of any weight, below 0 too, int64 [num_items]."""
        if self.target_weight is None:
            return self.item_train_counts
        rows = self._train_rows()
        return np.bincount(self.items[rows[self.target_weight[rows] != 0]], minlength=self.num_items)

    def _train_rows(self) -> np.ndarray:
        """The rows of the log that train."""
        users = self._training_parts()
        before = np.cumsum(users.train_lengths) - users.train_lengths
        rows = np.repeat(users.starts - before, users.train_lengths)
        return rows + np.arange(len(rows))

    @cached_property
    def candidate_rows(self) -> np.ndarray | None:
        """The items that may be ranked or recommended, int64, ascending; None: all."""
        allowed = find_candidates(
            self.schema, self.encoders.item_values, self._item_fields, lambda: self.item_ids().column(0)
        )
        return None if allowed is None else np.flatnonzero(allowed)

    @property
    def num_candidates(self) -> int:
        """How many items may be ranked or recommended."""
        return self.num_items if self.candidate_rows is None else len(self.candidate_rows)

    def check_candidates(self) -> None:
        """Refuse a dataset in which something is to be predicted that is no candidate."""
        if self.candidate_rows is None or self.target_weight is None:
            return
        is_target = np.zeros(self.num_items, bool)
        for start in range(0, self.num_events, EVENT_CHUNK_ROWS):
            events = slice(start, start + EVENT_CHUNK_ROWS)
            is_target[self.items[events][self.target_weight[events] > 0]] = True
        left_out = np.setdiff1d(np.flatnonzero(is_target), self.candidate_rows, assume_unique=True)
        if len(left_out):
            first = self.item_ids().column(0)[int(left_out[0])]
            raise DataError(
                f"[targets] candidates leave out {len(left_out):,} items that are targets, the first {first}",
                expected="candidates that hold every item that is predicted",
                next_step="correct [targets] in the schema",
            )

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.path / "tokenizer.json")

    def item_ids(self) -> pa.Table:
        """The ids of the catalogue rows, as the item table had them."""
        return pq.read_table(self.path / "items" / "ids.parquet")

    def item_display(self) -> pa.Table | None:
        """What people see of the catalogue rows: a text column per displayed one; None without any."""
        return pq.read_table(self.path / DISPLAY_FILE) if DISPLAY_FILE in self.manifest.files else None

    def user_ids(self) -> pa.Array:
        """The ids of the users, in the order of their events."""
        return pq.read_table(self.path / "users" / "ids.parquet")["user"].combine_chunks()

    def item_features(self, rows: np.ndarray) -> ItemFeatures:
        """The encoded fields of catalogue rows."""
        tokens = None
        encoded = {}
        for spec in self.fields.item:
            values = self._item_fields[spec.name][rows].astype(spec.dtype, copy=False)
            if spec.kind == "text":
                tokens = values
            else:
                encoded[spec.name] = values
        return ItemFeatures(tokens, encoded)

    def event_values(self, events: slice) -> dict[str, np.ndarray]:
        """What a model reads of some events' fields, as batches have it."""
        stored = self.event_fields
        return {
            spec.name: read_content(spec, stored[spec.name][events], self.event_contents) for spec in self.fields.event
        }

    @cached_property
    def event_texts(self) -> dict[str, pa.ChunkedArray]:
        """The distinct texts of the event fields that are texts, as the log has them, from number 1 on."""
        return {
            spec.name: pq.read_table(self.path / texts_file(number))["text"]
            for number, spec in enumerate(self.fields.event)
            if spec.kind == "text"
        }

    def num_batches(self, split: SplitName, batch_sequences: int) -> int:
        """Batches that hold each window of the split once; the last may reach into the next epoch."""
        return -(-self.counts(split).windows // batch_sequences)

    def batch(
        self, split: SplitName, batch_sequences: int, *, seed: int = 0, epoch: int = 0, position: int = 0
    ) -> Batch:
        """Batch number `position` of an epoch in the order that `seed` draws.

        The windows of all epochs form one endless line, so every batch is full: where an epoch ends inside a
        batch, the next epoch's order begins. Training may count steps in `position` alone.
        """
        start = epoch * self.counts(split).windows + position * batch_sequences
        return self.gather(split, self.window_order(split, start, start + batch_sequences, seed=seed))

    def window_order(self, split: SplitName, start: int, stop: int, *, seed: int = 0) -> np.ndarray:
        """The windows at places start..stop of the endless line that `seed` draws, int64 [stop - start]."""
        num_windows = self.counts(split).windows
        if num_windows == 0:
            raise DataError(
                f"{self.path}: the {split} split holds no windows", expected="users with two events or more"
            )
        windows = [np.empty(0, np.int64)] if start == stop else []
        while start < stop:
            epoch, place = divmod(start, num_windows)
            block, offset = divmod(place, _ORDER_BLOCK)
            windows.append(_order(num_windows, seed, epoch, block)[offset : offset + stop - start])
            start += len(windows[-1])
        return windows[0] if len(windows) == 1 else np.concatenate(windows)

    def event_rows(self, split: SplitName, windows: np.ndarray) -> np.ndarray:
        """The row of the log behind each slot of the given windows, int64 [B, L]; -1 in empty slots."""
        layout = self._side(split).table.layout(windows)
        rows = layout.rows()
        rows[np.repeat(layout.users < 0, layout.lengths)] = -1
        return rows.reshape(len(windows), self.seq_len)

    def gather(self, split: SplitName, windows: np.ndarray) -> Batch:
        """The given windows of a split as a batch, in the given order."""
        side = self._side(split)
        layout = side.table.layout(windows)
        shape = len(windows), self.seq_len
        lengths, begin, within = layout.lengths, layout.begin, layout.within
        records = layout.take(self.records)
        items = np.ascontiguousarray(records[ITEM])
        targets = np.empty_like(items)
        # Not from `items`: where the two arrays lie a multiple of 4 KiB apart, as they often do, a copy that is shifted
        # by one place takes several times as long.
        targets[:-1] = records[ITEM][1:]
        targets[begin + lengths - 1] = -1
        positions = layout.positions()
        if side.table.has_context:  # the query at a place predicts the event after it
            targets[positions + 1 < np.repeat(layout.first_target, lengths)] = -1
        weights = None
        if self.target_weight is not None:
            weights = self.target_weight.take(layout.rows() + 1, mode="clip")
            targets[weights == 0 if split == "train" else weights <= 0] = -1
        fields = {
            spec.name: read_content(spec, records[record_field(number)], self.event_contents)
            for number, spec in enumerate(self.fields.event)
        }
        real = layout.users >= 0
        segments = np.repeat(np.where(real, within, -1).astype(np.int32), lengths)
        empty = np.flatnonzero(segments < 0)
        if len(empty):
            items[empty], targets[empty], positions[empty] = 0, -1, 0
            for spec in self.fields.event:
                fields[spec.name][empty] = spec.missing
        max_segments = side.counts.max_segments
        boundaries = np.full(len(windows) * (max_segments + 1) + 1, items.size, np.int32)
        boundaries[: len(begin)] = begin
        users = np.full((len(windows), max_segments), -1, np.int64)
        users[layout.windows[real], within[real]] = layout.users[real]
        return Batch(
            items=items.reshape(shape),
            targets=targets.reshape(shape),
            positions=positions.reshape(shape),
            segments=segments.reshape(shape),
            boundaries=boundaries,
            users=users,
            fields={name: values.reshape(*shape, *values.shape[1:]) for name, values in fields.items()},
            target_weights=None if weights is None else np.where(targets < 0, 0, weights).reshape(shape),
        )


def _check_seq_len(seq_len: int) -> int:
    if seq_len < 2:
        raise ConfigError(f"seq_len is {seq_len}", expected="at least 2: an event, and the one that it predicts")
    if seq_len > MAX_SEQ_LEN:
        raise ConfigError(f"seq_len is {seq_len:,}", expected=f"at most {MAX_SEQ_LEN:,}")
    return seq_len


def _keep_freed_memory() -> None:
    """Teach glibc's allocator to keep what it frees instead of returning it to the system.

    A batch is some ten arrays of about 100 KB. By default each of them is returned and faulted in again, page by
    page, at every batch, which costs three times the batch itself. Freeing one larger block raises the allocator's
    own dynamic thresholds (mallopt(3), M_MMAP_THRESHOLD) for the life of the process.
    """
    np.empty(24 << 20, np.uint8)


# Window orders are drawn a block at a time: one batch costs little, and a resumed run needs no whole epoch.
_ORDER_BLOCK = 4096


@lru_cache(maxsize=16)
def _order(num_windows: int, seed: int, epoch: int, block: int) -> np.ndarray:
    places = np.arange(block * _ORDER_BLOCK, min((block + 1) * _ORDER_BLOCK, num_windows))
    return permute_index(places, num_windows, shuffle_keys(seed, Stream.WINDOWS, epoch))


class _Side(NamedTuple):
    """One side of the split, cut into windows."""

    windows: Windows
    counts: SplitCounts
    table: SegmentTable
