"""Generated events follow the oracle's law. The generator never computes a probability, the oracle never draws."""

from functools import cache

import numpy as np
import pytest

from habitus.events.world import MixtureWeights, Queries, World, WorldConfig

CONFIG = WorldConfig(
    num_items=24, num_users=26_000, events_per_user=42, num_groups=3, num_brands=5, copy_window=6,
    num_successors=4, taste_prior=3.0, seed=3,
)  # fmt: skip
PARTS = list(MixtureWeights.model_fields)
MOVED = 0.05  # of the weight, in the tests that must fail


def generated(num_events: int) -> Queries:
    """The first events of the world that have a history."""
    items, starts, events = all_events()
    return Queries.of_events(items, starts, events[:num_events])


@cache
def all_events() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    items, starts = World(CONFIG).histories(0, CONFIG.num_users)
    return items, starts, np.setdiff1d(np.arange(len(items)), starts)


def moved_weights(part: str) -> MixtureWeights:
    """The weights with a little taken from the heaviest other part and given to `part`."""
    values = CONFIG.weights.to_values()
    giver = max((name for name in PARTS if name != part), key=lambda name: values[name])
    return MixtureWeights(**values | {part: values[part] + MOVED, giver: values[giver] - MOVED})


def chi_square_excess(world: World, queries: Queries) -> tuple[float, float]:
    """How far observed counts lie from the oracle's, in standard deviations of chi-square: two tables.

    The first counts (last item, next item), the second buckets all pairs of a history and an item by the
    probability that the oracle gives them. Each count is a sum of independent chances given the histories, so
    its expectation is Σp and its variance Σp(1 - p).
    """
    size = world.config.num_items
    following = np.zeros((3, size * size))
    calibration = np.zeros((3, 64))
    for part in queries.chunks(1 << 22, size):
        p = world.oracle.conditionals(part)
        hit = np.zeros(p.shape)
        hit[np.arange(part.count), part.targets] = 1.0
        pairs = part.items[part.ends - 1][:, None] * size + np.arange(size)
        buckets = np.minimum(np.floor(-4 * np.log2(np.maximum(p, 2.0**-15))), 63).astype(np.int64)
        for table, cells in ((following, pairs), (calibration, buckets)):
            for row, values in enumerate((hit, p, p * (1 - p))):
                table[row] += np.bincount(cells.reshape(-1), values.reshape(-1), table.shape[1])
    return excess(following), excess(calibration)


def excess(table: np.ndarray) -> float:
    observed, expected, variance = table[:, table[2] > 10]
    squares = (observed - expected) ** 2 / variance
    return float((squares.sum() - len(squares)) / np.sqrt(2 * len(squares)))


def test_a_million_events_have_the_frequencies_of_the_conditional() -> None:
    queries = generated(1_000_000)
    assert queries.count == 1_000_000
    following, calibration = chi_square_excess(World(CONFIG), queries)
    assert abs(following) < 5 and abs(calibration) < 5


@pytest.mark.parametrize("part", ["copy_recent", "item_successor", "kind_successor", "kind_taste", "popular"])
def test_the_chi_square_sees_a_weight_that_is_a_little_off(part: str) -> None:
    wrong = World(CONFIG.model_copy(update={"weights": moved_weights(part)}))
    following, calibration = chi_square_excess(wrong, generated(100_000))
    assert max(following, calibration) > 10


def test_likelihood_scores_vanish_at_the_true_weights_and_only_there() -> None:
    """d log-likelihood / d weight is Σ(p_part / p − 1): zero in the mean for the true mixture of the parts."""
    queries = generated(150_000)
    alone = np.stack([part_probabilities(part, queries) for part in PARTS])
    true = np.array(CONFIG.weights.values())
    np.testing.assert_allclose(np.log(true @ alone), World(CONFIG).oracle.log_probs(queries), rtol=1e-10)
    assert np.abs(scores(true, alone)).max() < 4
    for part in PARTS:
        moved = np.array(moved_weights(part).values())
        assert np.abs(scores(moved, alone)).max() > 10, part


def part_probabilities(part: str, queries: Queries) -> np.ndarray:
    """The probability of each target under one part alone."""
    only = MixtureWeights(**{name: float(name == part) for name in PARTS})
    return np.exp(World(CONFIG.model_copy(update={"weights": only})).oracle.log_probs(queries))


def scores(weights: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """The score of each weight in its standard errors."""
    terms = alone / (weights @ alone) - 1.0
    return terms.sum(axis=1) / np.sqrt((terms**2).sum(axis=1))
