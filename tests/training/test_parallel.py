"""Which items belong to which process, worked by hand; and that a graph can hold it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from habitus.data import Dataset
from habitus.evaluation.ranks import Ranks
from habitus.softmax import candidate_pool, sample_negatives
from habitus.training.device_batches import DeviceEvents, DeviceItems, share_batch
from habitus.training.parallel import (
    ItemShares,
    catalogue_places,
    drawn_capacity,
    own_drawn,
    owned_counts,
    owned_items,
    places_among,
)


def process(rank: int, world: int) -> Ranks:
    ranks = Ranks()
    ranks.rank, ranks.world = rank, world
    return ranks


def test_the_items_of_a_batch_are_divided_by_owner_with_their_targets_first() -> None:
    """Targets 2, 3, 8 and other items 1, 4, 6: the first of two owns 2, 8 and 4, 6; the second 3 and 1."""
    items = np.array([2, 3, 8, 1, 4, 6])
    first, second = (ItemShares.of(items, 3, process(rank, 2)) for rank in range(2))
    assert first.own.tolist() == [2, 8, 4, 6] and first.num_own_targets == 2
    assert second.own.tolist() == [3, 1] and second.num_own_targets == 1
    assert first.stride == second.stride == 4 and first.least == second.least == 2
    # The table has four rows of each: 2 8 4 6 | 3 1 - -; the pool the targets alone: 2 8 | 3.
    assert first.table_places.tolist() == second.table_places.tolist() == [0, 4, 1, 5, 2, 3]
    assert first.pool_places[:3].tolist() == [0, 2, 1]
    assert (first.pool_places + first.table_shifts[items % 2])[:3].tolist() == [0, 4, 1]


def test_a_process_that_owns_nothing_holds_one_row_that_does_not_count() -> None:
    """Only even items: the second of two embeds its own first item, and its candidates begin after the first's."""
    shares = ItemShares.of(np.array([0, 4, 2]), 2, process(1, 2))
    assert shares.own.tolist() == [1] and shares.num_own_targets == 0
    assert shares.pool_firsts.tolist() == [0, 2]
    assert shares.least == 1 and shares.stride == 3
    # Of three, the first has no target: its row still stands before the others' in the pool.
    assert ItemShares.of(np.array([4, 5]), 2, process(0, 3)).pool_places.tolist() == [1, 2]


def test_every_item_has_one_owner() -> None:
    rows = [np.arange(10)[owned_items(10, process(rank, 4))] for rank in range(4)]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(10))
    assert owned_counts(10, None, process(0, 4)).tolist() == [3, 3, 2, 2]
    assert owned_counts(10, np.array([0, 4, 8, 9]), process(0, 4)).tolist() == [3, 1, 0, 0]


def test_room_for_a_draw_follows_the_process_that_owns_the_most_candidates() -> None:
    """10,000 of a million: 2,500 of four processes, ten standard deviations (500) and a grain of 64 more. Where one
    owns all candidates it needs room for all that are drawn."""
    even = owned_counts(1_000_000, None, process(0, 4))
    assert drawn_capacity(10_000, even) == 3_008
    one_owner = owned_counts(1_000_000, np.arange(0, 1_000_000, 4), process(0, 4))
    assert drawn_capacity(10_000, one_owner) == 10_000
    assert drawn_capacity(40, np.array([10, 30])) == 30  # never more than there are


@pytest.mark.parametrize("rank, expected", [(0, [6, 0, 4]), (1, [3, 1, 1])])
def test_a_process_finds_its_part_of_a_draw(rank: int, expected: list[int]) -> None:
    drawn = torch.tensor([6, 3, 0, 4])
    own, count = own_drawn(drawn, 3, process(rank, 2))
    assert own.tolist() == expected  # beyond its part its own first item stands
    assert count.item() == [3, 1][rank]


@pytest.mark.parametrize("num_items, world", [(10, 1), (10, 4), (12, 4), (3, 4), (11, 4)])
def test_places_in_a_catalogue_that_processes_hold_together(num_items: int, world: int) -> None:
    rows = [np.arange(num_items)[owned_items(num_items, process(rank, world))] for rank in range(world)]
    places = catalogue_places(torch.from_numpy(np.concatenate(rows)), num_items, process(0, world))
    assert places.tolist() == list(range(num_items))


class _NothingOfTheHost(TorchDispatchMode):
    """Refuses tensors of the host: a CUDA graph cannot hold a copy from there, nor wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        for value in (*args, result):
            assert not isinstance(value, torch.Tensor) or value.device.type == "meta", f"{func} on {value.device}"
        return result


def test_what_a_graph_holds_of_batches_and_places_needs_nothing_of_the_host(
    dataset: Dataset, recipe_of: Callable[..., Any]
) -> None:
    """Meta tensors have shapes and no values: what would wait for one fails, and so does what comes from a CPU."""
    device, ranks, num_items = torch.device("meta"), process(1, 2), dataset.num_items
    events, items = DeviceEvents(dataset, device), DeviceItems.of(dataset, recipe_of(), device, ranks=ranks)
    windows, keys = torch.empty(16, dtype=torch.int64, device=device), torch.empty(8, dtype=torch.int64, device=device)
    with _NothingOfTheHost():
        batch = share_batch(events.assemble(windows, items.lengths), items.lengths, num_items, ranks)
        part, (_, count) = batch.step_batch(events.names), batch.own_counts
        items.read(batch.rows, count, 500)
        places_among(batch.event_places, batch.items, len(batch.rows), ranks)
        catalogue_places(part.target_rows, num_items, ranks)
        drawn = sample_negatives(num_items, 64, keys)
        own, _ = own_drawn(drawn, drawn_capacity(64, owned_counts(num_items, None, ranks)), ranks)
        candidate_pool(batch.rows, own)
    assert batch.items.shape == (8, 32) and batch.counts.shape == (10,)
