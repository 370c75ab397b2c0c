"""Random numbers of the world: one counter per thing, so that no draw depends on a block or a thread."""

from enum import IntEnum

import numpy as np

from habitus.events.world.config import POSITION_BITS
from habitus.randomness import Stream, random_words, to_uniform


class Draw(IntEnum):
    """What is drawn: the step of the counter-based generator. Numbers must never change; 11 is not in use."""

    EVENT = 0
    TIME = 1
    LENGTH = 2
    USER_START = 3
    ITEM_RANK = 4
    ITEM_KIND = 5
    BRAND_GROUP = 6
    NEXT_GROUP = 7
    ITEM_SUCCESSOR = 8
    KIND_SUCCESSOR = 9
    WORD = 10
    TITLE = 12
    PRICE = 13
    PRICE_LEVEL = 14
    IMAGE = 15
    IMAGE_GROUP = 16
    IMAGE_BRAND = 17
    MISSING = 18
    SAMPLE = 19
    TOPIC = 20
    TOPIC_OF_GROUP = 21
    TOPIC_OF_BRAND = 22
    SHOWN_KIND = 23
    VIEW_COUNT = 24
    VIEW = 25


_UNIT = 2.0**-32
_IN_CACHE = 1 << 14  # entries; the ten rounds make some 150 passes, three times slower out of a core's cache


def event_keys(users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One number for each event of the world, whoever else is in the block."""
    return (users << POSITION_BITS) + positions


def draw_words(seed: int, draw: Draw, index: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Four 32-bit words, as int64, for each entry of `index`."""
    index = np.asarray(index, dtype=np.int64)
    words = tuple(np.empty(index.shape, dtype=np.int64) for _ in range(4))
    for first in range(0, index.size, _IN_CACHE):
        part = slice(first, first + _IN_CACHE)
        values = random_words(seed, Stream.WORLD, draw, index.reshape(-1)[part])
        for word, column in zip(words, values, strict=True):
            word.reshape(-1)[part] = column
    return words  # type: ignore[return-value]


def uniforms(seed: int, draw: Draw, index: np.ndarray) -> np.ndarray:
    """One float64 in [0, 1) with 53 random bits for each entry of `index`."""
    high, low, _, _ = draw_words(seed, draw, index)
    return to_uniform(high, low)


def fraction(word: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) with 32 random bits, from one word. Too coarse for tail items of 10^7, which weigh 2^-33."""
    return word * _UNIT


def normals(seed: int, draw: Draw, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two independent standard normal float64 for each entry of `index` (Box and Muller)."""
    a, b, c, d = draw_words(seed, draw, index)
    # 1 - u lies in (0, 1], so the logarithm is finite.
    radius = np.sqrt(-2.0 * np.log1p(-to_uniform(a, b)))
    angle = 2.0 * np.pi * to_uniform(c, d)
    return radius * np.cos(angle), radius * np.sin(angle)
