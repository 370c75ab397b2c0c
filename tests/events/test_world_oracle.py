"""The oracle against a slow twin written from the formula, and against exhaustive enumeration."""

import itertools
import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from habitus.errors import DataError
from habitus.events.world import MixtureWeights, Queries, World, WorldConfig
from habitus.events.world.draws import Draw, normals
from habitus.events.world.queries import estimate
from habitus.randomness import Stream, random_words, to_uniform

TINY = WorldConfig(
    num_items=30, num_users=400, events_per_user=20, num_groups=4, num_brands=6, copy_window=5, num_successors=4
)
TOPICS = {
    "num_topics": 3,
    "topic_sharpness": 2.0,
    "features_tell": 0.5,
    "weights": MixtureWeights(kind_taste=0.1, topic_taste=0.2, topic_recent=0.1),
}
ONLY_POPULAR = dict.fromkeys(MixtureWeights.model_fields, 0.0) | {"popular": 1.0}
VARIANTS = {
    "defaults": WorldConfig(num_items=700, num_users=200),
    "tiny": TINY,
    "two items": TINY.model_copy(update={"num_items": 2, "num_groups": 1, "num_brands": 1}),
    "topics": WorldConfig(num_items=700, num_users=200, **TOPICS),
    "tiny topics": TINY.model_copy(update=TOPICS),
    "one item per kind": TINY.model_copy(update={"num_groups": 50, "num_brands": 200}),
    "one kind": TINY.model_copy(update={"num_groups": 1, "num_brands": 1}),
    "even popularity, so that items tie": TINY.model_copy(update={"zipf_exponent": 0.0}),
    "only popularity": TINY.model_copy(update={"weights": MixtureWeights(**ONLY_POPULAR)}),
    "only copies": TINY.model_copy(
        update={"weights": MixtureWeights(**ONLY_POPULAR | {"popular": 0, "copy_recent": 1})}
    ),
}


def slow_item_at(world: World, members: list[int], fraction: float) -> int:
    """The member at a fraction of the members' popularity, by walking along them."""
    weight = {x: float(world.catalogue.weights(np.array([x]))[0]) for x in members}
    kind = world.catalogue.kind_of_item
    ordered = sorted(members, key=lambda x: (kind[x], world.catalogue.slot_of_item[x]))
    target, passed = fraction * sum(weight.values()), 0.0
    for x in ordered:
        passed += weight[x]
        if target < passed:
            return x
    return ordered[-1]


def slow_successor(world: World, draw: Draw, key: int, kind: int, number: int) -> int:
    catalogue, items = world.catalogue, range(world.config.num_items)
    index = np.array([key * 1024 + number])
    high, low, _, _ = random_words(world.config.seed, Stream.WORLD, draw, index)
    fraction = float(to_uniform(high, low)[0])
    if number % 2 == 0:
        members = [x for x in items if catalogue.kind_of_item[x] == kind]
    else:
        group = catalogue.next_group[catalogue.kind_group[kind], number]
        members = [x for x in items if catalogue.kind_group[catalogue.kind_of_item[x]] == group]
    return slow_item_at(world, members, fraction)


def slow_conditional(world: World, history: list[int]) -> list[float]:
    """p(x | history) for every x, part by part as docs/world.md states it."""
    config, catalogue, weights = world.config, world.catalogue, world.config.weights
    items = range(config.num_items)
    popularity = [float(catalogue.weights(np.array([x]))[0]) for x in items]
    if not history:
        return popularity
    result = [weights.popular * w for w in popularity]

    lags = range(1, min(len(history), config.copy_window) + 1)
    total = sum(lag**-config.copy_exponent for lag in lags)
    for lag in lags:
        result[history[-lag]] += weights.copy_recent * lag**-config.copy_exponent / total

    last, kind = history[-1], int(catalogue.kind_of_item[history[-1]])
    numbers = range(config.num_successors)
    total = sum((m + 1) ** -config.successor_exponent for m in numbers)
    for m in numbers:
        share = (m + 1) ** -config.successor_exponent / total
        result[slow_successor(world, Draw.ITEM_SUCCESSOR, last, kind, m)] += weights.item_successor * share
        result[slow_successor(world, Draw.KIND_SUCCESSOR, kind, kind, m)] += weights.kind_successor * share

    group, brand = catalogue.groups(np.array(items)), catalogue.brands(np.array(items))
    for weight, label in (
        (weights.kind_taste, list(zip(group.tolist(), brand.tolist(), strict=True))),
        (weights.group_taste, group.tolist()),
        (weights.brand_taste, brand.tolist()),
    ):
        met, mass = Counter(label[x] for x in history), Counter()
        for x in items:
            mass[label[x]] += popularity[x]
        for x in items:
            urn = (config.taste_prior * mass[label[x]] + met[label[x]]) / (config.taste_prior + len(history))
            result[x] += weight * urn * popularity[x] / mass[label[x]]
    if config.num_topics:
        like, recent = slow_affinities(world), history[::-1][: config.copy_window]
        total = sum(lag**-config.copy_exponent for lag in lags)
        for x in items:
            met = sum(like[y][x] for y in history)
            taste = (config.taste_prior + met) / (config.taste_prior + len(history))
            lately = sum(lag**-config.copy_exponent * like[y][x] for lag, y in enumerate(recent, 1)) / total
            result[x] += popularity[x] * (weights.topic_taste * taste + weights.topic_recent * lately)
    return result


