"""Item features tell group and brand, also of items that were not looked at."""

import numpy as np
import pyarrow as pa
import pytest

from habitus.events.world import World, WorldConfig

CONFIG = WorldConfig(num_items=6_000, num_groups=12, num_brands=30, missing_rate=0.05)
TRAIN = 4_000  # items that teach; the others are judged


@pytest.fixture(scope="module")
def world() -> World:
    return World(CONFIG)


@pytest.fixture(scope="module")
def table(world: World) -> dict[str, list]:
    return world.items(0, CONFIG.num_items).to_pydict()


def accuracy(scores: np.ndarray, labels: np.ndarray) -> float:
    return float(np.mean(scores[TRAIN:].argmax(axis=1) == labels[TRAIN:]))


@pytest.mark.parametrize("what", ["groups", "brands"])
def test_title_words_predict_group_and_brand_of_unseen_items(world: World, table: dict[str, list], what: str) -> None:
    labels = getattr(world.catalogue, what)(np.arange(CONFIG.num_items))
    vocabulary = {word: i for i, word in enumerate(sorted({w for t in table["title"] for w in t.split()}))}
    bags = np.zeros((CONFIG.num_items, len(vocabulary)))
    for item, title in enumerate(table["title"]):
        bags[item, [vocabulary[word] for word in title.split()]] = 1
    counts = np.stack([bags[:TRAIN][labels[:TRAIN] == label].sum(axis=0) for label in range(labels.max() + 1)])
    log_share = np.log((counts + 0.1) / (counts.sum(axis=1, keepdims=True) + 1))  # naive Bayes
    assert accuracy(bags @ log_share.T, labels) > 0.95


@pytest.mark.parametrize(("what", "least"), [("groups", 0.8), ("brands", 0.4)])
def test_images_predict_group_and_brand_of_unseen_items(
    world: World, table: dict[str, list], what: str, least: float
) -> None:
    labels = getattr(world.catalogue, what)(np.arange(CONFIG.num_items))
    seen = np.array([image is not None for image in table["image"]])
    images = np.array([image or [0.0] * CONFIG.image_dim for image in table["image"]])
    learn = seen.copy()
    learn[TRAIN:] = False
    centres = np.stack([images[learn & (labels == label)].mean(axis=0) for label in range(labels.max() + 1)])
    distance = ((images[:, None] - centres) ** 2).sum(axis=2)
    assert accuracy(-distance[seen], labels[seen]) > least


def test_category_and_brand_name_the_latent_group_and_brand(world: World, table: dict[str, list]) -> None:
    for column, labels in (
        ("category", world.catalogue.groups(np.arange(CONFIG.num_items))),
        ("brand", world.catalogue.brands(np.arange(CONFIG.num_items))),
    ):
        names = {(label, name) for label, name in zip(labels.tolist(), table[column], strict=True) if name is not None}
        assert len(names) == len({label for label, _ in names}) == len({name for _, name in names})


def test_values_are_missing_at_the_rate_asked_for(table: dict[str, list]) -> None:
    assert all(table["title"])
    for column in ("category", "brand", "price", "image"):
        assert np.mean([value is None for value in table[column]]) == pytest.approx(0.05, abs=0.015)


def test_types_and_titles_are_fit_for_use(world: World, table: dict[str, list]) -> None:
    schema = world.items(0, 3).schema
    assert schema.field("item_id").type == pa.int64()
    assert schema.field("image").type == pa.list_(pa.float32(), CONFIG.image_dim)
    assert len(set(table["title"])) > 0.99 * CONFIG.num_items
    prices = [price for price in table["price"] if price is not None]
    assert min(prices) > 0 and all(round(price, 2) == price for price in prices)
