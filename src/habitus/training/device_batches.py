"""The training data on a device: batches are put together there, with fixed shapes and nothing for the host to do.

Letters: B windows, L slots, S segments per window at most, I items, T text tokens per item.

Every function runs on CPU tensors as well, where the tests compare it with batches made on the host.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.data import PADDING_TOKEN, Dataset, Field
from habitus.evaluation import Ranks
from habitus.model import (
    BatchTensors,
    DropoutMask,
    ItemDropout,
    ItemTensors,
    TextCapacity,
    drop_features,
    pack_text,
)
from habitus.recipe import Recipe
from habitus.training.batches import StepBatch
from habitus.training.items import feature_bytes, text_lengths
from habitus.training.parallel import owned_items


class DeviceBatch(NamedTuple):
    """One batch in fixed shapes, and its distinct items: the targets first, each part in the catalogue's order."""

    items: Tensor  # int64 [B, L]: catalogue rows
    targets: Tensor  # int64 [B, L]: catalogue rows; where there is no query, that of some other target
    has_query: Tensor  # bool [B, L]
    positions: Tensor  # int32 [B, L]
    segments: Tensor  # int32 [B, L]
    boundaries: Tensor  # int32 [B·(S+1)+1]
    rows: Tensor  # int64 [min(2·B·L, I)]: the distinct items; 0 beyond the last
    event_places: Tensor  # int32 [B, L]: where each event's item stands among them
    target_places: Tensor  # int64 [B, L]
    # int64 [5]: distinct targets, distinct items, their tokens, the sum of tokens², queries; see also `share_batch`
    counts: Tensor
    weights: Tensor | None  # float32 [B, L]: of the targets, their sizes 1 on average; None: all 1
    fields: tuple[Tensor, ...]  # [B, L, ...] each, in the order of the dataset's event fields

    def step_batch(
        self,
        names: tuple[str, ...],
        dropout_mask: DropoutMask | None = None,
        text_capacity: TextCapacity | None = None,
    ) -> StepBatch:
        """The batch as the loss reads it: a query in every slot, and a mask of those that count."""
        fields = dict(zip(names, self.fields, strict=True))
        edges = self.boundaries.flatten()
        inputs = BatchTensors(
            self.items, self.targets, self.positions, self.segments, edges, fields, dropout_mask, text_capacity
        )
        return StepBatch(
            inputs=inputs,
            event_places=self.event_places,
            target_places=self.target_places.flatten(),
            target_rows=self.targets.flatten(),
            slots=None,
            counted=self.has_query.flatten(),
            num_queries=self.counts[4],
            weights=None if self.weights is None else self.weights.flatten(),
        )

    @property
    def own_counts(self) -> tuple[Tensor, Tensor]:
        """How many of `rows` are targets, and how many count at all."""
        targets, items = self.counts[5:7] if len(self.counts) > 5 else self.counts[:2]
        return targets, items

    def tensors(self) -> list[Tensor]:
        """All tensors, in one order."""
        return [*(value for value in self[:-1] if value is not None), *self.fields]

    def clone(self) -> "DeviceBatch":
        """The same values in memory of their own."""
        tensors = {name: value for name, value in self._asdict().items() if name not in ("fields", "weights")}
        copies = {name: value.clone() for name, value in tensors.items()}
        weights = None if self.weights is None else self.weights.clone()
        return DeviceBatch(**copies, weights=weights, fields=tuple(field.clone() for field in self.fields))


