"""The defaults behave like a shop at every size: popularity, repeats, gains from a long history."""

import numpy as np
import pytest

from habitus.events.world import Queries, World, WorldConfig

SIZES = [2_000, 20_000, 100_000, pytest.param(1_000_000, marks=pytest.mark.slow)]


def made(num_items: int, num_events: int) -> tuple[World, np.ndarray, np.ndarray]:
    config = WorldConfig(num_items=num_items, num_users=10**6)
    world = World(config)
    return world, *world.histories(0, int(num_events / config.events_per_user))


@pytest.mark.parametrize("num_items", SIZES)
def test_popularity_is_zipf_with_a_fifth_to_a_half_on_the_top_percent(num_items: int) -> None:
    _, items, _ = made(num_items, max(1_000_000, 5 * num_items))
    counts = np.sort(np.bincount(items, minlength=num_items))[::-1]
    assert 0.2 < counts[: num_items // 100].sum() / counts.sum() < 0.5
    # The slope from the end of the flat head to where counts are too small to be sorted by.
    ranks = np.unique(np.geomspace(0.005 * num_items, np.sum(counts >= 10), 50).astype(np.int64))
    slope = np.polyfit(np.log(ranks), np.log(counts[ranks - 1]), 1)[0]
    assert -1.15 < slope < -0.85


@pytest.mark.parametrize("num_items", SIZES)
def test_users_come_back_to_their_items(num_items: int) -> None:
    _, items, starts = made(num_items, 200_000)
    owner = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(items)))
    repeats = 1 - len(np.unique(owner * num_items + items)) / len(items)
    assert 0.15 < repeats < 0.65


@pytest.mark.parametrize("num_items", SIZES)
def test_longer_histories_are_easier_to_continue(num_items: int) -> None:
    world, items, starts = made(num_items, 800_000)
    long_enough = starts[np.diff(starts, append=len(items)) > 100]
    floors = [
        world.entropy_floor(Queries.of_events(items, starts, long_enough[:600] + length)) for length in (5, 20, 100)
    ]
    assert floors[0].value - floors[1].value > 0.1
    assert floors[1].value - floors[2].value > 0.1
    assert max(floor.se for floor in floors) < 0.04


def test_the_best_prediction_is_far_better_than_popularity() -> None:
    world, _, _ = made(20_000, 64)
    sample = world.sample(500)
    popularity = -np.log(world.catalogue.weights(sample.targets)).mean()
    assert world.entropy_floor(sample).value < popularity - 2


def test_popularity_does_not_follow_the_item_number() -> None:
    world = World(WorldConfig(num_items=10_000))
    weights = world.catalogue.weights(np.arange(10_000))
    order = np.argsort(-weights)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert sorted(weights.tolist(), reverse=True) == sorted(set(weights.tolist()), reverse=True)
    assert weights.sum() == pytest.approx(1.0, abs=1e-12)