def slow_affinities(world: World) -> list[list[float]]:
    """A of docs/world.md for each pair of items, from the draws of groups and brands."""
    config, catalogue = world.config, world.catalogue
    items, topics = range(config.num_items), range(config.num_topics)
    parts = []
    for x in items:
        group, brand = catalogue.groups(np.array(x)), catalogue.brands(np.array(x))
        scores = []
        for topic in topics:
            a, _ = normals(config.seed, Draw.TOPIC_OF_GROUP, np.array(group * config.num_topics + topic))
            b, _ = normals(config.seed, Draw.TOPIC_OF_BRAND, np.array(brand * config.num_topics + topic))
            score = math.sqrt(0.8) * float(a) + math.sqrt(0.2) * float(b)
            scores.append(math.exp(config.topic_sharpness * score))
        parts.append([score / sum(scores) for score in scores])
    popularity = catalogue.weights(np.array(items))
    size = [sum(popularity[x] * parts[x][topic] for x in items) for topic in topics]
    return [[sum(parts[y][t] * parts[x][t] / size[t] for t in topics) for x in items] for y in items]


def some_queries(world: World, count: int) -> Queries:
    """Queries of the world's own events, some without a history, some with targets that never follow."""
    items, starts = world.histories(0, min(200, world.config.num_users))
    events = np.unique(np.linspace(0, len(items) - 1, count).astype(np.int64))
    queries = Queries.of_events(items, starts, np.concatenate([starts[:5], events]))
    targets = np.where(np.arange(queries.count) % 3 == 0, queries.targets[::-1], queries.targets)
    return Queries(queries.items, queries.starts, queries.ends, targets)


@pytest.mark.parametrize("history", [[], [3], [3, 3, 3], [0, 29, 7, 7, 12, 3, 29, 0, 1, 2, 3, 29], list(range(30)) * 3])
@pytest.mark.parametrize("variant", ["tiny", "tiny topics"])
def test_conditional_equals_the_formula_worked_slowly(history: list[int], variant: str) -> None:
    world = World(VARIANTS[variant])
    np.testing.assert_allclose(world.conditional(history), slow_conditional(world, history), rtol=1e-12)


@pytest.mark.parametrize("name", VARIANTS)
def test_probabilities_sum_to_one(name: str) -> None:
    world = World(VARIANTS[name])
    dense = world.oracle.conditionals(some_queries(world, 100))
    assert dense.min() >= 0
    np.testing.assert_allclose(dense.sum(axis=1), 1.0, rtol=0, atol=1e-9)


def test_probabilities_sum_to_one_in_a_large_catalogue() -> None:
    world = World(WorldConfig(num_items=300_000))
    items, _ = world.histories(0, 20)
    for length in (0, 1, 50, len(items)):
        assert abs(world.conditional(items[:length]).sum() - 1.0) < 1e-9


@pytest.mark.parametrize("name", VARIANTS)
def test_streamed_answers_equal_those_from_the_whole_conditional(name: str) -> None:
    world = World(VARIANTS[name])
    queries = some_queries(world, 150)
    dense = world.oracle.conditionals(queries)
    of_target = dense[np.arange(queries.count), queries.targets]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropies = -np.nansum(dense * np.log(dense), axis=1)
        log_of_target = np.log(of_target)
    np.testing.assert_allclose(world.oracle.log_probs(queries), log_of_target, rtol=1e-11)
    np.testing.assert_allclose(world.oracle.entropies(queries), entropies, rtol=1e-11, atol=1e-12)
    assert world.oracle.ranks(queries).tolist() == (dense >= of_target[:, None]).sum(axis=1).tolist()
    for k in (1, 2, min(25, world.config.num_items), world.config.num_items):
        best, probabilities = world.oracle.top(queries, k)
        expected = np.argsort(-dense, axis=1, kind="stable")[:, :k]
        np.testing.assert_allclose(probabilities, np.take_along_axis(dense, expected, axis=1), rtol=1e-12)
        np.testing.assert_allclose(probabilities, np.take_along_axis(dense, best, axis=1), rtol=1e-12)
        assert all(len(set(row)) == k for row in best.tolist())


