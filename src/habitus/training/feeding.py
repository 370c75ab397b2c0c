"""What one step reads, made on the host: windows, the distinct items in them, and where each slot finds its own.

Letters: B windows of this process, L slots, m queries, n distinct items of the whole batch, h joint_dim.

Every process knows the whole batch, so all agree without talking: who embeds which items, who holds which
candidates, and how many queries the fullest process has.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from habitus.data import Batch, Dataset, ItemFeatures
from habitus.evaluation import Ranks
from habitus.model import BatchTensors, DropoutMask, ItemTensors, draw_dropout_mask, item_tensors
from habitus.recipe import Recipe
from habitus.training.windows import WindowOrder

_TABLE_ITEMS = 1 << 22  # up to so many items a table finds the distinct ones; beyond, sorting does
_RESIDENT_BYTES = 1 << 30  # item features up to this size are held in memory rather than mapped


@dataclass(frozen=True)
class Micro:
    """Some of a process's windows, with the places of their items and targets."""

    batch: BatchTensors
    events: Tensor  # int64 [B, L]: places of the events' items among all items of the step
    slots: Tensor  # int64 [m]: the flat slots that have a query
    targets: Tensor  # int64 [m]: places of their targets among the candidates
    weights: Tensor | None  # float32 [m]: 0 for queries that only fill up; None where all count


@dataclass(frozen=True)
class Feed:
    """One step, as one process reads it."""

    items: np.ndarray  # int64 [n]: the distinct items of the whole batch, targets first
    num_targets: int
    own_targets: tuple[int, int]  # the stretch of the targets that this process holds as candidates
    own_others: tuple[int, int]  # the stretch of the remaining items that it embeds
    stride: int  # rows that every process contributes to the table of all items, filled up
    num_queries: int  # of the whole batch
    micros: tuple[Micro, ...]


