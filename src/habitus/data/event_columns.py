"""The event side of a dataset: sorted chunks in; one record per event, the users and their statistics out."""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from habitus.data.arrays import ArrayWriter, map_array, write_array
from habitus.data.column_surveys import Moments
from habitus.data.event_contents import EventContent
from habitus.data.fields import Field
from habitus.data.split import TRAIN, VALIDATION, EventPlaces, Split
from habitus.data.targets import WEIGHT_FILE, TargetRows
from habitus.data.windows import UserParts
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
    target_weights: np.ndarray | None = None  # float32; None: every event is a target


@dataclass
class WrittenEvents:
    """What is known once all events are written."""

    users: UserParts
    fields: tuple[Field, ...]
    num_events: int
    filled: dict[str, int]
    time_span: tuple[int, int]
    contents: tuple[EventContent, ...] = ()  # with what training events hold of them


@dataclass(frozen=True)
class EventPlan:
    """The event columns, as they are known before the first event is written."""

    kinds: dict[str, str]
    values: dict[str, tuple[str, ...]]  # of the categories
    time_unit: TimeUnit
    num_items: int
    split: Split
    contents: tuple[EventContent, ...] = ()  # of the fields that are texts or vectors

    def specs(self) -> tuple[Field, ...]:
        """The event fields in order, those derived from the time last; numbers still without statistics."""
        contents = {content.name: content.field() for content in self.contents}
        categories = {
            name: Field(name=name, kind="category", size=len(values) + 1) for name, values in self.values.items()
        }
        known = {**contents, **categories}
        specs = [known[name] if name in known else Field(name=name, kind="number") for name in self.kinds]
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
        for chunk, following in _with_following(chunks):
            writer.append(chunk, before, following)
            before = chunk
        return writer.finish()


