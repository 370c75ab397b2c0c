"""The values of each query under one regime, and the Parquet file that holds them."""

from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.scores import Scores


@dataclass(frozen=True)
class PerQuery:
    """One entry per query; every mean can be recomputed from this."""

    batch: np.ndarray  # number of the evaluation batch
    user: np.ndarray
    event: np.ndarray  # row of the last visible event in the log
    target: np.ndarray
    history: np.ndarray
    cold: np.ndarray  # the target was never in training
    repeat: np.ndarray  # the target is in the visible history
    rank: np.ndarray
    loss: np.ndarray | None  # absent where history was excluded
    entropy: np.ndarray | None
    top: np.ndarray  # [Q, k]
    candidates: np.ndarray  # how many the query was ranked among

    @classmethod
    def of(cls, queries: QueryBatch, scores: Scores, train_counts: np.ndarray, num_candidates: int) -> "PerQuery":
        """The queries of one batch; `train_counts` says how often each item occurs in training."""
        count = len(queries.targets)
        return cls(
            batch=np.full(count, queries.number),
            user=queries.users,
            event=queries.events,
            target=queries.targets,
            history=queries.histories,
            cold=train_counts[queries.targets] == 0,
            repeat=_is_repeat(queries),
            rank=scores.rank,
            loss=scores.loss,
            entropy=scores.entropy,
            top=scores.top,
            candidates=np.full(count, num_candidates),
        )

    @classmethod
    def concatenate(cls, parts: list["PerQuery"]) -> "PerQuery":
        """The queries of several batches as one."""
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            columns[column.name] = None if values[0] is None else np.concatenate(values)
        return cls(**columns)

    def select(self, chosen: np.ndarray, *, rank: np.ndarray, top: np.ndarray) -> "PerQuery":
        """Some queries with other ranks and lists, and without loss and entropy, which no longer hold."""
        columns = {
            column.name: getattr(self, column.name)[chosen]
            for column in fields(self)
            if column.name not in ("rank", "loss", "entropy", "top")
        }
        return replace(self, **columns, rank=rank, loss=None, entropy=None, top=top)

    @property
    def num_candidates(self) -> int:
        """Candidates per query; in the batch regime the mean over queries, rounded."""
        return round(float(self.candidates.mean())) if len(self.candidates) else 0

    def table(self, scorer: str, regime: str) -> pa.Table:
        """One row per query; values that do not exist are null."""
        count = len(self.rank)
        columns: dict[str, Any] = {
            "scorer": pa.array([scorer] * count, pa.string()),
            "regime": pa.array([regime] * count, pa.string()),
        }
        for column in fields(self):
            values = getattr(self, column.name)
            if column.name == "top" and not values.shape[1]:
                continue  # there are no lists
            if column.name == "top":
                columns["top"] = pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
            else:
                columns[column.name] = pa.nulls(count, pa.float64()) if values is None else pa.array(values)
        return pa.table(columns)


class _Tabular(Protocol):
    def table(self, scorer: str, regime: str) -> pa.Table: ...


class PerQueryFile:
    """A Parquet file that takes the queries of one scorer and regime after the other."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._partial = self.path.with_name(f".{self.path.name}.partial")
        self._writer: pq.ParquetWriter | None = None

    def add(self, scorer: str, regime: str, values: _Tabular) -> None:
        """Append the queries of one scorer under one regime, or the users of one horizon."""
        table = values.table(scorer, regime)
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._partial, table.schema, compression="zstd")
        self._writer.write_table(table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
                if error is None:
                    self._partial.replace(self.path)
        finally:
            self._partial.unlink(missing_ok=True)


def _is_repeat(queries: QueryBatch) -> np.ndarray:
    """Whether each target occurs among the items that its query sees."""
    length = queries.batch.items.shape[1]
    place = np.arange(length)
    repeat = np.empty(len(queries.targets), bool)
    step = max(1, (1 << 22) // length)
    for first in range(0, len(repeat), step):
        chosen = slice(first, first + step)
        items = queries.batch.items[queries.windows[chosen]]
        slots = queries.slots[chosen, None]
        visible = (place <= slots) & (place > slots - queries.histories[chosen, None])
        repeat[chosen] = ((items == queries.targets[chosen, None]) & visible).any(axis=1)
    return repeat