class DeviceEvents:
    """Events and windows of the training split as tensors. Nothing writes to them."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        self.seq_len = dataset.seq_len
        self.num_items = dataset.num_items
        self.max_segments = dataset.counts("train").max_segments
        narrow = torch.int32 if dataset.num_items < 2**31 else torch.int64
        self.item = torch.from_numpy(np.array(dataset.items)).to(narrow).to(device)
        weight = dataset.target_weight
        self.target_weight = None if weight is None else torch.from_numpy(np.array(weight)).to(device)
        self.names = tuple(spec.name for spec in dataset.fields.event)
        self.is_number = tuple(spec.kind != "category" for spec in dataset.fields.event)
        self.columns = [_column(dataset.event_fields[spec.name], spec).to(device) for spec in dataset.fields.event]
        self.contents = [
            torch.from_numpy(np.array(dataset.event_contents[spec.name], spec.dtype)).to(device) if spec.rows else None
            for spec in dataset.fields.event
        ]
        segments, offsets = dataset.windows("train")
        self.offsets = torch.from_numpy(np.array(offsets)).to(device)
        self.start = torch.from_numpy(np.array(segments["start"])).to(device)
        self.length = torch.from_numpy(segments["length"].astype(np.int64)).to(device)
        self.first_target = torch.from_numpy(segments["first_target"].astype(np.int64)).to(device)

    def assemble(self, windows: Tensor, lengths: Tensor) -> DeviceBatch:
        """The batch of these windows [B]; `lengths` [I] are the tokens of every item."""
        B, L, S = len(windows), self.seq_len, self.max_segments  # noqa: N806
        device = windows.device
        slot = torch.arange(L, device=device)
        number = torch.arange(S, device=device)
        first = self.offsets[windows][:, None]
        exists = number < self.offsets[windows + 1][:, None] - first  # [B, S]
        segment = torch.where(exists, first + number, 0)
        length = torch.where(exists, self.length[segment], 0)
        ends = length.cumsum(1)
        filled = ends[:, -1:]
        begins = ends - length
        # Which segment a slot lies in: as many as have ended before it.
        place = torch.searchsorted(ends, slot.expand(B, L).contiguous(), right=True)
        empty = slot >= filled
        inside = place.clamp(max=S - 1)
        position = slot - begins.gather(1, inside)
        row = torch.where(empty, 0, self.start[segment].gather(1, inside) + position)
        following = position + 1
        has_query = ~empty & (following < length.gather(1, inside))
        has_query &= following >= self.first_target[segment].gather(1, inside)
        items = torch.where(empty, 0, self.item[row].long())
        weights = None
        if self.target_weight is not None:
            weights = torch.where(has_query, self.target_weight[torch.where(has_query, row + 1, 0)], 0)
            has_query &= weights != 0
            weights = weights * (has_query.sum() / weights.abs().sum(dtype=torch.float64)).float()
        targets = torch.where(has_query, self.item[torch.where(has_query, row + 1, 0)].long(), -1)
        targets = torch.where(has_query, targets, targets.max())  # padding that is a target in any case
        # A segment that is not there begins where the next one does: repeated boundaries divide nothing.
        edges = torch.cat((begins, filled), 1) + (torch.arange(B, device=device) * L)[:, None]
        boundaries = torch.cat((edges.flatten(), torch.full((1,), B * L, device=device))).int()
        rows, event_places, target_places, num_targets, num_items = distinct_items(items, targets, self.num_items)
        tokens = torch.where(torch.arange(len(rows), device=device) < num_items, lengths[rows].long(), 0)
        counts = torch.stack((num_targets, num_items, tokens.sum(), (tokens * tokens).sum(), has_query.sum()))
        fields = tuple(
            content[torch.where(empty, 0, column[row].int())]
            if content is not None
            else torch.where(empty, torch.nan, column[row].float())
            if number_field
            else torch.where(empty, 0, column[row].int())
            for column, content, number_field in zip(self.columns, self.contents, self.is_number, strict=True)
        )
        return DeviceBatch(
            items, targets, has_query, torch.where(empty, 0, position).int(), torch.where(empty, -1, place).int(),
            boundaries, rows, event_places, target_places, counts, weights, fields,
        )  # fmt: skip


def distinct_items(items: Tensor, targets: Tensor, num_items: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, places of items, places of targets, number of distinct targets, number of distinct items).

    One sort of all ids, a target before an event of the same item: the first of a run tells what the item is.
    """
    shape, size = items.shape, items.numel()
    narrow = torch.int32 if 2 * num_items < 2**31 else torch.int64
    keys = torch.cat((targets.flatten() * 2, items.flatten() * 2 + 1)).to(narrow)
    ordered, origin = keys.sort()
    item = ordered.long() >> 1
    fresh = torch.ones_like(item, dtype=torch.bool)
    fresh[1:] = item[1:] != item[:-1]
    is_target = fresh & (ordered % 2 == 0)
    is_other = fresh & (ordered % 2 == 1)
    num_targets = is_target.sum()
    place = torch.where(is_target, is_target.cumsum(0) - 1, num_targets + is_other.cumsum(0) - 1)
    run = fresh.cumsum(0) - 1  # every id of a run has the place of its first
    capacity = min(2 * size, num_items)
    first_place = torch.zeros(2 * size + 1, dtype=torch.int64, device=items.device)
    first_place.scatter_(0, torch.where(fresh, run, 2 * size), place)
    rows = torch.zeros(capacity + 1, dtype=torch.int64, device=items.device)
    rows.scatter_(0, torch.where(fresh, place, capacity), item)
    places = torch.empty_like(first_place[:-1]).scatter_(0, origin, first_place[run])
    return (
        rows[:capacity],
        places[size:].view(shape).int(),  # a lookup's gradient sorts these: narrow ones are sorted faster
        places[:size].view(shape),
        num_targets,
        num_targets + is_other.sum(),
    )


