"""The batches of training: which windows a step reads, the distinct items in them, and where each slot finds its own.

Two sources fill the same `StepBatch`. `HostBatches` reads mapped files and makes exact shapes, with a share of the
batch for every process and part. `habitus.training.device_batches` holds the data on a GPU and makes fixed shapes, so
that nothing waits for the host. A test compares them.

Letters: B windows, L slots, m queries, n distinct items of the full batch, K extra negatives.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.data import Batch, Dataset
from habitus.evaluation import Ranks
from habitus.model import BatchTensors, DropoutMask, draw_dropout_mask
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.recipe import Recipe
from habitus.training.parallel import ItemShares, pool_firsts

_TABLE_ITEMS = 1 << 22  # up to so many items a table finds the distinct ones; beyond, sorting does


class StepBatch(NamedTuple):
    """A batch, or a part of one, as the loss reads it."""

    inputs: BatchTensors
    event_places: Tensor  # int [B, L]: rows of the table of the step's item vectors
    target_places: Tensor  # int64 [m]: rows of the in-batch candidates
    target_rows: Tensor  # int64 [m]: rows of the catalogue
    slots: Tensor | None  # int64 [m]: the flat slots that have a query; None: all B·L of them
    counted: Tensor | None  # bool [m]: queries that are no padding; None: all
    num_queries: int | Tensor  # of the full batch, over all parts and processes
    weights: Tensor | None = None  # float32 [m]: of the targets, their sizes 1 on average over the full batch; None: 1


# Which windows ------------------------------------------------------------------------------------------------------


class WindowOrder:
    """The windows of every step and what they hold: a function of (seed, step), known without any history."""

    def __init__(self, dataset: Dataset, batch_sequences: int, seed: int) -> None:
        self.dataset, self.batch_sequences, self.seed = dataset, batch_sequences, seed
        self.num_windows = dataset.counts("train").windows
        segments, offsets = dataset.windows("train")
        lengths = segments["length"].astype(np.int64)
        self.events = np.add.reduceat(lengths, offsets[:-1])  # per window
        self.queries = np.add.reduceat(dataset.queries_per_segment("train"), offsets[:-1])
        self.pairs = np.add.reduceat(lengths * (lengths + 1) // 2, offsets[:-1])  # scored by causal attention

    def windows(self, step: int) -> np.ndarray:
        """The windows of one step's batch, int64 [B]."""
        return self._between(step * self.batch_sequences, (step + 1) * self.batch_sequences)

    def totals(self, first: int, steps: int) -> dict[str, int]:
        """Events, queries and attended pairs of steps first..first + steps - 1."""
        counts = {"events": 0, "queries": 0, "pairs": 0}
        size = self.batch_sequences
        start, stop = first * size, (first + steps) * size
        while start < stop:
            epoch = start // self.num_windows
            count = min(stop, (epoch + 1) * self.num_windows) - start
            windows = slice(None) if count == self.num_windows else self._between(start, start + count)
            counts["events"] += int(self.events[windows].sum())
            counts["queries"] += int(self.queries[windows].sum())
            counts["pairs"] += int(self.pairs[windows].sum())
            start += count
        return counts

    def unique_events(self, steps: int) -> int:
        """Distinct events among those of the first steps: windows are disjoint, an epoch holds each once."""
        return self._sum_of_first(self.events, steps)

    def unique_targets(self, steps: int) -> int:
        """Distinct events that are predicted in the first steps."""
        return self._sum_of_first(self.queries, steps)

    def _sum_of_first(self, per_window: np.ndarray, steps: int) -> int:
        count = min(steps * self.batch_sequences, self.num_windows)
        return int(per_window.sum() if count == self.num_windows else per_window[self._between(0, count)].sum())

    def _between(self, start: int, stop: int) -> np.ndarray:
        return self.dataset.window_order("train", start, stop, seed=self.seed)


# Batches made on the host -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostStep:
    """One step, as one process reads it."""

    items: np.ndarray  # int64 [n]: the distinct items of the full batch, targets first
    num_targets: int
    own_items: np.ndarray  # those that this process embeds: its targets, then its others
    own_targets: Tensor  # int64: its targets, the in-batch candidates that it holds
    least_own: int  # items of the process that has the fewest
    stride: int  # rows that every process contributes to the table of all items, padded
    num_queries: int
    parts: tuple[StepBatch, ...]
    drawn: Tensor | None = None  # int64 [K]: the extra negatives of stage 2
    own_extras: Tensor | None = None  # int64: this process's candidates of the second pool
    num_extras: int = 0  # of the full second pool
    valid_targets: Tensor | None = None  # 0 where this process has no target, and the one row it holds does not count
    valid_extras: Tensor | None = None  # the same of the second pool
    # int64 [W], by owner: what leads from a target's place in the first pool to that in the second, and in the table
    to_extras: Tensor | None = None
    to_table: Tensor | None = None


