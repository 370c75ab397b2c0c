"""Blocks of events and items: always the same, whatever is generated beside them."""

import numpy as np
import pyarrow as pa
import pytest

from habitus.errors import DataError
from habitus.events.world import World, WorldConfig

GOLDEN_ITEMS = [59, 27, 48, 65, 46, 27, 60, 72, 60, 27, 27, 27]
GOLDEN_TOPICAL_ITEMS = [40, 69, 40, 88, 85, 56, 22, 56, 8, 40, 72, 60]
GOLDEN_TOPICAL_TITLES = ["Roshimo zaloche bazifo dopeva shizili", "Nivala betoshe fefapi fegashe lasibo"]
GOLDEN_TITLES = ["Sechigi shotishe bazifo gibeva teshopo", "Milodo rapacho fefapi toposho shosaza"]

CONFIG = WorldConfig(num_users=3_000, num_items=500, events_per_user=30, seed=11)


@pytest.fixture(scope="module")
def world() -> World:
    return World(CONFIG)


def test_events_do_not_depend_on_the_block(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = world.events(0, 200)
    for step in (1, 7, 64):
        parts = [world.events(first, min(first + step, 200)) for first in range(0, 200, step)]
        assert pa.concat_tables(parts).equals(whole)
    monkeypatch.setattr("habitus.events.world.world._BLOCK_EVENTS", 50)
    assert world.events(0, 200).equals(whole)


def test_events_do_not_depend_on_threads(world: World) -> None:
    one = list(world.event_blocks(events_per_block=5_000))
    three = list(world.event_blocks(events_per_block=5_000, threads=3))
    assert len(one) == len(three) > 10
    assert all(a.equals(b) for a, b in zip(one, three, strict=True))
    assert sum(block.num_rows for block in one) == world.lengths(0, 3_000).sum()


def test_more_users_leave_the_first_ones_alone(world: World) -> None:
    larger = World(CONFIG.model_copy(update={"num_users": 50_000}))
    assert larger.events(0, 100).equals(world.events(0, 100))


def test_items_do_not_depend_on_the_block_or_threads(world: World) -> None:
    whole = world.items(0, 500)
    for threads in (1, 3):
        blocks = list(world.item_blocks(items_per_block=37, threads=threads))
        assert pa.concat_tables(blocks).equals(whole)


def test_another_seed_is_another_world(world: World) -> None:
    other = World(CONFIG.model_copy(update={"seed": 12}))
    assert not np.array_equal(other.catalogue.kind_of_item, world.catalogue.kind_of_item)
    assert not np.array_equal(other.lengths(0, 100), world.lengths(0, 100))


def test_a_world_stays_the_same_from_release_to_release() -> None:
    """Golden numbers: a change here makes every published floor another one, so it is a breaking change."""
    world = World(WorldConfig(num_items=100, seed=1))
    assert world.events(0, 1).column("item_id").to_pylist()[:12] == GOLDEN_ITEMS
    assert world.items(0, 2).column("title").to_pylist() == GOLDEN_TITLES
    topical = World(WorldConfig.like("logs", num_items=100, seed=1))
    assert topical.events(0, 1).column("item_id").to_pylist()[:12] == GOLDEN_TOPICAL_ITEMS
    assert topical.items(0, 2).column("title").to_pylist() == GOLDEN_TOPICAL_TITLES


def test_fields_show_the_kinds_of_the_share_that_tells() -> None:
    knobs = {"num_items": 20_000, "num_groups": 50, "num_brands": 40, "missing_rate": 0.0}
    plain, told = (World(WorldConfig(**knobs, features_tell=share)) for share in (1.0, 0.7))
    assert np.array_equal(plain.catalogue.kind_of_item, told.catalogue.kind_of_item)
    shown, own = told.items(0, 20_000)["category"].to_numpy(), plain.items(0, 20_000)["category"].to_numpy()
    shares = np.bincount(plain.catalogue.groups(np.arange(20_000))) / 20_000
    assert np.mean(shown == own) == pytest.approx(0.7 + 0.3 * np.sum(shares**2), abs=0.012)


def test_older_worlds_are_written_without_the_younger_knobs() -> None:
    younger = {"num_topics", "topic_sharpness", "features_tell"}
    values = WorldConfig().to_values()
    assert not younger & set(values) and not {"topic_taste", "topic_recent"} & set(values["weights"])
    like_logs = WorldConfig.like("logs")
    assert younger <= set(like_logs.to_values()) and WorldConfig.parse(like_logs.to_values(), "again") == like_logs


def test_histories_are_the_items_of_the_events(world: World) -> None:
    items, starts = world.histories(100, 150)
    events = world.events(100, 150)
    assert events.column("item_id").to_pylist() == items.tolist()
    users = events.column("user_id").to_numpy()
    assert users[starts].tolist() == list(range(100, 150))
    assert np.all(np.diff(users) >= 0)


def test_lengths_have_their_mean_their_least_and_a_heavy_tail() -> None:
    config = CONFIG.model_copy(update={"num_users": 100_000, "min_events_per_user": 4, "events_per_user": 50.0})
    lengths = World(config).lengths(0, 100_000)
    assert lengths.mean() == pytest.approx(50, rel=0.02)
    assert lengths.min() >= 4
    assert np.percentile(lengths, 99) > 4 * np.median(lengths)
    capped = World(config.model_copy(update={"max_events_per_user": 60})).lengths(0, 100_000)
    assert np.array_equal(capped, np.minimum(lengths, 60))
    even = config.model_copy(update={"length_spread": 0.0})
    assert set(World(even).lengths(0, 1_000).tolist()) == {50}


def test_time_runs_forward_by_day_more_than_by_night(world: World) -> None:
    events = world.events(0, 3_000)
    seconds = events.column("timestamp").to_numpy().astype("datetime64[s]").astype(np.int64)
    same_user = np.diff(events.column("user_id").to_numpy()) == 0
    assert np.diff(seconds)[same_user].min() >= 1
    hours = np.bincount(seconds // 3600 % 24, minlength=24) / len(seconds)
    assert hours[18:22].min() > 8 * hours[2:5].max()
    weekdays = np.bincount((seconds // 86400 + 3) % 7, minlength=7) / len(seconds)  # 1970 began on a Thursday
    assert weekdays.argmax() in (5, 6) and weekdays.min() > 0.1
    days = (seconds.max() - seconds.min()) / 86400
    assert 0.9 * CONFIG.span_days < days < 1.1 * CONFIG.span_days


def test_only_purchases_have_a_price_and_nobody_pays_more_than_the_list(world: World) -> None:
    events = world.events(0, 500).to_pydict()
    prices = world.items(0, 500).column("price").to_pylist()
    kinds = set()
    for item, kind, paid in zip(events["item_id"], events["event_type"], events["price_paid"], strict=True):
        kinds.add(kind)
        assert (paid is None) == (kind != "purchase")
        if paid is not None and prices[item] is not None:
            assert 0.69 * prices[item] - 0.01 <= paid <= prices[item]
    assert kinds == {"view", "cart", "purchase"}


def test_empty_blocks_have_their_columns(world: World) -> None:
    assert world.events(5, 5).schema == world.events(0, 5).schema
    assert world.items(5, 5).schema == world.items(0, 5).schema


@pytest.mark.parametrize("bounds", [(-1, 3), (4, 2), (0, 3_001)])
def test_blocks_outside_the_world_are_refused(world: World, bounds: tuple[int, int]) -> None:
    with pytest.raises(DataError, match="the number of users"):
        world.events(*bounds)
