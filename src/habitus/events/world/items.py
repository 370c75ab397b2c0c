"""The items of a world: their popularity, group and brand, and what follows what.

A **kind** is a group and a brand together; every item has one. Items stand in **slots**, sorted by group, brand
and falling popularity, so that a group or a kind is a range of slots and one table of cumulative popularity
serves every draw. Popularity is Zipf and Mandelbrot's: w(r) ∝ (r + 1 + offset·num_items)^(−exponent) for the
item of rank r; ranks are a random permutation of the item ids.
"""

import numpy as np

from habitus.events.world.config import SUCCESSOR_BITS, WorldConfig
from habitus.events.world.draws import Draw, draw_words, fraction, normals, uniforms
from habitus.randomness import Stream, permute_index, shuffle_keys, to_uniform

# Sizes of brands and groups fall with their number as powers; a shop has a few large brands and many small ones.
_BRAND_SKEW = 0.7
_GROUP_SKEW = 0.5
_GROUP_IN_TOPICS = 0.8  # of the variance of a kind's scores; the rest is the brand's
_CHUNK = 1 << 18  # items at a time while tables are built


class WorldCatalogue:
    """Tables over items, kinds, groups, brands and topics; about 30 bytes per item."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.kind_group, self.kind_brand, self.kind_of_item, rank_of_item = _kinds_and_ranks(config)
        by_slot = np.argsort(self.kind_of_item * np.int64(config.num_items) + rank_of_item)
        self.item_of_slot = by_slot.astype(np.int32)
        self.slot_of_item = np.empty(config.num_items, dtype=np.int32)
        self.slot_of_item[by_slot] = np.arange(config.num_items, dtype=np.int32)
        self.weight_of_slot = popularity(config)[rank_of_item[by_slot]]
        del rank_of_item, by_slot
        self.cumulative = _cumulative(self.weight_of_slot)

        self.kind_first_slot = _offsets(self.kind_of_item, self.num_kinds)
        self.kind_mass = np.add.reduceat(self.weight_of_slot, self.kind_first_slot[:-1])
        self.group_mass = np.bincount(self.kind_group, self.kind_mass, config.num_groups)
        self.brand_mass = np.bincount(self.kind_brand, self.kind_mass, config.num_brands)
        self.group_first_slot = self.kind_first_slot[_offsets(self.kind_group, config.num_groups)]

        self.kinds_by_brand = np.lexsort((self.kind_group, self.kind_brand))
        self.brand_first_kind = _offsets(self.kind_brand, config.num_brands)
        self.brand_cumulative = _cumulative(self.kind_mass[self.kinds_by_brand])
        self.next_group = self._next_groups()
        self.shown_kind = _shown_kinds(config, self.kind_of_item)
        self.topics = Topics(config, self) if config.num_topics else None

    @property
    def num_kinds(self) -> int:
        return len(self.kind_group)

    def weights(self, items: np.ndarray) -> np.ndarray:
        """The popularity of items: float64, summing to 1 over the catalogue."""
        return self.weight_of_slot[self.slot_of_item[items]]

    def groups(self, items: np.ndarray) -> np.ndarray:
        return self.kind_group[self.kind_of_item[items]]

    def brands(self, items: np.ndarray) -> np.ndarray:
        return self.kind_brand[self.kind_of_item[items]]

    def shown(self, items: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The group and the brand that the fields of items show."""
        kinds = self.shown_kind[items]
        return self.kind_group[kinds], self.kind_brand[kinds]

    def popular(self, fraction: np.ndarray) -> np.ndarray:
        """The items at given fractions in [0, 1) of the whole popularity."""
        return self._at(fraction, 0, self.config.num_items)

    def popular_in_group(self, groups: np.ndarray, fraction: np.ndarray) -> np.ndarray:
        """The items at given fractions of their groups' popularity. The groups must not be empty."""
        return self._within(self.group_first_slot[groups], self.group_first_slot[groups + 1], fraction)

    def popular_in_kind(self, kinds: np.ndarray, fraction: np.ndarray) -> np.ndarray:
        """The items at given fractions of their kinds' popularity."""
        return self._within(self.kind_first_slot[kinds], self.kind_first_slot[kinds + 1], fraction)

    def popular_in_brand(self, brands: np.ndarray, fraction: np.ndarray) -> np.ndarray:
        """The items at given fractions of their brands' popularity: first the brand's kind, then the item."""
        first, end = self.brand_first_kind[brands], self.brand_first_kind[brands + 1]
        target = _between(self.brand_cumulative, first, end, fraction)
        place = _locate(self.brand_cumulative, target, first, end)
        inside = target - self.brand_cumulative[place]
        inside /= self.brand_cumulative[place + 1] - self.brand_cumulative[place]
        return self.popular_in_kind(self.kinds_by_brand[place], inside)

    def item_successors(self, items: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The successor of each item under its number in [0, num_successors)."""
        return self._successors(Draw.ITEM_SUCCESSOR, items, self.kind_of_item[items], number)

    def kind_successors(self, kinds: np.ndarray, number: np.ndarray) -> np.ndarray:
        """The successor of each kind under its number in [0, num_successors)."""
        return self._successors(Draw.KIND_SUCCESSOR, kinds, kinds, number)

    def _successors(self, draw: Draw, keys: np.ndarray, kinds: np.ndarray, number: np.ndarray) -> np.ndarray:
        """Even numbers stay in the kind, odd ones lead to the group that follows; the item is hashed."""
        fraction = uniforms(self.config.seed, draw, (keys.astype(np.int64) << SUCCESSOR_BITS) + number)
        stays = number % 2 == 0
        group = self.next_group[self.kind_group[kinds], number]
        first = np.where(stays, self.kind_first_slot[kinds], self.group_first_slot[group])
        end = np.where(stays, self.kind_first_slot[kinds + 1], self.group_first_slot[group + 1])
        return self._within(first, end, fraction)

    def _within(self, first: np.ndarray, end: np.ndarray, fraction: np.ndarray) -> np.ndarray:
        return self._at(_between(self.cumulative, first, end, fraction), first, end)

    def _at(self, target: np.ndarray, first: np.ndarray | int, end: np.ndarray | int) -> np.ndarray:
        return self.item_of_slot[_locate(self.cumulative, target, first, end)].astype(np.int64)

    def _next_groups(self) -> np.ndarray:
        """The group that follows each group under each successor number, drawn by popularity."""
        number = np.arange(self.config.num_successors)
        groups = np.arange(self.config.num_groups)[:, None]
        fraction = uniforms(self.config.seed, Draw.NEXT_GROUP, (groups << SUCCESSOR_BITS) + number)
        return self.groups(self.popular(fraction.reshape(-1))).reshape(fraction.shape)


class Topics:
    """Low-rank taste: every kind belongs to topics, in parts that depend on its group and its brand.

    A kind k belongs to topic τ to the part a_τ(k), a softmax over topics of `topic_sharpness` times a normal score, of
    whose variance four fifths are the group's and the rest the brand's. Topic τ has popularity π_τ = Σ_k W_k a_τ(k) and
    shows item x with probability w(x) a_τ(k(x)) / π_τ. So all topics together give w again, and so does the topic of an
    item that was drawn by popularity.
    """

    def __init__(self, config: WorldConfig, catalogue: WorldCatalogue) -> None:
        of_group, of_brand = (
            normals(config.seed, draw, np.arange(count * config.num_topics))[0].reshape(count, -1)
            for draw, count in (
                (Draw.TOPIC_OF_GROUP, config.num_groups),
                (Draw.TOPIC_OF_BRAND, config.num_brands),
            )
        )
        scores = np.sqrt(_GROUP_IN_TOPICS) * of_group[catalogue.kind_group]
        scores += np.sqrt(1 - _GROUP_IN_TOPICS) * of_brand[catalogue.kind_brand]
        scores *= config.topic_sharpness
        parts = np.exp(scores - scores.max(axis=1, keepdims=True))
        self.of_kind = parts / parts.sum(axis=1, keepdims=True)  # a: [kinds, topics]
        mass = self.of_kind * catalogue.kind_mass[:, None]
        self.lift = self.of_kind / mass.sum(axis=0)  # a / π
        # One growing table for all rows each: entry j of row i lies between i and i + 1.
        self._topic_ends = _rows_of_ends(self.of_kind)
        self._kind_ends = _rows_of_ends(mass.T)

    def draw_kinds(self, kinds: np.ndarray, topic: np.ndarray, kind: np.ndarray) -> np.ndarray:
        """For each kind, a kind of one of its topics, at given fractions in [0, 1) of its topics and of that topic."""
        num_kinds, num_topics = self.of_kind.shape
        drawn = np.searchsorted(self._topic_ends, kinds + topic, side="right") - kinds * num_topics
        drawn = np.clip(drawn, 0, num_topics - 1)
        place = np.searchsorted(self._kind_ends, drawn + kind, side="right") - drawn * num_kinds
        return np.clip(place, 0, num_kinds - 1)


def _rows_of_ends(weights: np.ndarray) -> np.ndarray:
    ends = np.cumsum(weights, axis=1)
    return (ends / ends[:, -1:] + np.arange(len(weights))[:, None]).reshape(-1)


def popularity(config: WorldConfig) -> np.ndarray:
    """The probability of each rank under global popularity: float64, falling, summing to 1."""
    ranks = np.arange(config.num_items, dtype=np.float64)
    weights = (ranks + 1.0 + config.zipf_offset * config.num_items) ** -config.zipf_exponent
    return weights / weights.sum()


def successor_weights(config: WorldConfig) -> np.ndarray:
    """The probability of each successor number: a power law, summing to 1."""
    weights = np.arange(1, config.num_successors + 1, dtype=np.float64) ** -config.successor_exponent
    return weights / weights.sum()


def copy_weights(config: WorldConfig) -> np.ndarray:
    """The weight of each lag 1..copy_window, not normalised: a short history uses the first of them."""
    return np.arange(1, config.copy_window + 1, dtype=np.float64) ** -config.copy_exponent


def _kinds_and_ranks(config: WorldConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Group and brand of each kind that has items, then kind and popularity rank of each item.

    Kinds are sorted by group and brand. Kind and rank are drawn without regard to each other.
    """
    kind_group, kind_brand, share = _possible_kinds(config)
    kind_end = np.cumsum(share)
    keys = shuffle_keys(config.seed, Stream.WORLD, Draw.ITEM_RANK)
    kinds = np.empty(config.num_items, dtype=np.int32)
    ranks = np.empty(config.num_items, dtype=np.int32)
    for first in range(0, config.num_items, _CHUNK):
        items = np.arange(first, min(first + _CHUNK, config.num_items))
        fraction = uniforms(config.seed, Draw.ITEM_KIND, items)
        kinds[items] = np.minimum(np.searchsorted(kind_end, fraction, side="right"), len(share) - 1)
        ranks[items] = permute_index(items, config.num_items, keys)
    held = np.bincount(kinds, minlength=len(share)) > 0
    number = (np.cumsum(held) - 1).astype(np.int32)
    return kind_group[held], kind_brand[held], number[kinds], ranks


def _shown_kinds(config: WorldConfig, kind_of_item: np.ndarray) -> np.ndarray:
    """The kind that each item's fields show: its own, or that of some item."""
    if config.features_tell == 1:
        return kind_of_item
    shown = kind_of_item.copy()
    for first in range(0, config.num_items, _CHUNK):
        items = np.arange(first, min(first + _CHUNK, config.num_items))
        tells, other, more, _ = draw_words(config.seed, Draw.SHOWN_KIND, items)
        other = np.floor(to_uniform(other, more) * config.num_items).astype(np.int64)
        shown[items] = kind_of_item[np.where(fraction(tells) < config.features_tell, items, other)]
    return shown


def _possible_kinds(config: WorldConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group, brand and expected share of the items of each kind, sorted by group and brand."""
    group_size = (np.arange(config.num_groups) + 1.0) ** -_GROUP_SKEW
    group_end = np.cumsum(group_size) / group_size.sum()
    brands = np.repeat(np.arange(config.num_brands), config.groups_per_brand)
    fraction = uniforms(config.seed, Draw.BRAND_GROUP, np.arange(len(brands)))
    groups = np.minimum(np.searchsorted(group_end, fraction, side="right"), config.num_groups - 1)
    pairs = np.unique(groups * np.int64(config.num_brands) + brands)  # a brand may draw a group twice
    groups, brands = pairs // config.num_brands, pairs % config.num_brands
    brand_size = (np.arange(config.num_brands) + 1.0) ** -_BRAND_SKEW
    share = (brand_size / np.bincount(brands, minlength=config.num_brands))[brands]
    return groups, brands, share / share.sum()


def _offsets(labels: np.ndarray, num_labels: int) -> np.ndarray:
    """Where each label's entries start once sorted by label, and one more entry for the end."""
    return np.concatenate([[0], np.cumsum(np.bincount(labels, minlength=num_labels))])


def _cumulative(weights: np.ndarray) -> np.ndarray:
    """Cumulative sums from exactly 0 to exactly 1."""
    total = np.concatenate([[0.0], np.cumsum(weights)])
    total /= total[-1]
    return total


def _between(cumulative: np.ndarray, first: np.ndarray, end: np.ndarray, fraction: np.ndarray) -> np.ndarray:
    """The point at a fraction of the way through the range [first, end) of a cumulative sum."""
    low = cumulative[first]
    return low + fraction * (cumulative[end] - low)


def _locate(cumulative: np.ndarray, target: np.ndarray, first: np.ndarray | int, end: np.ndarray | int) -> np.ndarray:
    """The entry of the range [first, end) whose interval holds the target; rounding cannot leave the range."""
    return np.clip(np.searchsorted(cumulative[1:], target, side="right"), first, np.subtract(end, 1))
