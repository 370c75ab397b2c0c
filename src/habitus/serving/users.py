"""Validation users of a prepared dataset, for `serve --show-users`: histories as the log has them.

Events that test are never shown.
"""

from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data import MICROSECONDS_PER_DAY, TIME_UNIT_US, Dataset
from habitus.serving.retriever import Retriever
from habitus.serving.schemas import Event, UnknownItemError, UserEvent, UserResponse, UsersResponse

_EPOCH = datetime(1970, 1, 1)


class ValidationUsers:
    """The users who have events that validate."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._begins, self._ends = dataset.user_parts.part("validation")

    @cached_property
    def _users(self) -> np.ndarray:
        """Numbers of users with an event to predict and one before it, those with the most to predict first."""
        users = np.flatnonzero((self._ends > self._begins) & (self._ends > 1))
        return users[np.argsort(self._begins[users] - self._ends[users], kind="stable")]

    @cached_property
    def _ids(self) -> pa.Array:
        return self.dataset.user_ids().take(pa.array(self._users))

    @cached_property
    def _texts(self) -> pa.Array:
        return self._ids.cast(pa.string())

    def find(self, text: str, k: int) -> UsersResponse:
        """Users whose ids begin with a text, the one whose id it is first."""
        text = text.strip()
        starts, equals = (np.flatnonzero(test(self._texts, text)) for test in (pc.starts_with, pc.equal))
        places = np.concatenate([equals, np.setdiff1d(starts, equals)])[:k]
        return UsersResponse(users=tuple(self._ids.take(pa.array(places)).to_pylist()), num_users=len(self._users))

    def history(self, user_id: str, retriever: Retriever) -> UserResponse:
        """A user's newest events, up to the last that validates."""
        place = pc.index(self._texts, user_id).as_py()
        if place < 0:
            raise UnknownItemError(f"there is no validation user {user_id[:100]!r}", expected="an id of /v1/users")
        user = int(self._users[place])
        start = int(self.dataset.user_offsets[user])
        stop, first_target = start + int(self._ends[user]), start + int(self._begins[user])
        begin = max(start, stop - retriever.limits.max_history)
        rows = self.dataset.items[begin:stop].tolist()
        ids, display = retriever.candidates.catalogue.ids_at(rows), retriever.candidates.catalogue.names.at(rows)
        return UserResponse(
            user_id=self._ids[place].as_py(),
            events=tuple(
                UserEvent(
                    item_id=item,
                    display=shown or None,
                    event=self._event(number, item),
                    validates=number >= first_target,
                )
                for number, (item, shown) in enumerate(zip(ids, display, strict=True), begin)
            ),
            num_earlier=begin - start,
        )

    def _event(self, number: int, item: Any) -> Event:
        """An event by the columns of the log, as a request may send it; missing values are absent."""
        schema, encoders = self.dataset.schema, self.dataset.encoders
        event: Event = {}
        for name, kind in schema.event_fields.items():
            value = self.dataset.event_fields[name][number]
            if name in self.dataset.event_contents:
                if kind == "text":
                    event |= {name: self.dataset.event_texts[name][int(value) - 1].as_py()} if value else {}
                elif not np.isnan(vector := self.dataset.event_contents[name][value]).any():
                    event[name] = vector.tolist()
            elif name in encoders.event_values:
                if value:
                    event[name] = encoders.event_values[name][int(value) - 1]
            elif not np.isnan(value):
                # The shortest number that rounds to the float32, as the log wrote it.
                event[name] = _from_days(float(value)) if kind == "time" else float(str(value))
        pair = dict(item) if isinstance(item, dict) else {schema.items.item: item}
        event[schema.events.item_column] = pair.pop(schema.items.item)
        return event | pair | {schema.events.timestamp: self._time(int(self.dataset.times[number]))}

    def _time(self, time: int) -> str | int | float:
        unit = self.dataset.schema.events.time_unit
        if unit == "order":
            return time
        if unit == "datetime":
            return (_EPOCH + timedelta(microseconds=time)).isoformat()
        return time // TIME_UNIT_US[unit] if time % TIME_UNIT_US[unit] == 0 else time / TIME_UNIT_US[unit]


def _from_days(days: float) -> str:
    return (_EPOCH + timedelta(microseconds=round(days * MICROSECONDS_PER_DAY))).isoformat()
