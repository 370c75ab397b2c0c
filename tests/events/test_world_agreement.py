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
PRESENT = [part for part in PARTS if getattr(CONFIG.weights, part)]  # those of topics have no weight here
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
    giver = max((name for name in PRESENT if name != part), key=lambda name: values[name])
    return MixtureWeights(**values | {part: values[part] + MOVED, giver: values[giver] - MOVED})


def chi_square_excess(world: World, queries: Queries) -> dict[str, float]:
    """How far observed counts lie from the oracle's, in standard deviations of chi-square, by table.

    Every pair of a history and an item is put into one cell of each table. A cell's count of items that did
    come next is a sum of independent chances given the histories: expectation Σp, variance Σp(1 − p).
    """
    tables: dict[str, np.ndarray] = {}
    for part in queries.chunks(1 << 22, world.config.num_items):
        p = world.oracle.conditionals(part)
        hit = np.zeros(p.shape)
        hit[np.arange(part.count), part.targets] = 1.0
        for name, cells in pair_cells(world, part, p).items():
            table = tables.setdefault(name, np.zeros((3, 1024)))
            for row, values in enumerate((hit, p, p * (1 - p))):
                table[row] += np.bincount(cells.reshape(-1), values.reshape(-1), table.shape[1])
    return {name: excess(table) for name, table in tables.items()}


def pair_cells(world: World, queries: Queries, p: np.ndarray) -> dict[str, np.ndarray]:
    """Cells of (history, item) pairs, each made to see one thing: successors, copies, urns, the whole."""
    catalogue, size, rows = world.catalogue, world.config.num_items, np.arange(queries.count)
    age = np.minimum(np.log2(queries.lengths), 7).astype(np.int64)[:, None]
    last = queries.items[queries.ends - 1][:, None]
    lag = np.zeros(p.shape, dtype=np.int64)
    for back in range(world.config.copy_window + 2, 0, -1):
        reached = queries.lengths >= back
        lag[rows[reached], queries.items[queries.ends[reached] - back]] = back
    owner, events = queries.expand()
    kinds = owner * catalogue.num_kinds + catalogue.kind_of_item[events]
    met = np.bincount(kinds, minlength=queries.count * catalogue.num_kinds).reshape(queries.count, -1)
    return {
        "last item": last * size + np.arange(size),
        "lag": lag * 8 + age,
        "kind met": np.minimum(met, 31)[:, catalogue.kind_of_item] * 8 + age,
        "probability": np.minimum(-4 * np.log2(np.maximum(p, 2.0**-15)), 63).astype(np.int64),
    }


def excess(table: np.ndarray) -> float:
    observed, expected, variance = table[:, table[2] > 10]
    squares = (observed - expected) ** 2 / variance
    return float((squares.sum() - len(squares)) / np.sqrt(2 * len(squares)))


def test_a_million_events_have_the_frequencies_of_the_conditional() -> None:
    queries = generated(1_000_000)
    assert queries.count == 1_000_000
    found = chi_square_excess(World(CONFIG), queries)
    assert len(found) == 4 and max(map(abs, found.values())) < 5, found


@pytest.mark.parametrize("part", ["copy_recent", "item_successor", "kind_successor", "kind_taste", "popular"])
def test_the_chi_square_sees_a_weight_that_is_a_little_off(part: str) -> None:
    wrong = World(CONFIG.model_copy(update={"weights": moved_weights(part)}))
    assert max(chi_square_excess(wrong, generated(100_000)).values()) > 10


def test_likelihood_scores_vanish_at_the_true_weights_and_only_there() -> None:
    """d log-likelihood / d weight is Σ(p_part / p − 1): zero in the mean for the true mixture of the parts."""
    queries = generated(150_000)
    alone = np.stack([part_probabilities(part, queries) for part in PRESENT])
    true = weights_of(CONFIG.weights)
    np.testing.assert_allclose(np.log(true @ alone), World(CONFIG).oracle.log_probs(queries), rtol=1e-10)
    assert np.abs(scores(true, alone)).max() < 4
    for part in PRESENT:
        moved = weights_of(moved_weights(part))
        assert np.abs(scores(moved, alone)).max() > 10, part


def weights_of(weights: MixtureWeights) -> np.ndarray:
    return np.array([getattr(weights, part) for part in PRESENT])


def test_topics_are_drawn_as_often_as_the_oracle_says() -> None:
    """Scores of the two topical parts, as above: they vanish for the weights that the events were drawn with."""
    weights = MixtureWeights(**dict.fromkeys(PARTS, 0.0) | {"topic_taste": 0.5, "topic_recent": 0.3, "popular": 0.2})
    config = WorldConfig(
        num_items=300, num_users=1_500, events_per_user=42, num_groups=30, num_brands=10, taste_prior=2.0,
        num_topics=8, topic_sharpness=8.0, weights=weights,
    )  # fmt: skip
    items, starts = World(config).histories(0, config.num_users)
    queries = Queries.of_events(items, starts, np.setdiff1d(np.arange(len(items)), starts))

    def score(part: str, believed: MixtureWeights) -> float:
        only = MixtureWeights(**{name: float(name == part) for name in PARTS})
        alone, believed_law = (
            World(config.model_copy(update={"weights": one})).oracle.log_probs(queries) for one in (only, believed)
        )
        terms = np.exp(alone - believed_law) - 1.0
        return float(terms.sum() / np.sqrt((terms**2).sum()))

    for part in ("topic_taste", "topic_recent"):
        moved = {**weights.to_values(), part: getattr(weights, part) - 0.2, "popular": 0.4}
        assert abs(score(part, weights)) < 4 < 10 < score(part, MixtureWeights(**moved))


@pytest.mark.parametrize("off", [0.9, 1.1])
@pytest.mark.parametrize("knob", ["taste_prior", "copy_exponent", "successor_exponent"])
def test_events_are_likelier_under_the_true_knob_than_under_one_a_little_off(knob: str, off: float) -> None:
    queries = generated(400_000)
    wrong = World(CONFIG.model_copy(update={knob: getattr(CONFIG, knob) * off}))
    assert true_log_likelihood(queries.count) - wrong.oracle.log_probs(queries).sum() > 5


@cache
def true_log_likelihood(num_events: int) -> float:
    return float(World(CONFIG).oracle.log_probs(generated(num_events)).sum())


def part_probabilities(part: str, queries: Queries) -> np.ndarray:
    """The probability of each target under one part alone."""
    only = MixtureWeights(**{name: float(name == part) for name in PARTS})
    return np.exp(World(CONFIG.model_copy(update={"weights": only})).oracle.log_probs(queries))


def scores(weights: np.ndarray, alone: np.ndarray) -> np.ndarray:
    """The score of each weight in its standard errors."""
    terms = alone / (weights @ alone) - 1.0
    return terms.sum(axis=1) / np.sqrt((terms**2).sum(axis=1))
