"""A synthetic shop whose best possible prediction is known exactly.

`World(config)` generates users' histories and an item table, block by block and always the same. As the oracle it
gives the exact distribution of the next item given a history. The mathematics is in `oracle.py`.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from habitus.errors import DataError
from habitus.events.world.clock import EVENT_TYPES, PURCHASE, VIEW, occasions
from habitus.events.world.config import WorldConfig
from habitus.events.world.draws import Draw
from habitus.events.world.features import Features
from habitus.events.world.histories import draw_items, history_lengths
from habitus.events.world.items import WorldCatalogue
from habitus.events.world.oracle import Oracle
from habitus.events.world.queries import Estimate, Queries, estimate
from habitus.events.world.views import ViewOracle, add_views
from habitus.randomness import Stream, permute_index, shuffle_keys

_BLOCK_EVENTS = 1 << 18  # events generated together: more share the cost of a call, fewer need less memory


class World:
    """Users, items, and how users choose. Equal configs give equal worlds, whatever the block or thread."""

    def __init__(self, config: WorldConfig) -> None:
        self.config = config
        self.catalogue = WorldCatalogue(config)
        self.features = Features(self.catalogue)
        self.oracle = Oracle(self.catalogue)
        # Where there are views, histories and queries of the oracle are of purchases, and this one knows of views.
        self.view_oracle = ViewOracle(self.catalogue, self.oracle) if config.views_per_purchase else None

    @classmethod
    def read(cls, path: str | Path) -> "World":
        """The world behind a folder that `habitus world` or `habitus prepare` wrote, or of a file of knobs."""
        return cls(WorldConfig.find(path))

    def items(self, first_item: int, last_item: int) -> Any:
        """The item table of items in [first_item, last_item), as Arrow: id, title, category, brand, price, image."""
        _check_range("items", first_item, last_item, self.config.num_items)
        return self.features.table(first_item, last_item)

    def lengths(self, first_user: int, last_user: int) -> np.ndarray:
        """The number of events of each user in [first_user, last_user): int64."""
        _check_range("users", first_user, last_user, self.config.num_users)
        return history_lengths(self.config, first_user, last_user)

    def histories(self, first_user: int, last_user: int) -> tuple[np.ndarray, np.ndarray]:
        """The items of the users in [first_user, last_user), one after the other, and each user's first row."""
        lengths = self.lengths(first_user, last_user)
        blocks = [draw_items(self.catalogue, *block) for block in _user_blocks(first_user, lengths)]
        return np.concatenate([np.empty(0, np.int64), *blocks]), np.cumsum(lengths) - lengths

    def events(self, first_user: int, last_user: int) -> Any:
        """The event table of users in [first_user, last_user), as Arrow, sorted by user and time."""
        lengths = self.lengths(first_user, last_user)
        blocks = [self._event_columns(*block) for block in _user_blocks(first_user, lengths)]
        blocks = blocks or [self._event_columns(np.empty(0, np.int64), np.empty(0, np.int64))]
        users, items, seconds, types, paid = (np.concatenate(column) for column in zip(*blocks, strict=True))
        return pa.table(
            {
                "user_id": users,
                "item_id": items,
                "timestamp": (seconds * 1_000_000).view("datetime64[us]"),
                "event_type": pa.DictionaryArray.from_arrays(types, pa.array(EVENT_TYPES)),
                "price_paid": pa.array(paid, mask=types != PURCHASE),
            }
        )

    def event_blocks(self, events_per_block: int = 1 << 20, threads: int = 1) -> Iterator[Any]:
        """The whole event table in user order, in blocks of about `events_per_block` rows."""
        return _in_order(self.events, self._user_ranges(events_per_block), threads)

    def item_blocks(self, items_per_block: int = 1 << 16, threads: int = 1) -> Iterator[Any]:
        """The whole item table in item order, in blocks of `items_per_block` rows."""
        count = self.config.num_items
        ranges = ((at, min(at + items_per_block, count)) for at in range(0, count, items_per_block))
        return _in_order(self.items, ranges, threads)

    def sample(self, num_queries: int, first_user: int = 0, last_user: int | None = None) -> Queries:
        """Queries drawn evenly, each at most once, from the users' events that have a history.

        Without `last_user` enough users are taken for about ten times as many events, as far as they exist.
        """
        if last_user is None:
            num_users = max(2, int(10 * num_queries / self.config.events_per_user))
            last_user = min(first_user + num_users, self.config.num_users)
        items, starts = self.histories(first_user, last_user)
        eligible = np.setdiff1d(np.arange(len(items)), starts, assume_unique=True)
        if not 1 <= num_queries <= len(eligible):
            raise DataError(
                f"a sample of {num_queries} queries from users {first_user} to {last_user}",
                expected=f"1 to {len(eligible)}, the events of these users that have a history",
            )
        keys = shuffle_keys(self.config.seed, Stream.WORLD, Draw.SAMPLE)
        chosen = eligible[np.sort(permute_index(np.arange(num_queries), len(eligible), keys))]
        return Queries.of_events(items, starts, chosen)

    def conditional(self, history: Any) -> np.ndarray:
        """The probability of every item to come next after the items of `history`, oldest first."""
        return self.oracle.conditional(history)

    def entropy_floor(self, sample: Queries) -> Estimate:
        """The least cross-entropy that any model can have on the sample's histories, in nats per event."""
        return estimate(self.oracle.entropies(sample), sample.starts)

    def best_recall(self, k: int, sample: Queries) -> Estimate:
        """The best recall@k that any model can expect on the sample's histories."""
        _, probabilities = self.oracle.top(sample, k)
        return estimate(probabilities.sum(axis=1), sample.starts)

    def _event_columns(self, users: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        items = draw_items(self.catalogue, users, positions)
        is_purchase = None
        if self.config.views_per_purchase:
            users, positions, items, is_purchase = add_views(self.catalogue, users, positions, items)
        seconds, types, paid_share = occasions(self.config, users, positions)
        types = types if is_purchase is None else np.where(is_purchase, PURCHASE, VIEW).astype(np.int8)
        bought = types == PURCHASE
        paid = np.zeros(len(items))
        paid[bought] = np.round(self.features.prices(items[bought]) * paid_share[bought], 2)
        return users, items, seconds, types, paid

    def _user_ranges(self, events_per_block: int) -> Iterator[tuple[int, int]]:
        """Consecutive user ranges of about `events_per_block` events by the mean length."""
        step = max(1, int(events_per_block / self.config.events_per_user))
        for first in range(0, self.config.num_users, step):
            yield first, min(first + step, self.config.num_users)


def _user_blocks(first_user: int, lengths: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Users and positions of whole histories, about _BLOCK_EVENTS events at a time."""
    ends = np.cumsum(lengths)
    first = 0
    while first < len(lengths):
        before = ends[first - 1] if first else 0
        last = max(int(np.searchsorted(ends, before + _BLOCK_EVENTS, side="right")), first + 1)
        part = lengths[first:last]
        users = np.repeat(np.arange(first_user + first, first_user + last), part)
        yield users, np.arange(len(users)) - np.repeat(np.cumsum(part) - part, part)
        first = last


def _in_order(make: Any, ranges: Iterator[tuple[int, int]], threads: int) -> Iterator[Any]:
    """make(first, last) of each range, in order, with at most 2·threads results waiting."""
    if threads == 1:
        yield from (make(*part) for part in ranges)
        return
    with ThreadPoolExecutor(threads) as pool:
        waiting: list[Future[Any]] = [pool.submit(make, *part) for part in islice(ranges, 2 * threads)]
        while waiting:
            done = waiting.pop(0).result()
            waiting += [pool.submit(make, *part) for part in islice(ranges, 1)]
            yield done


def _check_range(what: str, first: int, last: int, count: int) -> None:
    if not 0 <= first <= last <= count:
        raise DataError(
            f"{what} from {first} to {last}", expected=f"0 <= first <= last <= {count}, the number of {what}"
        )
