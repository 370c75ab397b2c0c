"""What belongs to whom where several processes train together.

Item i belongs to process i mod W: that one holds its encoded fields or its frozen vector as row i // W, embeds it when
it is in a batch, and scores it as a candidate. So what a process holds falls with their number, and nobody asks another
for an item. Windows go to the processes in blocks. All know the full batch, so all agree without a message.

A process's items of a batch stand in the batch's order, targets first. Two tables hold those of all processes, one
process after the other: the vectors for the events (`stride` rows each) and the candidates.

Letters: W processes, n distinct items of the full batch, B windows, L slots.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from habitus.evaluation import Ranks

if TYPE_CHECKING:
    from habitus.training.device_batches import DeviceBatch

_SIGMAS = 10  # by which a draw of negatives may exceed a process's mean share of it


def owned_items(num_items: int, ranks: Ranks) -> slice:
    """The catalogue rows that belong to this process."""
    return slice(ranks.rank, num_items, ranks.world)


# On the host: exact shapes ------------------------------------------------------------------------------------------


class ItemShares(NamedTuple):
    """The distinct items of a batch, divided."""

    own: np.ndarray  # int64: this process's, its targets first; never empty
    num_own_targets: int
    stride: int
    least: int  # items of the process that has the fewest, one at least
    table_places: np.ndarray  # int64 [n]: of each item in the table of all vectors
    pool_places: np.ndarray  # int64 [n]: of each target among the candidates
    table_shifts: np.ndarray  # int64 [W]: what to add to a target's place in the pool for its place in the table
    pool_firsts: np.ndarray  # int64 [W]: where each process's candidates begin

    @classmethod
    def of(cls, items: np.ndarray, num_targets: int, ranks: Ranks) -> "ItemShares":
        """The shares of items of which the first `num_targets` are targets."""
        owner = items % ranks.world
        counts = np.bincount(owner, minlength=ranks.world)
        order = np.argsort(owner, kind="stable")
        local = np.empty_like(items)
        local[order] = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
        stride = max(1, int(counts.max()))
        num_own_targets = np.bincount(owner[:num_targets], minlength=ranks.world)
        firsts = pool_firsts(num_own_targets)
        own = items[owner == ranks.rank]
        return cls(
            own=own if len(own) else np.array([ranks.rank], np.int64),
            num_own_targets=int(num_own_targets[ranks.rank]),
            stride=stride,
            least=max(1, int(counts.min())),
            table_places=owner * stride + local,
            pool_places=firsts[owner] + local,
            table_shifts=np.arange(ranks.world) * stride - firsts,
            pool_firsts=firsts,
        )


def pool_firsts(counts: np.ndarray) -> np.ndarray:
    """Where each process's candidates begin; one that has none holds a row that does not count."""
    held = np.maximum(counts, 1)
    firsts: np.ndarray = np.cumsum(held) - held
    return firsts


# On the device: fixed shapes ----------------------------------------------------------------------------------------


def share_batch(batch: "DeviceBatch", lengths: Tensor, num_items: int, ranks: Ranks) -> "DeviceBatch":
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


def places_among(local: Tensor, items: Tensor, rows_each: int, ranks: Ranks) -> Tensor:
    """Places in a table to which every process contributes `rows_each` rows, from places among the owner's items."""
    if ranks.world == 1:
        return local
    return local + (items.view_as(local) % ranks.world * rows_each).to(local.dtype)


def catalogue_places(rows: Tensor, num_items: int, ranks: Ranks) -> Tensor:
    """Places of catalogue rows where each process contributes all items that it holds."""
    each, more = divmod(num_items, ranks.world)  # the first `more` processes hold one more than the others
    owner = rows % ranks.world
    return rows // ranks.world + owner * each + owner.clamp(max=more)


def owned_counts(num_items: int, candidates: np.ndarray | None, ranks: Ranks) -> np.ndarray:
    """How many of the catalogue's items, or of those that are candidates, belong to each process."""
    if candidates is not None:
        return np.bincount(candidates % ranks.world, minlength=ranks.world)
    return np.array([len(range(rank, num_items, ranks.world)) for rank in range(ranks.world)])


def drawn_capacity(num_drawn: int, owned: np.ndarray) -> int:
    """Rows for a process's share of a draw from candidates of which each process owns so many: more than any draw
    will ever need of the one that owns the most. Rows may be anything but evenly spread: where items are pairs of an
    item and a kind of event, every second one may be a candidate."""
    most = int(owned.max())
    mean = num_drawn * most / int(owned.sum())
    rows = -(-int(mean + _SIGMAS * mean**0.5 + 1) // 64) * 64
    return min(num_drawn, most, rows)


def own_drawn(drawn: Tensor, capacity: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This process's items among those drawn [capacity], its own first item beyond them; and how many there are."""
    is_own = drawn % ranks.world == ranks.rank
    place = torch.where(is_own, is_own.cumsum(0) - 1, capacity).clamp(max=capacity)
    own = torch.full((capacity + 1,), ranks.rank, dtype=drawn.dtype, device=drawn.device)
    return own.scatter_(0, place, drawn)[:capacity], is_own.sum()
