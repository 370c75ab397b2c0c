"""The event side of a dataset: sorted chunks in; one record per event, the users and their statistics out."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from habitus.data.arrays import ArrayWriter, write_array
from habitus.data.column_surveys import Moments
from habitus.data.fields import Field
from habitus.data.split import Split
from habitus.events import GAP, HOUR, WEEKDAY, TimeUnit

EVENT_CHUNK_ROWS = 1 << 20
ITEM = "item"
_HOUR_US = 3_600_000_000
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday; Monday is 0


@dataclass(frozen=True)
class EventChunk:
    """Consecutive events in (user, time, row) order, encoded."""

    users: pa.Array  # ids
    times: np.ndarray  # int64, microseconds since 1970, or positions
    items: np.ndarray  # int64, catalogue rows
    fields: dict[str, np.ndarray]  # codes, or float32 with NaN where missing


@dataclass
class Users:
    """Where each user's events are, and how many of them train."""

    starts: np.ndarray  # int64 [U]: first event
    lengths: np.ndarray  # int64 [U]
    train_lengths: np.ndarray  # int64 [U]: how many of them, from the first, train


@dataclass
class WrittenEvents:
    """What is known once all events are written."""

    users: Users
    fields: tuple[Field, ...]
    num_events: int
    filled: dict[str, int]
    time_span: tuple[int, int]


@dataclass(frozen=True)
class EventPlan:
    """The event columns, as they are known before the first event is written."""

    kinds: dict[str, str]
    values: dict[str, tuple[str, ...]]  # of the categories
    time_unit: TimeUnit
    num_items: int
    split: Split

    def specs(self) -> tuple[Field, ...]:
        """The event fields in order, those derived from the time last; numbers still without statistics."""
        specs = [
            Field(name=name, kind="category", size=len(self.values[name]) + 1)
            if name in self.values
            else Field(name=name, kind="number")
            for name in self.kinds
        ]
        if self.time_unit != "order":
            specs += [
                Field(name=GAP, kind="number"),
                Field(name=HOUR, kind="category", size=25),
                Field(name=WEEKDAY, kind="category", size=8),
            ]
        return tuple(specs)

    def vocabularies(self) -> dict[str, pa.Array]:
        """The values of the categories, as arrays to look codes up in."""
        return {name: pa.array(values, pa.string()) for name, values in self.values.items()}

    def all_values(self) -> dict[str, tuple[str, ...]]:
        clock = {HOUR: tuple(map(str, range(24))), WEEKDAY: tuple(map(str, range(7)))}
        return {**self.values, **(clock if self.time_unit != "order" else {})}


def write_events(chunks: Iterable[EventChunk], plan: EventPlan, stage: Path) -> WrittenEvents:
    """Write items and fields as records and times as an array to `stage`/events, and user ids to `stage`/users."""
    records = ArrayWriter(stage / "events" / "records.npy", _record_dtype(plan.specs()))
    times = ArrayWriter(stage / "events" / "time.npy", np.int64)
    with records, times, _IdWriter(stage / "users" / "ids.parquet") as ids:
        writer = _EventWriter(plan, stage, records, times, ids)
        before: EventChunk | None = None
        for chunk, after in _with_next(chunks):
            writer.append(chunk, before, after)
            before = chunk
        return writer.finish()


def _record_dtype(specs: tuple[Field, ...]) -> np.dtype:
    """One event as stored: its item, then the fields in order, codes as narrow as their range allows, no gaps.

    Rows and not columns, since a batch takes short stretches of events from all over the log: one place to look
    instead of one per field makes it more than twice as fast.
    """
    fields = [(record_field(number), spec.stored_dtype) for number, spec in enumerate(specs)]
    return np.dtype([(ITEM, np.dtype("<i8")), *fields])


def record_field(number: int) -> str:
    return f"field_{number:02d}"