class HostBatches:
    """The steps of this process, its windows in `num_parts` parts.

    Every process knows the full batch, so all agree without communication: who embeds which items, who holds which
    candidates, and how many queries the fullest process has.
    """

    def __init__(self, dataset: Dataset, recipe: Recipe, device: torch.device, ranks: Ranks, num_parts: int) -> None:
        self.dataset, self.recipe, self.device, self.ranks = dataset, recipe.train, device, ranks
        self.num_parts = num_parts
        self.order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
        self.finder = ItemFinder(dataset.num_items)
        # A GPU need not wait for the host: the next step is read, into pinned memory, while it works on this one.
        self._reader = ThreadPoolExecutor(1, "batches") if device.type == "cuda" else None
        self._next: tuple[int, Future[HostStep]] | None = None

    def read(self, step: int) -> HostStep:
        """What this process reads in a step."""
        if self._reader is None:
            return self._read(step)
        current = self._next[1].result() if self._next and self._next[0] == step else self._read(step)
        self._next = step + 1, self._reader.submit(self._read, step + 1)
        return current

    def _read(self, step: int) -> HostStep:
        windows = self.order.windows(step)
        batch = self.dataset.gather("train", windows)
        has_query = batch.targets >= 0
        items, num_targets, targets, events = self.finder.find(batch.targets[has_query], batch.items)
        shares = None
        if self.ranks.world > 1:
            shares = ItemShares.of(items, num_targets, self.ranks)
            events = shares.table_places[events]
        places = np.full(batch.targets.shape, -1, np.int64)
        places[has_query] = targets
        pool_places = None if shares is None else shares.pool_places
        host_step = HostStep(
            items=items,
            num_targets=num_targets,
            own_items=items,
            own_targets=self._tensor(items[:num_targets]),
            least_own=len(items),
            stride=len(items),
            num_queries=len(targets),
            parts=tuple(self._parts(step, windows, batch, items, events, places, pool_places)),
        )
        if shares is not None:
            host_step = replace(
                host_step,
                own_items=shares.own,
                own_targets=self._tensor(shares.own[: max(1, shares.num_own_targets)]),
                least_own=shares.least,
                stride=shares.stride,
                valid_targets=None if shares.num_own_targets else self._tensor(np.zeros((), np.int64)),
                to_table=self._tensor(shares.table_shifts),
            )
        return self._with_extras(host_step, step, shares) if self.recipe.num_negatives else host_step

    def _with_extras(self, host_step: HostStep, step: int, shares: ItemShares | None) -> HostStep:
        """The step with the extra negatives of stage 2; one that is a target too is not twice in their union."""
        keys = shuffle_keys(self.recipe.seed, Stream.NEGATIVES, step)
        candidates = self.dataset.candidate_rows
        drawn = permute_index(np.arange(self.recipe.num_negatives), self.dataset.num_candidates, keys)
        pool = drawn = drawn if candidates is None else candidates[drawn]
        if self.recipe.extra_pool == "union":
            targets = host_step.items[: host_step.num_targets]
            is_target = np.zeros(self.dataset.num_items, bool)
            is_target[targets] = True
            pool = np.concatenate([targets, drawn[~is_target[drawn]]])
        host_step = replace(host_step, drawn=self._tensor(drawn), own_extras=self._tensor(pool), num_extras=len(pool))
        if shares is None:
            return host_step
        owner = pool % self.ranks.world
        own = pool[owner == self.ranks.rank]
        firsts = pool_firsts(np.bincount(owner, minlength=self.ranks.world))
        return replace(
            host_step,
            own_extras=self._tensor(own if len(own) else np.array([self.ranks.rank], np.int64)),
            valid_extras=None if len(own) else self._tensor(np.zeros((), np.int64)),
            to_extras=self._tensor(firsts - shares.pool_firsts),
        )

    def _parts(
        self, step: int, windows: np.ndarray, full: Batch, items: np.ndarray, events: np.ndarray, targets: np.ndarray,
        pool_places: np.ndarray | None,
    ) -> Iterator[StepBatch]:  # fmt: skip
        """The parts of this process; each has as many queries on every process."""
        undivided = self.ranks.world == 1 and self.num_parts == 1
        num_queries = int(np.count_nonzero(targets >= 0))
        scale = 0.0 if full.target_weights is None else num_queries / np.abs(full.target_weights).sum(dtype=np.float64)
        for part in range(self.num_parts):
            spans = [self._span(rank, part, len(windows)) for rank in range(self.ranks.world)]
            start, stop = spans[self.ranks.rank]
            queries = self.order.queries[windows]
            needed = max(int(queries[a:b].sum()) for a, b in spans)
            needed = needed if undivided else max(1, needed)  # all processes score something in every part
            if stop == start:  # more parts than windows: one window without queries keeps the shapes alive
                stop = start + 1 if start < len(windows) else start
                start = stop - 1
                places = np.full(targets[start:stop].size, -1, np.int64)
            else:
                places = targets[start:stop].ravel()
            batch = full if undivided else self.dataset.gather("train", windows[start:stop])
            slots = np.flatnonzero(places >= 0)
            target_places, counted, weights = places[slots], None, None
            if batch.target_weights is not None:
                weights = (batch.target_weights.ravel()[slots] * scale).astype(np.float32)
            if len(slots) < needed:
                counted = self._tensor(np.arange(needed) < len(slots))
                padding = (0, needed - len(slots))
                slots, target_places = np.pad(slots, padding), np.pad(target_places, padding)
                weights = None if weights is None else np.pad(weights, padding)
            yield StepBatch(
                inputs=self._inputs(batch, self._dropout_mask(step, start, batch.items)),
                event_places=self._tensor(events[start:stop]),
                target_places=self._tensor(target_places if pool_places is None else pool_places[target_places]),
                target_rows=self._tensor(items[target_places]),
                slots=self._tensor(slots),
                counted=counted,
                num_queries=num_queries,
                weights=None if weights is None else self._tensor(weights),
            )

    def _span(self, rank: int, part: int, size: int) -> tuple[int, int]:
        """The windows start..stop of a batch of `size` that a process takes in one of its parts."""
        world, parts = self.ranks.world, self.num_parts
        first, last = rank * size // world, (rank + 1) * size // world
        return first + part * (last - first) // parts, first + (part + 1) * (last - first) // parts

    def _dropout_mask(self, step: int, start: int, items: np.ndarray) -> DropoutMask | None:
        """By the windows' places in the full batch: the same whichever process and part has them."""
        if not self.recipe.dropout:
            return None
        first = start * items.shape[1]
        return draw_dropout_mask(self.recipe.seed, step, first, items.size, self.recipe.dropout, self.device)

    def _inputs(self, batch: Batch, dropout_mask: DropoutMask | None) -> BatchTensors:
        return BatchTensors(
            items=self._tensor(batch.items),
            targets=self._tensor(batch.targets),
            positions=self._tensor(batch.positions),
            segments=self._tensor(batch.segments),
            boundaries=self._tensor(batch.boundaries),
            fields={name: self._tensor(values) for name, values in batch.fields.items()},
            dropout_mask=dropout_mask,
        )

    def _tensor(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values if values.flags.writeable and values.flags.c_contiguous else np.array(values))
        return tensor if self._reader is None else tensor.pin_memory().to(self.device, non_blocking=True)


