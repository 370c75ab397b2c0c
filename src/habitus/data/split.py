"""Which events train, which validate and which test."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import not_
from typing import Self

import numpy as np
import pyarrow as pa
from pydantic import Field

from habitus.store import SplitKind
from habitus.typed import Typed

TRAIN, VALIDATION, TEST = 0, 1, 2  # sides of events and of users, as int8


class Split(Typed):
    """A user's history is training events, then validation events, then test events; any of them may be missing.

    user: all events of a user are on one side. time: up to a time, up to a later one, and after it. last: all but
    the last two, the last but one, the last.
    """

    kind: SplitKind = "user"
    validation_share: float = Field(0.1, gt=0, lt=1, description="Of users, or of events by time.")
    test_share: float = Field(
        0.0, ge=0, lt=1, exclude_if=not_, description="Likewise; absent: there is no test side. 'last' takes any share."
    )
    seed: int = Field(0, ge=0, description="Of the hash that chooses validation and test users.")
    time_cut_us: int | None = Field(None, description="For 'time': where validation begins.")
    test_cut_us: int | None = Field(None, description="For 'time': where test begins.")

    def with_cuts(self, time_at: Callable[[float], int]) -> Self:
        """With the cuts of 'time'; `time_at` gives the time at which a share of the events has passed."""
        if self.kind != "time":
            return self
        cuts = {"time_cut_us": time_at(1 - (self.validation_share + self.test_share))}
        if self.test_share:
            cuts["test_cut_us"] = time_at(1 - self.test_share)
        return self.model_copy(update=cuts)

    def user_sides(self, ids: pa.Array) -> np.ndarray:
        """The side of each user, by a hash of the id: a user stays where it is when others come or go, and a
        validation user stays one whatever the test share is."""
        sides = np.full(len(ids), TRAIN, np.int8)
        if self.kind != "user":
            return sides
        salt = f"{self.seed}:".encode()
        hashes = np.fromiter(
            (
                int.from_bytes(hashlib.md5(salt + str(value).encode()).digest()[:8], "little")
                for value in ids.to_pylist()
            ),
            np.uint64,
            len(ids),
        )
        sides[hashes < np.uint64(int((self.validation_share + self.test_share) * 2**64))] = TEST
        sides[hashes < np.uint64(int(self.validation_share * 2**64))] = VALIDATION
        return sides

    def event_sides(self, user_sides: np.ndarray, times_us: np.ndarray, places: "EventPlaces") -> np.ndarray:
        """The side of each of a chunk's events; `user_sides` holds that of the event's user."""
        if self.kind == "user":
            return user_sides
        sides = np.full(len(times_us), TRAIN, np.int8)
        if self.kind == "time":
            assert self.time_cut_us is not None
            sides[times_us >= self.time_cut_us] = VALIDATION
            if self.test_cut_us is not None:
                sides[times_us >= self.test_cut_us] = TEST
        elif not self.test_share:
            sides[places.after == 0] = VALIDATION
        else:  # a user's second event validates where there is no third, and the only one trains
            sides[(places.before >= 1) & (places.after <= 1)] = VALIDATION
            sides[(places.before >= 2) & (places.after == 0)] = TEST
        return sides


@dataclass(frozen=True)
class EventPlaces:
    """Where the events of a chunk stand in their users' histories."""

    is_first: np.ndarray  # bool [n]: the user's first event
    num_before: int  # events of the chunk's first user in earlier chunks
    num_after: int  # events of its last user in later chunks; 2 means two or more

    @property
    def before(self) -> np.ndarray:
        """How many events of the same user come before each event."""
        return np.arange(len(self.is_first)) - np.repeat(self._begins, self._counts)

    @property
    def after(self) -> np.ndarray:
        """How many come after it; 2 at the end of a chunk means two or more."""
        ends = np.append(self._begins[1:], len(self.is_first) + self.num_after)
        return np.repeat(ends, self._counts) - 1 - np.arange(len(self.is_first))

    @cached_property
    def _begins(self) -> np.ndarray:
        begins = np.flatnonzero(self.is_first)
        return begins if self.is_first[0] else np.append(-self.num_before, begins)

    @property
    def _counts(self) -> np.ndarray:
        """Events of each user in this chunk."""
        return np.diff(np.append(np.maximum(self._begins, 0), len(self.is_first)))
