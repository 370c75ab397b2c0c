"""The items of a world: their popularity, group and brand, and what follows what.

A **kind** is a group and a brand together; every item has one. Items stand in **slots**, sorted by group, brand
and falling popularity, so that a group or a kind is a range of slots and one table of cumulative popularity
serves every draw. Popularity is Zipf and Mandelbrot's: w(r) ∝ (r + 1 + offset·num_items)^(−exponent) for the
item of rank r; ranks are a random permutation of the item ids.
"""

import numpy as np

from habitus.events.world.config import SUCCESSOR_BITS, WorldConfig
from habitus.events.world.draws import Draw, uniforms
from habitus.randomness import Stream, permute_index, shuffle_keys

# Sizes of brands and groups fall with their number as powers; a shop has a few large brands and many small ones.
_BRAND_SKEW = 0.7
_GROUP_SKEW = 0.5
_CHUNK = 1 << 18  # items at a time while tables are built


class WorldCatalogue:
    """Tables over items, kinds, groups and brands; about 30 bytes per item."""

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
