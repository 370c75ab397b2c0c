"""From raw events and items to what the model reads: every value checked, then encoded by `habitus.data`.

Preparation drops or counts values that it cannot read; here they are refused, with the name of the place.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from torch import Tensor

from habitus.data import (
    KINDS,
    SEGMENT,
    Batch,
    ItemFeatures,
    clock_fields,
    pack,
    to_display,
)
from habitus.data import (
    Fields as EncodedFields,
)
from habitus.events import GAP, HOUR, WEEKDAY, comma_numbers, user_field
from habitus.model import EMBED_ROWS, Bundle, embed_features
from habitus.serving.limits import Limits
from habitus.serving.schemas import Event, EventOrId, Fields, RequestError
from habitus.serving.values import (
    IdFormat,
    Key,
    check_names,
    read_category,
    read_days,
    read_number,
    read_text,
    read_time,
    read_value,
    read_vector,
    to_moment,
)


@dataclass(frozen=True)
class EncodedHistory:
    """The newest events of known items, oldest first. Arrays are [n]."""

    rows: np.ndarray  # int64: rows of the candidates
    fields: dict[str, np.ndarray]  # codes int32, numbers float32 with NaN where missing; tokens and vectors [n, ...]
    seen_rows: frozenset[int] = frozenset()  # of all known items of the request, older ones too
    unknown_ids: tuple[Any, ...] = ()  # of the items whose events were left out


class HistoryEncoder:
    """Encodes the histories of one run."""

    def __init__(self, bundle: Bundle, id_format: IdFormat, window: int, limits: Limits) -> None:
        schema, encoders = bundle.schema, bundle.encoders
        self.bundle = bundle
        self.roles = schema.events
        self.id_format = id_format
        self.window = window
        self.limits = limits
        self.fields = encoders.fields
        self.sizes = {field.name: field.size for field in encoders.fields.event}
        self.codes = encoders.event_codes
        roles = self.roles
        self.kinds = schema.event_fields
        self.user_fields = () if schema.users is None else tuple(schema.users.fields)
        self.commas = {*comma_numbers(roles), *map(user_field, comma_numbers(schema.users))}
        self.columns = {roles.user, roles.item_column, *roles.pair_columns, roles.timestamp, *self.kinds}
        self.has_clock = roles.time_unit != "order"

    def encode(self, history: Sequence[EventOrId], rows_of: Callable[[Sequence[Key]], Sequence[int]]) -> EncodedHistory:
        """One history; `rows_of` looks up the rows of items, -1 for unknown ones.

        Events are sorted by time, those of the same time in the order given. Events of unknown items are left out, and
        their ids returned; of the others the newest are used, as many as the model's window holds.
        """
        self.limits.check_history(history)
        events = self._events(history)
        keys = self._keys(events)
        rows = np.asarray(rows_of(keys), np.int64)
        times = self._times(events)
        order = np.arange(len(events)) if times is None else np.argsort(times, kind="stable")
        order = order[rows[order] >= 0]
        newest = order[-self.window :]
        clock = self._clock(None if times is None else times[order], len(order))
        fields = {name: column[-self.window :] for name, column in clock.items()}
        for name, kind in self.kinds.items():
            fields[name] = self._field(name, kind, events, newest)
        unknown = dict.fromkeys(keys[place] for place in np.flatnonzero(rows < 0))
        return EncodedHistory(
            rows=rows[newest],
            fields=fields,
            seen_rows=frozenset(rows[order].tolist()),
            unknown_ids=tuple(self.id_format.to_id(key) for key in unknown),
        )

    def add_user(self, history: Sequence[EventOrId], user: Mapping[str, Any]) -> Sequence[EventOrId]:
        """The events with the fields of their user, where they do not say what was known at their time."""
        if not user:
            return history
        if not self.user_fields:
            raise RequestError("user was given, and the model knows no user fields", expected="no user")
        check_names("user", user, self.user_fields)
        known = {user_field(name): value for name, value in user.items()}
        return [{**known, **event} for event in self._events(history)]

    def _events(self, history: Sequence[EventOrId]) -> list[Event]:
        """A plain id stands for an event with that item."""
        column = self.roles.item_column
        return [event if isinstance(event, dict) else {column: event} for event in history]

    def _keys(self, events: Sequence[Event]) -> list[Key]:
        keys = []
        for number, event in enumerate(events):
            if not self.columns.issuperset(event):
                check_names(f"history[{number}]", event, self.columns)
            if self.roles.no_item is not None and event.get(self.roles.item_column) is None:
                event = {**event, self.roles.item_column: self.roles.no_item}
            keys.append(self.id_format.event_key(event, f"history[{number}].{self.roles.item_column}"))
        return keys

    def _times(self, events: Sequence[Event]) -> np.ndarray | None:
        """The times; None if no event has one, and the order given counts."""
        column = self.roles.timestamp
        missing = [number for number, event in enumerate(events) if event.get(column) is None]
        if len(missing) == len(events):
            return None
        if missing:
            raise RequestError(
                f"history[{missing[0]}] has no {column!r}, and other events have one",
                expected="a time in every event, or in none: then their order counts",
            )
        unit, form = self.roles.time_unit, self.roles.time_format
        times = [
            read_time(f"history[{number}].{column}", event[column], unit, form) for number, event in enumerate(events)
        ]
        return np.array(times, np.int64)

    def _clock(self, times: np.ndarray | None, size: int) -> dict[str, np.ndarray]:
        """Seconds since the last event, hour and weekday of sorted times; missing without times."""
        if not self.has_clock:
            return {}
        if times is None:
            missing = np.zeros(size, np.int32)
            return {GAP: np.full(size, np.nan, np.float32), HOUR: missing, WEEKDAY: missing}
        return clock_fields(times, np.concatenate([times[:1], times[:-1]]), np.arange(size) == 0)

    def _field(self, name: str, kind: str, events: Sequence[Event], places: np.ndarray) -> np.ndarray:
        values = [(f"history[{place}].{name}", events[place].get(name)) for place in places.tolist()]
        if name in self.codes:
            codes, longest = self.codes[name], self.limits.max_text
            texts = [read_category(what, value, longest) for what, value in values]
            return np.array([0 if text is None else codes.get(text, 0) for text in texts], np.int32)
        if kind == "text":
            longest = self.limits.max_text
            texts = [None if value is None else read_text(what, value, longest) for what, value in values]
            return self.bundle.encoders.encode_event_texts(texts, self.bundle.tokenizer)
        if kind == "vector":
            size = self.sizes[name]
            missing = [math.nan] * size
            vectors = [missing if value is None else read_vector(what, value, size) for what, value in values]
            return np.array(vectors, np.float32).reshape(-1, size)
        read = partial(read_number, comma=name in self.commas) if kind == "number" else read_days
        return np.array([read(what, value) for what, value in values], np.float32)


def pack_histories(
    histories: Sequence[EncodedHistory], fields_read: EncodedFields
) -> tuple[Batch, np.ndarray, np.ndarray]:
    """The histories as one batch, short ones several to a window, and the window and slot of each last event."""
    lengths = np.array([len(history.rows) for history in histories])
    slots = int(lengths.max())
    segments = np.zeros(len(histories), SEGMENT)
    segments["user"], segments["length"] = np.arange(len(histories)), lengths
    windows = pack(segments, slots)
    shape = len(windows.offsets) - 1, slots
    items = np.zeros(shape, np.int64)
    positions = np.zeros(shape, np.int32)
    numbers = np.full(shape, -1, np.int32)
    fields = {
        field.name: np.full((*shape, *field.row_shape(fields_read.text_len)), field.missing, field.dtype)
        for field in fields_read.event
    }
    last_windows, last_slots = np.empty(len(histories), np.int64), np.empty(len(histories), np.int64)
    boundaries = []
    for window, (first, stop) in enumerate(zip(windows.offsets[:-1], windows.offsets[1:], strict=True)):
        at = 0
        for number, segment in enumerate(windows.segments[first:stop]):
            history, length = histories[segment["user"]], int(segment["length"])
            place = window, slice(at, at + length)
            items[place], numbers[place] = history.rows, number
            positions[place] = np.arange(length)
            for name, column in fields.items():
                column[place] = history.fields[name]
            boundaries.append(window * slots + at)
            last_windows[segment["user"]], last_slots[segment["user"]] = window, at + length - 1
            at += length
        if at < slots:
            boundaries.append(window * slots + at)  # the empty tail is a segment of its own
    boundaries.append(items.size)
    batch = Batch(
        items=items,
        targets=np.full(shape, -1, np.int64),
        positions=positions,
        segments=numbers,
        boundaries=np.array(boundaries, np.int32),
        users=np.empty((shape[0], 0), np.int64),
        fields=fields,
    )
    return batch, last_windows, last_slots


class ItemEncoder:
    """Reads and embeds the items of one run from their raw fields."""

    def __init__(self, bundle: Bundle, id_format: IdFormat, limits: Limits) -> None:
        self.bundle = bundle
        self.id_format = id_format
        self.limits = limits
        self.kinds = bundle.encoders.item_kinds
        self.commas = comma_numbers(bundle.schema.items)
        self.displayed = bundle.schema.items.display or ()  # some of them may be no fields: the model ignores those
        self.vector_sizes = {field.name: field.size for field in bundle.encoders.fields.item if field.kind == "vector"}

    def read_item(self, key: Key, fields: Mapping[str, Any]) -> Fields:
        """The fields of an item as they are stored: plain values by name, missing ones absent.

        The columns of an item×field pair come from its id; if the fields repeat them, they must agree.
        """
        id_column = self.id_format.table_column
        values = {name: value for name, value in fields.items() if name != id_column}
        if id_column in fields and self._first_key(fields[id_column]) != self._first(key):
            raise RequestError(
                f"the field {id_column!r} is not the item's id", expected="the same id, or no such field"
            )
        for name, value in zip(self.id_format.pair_columns, key[1:] if self.id_format.is_pair else (), strict=True):
            if str(values.setdefault(name, value)) != value:
                raise RequestError(f"the field {name!r} is not that of the item's id", expected=f"{value!r}")
        return self.read_fields(values)

    def read_fields(self, fields: Mapping[str, Any]) -> Fields:
        """The same for an item without an id; if it has one, it is ignored."""
        readable = {*self.kinds, *self.displayed}
        check_names("the item", fields, [*readable, self.id_format.table_column])
        values = {name: self._read(name, value) for name, value in fields.items() if name in readable}
        values = {name: value for name, value in values.items() if value is not None}
        own = set(self.kinds) - set(self.id_format.pair_columns)
        if not own & values.keys():
            raise RequestError("the item has no fields", expected=f"at least one of: {', '.join(sorted(own))}")
        return values

    def categories(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values that filters look at: categories as texts, numbers and times as they are compared."""
        values = {name: fields.get(name) for name in self.bundle.encoders.item_values}
        for name, kind in self.kinds.items():
            if kind in ("number", "time"):
                values[name] = read_value(f"field {name!r}", kind, fields.get(name))
        return values

    def display(self, fields: Mapping[str, Any]) -> dict[str, str]:
        """What people see of an item beside its id."""
        shown = {}
        for name in self.displayed:
            value = fields.get(name)
            if value is not None:
                is_time = self.kinds.get(name) == "time"
                text = to_display(pa.array([datetime.fromisoformat(value) if is_time else value]))[0].as_py()
                if text is not None:
                    shown[name] = text
        return shown

    def embed(self, items: Sequence[Fields]) -> Tensor:
        """The vectors [n, joint_dim] of items whose fields have been read."""

        def features() -> Iterator[ItemFeatures]:
            for at in range(0, len(items), EMBED_ROWS):
                table = self._table(items[at : at + EMBED_ROWS])
                yield self.bundle.encoders.encode_items(table, self.bundle.tokenizer)

        return embed_features(self.bundle.model, features(), precision=self.bundle.recipe.train.precision)

    def _table(self, items: Sequence[Fields]) -> pa.RecordBatch:
        columns = {}
        for name, kind in self.kinds.items():
            column = [item.get(name) for item in items]
            if kind == "time":
                column = [None if value is None else read_time(name, value, "datetime") for value in column]
            columns[name] = pa.array(column, KINDS[kind].arrow_type)
        return pa.RecordBatch.from_pydict(columns)

    def _read(self, name: str, value: Any) -> Any:
        """The value as it is stored, by the kind of its field."""
        if value is None:
            return None
        what, longest = f"field {name!r}", self.limits.max_text
        match self.kinds.get(name, "category"):
            case "text":
                return read_text(what, value, longest)
            case "category":
                return read_category(what, value, longest)
            case "categories":
                return self._read_categories(name, what, value)
            case "number":
                return read_number(what, value, comma=name in self.commas)
            case "time":
                return to_moment(read_time(what, value, "datetime")).isoformat()
            case "vector":
                return read_vector(what, value, self.vector_sizes[name])
            case kind:
                raise NotImplementedError(f"fields of kind {kind!r} cannot be read one by one")

    def _read_categories(self, name: str, what: str, value: Any) -> list[str] | None:
        """Several categories: a list, or a text that the field's separator divides; None where there is none."""
        separator = (self.bundle.encoders.separators or {}).get(name)
        if isinstance(value, str) and separator is not None:
            value = value.split(separator)
        entries = list(value) if isinstance(value, list | tuple | np.ndarray) else [value]
        read = [read_category(f"{what}[{n}]", entry, self.limits.max_text) for n, entry in enumerate(entries)]
        return list(dict.fromkeys(text.strip() for text in read if text and text.strip())) or None

    def _first_key(self, item_id: Any) -> Any:
        """The key of an item's own id, without the columns of a pair."""
        pair = ("x" for _ in self.id_format.pair_columns)
        return self._first(self.id_format.key((item_id, *pair) if self.id_format.is_pair else item_id))

    def _first(self, key: Key) -> Any:
        return key[0] if self.id_format.is_pair else key
