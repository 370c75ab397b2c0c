"""What an item looks like: title, category, brand, price and an image-like vector, from its latent attributes.

Everything but the noise depends on the group and brand that the item shows, which are its own for all items or for a
share of them (`features_tell`), so what is learned of some items holds for others. Words are made of syllables and
belong to one use: a group's nouns, a brand's name, or descriptors.
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.events.world.config import WorldConfig
from habitus.events.world.draws import Draw, draw_words, fraction, normals
from habitus.events.world.items import WorldCatalogue
from habitus.randomness import Stream, permute_index, shuffle_keys

_NOUNS = 3  # per group; the first of them names the category
_OWN_WORDS = 24  # descriptors that a group favours
_CONSONANTS = "b d f g k l m n p r s t v z ch sh".split()
_VOWELS = "a e i o".split()
_SYLLABLES = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
_BRAND_IN_IMAGE = 0.7  # length of the brand's part of the vector, where the group's is 1
_NOISE_IN_IMAGE = 0.5


class Features:
    """The item table of a world, any block of it."""

    def __init__(self, catalogue: WorldCatalogue) -> None:
        config = catalogue.config
        self.catalogue, self.config = catalogue, config
        names = _invent_words(config)
        nouns, brands = config.num_groups * _NOUNS, config.num_brands
        self.nouns = names.slice(0, nouns)
        self.brand_names = pc.utf8_capitalize(names.slice(nouns, brands))
        self.descriptors = names.slice(nouns + brands)
        self.category_names = self.nouns.take(np.arange(config.num_groups) * _NOUNS)
        self.group_level, self.brand_level = _price_levels(config)
        self.group_image = _vectors(config, Draw.IMAGE_GROUP, np.arange(config.num_groups))
        self.brand_image = _vectors(config, Draw.IMAGE_BRAND, np.arange(config.num_brands))

    def table(self, first_item: int, last_item: int) -> Any:
        """Columns item_id, title, category, brand, price, image of the items in [first_item, last_item)."""
        items = np.arange(first_item, last_item)
        groups, brands = self.catalogue.shown(items)
        # A title is always there, as in a shop; each other field is missing now and then.
        no_category, no_brand, no_price, no_image = (
            fraction(word) < self.config.missing_rate for word in draw_words(self.config.seed, Draw.MISSING, items)
        )
        return pa.table(
            {
                "item_id": items,
                "title": self._titles(items, groups, brands),
                "category": _labels(groups, self.category_names, no_category),
                "brand": _labels(brands, self.brand_names, no_brand),
                "price": pa.array(self.prices(items), mask=no_price),
                "image": self._images(items, groups, brands, no_image),
            }
        )

    def prices(self, items: np.ndarray) -> np.ndarray:
        """List prices in whole cents: float64."""
        z, _ = normals(self.config.seed, Draw.PRICE, items)
        groups, brands = self.catalogue.shown(items)
        level = self.group_level[groups] + self.brand_level[brands]
        return np.maximum(np.round(np.exp(level + 0.4 * z), 2), 0.01)

    def _titles(self, items: np.ndarray, groups: np.ndarray, brands: np.ndarray) -> Any:
        """Brand, a descriptor that the group favours, a noun of the group, two descriptors of any kind."""
        chosen = draw_words(self.config.seed, Draw.TITLE, items)
        own = groups * _OWN_WORDS + chosen[0] % _OWN_WORDS
        noun = groups * _NOUNS + chosen[1] % _NOUNS
        number = self.config.num_words
        return pc.binary_join_element_wise(
            self.brand_names.take(brands),
            self.descriptors.take(own % number),
            self.nouns.take(noun),
            self.descriptors.take(chosen[2] % number),
            self.descriptors.take(chosen[3] % number),
            " ",
        )

    def _images(self, items: np.ndarray, groups: np.ndarray, brands: np.ndarray, missing: np.ndarray) -> Any:
        noise = _NOISE_IN_IMAGE * _vectors(self.config, Draw.IMAGE, items)
        vectors = self.group_image[groups] + _BRAND_IN_IMAGE * self.brand_image[brands] + noise
        values = pa.array(vectors.astype(np.float32).reshape(-1))
        return pa.FixedSizeListArray.from_arrays(values, self.config.image_dim, mask=pa.array(missing))


def _labels(numbers: np.ndarray, names: Any, missing: np.ndarray) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(numbers.astype(np.int32), mask=missing), names)


def _invent_words(config: WorldConfig) -> Any:
    """Distinct pronounceable words: nouns of groups, then names of brands, then descriptors."""
    count = config.num_groups * _NOUNS + config.num_brands + config.num_words
    base = len(_SYLLABLES)
    syllables = 3 if count <= base**3 // 4 else 4
    keys = shuffle_keys(config.seed, Stream.WORLD, Draw.WORD)
    codes = permute_index(np.arange(count), base**syllables, keys)
    table = np.array(_SYLLABLES, dtype=object)
    spelled = table[codes % base]
    for _ in range(syllables - 1):
        codes //= base
        spelled = spelled + table[codes % base]
    return pa.array(spelled, type=pa.string())


def _price_levels(config: WorldConfig) -> tuple[np.ndarray, np.ndarray]:
    """Mean log price of each group, and what each brand adds to it."""
    group, _ = normals(config.seed, Draw.PRICE_LEVEL, np.arange(config.num_groups))
    _, brand = normals(config.seed, Draw.PRICE_LEVEL, np.arange(config.num_brands))
    return 3.0 + 0.8 * group, 0.3 * brand


def _vectors(config: WorldConfig, draw: Draw, index: np.ndarray) -> np.ndarray:
    """A standard normal vector of length image_dim for each entry of `index`."""
    pairs = -(-config.image_dim // 2)
    first, second = normals(config.seed, draw, index[:, None] * pairs + np.arange(pairs))
    return np.concatenate([first, second], axis=1)[:, : config.image_dim]
