"""Where the targets of a log are: every event, or those to which the schema's [targets] give a weight.

A weight of 0 is context only. Above 0 an event is predicted. Below 0 it says 'not this item': it trains, and no
query of an evaluation asks for it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.columns import to_categories
from habitus.errors import DataError
from habitus.events import Schema, Targets
from habitus.store import SplitName

WEIGHT_FILE = "events/target_weight.npy"
_CHUNK_EVENTS = 1 << 22


@dataclass(frozen=True)
class TargetRows:
    """The rows of the log that count, ascending."""

    trained: np.ndarray  # of a weight other than 0
    scored: np.ndarray  # of a weight above 0

    @classmethod
    def of(cls, weights: np.ndarray) -> "TargetRows":
        """From the weight of every event of the log."""
        trained = _rows_where(weights, lambda chunk: chunk != 0)
        return cls(trained, _rows_where(weights, lambda chunk: chunk > 0) if weights.min(initial=0) < 0 else trained)

    def on(self, side: SplitName) -> np.ndarray:
        return self.trained if side == "train" else self.scored

    def last_before(self, side: SplitName, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """One past the last target in rows begins..ends; `begins` where there is none."""
        rows = self.on(side)
        last = self._num_before(side, ends) - 1
        found = np.where(last >= 0, rows[last].astype(np.int64) + 1, 0) if len(rows) else np.zeros_like(ends)
        return np.maximum(found, begins)

    def count(self, side: SplitName, segments: np.ndarray) -> np.ndarray:
        """How many events of each segment are predicted."""
        begins = segments["start"] + segments["first_target"]
        ends = segments["start"] + segments["length"]
        return self._num_before(side, ends) - self._num_before(side, begins)

    def _num_before(self, side: SplitName, rows: np.ndarray) -> np.ndarray:
        targets = self.on(side)
        return np.searchsorted(targets, rows.astype(targets.dtype))  # of another type, all targets would be copied

    def trim(self, side: SplitName, segments: np.ndarray) -> np.ndarray:
        """The segments up to their last target, for nothing is learnt from what follows it; none without a target."""
        begins = segments["start"] + segments["first_target"]
        ends = self.last_before(side, begins, segments["start"] + segments["length"])
        trimmed = segments.copy()
        trimmed["length"] = ends - segments["start"]
        return trimmed[ends > begins]


def _rows_where(weights: np.ndarray, keeps: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """The rows whose weight is to be kept, in four bytes where that is enough: a log may have 10⁹ of them."""
    dtype = np.dtype(np.uint32 if len(weights) < 2**32 - 1 else np.int64)
    starts = range(0, len(weights), _CHUNK_EVENTS)
    chunks = (np.flatnonzero(keeps(weights[start : start + _CHUNK_EVENTS])) + start for start in starts)
    return np.concatenate([np.empty(0, dtype), *(chunk.astype(dtype) for chunk in chunks)])


def candidate_values(schema: Schema) -> dict[str, tuple[str, ...]]:
    """Category fields of the items, with the values of which a candidate must have one; empty: every item is one.

    Item×value pairs whose value is no target are no candidates.
    """
    if schema.targets is None:
        return {}
    column, weights = schema.targets.column, schema.targets.weights
    wanted = dict(schema.targets.candidates or {})
    if column in schema.events.pair_columns and weights:
        wanted.setdefault(column, tuple(value for value, weight in weights.items() if weight > 0))
    return wanted


def find_candidates(
    schema: Schema,
    values: Mapping[str, Sequence[str]],
    codes: Mapping[str, np.ndarray],
    ids: Callable[[], pa.ChunkedArray],  # read where they matter
) -> np.ndarray | None:
    """Which items may be ranked or recommended, bool [items]; None: all.

    `values` and `codes` are those of the items' category fields. What stands for events without an item is none.
    """
    allowed: np.ndarray | None = None
    if schema.events.no_item is not None:
        named = pc.not_equal(ids().cast(pa.string()), str(schema.events.no_item))
        allowed = named.to_numpy(zero_copy_only=False).astype(bool)
    for name, chosen in candidate_values(schema).items():
        unknown = [value for value in chosen if value not in values[name]]
        if unknown:
            raise DataError(
                f"[targets] candidates: no item has {name} = {', '.join(map(repr, unknown))}",
                expected=f"values of items, such as {', '.join(map(repr, values[name][:3]))}",
                next_step="correct [targets] in the schema",
            )
        found = np.isin(codes[name], [values[name].index(value) + 1 for value in chosen])
        passes = np.asarray(found.reshape(len(found), -1).any(axis=1))  # of several categories one is enough
        allowed = passes if allowed is None else allowed & passes
    return allowed


def weights_of(values: pa.Array, targets: Targets) -> np.ndarray:
    """The weight of each event, float32, from the values of the schema's column; 0 where a value is missing."""
    if targets.weights is None:
        return values.cast(pa.float32()).fill_null(0).to_numpy(zero_copy_only=False)
    names = to_categories(values).fill_null("").to_numpy(zero_copy_only=False)
    weights = np.zeros(len(names), np.float32)
    for name, weight in targets.weights.items():
        weights[names == name] = weight
    return weights