def test_answers_do_not_depend_on_how_queries_are_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(TINY)
    queries = some_queries(world, 80)
    whole = [world.oracle.entropies(queries), world.oracle.ranks(queries), world.oracle.top(queries, 3)[0]]
    monkeypatch.setattr("habitus.events.world.oracle._CHUNK_CELLS", 60)
    parts = [world.oracle.entropies(queries), world.oracle.ranks(queries), world.oracle.top(queries, 3)[0]]
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-13)
    assert np.array_equal(parts[1], whole[1]) and np.array_equal(parts[2], whole[2])


def test_equal_probabilities_give_the_worst_rank() -> None:
    world = World(VARIANTS["only popularity"].model_copy(update={"zipf_exponent": 0.0}))
    assert set(world.oracle.ranks(some_queries(world, 50)).tolist()) == {30}


@pytest.mark.parametrize("length", [1, 3])
def test_floor_and_recall_equal_exhaustive_enumeration(length: int) -> None:
    config = WorldConfig(
        num_items=5, num_users=20_000, events_per_user=5, length_spread=0, num_groups=2, num_brands=3,
        groups_per_brand=1, copy_window=2, num_successors=2, taste_prior=2.0,
    )  # fmt: skip
    world = World(config)
    floor = best_two = 0.0
    for history in itertools.product(range(5), repeat=length):
        reached = math.prod(slow_conditional(world, list(history[:i]))[x] for i, x in enumerate(history))
        following = slow_conditional(world, list(history))
        floor -= reached * math.fsum(p * math.log(p) for p in following)
        best_two += reached * sum(sorted(following)[-2:])

    items, starts = world.histories(0, config.num_users)
    sample = Queries.of_events(items, starts, starts + length)
    for found, expected in ((world.entropy_floor(sample), floor), (world.best_recall(2, sample), best_two)):
        assert 0 < found.se < 0.01
        assert abs(found.value - expected) < 4 * found.se


def test_entropy_floor_is_the_mean_of_slow_entropies_and_what_the_oracle_pays() -> None:
    world = World(TINY)
    sample = world.sample(60, 0, 100)
    slow = [
        -math.fsum(p * math.log(p) for p in slow_conditional(world, sample.items[start:end].tolist()))
        for start, end in zip(sample.starts, sample.ends, strict=True)
    ]
    assert world.entropy_floor(sample).value == pytest.approx(np.mean(slow), rel=1e-12)

    sample = world.sample(6_000, 0, 400)
    excess = -world.oracle.log_probs(sample) - world.oracle.entropies(sample)
    paid = estimate(excess, sample.starts)
    assert abs(paid.value) < 4 * paid.se


def test_standard_errors_are_clustered_by_user() -> None:
    # Two users with deviations (-1, -1) and (1, 1) from the mean 2: two draws, not four.
    found = estimate(np.array([1.0, 1.0, 3.0, 3.0]), np.array([7, 7, 9, 9]))
    assert (found.value, found.num_queries, found.num_users) == (2.0, 4, 2)
    assert found.se == pytest.approx(float(Fraction(4 + 4) * Fraction(2, 1)) ** 0.5 / 4)


def test_a_sample_holds_distinct_events_that_have_a_history() -> None:
    world = World(TINY)
    sample = world.sample(200, 10, 60)
    items, starts = world.histories(10, 60)
    assert np.array_equal(sample.items, items) and sample.lengths.min() >= 1
    assert len(np.unique(sample.ends)) == 200 and np.array_equal(sample.targets, items[sample.ends])
    assert set(sample.starts.tolist()) <= set(starts.tolist())


def test_questions_without_an_answer_are_refused() -> None:
    world = World(TINY)
    with pytest.raises(DataError, match="2 items are not in the catalogue, the first 30"):
        world.conditional([3, 30, -1])
    with pytest.raises(DataError, match="a history of type float64"):
        world.conditional([1.5])
    with pytest.raises(DataError, match="k = 31"):
        world.best_recall(31, world.sample(10))
    with pytest.raises(DataError, match="at least 2 users"):
        world.entropy_floor(world.sample(3, 0, 1))
    with pytest.raises(DataError, match="a sample of 1000000 queries"):
        world.sample(1_000_000)
