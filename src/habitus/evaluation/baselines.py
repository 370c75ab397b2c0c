"""What a model must beat: popularity, recent popularity, repeating, item-to-item transitions, and the world's oracle.

Each is a proper distribution over the catalogue, so that losses compare. What is counted is counted on training
events only. Where the schema has [targets], popularity and what follows an item count targets, and histories hold all
events.
"""

from typing import Any

import numpy as np

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.scores import DenseScorer, Scores
from habitus.evaluation.sparse_scores import SparseScorer
from habitus.events import Queries, ViewQueries, World

_HALF_LIVES = 10  # of recent popularity, in the training span
_REPEAT_SHARE = 0.8  # of the probability that repeating gives to the visible history
_TYPE, _PURCHASE = "event_type", "purchase"  # of a world with views
_PRIOR_TRANSITIONS = 5.0  # transitions that popularity is worth in the item-to-item model


def baselines(dataset: Dataset) -> list[Any]:
    """All baselines of a dataset; the oracle too where the dataset is a world whose law of the targets is known."""
    scorers: list[Any] = [Popularity(dataset), RecentPopularity(dataset), Repeat(dataset), Transitions(dataset)]
    return [*scorers, OracleScorer(dataset)] if has_oracle(dataset) else scorers


def has_oracle(dataset: Dataset) -> bool:
    """Whether a dataset is a world that knows the law of what is asked: with views, of purchases or of all events."""
    schema = dataset.schema
    if schema.world is None or not schema.world.views_per_purchase:
        return schema.world is not None
    if schema.targets is None:
        return _TYPE in schema.events.fields
    predicted = [value for value, weight in (schema.targets.weights or {}).items() if weight > 0]
    return schema.targets.column == _TYPE and predicted == [_PURCHASE]


class Popularity(SparseScorer):
    """Each item in proportion to its training targets, plus one."""

    name = "popularity"

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(self._weights(dataset) + 1.0)

    def _weights(self, dataset: Dataset) -> np.ndarray:
        return dataset.item_target_counts.astype(np.float64)


class RecentPopularity(Popularity):
    """Popularity in which an event's weight halves every tenth of the training span."""

    name = "recent popularity"

    def _weights(self, dataset: Dataset) -> np.ndarray:
        weights = np.zeros(dataset.num_items)
        events = train_events(dataset)
        events = events[dataset.is_target(events)]
        times = dataset.times[events]
        span = max(int(times.max() - times.min()), 1) if len(times) else 1
        decay = 0.5 ** ((times.max(initial=0) - times) / span * _HALF_LIVES)
        np.add.at(weights, dataset.items[events], decay)
        # As many events in total as before, so that plus one means the same.
        return weights * (len(events) / max(weights.sum(), 1e-300))


class Repeat(SparseScorer):
    """The items of the visible history, the most recent first with weight 1/lag; popularity for the rest."""

    name = "repeat recent"

    def __init__(self, dataset: Dataset) -> None:
        super().__init__((1 - _REPEAT_SHARE) * _popularity(dataset))

    def additions(self, queries: QueryBatch, query: int) -> tuple[np.ndarray, np.ndarray]:
        visible = queries.visible(query)
        weights = 1.0 / np.arange(len(visible), 0, -1)
        items, places = np.unique(visible, return_inverse=True)
        return items, np.bincount(places, weights * (_REPEAT_SHARE / weights.sum()))


class Transitions(SparseScorer):
    """What followed the last item in training, smoothed by popularity."""

    name = "item to item"

    def __init__(self, dataset: Dataset) -> None:
        from scipy.sparse import csr_matrix

        super().__init__(_PRIOR_TRANSITIONS * _popularity(dataset))
        before, after = train_pairs(dataset)
        shape = (dataset.num_items, dataset.num_items)
        self.pairs = csr_matrix((np.ones(len(before)), (before, after)), shape=shape)
        self.pairs.sum_duplicates()

    def additions(self, queries: QueryBatch, query: int) -> tuple[np.ndarray, np.ndarray]:
        last = queries.batch.items[queries.windows[query], queries.slots[query]]
        row = slice(self.pairs.indptr[last], self.pairs.indptr[last + 1])
        return self.pairs.indices[row], self.pairs.data[row]