class _IdWriter:
    """Appends ids to a Parquet file, whose type is that of the first ones."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._writer: pq.ParquetWriter | None = None

    def append(self, ids: pa.Array) -> None:
        table = pa.table({"user": ids})
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._path, table.schema, compression="zstd")
        self._writer.write_table(table)

    def __enter__(self) -> "_IdWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(OSError) if kind else nullcontext():  # a full disk refuses the footer, too
            if self._writer is not None:
                self._writer.close()


@dataclass
class _EventWriter:
    plan: EventPlan
    stage: Path
    records: ArrayWriter
    times: ArrayWriter
    ids: _IdWriter
    num_events: int = 0
    num_users: int = 0
    first_time: int = np.iinfo(np.int64).max
    last_time: int = np.iinfo(np.int64).min
    starts: list[np.ndarray] = field(default_factory=list)
    train_counts: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.specs = self.plan.specs()
        self.moments = {spec.name: Moments() for spec in self.specs if spec.kind == "number"}
        self.filled = {spec.name: 0 for spec in self.specs}
        self.item_counts = np.zeros(self.plan.num_items, np.int64)
        self.train_user = True  # of the last user of the chunk before

    def append(self, chunk: EventChunk, before: EventChunk | None, after: EventChunk | None) -> None:
        size = len(chunk.items)
        changes = pc.not_equal(chunk.users.slice(1), chunk.users.slice(0, size - 1)).to_numpy(zero_copy_only=False)
        is_first = np.concatenate([[before is None or before.users[-1] != chunk.users[0]], changes])
        is_last = np.concatenate([changes, [after is None or after.users[0] != chunk.users[-1]]])
        new_ids = chunk.users.filter(pa.array(is_first))
        self.ids.append(new_ids)

        new_train = self.plan.split.train_users(new_ids)
        user = np.cumsum(is_first)  # 0: the user that the chunk before ended with
        train_user = np.concatenate([[self.train_user], new_train])
        trains = self.plan.split.trains(train_user[user], chunk.times, is_last)
        self.train_user = bool(train_user[user[-1]])
        counts = np.bincount(user[trains], minlength=len(new_ids) + 1)
        if self.train_counts:
            self.train_counts[-1][-1] += counts[0]
        self.starts.append(self.num_events + np.flatnonzero(is_first))
        if len(new_ids):
            self.train_counts.append(counts[1:])

        np.add.at(self.item_counts, chunk.items[trains], 1)
        previous = np.concatenate([[before.times[-1] if before is not None else 0], chunk.times[:-1]])
        clock = {} if self.plan.time_unit == "order" else clock_fields(chunk.times, previous, is_first)
        records = np.empty(size, self.records.dtype)
        records[ITEM] = chunk.items
        for number, spec in enumerate(self.specs):
            values = chunk.fields[spec.name] if spec.name in chunk.fields else clock[spec.name]
            records[record_field(number)] = values
            self._count(spec, values, trains)
        self.records.append(records)
        self.times.append(chunk.times)
        self.num_events += size
        self.num_users += len(new_ids)
        self.first_time = min(self.first_time, int(chunk.times.min()))
        self.last_time = max(self.last_time, int(chunk.times.max()))

    def _count(self, spec: Field, values: np.ndarray, trains: np.ndarray) -> None:
        if spec.kind == "number":
            self.moments[spec.name].add(values[trains])
            self.filled[spec.name] += int(np.count_nonzero(~np.isnan(values)))
        else:
            self.filled[spec.name] += int(np.count_nonzero(values))

    def finish(self) -> WrittenEvents:
        starts = np.concatenate(self.starts).astype(np.int64)
        lengths = np.diff(np.append(starts, self.num_events))
        train_lengths = np.concatenate(self.train_counts).astype(np.int64)
        write_array(self.stage / "users" / "offsets.npy", np.append(starts, np.int64(self.num_events)))
        write_array(self.stage / "users" / "train_length.npy", train_lengths)
        write_array(self.stage / "items" / "train_count.npy", self.item_counts)
        specs = tuple(
            self.moments[spec.name].to_field(spec.name) if spec.kind == "number" else spec for spec in self.specs
        )
        users = Users(starts, lengths, train_lengths)
        return WrittenEvents(users, specs, self.num_events, self.filled, (self.first_time, self.last_time))


def clock_fields(times: np.ndarray, previous: np.ndarray, is_first: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds since the user's previous event (missing at the first), hour and weekday as codes from 1."""
    gap = ((times - previous) * 1e-6).astype(np.float32)
    gap[is_first] = np.nan
    hours = (times // _HOUR_US).astype(np.int32)  # since 1970; divisions of int32 are several times faster
    return {GAP: gap, HOUR: hours % 24 + 1, WEEKDAY: (hours // 24 + _EPOCH_WEEKDAY) % 7 + 1}


def _with_next(chunks: Iterable[EventChunk]) -> Iterator[tuple[EventChunk, EventChunk | None]]:
    held: EventChunk | None = None
    for chunk in chunks:
        if held is not None:
            yield held, chunk
        held = chunk
    if held is not None:
        yield held, None