class Feeder:
    """Feeds of this process, step by step."""

    def __init__(self, dataset: Dataset, recipe: Recipe, device: torch.device, ranks: Ranks, accumulate: int) -> None:
        self.dataset = dataset
        self.recipe = recipe.train
        self.device = device
        self.ranks = ranks
        self.accumulate = accumulate
        self.order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
        self.finder = ItemFinder(dataset.num_items)
        # A GPU need not wait for the host: the next feed is made, in pinned memory, while it works on this one.
        self.ahead = ThreadPoolExecutor(1, "feeding") if device.type == "cuda" else None
        self.coming: tuple[int, Future[Feed]] | None = None

    def feed(self, step: int) -> Feed:
        """What this process reads in a step."""
        if self.ahead is None:
            return self._made(step)
        found = self.coming[1].result() if self.coming and self.coming[0] == step else self._made(step)
        self.coming = step + 1, self.ahead.submit(self._made, step + 1)
        return found

    def _made(self, step: int) -> Feed:
        windows = self.order.of_step(step)
        whole = self.dataset.gather("train", windows)
        has_query = whole.targets >= 0
        items, num_targets, targets, events = self.finder.find(whole.targets[has_query], whole.items)
        own_targets = self.ranks.stretch(num_targets)
        own_others = tuple(num_targets + place for place in self.ranks.stretch(len(items) - num_targets))
        stride = -(-num_targets // self.ranks.world) + -(-(len(items) - num_targets) // self.ranks.world)
        if self.ranks.world > 1:
            events = gathered_places(len(items), num_targets, self.ranks.world, stride)[events]
        all_targets = np.full(whole.targets.shape, -1, np.int64)
        all_targets[has_query] = targets
        micros = tuple(self._micros(step, windows, whole, events, all_targets))
        num_queries = len(targets)
        return Feed(items, num_targets, own_targets, own_others, stride, num_queries, micros)  # type: ignore[arg-type]

    def _micros(
        self, step: int, windows: np.ndarray, whole: Batch, events: np.ndarray, targets: np.ndarray
    ) -> Iterator[Micro]:
        """This process's windows in `accumulate` parts; each part has as many queries on every process."""
        alone = self.ranks.world == 1 and self.accumulate == 1
        for part in range(self.accumulate):
            spans = [self._span(rank, part, len(windows)) for rank in range(self.ranks.world)]
            start, stop = spans[self.ranks.rank]
            queries = self.order.queries[windows]
            needed = max(int(queries[a:b].sum()) for a, b in spans)
            if stop == start:  # more parts than windows: one window without queries keeps the shapes alive
                stop = start + 1 if start < len(windows) else start
                start = stop - 1
                here = np.full_like(targets[start:stop], -1)
            else:
                here = targets[start:stop]
            batch = whole if alone else self.dataset.gather("train", windows[start:stop])
            flat = here.ravel()
            slots = np.flatnonzero(flat >= 0)
            chosen, weights = flat[slots], None
            if len(slots) < needed:
                spare = needed - len(slots)
                weights = torch.zeros(needed, device=self.device)
                weights[: len(slots)] = 1
                slots, chosen = np.pad(slots, (0, spare)), np.pad(chosen, (0, spare))
            yield Micro(
                self._batch(batch, self._dropout_mask(step, start, batch.items)),
                self._tensor(events[start:stop]),
                self._tensor(slots),
                self._tensor(chosen),
                weights,
            )

    def _span(self, rank: int, part: int, size: int) -> tuple[int, int]:
        """The windows start..stop of a batch of `size` that a process takes in one of its parts."""
        world, parts = self.ranks.world, self.accumulate
        first, last = rank * size // world, (rank + 1) * size // world
        return first + part * (last - first) // parts, first + (part + 1) * (last - first) // parts

    def _dropout_mask(self, step: int, start: int, items: np.ndarray) -> DropoutMask | None:
        """What dropout draws from: numbers of the windows' places in the whole batch, whoever has them."""
        if not self.recipe.dropout:
            return None
        first = start * items.shape[1]
        return draw_dropout_mask(self.recipe.seed, step, first, items.size, self.recipe.dropout, self.device)

    def _batch(self, batch: Batch, dropout_mask: DropoutMask | None) -> BatchTensors:
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
        return tensor if self.ahead is None else tensor.pin_memory().to(self.device, non_blocking=True)


class ItemFinder:
    """Finds the distinct items of a batch, the targets first, each part in the order of the catalogue."""

    def __init__(self, num_items: int) -> None:
        self.num_items = num_items
        self.place = np.zeros(num_items if num_items <= _TABLE_ITEMS else 0, np.int64)

    def find(self, targets: np.ndarray, events: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        """(items, number of distinct targets, place of each target, place of each event) for items of any shape."""
        if not len(self.place):
            return self._sorted(targets, events)
        present = np.zeros(self.num_items, bool)
        present[targets] = True
        wanted = np.flatnonzero(present)
        present[:] = False
        present[events] = True
        present[wanted] = False
        items = np.concatenate([wanted, np.flatnonzero(present)])
        self.place[items] = np.arange(len(items))
        return items, len(wanted), self.place[targets], self.place[events]

    def _sorted(self, targets: np.ndarray, events: np.ndarray) -> tuple[np.ndarray, int, np.ndarray, np.ndarray]:
        wanted, of_target = np.unique(targets, return_inverse=True)
        every, of_event = np.unique(events, return_inverse=True)
        known = np.isin(every, wanted, assume_unique=True)
        place = np.empty(len(every), np.int64)
        place[known] = np.searchsorted(wanted, every[known])
        place[~known] = len(wanted) + np.arange(np.count_nonzero(~known))
        items = np.concatenate([wanted, every[~known]])
        return items, len(wanted), of_target, place[of_event].reshape(events.shape)


def gathered_places(num_items: int, num_targets: int, world: int, stride: int) -> np.ndarray:
    """Where each item stands once every process has contributed `stride` rows: its targets, its others, filling."""
    place = np.empty(num_items, np.int64)
    for rank in range(world):
        first, last = rank * num_targets // world, (rank + 1) * num_targets // world
        place[first:last] = rank * stride + np.arange(last - first)
        others = num_items - num_targets
        begin, end = num_targets + rank * others // world, num_targets + (rank + 1) * others // world
        place[begin:end] = rank * stride + (last - first) + np.arange(end - begin)
    return place


class ItemReader:
    """Encoded items as tensors: from memory where all of them fit, else from the dataset's files."""

    def __init__(self, dataset: Dataset, recipe: Recipe, device: torch.device) -> None:
        self.model = recipe.model
        self.device = device
        self.read: Callable[[np.ndarray], ItemFeatures] = dataset.item_features
        self.lengths: np.ndarray | None = None  # tokens of every item
        if feature_bytes(dataset) * dataset.num_items <= _RESIDENT_BYTES:
            held = dataset.item_features(np.arange(dataset.num_items))
            tokens = None if held.tokens is None else np.ascontiguousarray(held.tokens[:, : recipe.model.text_len])
            self.lengths = np.zeros(dataset.num_items, np.int64)
            if tokens is not None:
                self.lengths = np.count_nonzero(tokens, axis=1)
            self.read = lambda rows: ItemFeatures(
                None if tokens is None else tokens[rows], {name: v[rows] for name, v in held.fields.items()}
            )

    def tensors(self, rows: np.ndarray) -> ItemTensors:
        """What the embedder reads of these items."""
        return item_tensors(self.read(rows), self.model, self.device)

    def text_counts(self, rows: np.ndarray) -> tuple[int, int]:
        """Tokens of these items, and the sum of their squares per item: what text attention scores."""
        if self.lengths is not None:
            lengths = self.lengths[rows]
        else:
            tokens = self.read(rows).tokens
            lengths = np.zeros(0, np.int64) if tokens is None else (tokens[:, : self.model.text_len] != 0).sum(1)
        return int(lengths.sum()), int((lengths * lengths).sum())


def feature_bytes(dataset: Dataset) -> int:
    """Bytes of one item's encoded fields."""
    one = dataset.item_features(np.arange(1))
    return sum(values.nbytes for values in one.fields.values()) + (0 if one.tokens is None else one.tokens.nbytes)