class OracleScorer:
    """The exact conditional of a synthetic world, given the user's full history: nothing can do better."""

    name = "oracle"

    def __init__(self, dataset: Dataset) -> None:
        if dataset.schema.world is None:
            raise ConfigError(f"{dataset.path} is not a synthetic world, so it has no oracle")
        if not has_oracle(dataset):
            raise ConfigError(
                f"{dataset.path}, a world with views, predicts neither purchases nor all events: it has no oracle",
                expected=f"[targets] of {_TYPE!r} that weigh {_PURCHASE!r} alone, or none and {_TYPE!r} as a field",
            )
        self.world = World(dataset.schema.world)
        self.dataset = dataset
        self.num_items = dataset.num_items
        self.views = None if self.world.view_oracle is None else _ViewsOracle(dataset, self.world)

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        if self.views is not None:
            return self.views.score(queries, candidates, k, losses=losses)
        if candidates is not None:
            return _RestrictedOracle(self).score(queries, candidates, k, losses=losses)
        oracle, world_queries = self.world.oracle, self.world_queries(queries, slice(None))
        width = min(k, self.num_items)
        top = oracle.top(world_queries, width)[0] if width else np.empty((len(queries.targets), 0), np.int64)
        return Scores(
            loss=-oracle.log_probs(world_queries) if losses else None,
            entropy=oracle.entropies(world_queries) if losses else None,
            rank=oracle.ranks(world_queries),
            top=np.pad(top, ((0, 0), (0, k - width)), constant_values=-1),
        )

    def world_queries(self, queries: QueryBatch, chosen: slice) -> Queries:
        """The chosen queries as the world's oracle takes them."""
        events = queries.events[chosen] + 1  # the target's row
        return Queries.of_events(self.dataset.items, self.dataset.user_offsets[:-1], events)


class _RestrictedOracle(DenseScorer):
    """The oracle's conditional restricted to some candidates."""

    name = "oracle"
    writes_full_rows = True

    def __init__(self, oracle: OracleScorer) -> None:
        self.oracle = oracle
        self.num_items = oracle.num_items

    def log_probs(self, queries: QueryBatch, chosen: slice, candidates: np.ndarray | None) -> np.ndarray:
        dense = self.oracle.world.oracle.conditionals(self.oracle.world_queries(queries, chosen))
        with np.errstate(divide="ignore"):
            return np.log(dense if candidates is None else dense[:, candidates])


class _ViewsOracle(DenseScorer):
    """The exact conditional of a world with views: of the next purchase, or of the next event without [targets]."""

    name = "oracle"
    writes_full_rows = True

    def __init__(self, dataset: Dataset, world: World) -> None:
        assert world.view_oracle is not None
        self.dataset, self.num_items = dataset, dataset.num_items
        if dataset.target_weight is not None:
            self.law, self.is_purchase = world.view_oracle.next_purchase, dataset.target_weight > 0
            return
        purchase = dataset.encoders.event_values[_TYPE].index(_PURCHASE) + 1
        self.law, self.is_purchase = world.view_oracle.next_event, dataset.event_fields[_TYPE] == purchase

    def log_probs(self, queries: QueryBatch, chosen: slice, candidates: np.ndarray | None) -> np.ndarray:
        dense = self.law(self.view_queries(queries.events[chosen] + 1))
        with np.errstate(divide="ignore"):
            return np.log(dense if candidates is None else dense[:, candidates])

    def view_queries(self, events: np.ndarray) -> ViewQueries:
        """The queries whose targets are these rows of the log."""
        starts = self.dataset.user_offsets[:-1]
        return ViewQueries.of_events(self.dataset.items, self.is_purchase, starts, events)


def _popularity(dataset: Dataset) -> np.ndarray:
    counts = dataset.item_target_counts + 1.0
    return counts / counts.sum()


def train_events(dataset: Dataset) -> np.ndarray:
    """The rows of the log that train."""
    segments = dataset.windows("train").segments
    lengths = segments["length"].astype(np.int64)
    before = np.cumsum(lengths) - lengths
    return np.repeat(segments["start"] - before, lengths) + np.arange(lengths.sum())


def train_pairs(dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Item and next item of every training query, where that is a target."""
    segments = dataset.windows("train").segments
    lengths = segments["length"].astype(np.int64) - 1
    before = np.cumsum(lengths) - lengths
    rows = np.repeat(segments["start"] - before, lengths) + np.arange(lengths.sum())
    rows = rows if dataset.target_weight is None else rows[dataset.is_target(rows + 1)]
    return dataset.items[rows], dataset.items[rows + 1]
