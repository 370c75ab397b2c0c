"""From raw events to what the contextualizer reads, encoded as preparation encodes a log."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from habitus.data import SEGMENT, Batch, Encoders, pack
from habitus.events import GAP, HOUR, WEEKDAY, Schema
from habitus.serving import values
from habitus.serving.ids import IdKind, Key
from habitus.serving.requests import Limits, RequestError

HOUR_US = 3_600_000_000
EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday; Monday is 0
Rows = Callable[[Sequence[Key]], Sequence[int]]


@dataclass(frozen=True)
class History:
    """One encoded history: the newest events of known items, oldest first. Arrays are [n]."""

    rows: np.ndarray  # int64: rows of the served items
    fields: dict[str, np.ndarray]  # codes int32, numbers float32 with NaN where missing
    seen: frozenset[int]  # rows of all known items of the request, older ones too
    unknown: tuple[Any, ...]  # ids that were left out


class HistoryEncoder:
    """Encodes the histories of one run."""

    def __init__(self, schema: Schema, encoders: Encoders, kind: IdKind, limits: Limits) -> None:
        self.roles = schema.events
        self.kind = kind
        self.limits = limits
        self.specs = encoders.fields.event
        self.codes = {
            name: {value: code for code, value in enumerate(known, 1)} for name, known in encoders.event_values.items()
        }
        roles = self.roles
        self.columns = {roles.user, roles.item_column, *roles.pair_columns, roles.timestamp, *roles.fields}
        self.has_clock = roles.time_unit != "order"

    def encode(self, histories: Sequence[Sequence[Mapping[str, Any]]], rows_of: Rows) -> list[History]:
        """The histories; `rows_of` finds the rows of items, -1 for unknown ones.

        Events are put in the order of their times, events of one time in the order given. Events of unknown items
        are left out and told; of the others the newest `limits.window` are used.
        """
        keys = [self._keys(events) for events in histories]
        flat = [key for part in keys for key in part]
        found = np.asarray(rows_of(flat), np.int64)
        encoded, first = [], 0
        for events, part in zip(histories, keys, strict=True):
            encoded.append(self._history(events, part, found[first : first + len(part)]))
            first += len(part)
        return encoded

    def check(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Raise what is wrong with a history, whatever items there are."""
        keys = self._keys(events)
        self._history(events, keys, np.zeros(len(keys), np.int64))

    def _keys(self, events: Sequence[Mapping[str, Any]]) -> list[Key]:
        if isinstance(events, str | bytes | Mapping) or not isinstance(events, Sequence):
            raise values.refuse("history", events, "a list of events")
        if not events:
            raise RequestError("the history is empty", expected="at least one event")
        if len(events) > self.limits.max_history:
            raise RequestError(
                f"the history has {len(events):,} events",
                expected=f"at most {self.limits.max_history:,}; the newest {self.limits.window} are used",
            )
        found = []
        for number, event in enumerate(events):
            what = f"history[{number}]"
            values.check_mapping(what, event)
            if not self.columns.issuperset(event):
                values.check_names(what, event, self.columns)
            found.append(self.kind.of_event(event, f"{what}.{self.roles.item_column}"))
        return found

    def _history(self, events: Sequence[Mapping[str, Any]], keys: list[Key], rows: np.ndarray) -> History:
        times = self._times(events)
        order = np.arange(len(events)) if times is None else np.argsort(times, kind="stable")
        kept = order[rows[order] >= 0]
        shown = kept[-self.limits.window :]
        clock = self._clock(None if times is None else times[kept], len(kept))
        fields = {name: column[-self.limits.window :] for name, column in clock.items()}
        for name, kind in self.roles.fields.items():
            fields[name] = self._field(name, kind, events, shown)
        unknown = list(dict.fromkeys(keys[place] for place in np.flatnonzero(rows < 0)))
        return History(
            rows=rows[shown],
            fields=fields,
            seen=frozenset(rows[kept].tolist()),
            unknown=tuple(self.kind.shown(key) for key in unknown),
        )

    def _times(self, events: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
        """The times; None where no event has one, and the order given counts."""
        column = self.roles.timestamp
        absent = sum(event.get(column) is None for event in events)
        if absent == len(events):
            return None
        if absent:
            place = next(number for number, event in enumerate(events) if event.get(column) is None)
            raise RequestError(
                f"history[{place}] has no {column!r}, and other events have one",
                expected="a time in every event, or in none: then their order counts",
            )
        unit = self.roles.time_unit
        moments = [values.moment(f"history[{n}].{column}", event[column], unit) for n, event in enumerate(events)]
        return np.array(moments, np.int64)

    def _clock(self, times: np.ndarray | None, size: int) -> dict[str, np.ndarray]:
        """Seconds since the last event, hour and weekday of sorted times, as preparation makes them."""
        if not self.has_clock:
            return {}
        if times is None:
            nothing = np.zeros(size, np.int32)
            return {GAP: np.full(size, np.nan, np.float32), HOUR: nothing, WEEKDAY: nothing}
        gap = np.full(size, np.nan, np.float32)
        gap[1:] = (np.diff(times) * 1e-6).astype(np.float32)
        hours = (times // HOUR_US).astype(np.int32)
        return {GAP: gap, HOUR: hours % 24 + 1, WEEKDAY: (hours // 24 + EPOCH_WEEKDAY) % 7 + 1}

    def _field(self, name: str, kind: str, events: Sequence[Mapping[str, Any]], shown: np.ndarray) -> np.ndarray:
        given = [(f"history[{place}].{name}", events[place].get(name)) for place in shown.tolist()]
        if kind == "category":
            known, longest = self.codes[name], self.limits.max_text
            texts = [values.category(what, value, longest) for what, value in given]
            return np.array([0 if text is None else known.get(text, 0) for text in texts], np.int32)
        read = values.number if kind == "number" else values.days
        return np.array([read(what, value) for what, value in given], np.float32)


def packed(histories: Sequence[History], specs: Sequence[Any]) -> tuple[Batch, np.ndarray, np.ndarray]:
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
        spec.name: np.zeros(shape, np.int32) if spec.kind == "category" else np.full(shape, np.nan, np.float32)
        for spec in specs
    }
    window_of, last = np.empty(len(histories), np.int64), np.empty(len(histories), np.int64)
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
            window_of[segment["user"]], last[segment["user"]] = window, at + length - 1
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
    return batch, window_of, last
