"""A prepared dataset, opened by memory map; any batch can be produced again from (seed, epoch, position)."""

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.arrays import map_array
from habitus.data.batch import Batch, ItemFeatures
from habitus.data.catalogue import item_file
from habitus.data.encoders import Encoders, load_tokenizer
from habitus.data.event_columns import event_file
from habitus.data.fields import Fields
from habitus.data.manifest import FORMAT_VERSION, NAME, Manifest, SplitCounts, verify_files
from habitus.data.windows import Windows
from habitus.errors import DataError
from habitus.events.schema import Schema
from habitus.randomness import Stream, shuffle_keys, shuffled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SplitName = Literal["train", "validation"]


class Dataset:
    """The folder that `prepare` wrote. Arrays are mapped, not read; ids are int64 throughout."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.manifest = manifest
        self.encoders = Encoders.read(path / "encoders.json")
        self.items = map_array(path / "events" / "item.npy")
        self.times = map_array(path / "events" / "time.npy")
        self.user_offsets = map_array(path / "users" / "offsets.npy")
        self._event_fields = {
            spec.name: map_array(path / event_file(number)) for number, spec in enumerate(self.fields.event)
        }
        self._item_fields = {
            spec.name: map_array(path / item_file(number)) for number, spec in enumerate(self.fields.item)
        }
        self._windows = {
            name: Windows(map_array(path / name / "segments.npy"), map_array(path / name / "windows.npy"))
            for name in ("train", "validation")
        }
        self._columns = {name: _columns(windows) for name, windows in self._windows.items()}

    @classmethod
    def open(cls, path: str | Path, *, verify: bool = True) -> "Dataset":
        """The dataset in a folder. `verify` hashes every file; without it only sizes are compared."""
        path = Path(path)
        if not (path / NAME).exists():
            raise DataError(
                f"{path} holds no {NAME}",
                expected="a folder that 'habitus prepare' wrote",
                next_step="habitus prepare EVENTS ITEMS --schema schema.toml --out " + str(path),
            )
        manifest = Manifest.read(path / NAME)
        if manifest.format_version != FORMAT_VERSION:
            raise DataError(
                f"{path} has format version {manifest.format_version}",
                expected=f"version {FORMAT_VERSION}",
                next_step="prepare the dataset again with this version of habitus",
            )
        verify_files(path, manifest, contents=verify)
        return cls(path, manifest)

    @property
    def fields(self) -> Fields:
        return self.encoders.fields

    @property
    def schema(self) -> Schema:
        return self.manifest.schema_

    @property
    def seq_len(self) -> int:
        return self.manifest.seq_len

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

    def counts(self, split: SplitName) -> SplitCounts:
        return self.manifest.train if split == "train" else self.manifest.validation

    def windows(self, split: SplitName) -> Windows:
        return self._windows[split]

    @cached_property
    def item_train_counts(self) -> np.ndarray:
        """How often each item occurs among the training events, int64 [num_items]."""
        return map_array(self.path / "items" / "train_count.npy")

    @cached_property
    def tokenizer(self) -> "Tokenizer":
        return load_tokenizer(self.path / "tokenizer.json")

    def item_ids(self) -> pa.Table:
        """The ids of the catalogue rows, as the item table had them."""
        return pq.read_table(self.path / "items" / "ids.parquet")

    def user_ids(self) -> pa.Array:
        """The ids of the users, in the order of their events."""
        return pq.read_table(self.path / "users" / "ids.parquet")["user"].combine_chunks()

    def item_features(self, rows: np.ndarray) -> ItemFeatures:
        """The encoded fields of catalogue rows."""
        tokens = None
        encoded = {}
        for spec in self.fields.item:
            values = self._item_fields[spec.name][rows]
            if spec.kind == "text":
                tokens = values.astype(np.int32)
            else:
                encoded[spec.name] = values.astype(np.int32) if spec.kind == "category" else values
        return ItemFeatures(tokens, encoded)

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
        num_windows = self.counts(split).windows
        if num_windows == 0:
            raise DataError(
                f"{self.path}: the {split} split holds no windows", expected="users with two events or more"
            )
        line = epoch * num_windows + position * batch_sequences + np.arange(batch_sequences)
        epochs, places = line // num_windows, line % num_windows
        windows = np.empty(batch_sequences, np.int64)
        for one in range(int(epochs[0]), int(epochs[-1]) + 1):
            chosen = epochs == one
            windows[chosen] = shuffled(places[chosen], num_windows, shuffle_keys(seed, Stream.WINDOWS, one))
        return self.gather(split, windows)

    def gather(self, split: SplitName, windows: np.ndarray) -> Batch:
        """The given windows of a split as a batch, in the given order."""
        columns = self._columns[split]
        seq_len, size = self.seq_len, len(windows)
        slots = size * seq_len
        first, counts = columns.offsets[windows], columns.counts[windows]
        ends = np.cumsum(counts)
        within = np.arange(ends[-1]) - np.repeat(ends - counts, counts)  # number of the segment in its window
        chosen = np.repeat(first, counts) + within
        lengths, starts = columns.length[chosen], columns.start[chosen]
        window = np.repeat(np.arange(size), counts)
        slot_of = np.cumsum(lengths) - lengths
        filled = np.add.reduceat(lengths, ends - counts)
        # Empty tails push later windows on: add what is missing before each window.
        slot_of += np.repeat((np.cumsum(seq_len - filled) - (seq_len - filled)), counts)

        full = int(lengths.sum()) == slots
        occupied = slice(None) if full else _occupied(slot_of, lengths, slots)
        rank = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)  # place in the segment
        event = np.repeat(starts, lengths) + rank
        items_here = self.items[event]
        targets_here = np.empty_like(items_here)
        targets_here[:-1] = items_here[1:]
        last_of = np.cumsum(lengths) - 1
        targets_here[last_of] = -1
        late = columns.first_target[chosen]
        if late.max(initial=1) > 1:  # a query predicts the event after it
            targets_here[rank + 1 < np.repeat(late, lengths)] = -1

        def laid_out(values: np.ndarray, dtype: type, empty: float) -> np.ndarray:
            if full:
                return values.astype(dtype, copy=False).reshape(size, seq_len)
            wide: np.ndarray = np.full(slots, empty, dtype)
            wide[occupied] = values
            return wide.reshape(size, seq_len)

        return Batch(
            items=laid_out(items_here, np.int64, 0),
            targets=laid_out(targets_here, np.int64, -1),
            positions=laid_out(rank, np.int32, 0),
            segments=laid_out(np.repeat(within, lengths), np.int32, -1),
            boundaries=self._boundaries(split, slot_of, slot_of + lengths, filled),
            users=self._users_of(split, starts, window, within, size),
            fields={
                spec.name: laid_out(
                    self._event_fields[spec.name][event],
                    np.int32 if spec.kind == "category" else np.float32,
                    0 if spec.kind == "category" else np.nan,
                )
                for spec in self.fields.event
            },
        )

    def _boundaries(self, split: SplitName, begin: np.ndarray, end: np.ndarray, filled: np.ndarray) -> np.ndarray:
        size, seq_len = len(filled), self.seq_len
        tails = np.flatnonzero(filled < seq_len) * seq_len + filled[filled < seq_len]
        edges = np.sort(np.concatenate([begin, tails])) if len(tails) else begin
        fixed = np.full(size * (self.counts(split).max_segments + 1) + 1, size * seq_len, np.int32)
        fixed[: len(edges)] = edges
        return fixed

    def _users_of(
        self, split: SplitName, starts: np.ndarray, window: np.ndarray, within: np.ndarray, size: int
    ) -> np.ndarray:
        users = np.full((size, self.counts(split).max_segments), -1, np.int64)
        users[window, within] = np.searchsorted(self.user_offsets, starts, side="right") - 1
        return users


class _Columns(NamedTuple):
    """The columns of a split's windows, each contiguous."""

    offsets: np.ndarray
    counts: np.ndarray
    start: np.ndarray
    length: np.ndarray
    first_target: np.ndarray


def _columns(windows: Windows) -> _Columns:
    segments = windows.segments
    return _Columns(
        np.ascontiguousarray(windows.offsets[:-1]),
        np.diff(windows.offsets),
        np.ascontiguousarray(segments["start"]),
        segments["length"].astype(np.int64),
        segments["first_target"].astype(np.int64),
    )


def _occupied(slot_of: np.ndarray, lengths: np.ndarray, slots: int) -> np.ndarray:
    """Which slots hold an event."""
    change = np.zeros(slots + 1, np.int8)
    np.add.at(change, slot_of, 1)
    np.add.at(change, slot_of + lengths, -1)
    return np.cumsum(change[:-1], dtype=np.int8).astype(bool)