class ItemFinder:
    """Finds the distinct items of a batch, the targets first, each part in the order of the catalogue.

    As `device_batches.distinct_items` does; a table of the catalogue makes it forty times as fast on a host.
    """

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.place = np.zeros(num_items if num_items <= _TABLE_ITEMS else 0, np.int64)

    def find(self, targets: np.ndarray, events: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        """(items, number of distinct targets, place of each target, place of each event) for items of any shape."""
        if not len(self.place):
            return self._find_by_sorting(targets, events)
        present = np.zeros(self.num_items, bool)
        present[targets] = True
        distinct_targets = np.flatnonzero(present)
        present[:] = False
        present[events] = True
        present[distinct_targets] = False
        items = np.concatenate([distinct_targets, np.flatnonzero(present)])
        self.place[items] = np.arange(len(items))
        return items, len(distinct_targets), self.place[targets], self.place[events]

    def _find_by_sorting(
        self, targets: np.ndarray, events: np.ndarray
    ) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        distinct_targets, of_target = np.unique(targets, return_inverse=True)
        distinct_events, of_event = np.unique(events, return_inverse=True)
        is_target = np.isin(distinct_events, distinct_targets, assume_unique=True)
        place = np.empty(len(distinct_events), np.int64)
        place[is_target] = np.searchsorted(distinct_targets, distinct_events[is_target])
        place[~is_target] = len(distinct_targets) + np.arange(np.count_nonzero(~is_target))
        items = np.concatenate([distinct_targets, distinct_events[~is_target]])
        return items, len(distinct_targets), of_target, place[of_event].reshape(events.shape)
