"""Which events train and which validate."""

import hashlib

import numpy as np
import pyarrow as pa
from pydantic import Field

from habitus.store import SplitKind
from habitus.typed import Typed


class Split(Typed):
    """A user's training events are always a prefix of the history: all or none, up to a time, all but the last."""

    kind: SplitKind = "user"
    validation_share: float = Field(0.1, gt=0, lt=1, description="Of users, or of events by time.")
    seed: int = Field(0, ge=0, description="Of the hash that chooses validation users.")
    time_cut_us: int | None = Field(None, description="For 'time': where validation begins.")

    def trains(self, is_train_user: np.ndarray, times_us: np.ndarray, is_last: np.ndarray) -> np.ndarray:
        """Which of a chunk's events train."""
        if self.kind == "user":
            return is_train_user
        if self.kind == "time":
            return times_us < self.time_cut_us
        return ~is_last

    def train_users(self, ids: pa.Array) -> np.ndarray:
        """Which users train, by a hash of the id: a user stays where it is when others come or go."""
        if self.kind != "user":
            return np.ones(len(ids), bool)
        threshold = int(self.validation_share * 2**64)
        salt = f"{self.seed}:".encode()
        return np.fromiter(
            (
                int.from_bytes(hashlib.md5(salt + str(value).encode()).digest()[:8], "little") >= threshold
                for value in ids.to_pylist()
            ),
            bool,
            len(ids),
        )
