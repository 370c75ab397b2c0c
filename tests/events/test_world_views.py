"""Views that announce purchases: drawn as the law says, and the oracle's gain by brute force."""

import numpy as np
import pytest

from habitus.events import ViewQueries, World, WorldConfig, schema_of

KNOBS = {"num_users": 400, "num_items": 12, "num_groups": 3, "num_brands": 2, "events_per_user": 12, "seed": 5}
VIEWS = {"views_per_purchase": 1.5, "view_informs": 0.4}


@pytest.fixture(scope="module")
def world() -> World:
    return World(WorldConfig(**KNOBS, **VIEWS))


@pytest.fixture(scope="module")
def log(world: World) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Items, whether they were bought, and the first row of each user."""
    table = world.events(0, 400)
    users = table["user_id"].to_numpy()
    bought = np.array(table["event_type"].to_pylist()) == "purchase"
    return table["item_id"].to_numpy(), bought, np.flatnonzero(np.diff(users, prepend=-1))


def test_purchases_are_those_of_the_world_without_views(
    world: World, log: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    items, bought, _ = log
    plain = World(WorldConfig(**KNOBS))
    assert np.array_equal(items[bought], plain.histories(0, 400)[0])
    assert np.array_equal(items[bought], world.histories(0, 400)[0])
    assert not {"views_per_purchase", "view_informs"} & set(plain.config.to_values())
    assert schema_of(plain).targets is None
    assert schema_of(world).targets.weights == {"purchase": 1.0}  # type: ignore[union-attr]


def test_views_are_as_many_and_as_telling_as_the_knobs_say(log: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    items, bought, _ = log
    num_bought = int(bought.sum())
    assert (len(items) - num_bought) / num_bought == pytest.approx(1.5, abs=0.08)
    following = np.searchsorted(np.flatnonzero(bought), np.flatnonzero(~bought))
    announced = items[np.flatnonzero(bought)[following]]
    # Told with 0.4, and by chance where popularity draws the same item.
    assert 0.4 < np.mean(items[~bought] == announced) < 0.55


def test_blocks_change_nothing(world: World) -> None:
    parts = world.events(0, 150).to_pylist() + world.events(150, 400).to_pylist()
    assert world.events(0, 400).to_pylist() == parts


def test_the_law_of_the_next_purchase_and_of_the_next_event_by_brute_force(
    world: World, log: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> None:
    items, bought, starts = log
    assert world.view_oracle is not None
    rows = np.arange(2_000, 2_060)
    queries = ViewQueries.of_events(items, bought, starts, rows)
    purchase, event = world.view_oracle.next_purchase(queries), world.view_oracle.next_event(queries)
    popular = world.conditional([])
    for row, p_purchase, p_event in zip(rows, purchase, event, strict=True):
        first = starts[np.searchsorted(starts, row, side="right") - 1]
        past = range(first, row)
        history = [items[n] for n in past if bought[n]]
        last = max((n for n in past if bought[n]), default=first - 1)
        chances = world.conditional(np.array(history, np.int64))
        for view in items[last + 1 : row]:
            chances = chances * np.array([0.4 * (view == x) + 0.6 * popular[view] for x in range(12)])
        chances /= chances.sum()
        np.testing.assert_allclose(p_purchase, chances, rtol=1e-9)
        seen = 0.4 * chances + 0.6 * popular
        np.testing.assert_allclose(p_event, 0.4 * chances + 0.6 * seen, rtol=1e-9)  # a purchase with 1/(1 + 1.5)


def test_both_laws_are_those_of_what_happens(world: World, log: tuple[np.ndarray, np.ndarray, np.ndarray]) -> None:
    """Calibrated on all that was drawn, and views tell what the oracle says they do."""
    items, bought, starts = log
    assert world.view_oracle is not None
    every = np.setdiff1d(np.arange(len(items)), starts)
    purchases = every[bought[every]]
    for rows, law in ((every, world.view_oracle.next_event), (purchases, world.view_oracle.next_purchase)):
        queries = ViewQueries.of_events(items, bought, starts, rows)
        chances = law(queries)
        found = -np.log(chances[np.arange(len(rows)), items[rows]])
        entropy = -(chances * np.log(chances)).sum(1)
        error = np.std(found - entropy) / np.sqrt(len(rows))
        assert abs(np.mean(found - entropy)) < 4 * error
    queries = ViewQueries.of_events(items, bought, starts, purchases)
    without = world.oracle.log_probs(queries.purchases)
    with_views = np.log(world.view_oracle.next_purchase(queries)[np.arange(len(purchases)), items[purchases]])
    unaware = np.log(world.view_oracle.next_event(queries)[np.arange(len(purchases)), items[purchases]])
    assert with_views.mean() > unaware.mean() + 0.05 and with_views.mean() > without.mean() + 0.3