def _record_dtype(specs: tuple[Field, ...]) -> np.dtype:
    """One event as stored: its item, then the fields in order, codes as narrow as their range allows, no gaps.

    Rows and not columns, since a batch takes short stretches of events from all over the log: one place to look
    instead of one per field makes it more than twice as fast.
    """
    fields = [(record_field(number), spec.record_dtype) for number, spec in enumerate(specs)]
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
    train_lengths: list[np.ndarray] = field(default_factory=list)
    validation_lengths: list[np.ndarray] = field(default_factory=list)
    target_weights: ArrayWriter | None = None

    def __post_init__(self) -> None:
        self.specs = self.plan.specs()
        self.moments = {spec.name: Moments() for spec in self.specs if spec.kind == "number"}
        self.filled = {spec.name: 0 for spec in self.specs}
        self.filled |= {content.name: content.filled for content in self.plan.contents}
        self.trains = {content.name: np.zeros(content.num_rows, bool) for content in self.plan.contents}
        self.item_counts = np.zeros(self.plan.num_items, np.int64)
        self.last_user_side = TRAIN  # of the last user of the chunk before
        self.last_user_events = 0  # so far

    def append(self, chunk: EventChunk, before: EventChunk | None, following: list[pa.Scalar]) -> None:
        """Take in the next chunk; `following` are the users of up to two events after it."""
        size = len(chunk.items)
        changes = pc.not_equal(chunk.users.slice(1), chunk.users.slice(0, size - 1)).to_numpy(zero_copy_only=False)
        is_first = np.concatenate([[before is None or before.users[-1] != chunk.users[0]], changes])
        new_ids = chunk.users.filter(pa.array(is_first))
        self.ids.append(new_ids)

        split = self.plan.split
        user = np.cumsum(is_first)  # 0: the user that the chunk before ended with
        user_sides = np.append(np.int8(self.last_user_side), split.user_sides(new_ids))
        num_after = sum(1 for other in following if other == chunk.users[-1])
        places = EventPlaces(is_first, self.last_user_events, num_after)
        sides = split.event_sides(user_sides[user], chunk.times, places)
        self.last_user_side = int(user_sides[user[-1]])
        self.last_user_events = int(np.argmax(is_first[::-1])) + 1 if len(new_ids) else self.last_user_events + size
        trains = sides == TRAIN
        self._add_lengths(self.train_lengths, user[trains], len(new_ids))
        if split.test_share:
            self._add_lengths(self.validation_lengths, user[sides == VALIDATION], len(new_ids))
        self.starts.append(self.num_events + np.flatnonzero(is_first))

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
        if chunk.target_weights is not None:
            self.target_weights = self.target_weights or ArrayWriter(self.stage / WEIGHT_FILE, np.float32)
            self.target_weights.append(chunk.target_weights)
        self.num_events += size
        self.num_users += len(new_ids)
        self.first_time = min(self.first_time, int(chunk.times.min()))
        self.last_time = max(self.last_time, int(chunk.times.max()))

    @staticmethod
    def _add_lengths(lengths: list[np.ndarray], user: np.ndarray, num_new: int) -> None:
        """Count a side's events by user; those of user 0 belong to the last user of the chunk before."""
        counts = np.bincount(user, minlength=num_new + 1)
        if lengths:
            lengths[-1][-1] += counts[0]
        if num_new:
            lengths.append(counts[1:])

    def _count(self, spec: Field, values: np.ndarray, trains: np.ndarray) -> None:
        if spec.kind == "number":
            self.moments[spec.name].add(values[trains])
            self.filled[spec.name] += int(np.count_nonzero(~np.isnan(values)))
        elif spec.rows is None:
            self.filled[spec.name] += int(np.count_nonzero(values))
        else:
            self.trains[spec.name][values[trains]] = True

    def finish(self) -> WrittenEvents:
        starts = np.concatenate(self.starts).astype(np.int64)
        lengths = np.diff(np.append(starts, self.num_events))
        train_lengths = np.concatenate(self.train_lengths).astype(np.int64)
        validation_lengths = None
        write_array(self.stage / "users" / "offsets.npy", np.append(starts, np.int64(self.num_events)))
        write_array(self.stage / "users" / "train_length.npy", train_lengths)
        if self.validation_lengths:
            validation_lengths = np.concatenate(self.validation_lengths).astype(np.int64)
            write_array(self.stage / "users" / "validation_length.npy", validation_lengths)
        write_array(self.stage / "items" / "train_count.npy", self.item_counts)
        specs = tuple(
            self.moments[spec.name].to_field(spec.name) if spec.kind == "number" else spec for spec in self.specs
        )
        targets = None
        if self.target_weights is not None:
            self.target_weights.close()
            targets = TargetRows.of(map_array(self.stage / WEIGHT_FILE))
        users = UserParts(starts, lengths, train_lengths, validation_lengths, targets)
        contents = tuple(replace(content, trains=self.trains[content.name]) for content in self.plan.contents)
        return WrittenEvents(users, specs, self.num_events, self.filled, (self.first_time, self.last_time), contents)


def clock_fields(times: np.ndarray, previous: np.ndarray, is_first: np.ndarray) -> dict[str, np.ndarray]:
    """Seconds since the user's previous event (missing at the first), hour and weekday as codes from 1."""
    gap = ((times - previous) * 1e-6).astype(np.float32)
    gap[is_first] = np.nan
    hours = (times // _HOUR_US).astype(np.int32)  # since 1970; divisions of int32 are several times faster
    return {GAP: gap, HOUR: hours % 24 + 1, WEEKDAY: (hours // 24 + _EPOCH_WEEKDAY) % 7 + 1}


def _with_following(chunks: Iterable[EventChunk]) -> Iterator[tuple[EventChunk, list[pa.Scalar]]]:
    """Each chunk with the users of the two events after it; fewer at the end."""
    held: list[EventChunk] = []
    for chunk in chunks:
        held.append(chunk)
        while len(held) > 1 and sum(len(later.items) for later in held[1:]) >= 2:
            yield held[0], _first_users(held[1:])
            del held[0]
    while held:
        yield held[0], _first_users(held[1:])
        del held[0]


def _first_users(chunks: list[EventChunk]) -> list[pa.Scalar]:
    return [user for chunk in chunks for user in chunk.users.slice(0, 2)][:2]