def share_batch(batch: DeviceBatch, lengths: Tensor, num_items: int, ranks: Ranks) -> DeviceBatch:
    """This process's share of a full batch: its windows, its distinct items, and places among its owner's for all.

    Counts go on behind those of the full batch: own targets, own items, and the most targets, items and tokens that
    any process has. `places_among` makes places of all processes out of those.
    """
    world, rank = ranks.world, ranks.rank
    rows, place = batch.rows, torch.arange(len(batch.rows), device=batch.rows.device)
    owner = torch.where(place < batch.counts[1], rows % world, world)
    ordered, order = owner.sort(stable=True)
    is_owner = owner[:, None] == torch.arange(world, device=rows.device)
    sizes = is_owner.sum(0)
    firsts = torch.cat((sizes, sizes.new_zeros(1))).cumsum(0) - torch.cat((sizes, sizes.new_zeros(1)))
    local = torch.empty_like(place).scatter_(0, order, place - firsts[ordered])
    capacity = min(len(rows), -(-num_items // world))
    number = torch.arange(capacity, device=rows.device)
    own = torch.where(number < sizes[rank], rows[order][(firsts[rank] + number).clamp(max=len(rows) - 1)], rank)
    targets = (is_owner & (place < batch.counts[0])[:, None]).sum(0)
    tokens = (is_owner * lengths[rows].long()[:, None]).sum(0)
    own_counts = torch.stack((targets[rank], sizes[rank], targets.max(), sizes.max(), tokens.max()))
    num_windows, seq_len = batch.items.shape
    first, last = rank * num_windows // world, (rank + 1) * num_windows // world
    per_window = (len(batch.boundaries) - 1) // num_windows
    boundaries = batch.boundaries[first * per_window : last * per_window] - first * seq_len
    end = torch.full_like(boundaries[:1], (last - first) * seq_len)
    mine = slice(first, last)
    return batch._replace(
        items=batch.items[mine],
        targets=batch.targets[mine],
        has_query=batch.has_query[mine],
        positions=batch.positions[mine],
        segments=batch.segments[mine],
        boundaries=torch.cat((boundaries, end)),
        rows=own,
        event_places=local[batch.event_places[mine].long()].int(),
        target_places=local[batch.target_places[mine]],
        counts=torch.cat((batch.counts, own_counts)),
        weights=None if batch.weights is None else batch.weights[mine],
        fields=tuple(field[mine] for field in batch.fields),
    )


_events_on_device: dict[tuple[object, ...], DeviceEvents] | None = None  # one at a time


@contextmanager
def keep_events_on_device() -> Iterator[None]:
    """Within the block events stay on their device from run to run, one dataset's at a time: for cells of a sweep."""
    global _events_on_device
    before, _events_on_device = _events_on_device, {}
    try:
        yield
    finally:
        _events_on_device = before


def load_events(dataset: Dataset, device: torch.device) -> DeviceEvents:
    """The dataset's events on a device, those of the last run within `keep_events_on_device`."""
    if _events_on_device is None:
        return DeviceEvents(dataset, device)
    view = dataset.seq_len, dataset.user_share, dataset.user_part, dataset.includes_validation
    key = (dataset.checksum, *view, device)
    if key not in _events_on_device:
        _events_on_device.clear()
        _events_on_device[key] = DeviceEvents(dataset, device)
    return _events_on_device[key]


@dataclass
class DeviceItems:
    """The encoded fields of this process's items as tensors: every world-th of the catalogue."""

    tokens: Tensor | None  # [I, T], or I / W rows of it
    lengths: Tensor  # int16 [I]: tokens per item, of all items; 0 without text
    fields: dict[str, Tensor]
    world: int = 1

    @classmethod
    def of(
        cls,
        dataset: Dataset,
        recipe: Recipe,
        device: torch.device,
        *,
        features: bool = True,
        ranks: Ranks | None = None,
    ) -> "DeviceItems":
        """The items of a dataset; without `features` only what counting needs."""
        ranks = ranks or Ranks()
        lengths = torch.zeros(dataset.num_items, dtype=torch.int16, device=device)
        if not features:
            return cls(None, lengths, {}, ranks.world)
        encoded = dataset.item_features(np.arange(dataset.num_items)[owned_items(dataset.num_items, ranks)])
        fields = {name: torch.from_numpy(np.array(values)).to(device) for name, values in encoded.fields.items()}
        tokens = None
        if encoded.tokens is not None:
            tokens = torch.from_numpy(np.array(encoded.tokens[:, : recipe.model.text_len])).to(device)
            if ranks.world == 1:
                lengths = (tokens != PADDING_TOKEN).sum(1).to(torch.int16)
            else:
                lengths = torch.from_numpy(text_lengths(dataset, recipe.model.text_len)).to(device)
        return cls(tokens, lengths, fields, ranks.world)

    def read(self, rows: Tensor, count: Tensor, token_capacity: int, dropout: ItemDropout | None = None) -> ItemTensors:
        """The first `count` of these rows as the embedder reads them; the others are there, without text."""
        rows = rows if self.world == 1 else rows // self.world
        tokens, fields = None, {name: values[rows] for name, values in self.fields.items()}
        if self.tokens is not None:
            valid = torch.arange(len(rows), device=rows.device) < count
            tokens = torch.where(valid[:, None], self.tokens[rows], PADDING_TOKEN)
        if dropout is not None:
            tokens, fields = drop_features(tokens, fields, dropout)
        return ItemTensors(None if tokens is None else pack_text(tokens, token_capacity), fields)


def device_bytes(dataset: Dataset, world: int = 1) -> int:
    """Bytes that the data would take on a device, one of so many that share the items."""
    event_bytes = 4 + sum(1 if f.kind == "category" and f.size <= 256 else 4 for f in dataset.fields.event)
    event_bytes += 0 if dataset.target_weight is None else 4
    segments, offsets = dataset.windows("train")
    contents = sum(4 * table.size for table in dataset.event_contents.values())
    return (
        contents
        + dataset.num_events * event_bytes
        + dataset.num_items * (feature_bytes(dataset) // world + 8)
        + segments.nbytes
        + offsets.nbytes
    )


def text_capacity(dataset: Dataset, batch_sequences: int, text_len: int) -> TextCapacity | None:
    """Room for the event texts of any batch: those of the fullest windows together; None without such fields."""
    segments, offsets = dataset.windows("train")
    capacity = None
    for spec in dataset.fields.event:
        if spec.kind != "text":
            continue
        lengths = np.count_nonzero(dataset.event_contents[spec.name][:, :text_len], axis=1)
        lengths = lengths[dataset.event_fields[spec.name]]
        rooms = []
        for per_event in (lengths > 0, lengths):
            running = np.concatenate([[0], np.cumsum(per_event, dtype=np.int64)])
            per_segment = running[segments["start"] + segments["length"]] - running[segments["start"]]
            fullest = np.sort(np.add.reduceat(per_segment, offsets[:-1]))[::-1]
            times = batch_sequences // len(fullest) + 2  # a batch may hold the end of an epoch and the next one's begin
            rooms.append(int(np.repeat(fullest[:batch_sequences], times)[:batch_sequences].sum()))
        texts, tokens = min(rooms[0], (spec.rows or 1) - 1) + 1, max(128, -(-rooms[1] // 128) * 128)
        before = capacity or TextCapacity(0, 0)
        capacity = TextCapacity(max(before.texts, texts), max(before.tokens, tokens))
    return capacity


def _column(values: np.ndarray, spec: Field) -> Tensor:
    if spec.kind != "category" and spec.rows is None:
        return torch.from_numpy(values.astype(np.float32))
    size = spec.size if spec.rows is None else spec.rows
    return torch.from_numpy(values.astype(np.uint8 if size <= 256 else np.int32))
