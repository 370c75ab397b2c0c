"""From per-query values to named metrics: over all queries, by history length, and by kind of target."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data import Dataset
from habitus.evaluate.metrics import coverage, mean, mrr, ndcg, perplexity, recall
from habitus.evaluate.queries import QueryBatch
from habitus.evaluate.scores import Scores
from habitus.record import Metric


@dataclass(frozen=True)
class PerQuery:
    """What is known of each query under one regime; every mean can be recomputed from this."""

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
    def of(cls, dataset: Dataset, queries: QueryBatch, scores: Scores, num_candidates: int) -> "PerQuery":
        count = len(queries.targets)
        return cls(
            batch=np.full(count, queries.number),
            user=queries.users,
            event=queries.events,
            target=queries.targets,
            history=queries.histories,
            cold=dataset.item_train_counts[queries.targets] == 0,
            repeat=_is_repeat(queries),
            rank=scores.rank,
            loss=scores.loss,
            entropy=scores.entropy,
            top=scores.top,
            candidates=np.full(count, num_candidates),
        )

    @classmethod
    def joined(cls, parts: list["PerQuery"]) -> "PerQuery":
        columns: dict[str, Any] = {}
        for column in fields(cls):
            values = [getattr(part, column.name) for part in parts]
            columns[column.name] = None if values[0] is None else np.concatenate(values)
        return cls(**columns)

    def taken(self, chosen: np.ndarray, *, rank: np.ndarray, top: np.ndarray) -> "PerQuery":
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

    def write(self, path: Path) -> None:
        """A Parquet file with one row per query."""
        columns = {
            column.name: getattr(self, column.name)
            for column in fields(self)
            if column.name != "top" and getattr(self, column.name) is not None
        }
        table = pa.table({**columns, "top": pa.FixedSizeListArray.from_arrays(self.top.ravel(), self.top.shape[1])})
        pq.write_table(table, path)


def summarise(regime: str, values: PerQuery, cutoffs: tuple[int, ...], histories: tuple[int, ...]) -> dict[str, Metric]:
    """Every per-query metric over all queries and over each slice that has any."""
    metrics = {}
    for slice_name, chosen in _slices(values, histories):
        if not chosen.any():
            continue  # what is missing is absent
        for name, per_query in _per_query(values, cutoffs):
            found = mean(per_query[chosen], values.user[chosen])
            metrics[f"{regime}/{name}{slice_name}"] = Metric(value=found.value, se=found.se, n=found.n)
        loss = metrics.get(f"{regime}/loss{slice_name}")
        if loss is not None and loss.value < 700:
            power = perplexity(loss.value)
            se = None if loss.se is None else power * loss.se  # first order
            metrics[f"{regime}/perplexity{slice_name}"] = Metric(value=power, se=se, n=loss.n)
    return metrics


def coverage_metrics(regime: str, values: PerQuery, cutoffs: tuple[int, ...]) -> dict[str, Metric]:
    """Coverage in both protocols: the mean over evaluation batches, and of the union of all lists."""
    metrics = {}
    batches = [np.flatnonzero(values.batch == number) for number in np.unique(values.batch)]
    pool = _union_of_candidates(regime, values)
    for k in cutoffs:
        each = np.array([coverage(values.top[rows], k, int(values.candidates[rows[0]])) for rows in batches])
        se = float(each.std(ddof=1) / len(each) ** 0.5) if len(each) > 1 else None
        metrics[f"{regime}/coverage@{k}"] = Metric(value=float(each.mean()), se=se, n=len(each))
        metrics[f"{regime}/coverage_union@{k}"] = Metric(value=coverage(values.top, k, pool), n=len(values.rank))
    return metrics


def _union_of_candidates(regime: str, values: PerQuery) -> int:
    """How many candidates there were in all: the catalogue, or every item that was in some batch's pool.

    A pool is the targets of its batch, and all of them but those of a last, partly counted batch are queries.
    """
    if regime == "catalogue":
        return int(values.candidates[0])
    listed = np.unique(values.top[values.top >= 0])
    return len(np.union1d(values.target, listed))


def _per_query(values: PerQuery, cutoffs: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    if values.loss is not None and values.entropy is not None:
        yield "loss", values.loss
        yield "entropy", values.entropy
    for k in cutoffs:
        yield f"recall@{k}", recall(values.rank, k)
        yield f"ndcg@{k}", ndcg(values.rank, k)
        yield f"mrr@{k}", mrr(values.rank, k)


def _slices(values: PerQuery, histories: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    yield "", np.ones(len(values.rank), bool)
    for length in histories:
        yield f"/history={length}", values.history == length
    yield "/cold", values.cold
    yield "/warm", ~values.cold
    yield "/repeat", values.repeat
    yield "/first", ~values.repeat


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
        seen = (place <= slots) & (place > slots - queries.histories[chosen, None])
        repeat[chosen] = ((items == queries.targets[chosen, None]) & seen).any(axis=1)
    return repeat
