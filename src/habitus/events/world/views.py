"""Views that announce purchases: what a user looks at before buying, and what that tells, exactly.

Purchases follow the law of `oracle.py` given earlier purchases. Before each of them a user has its item x in mind:
every event is the purchase with probability r = 1/(1 + views_per_purchase), otherwise a view, which shows x with
probability q = view_informs and an item drawn by popularity w otherwise. With the views v of x so far,

    p(x | purchases, views) ∝ p(x | purchases) · Π_v (q·[v = x] + (1 − q)·w(v))

is the law of the next purchase, and (r + (1 − r)·q) · p(x | purchases, views) + (1 − r)·(1 − q)·w(x) that of the next
event, whose type nobody knows beforehand.
"""

from typing import NamedTuple

import numpy as np

from habitus.events.world.draws import Draw, draw_words, event_keys, fraction, uniforms
from habitus.events.world.items import WorldCatalogue
from habitus.events.world.oracle import Oracle
from habitus.events.world.queries import Queries
from habitus.randomness import to_uniform


class ViewedEvents(NamedTuple):
    """Purchases and the views before them, user by user."""

    users: np.ndarray
    positions: np.ndarray  # among all events of the user
    items: np.ndarray
    is_purchase: np.ndarray


def add_views(catalogue: WorldCatalogue, users: np.ndarray, positions: np.ndarray, items: np.ndarray) -> ViewedEvents:
    """The purchases with their views; whole histories, from their starts."""
    config = catalogue.config
    rate = _purchase_rate(config.views_per_purchase)
    draws = uniforms(config.seed, Draw.VIEW_COUNT, event_keys(users, positions))
    counts = np.floor(np.log1p(-draws) / np.log1p(-rate)).astype(np.int64)
    purchase = np.repeat(np.arange(len(users)), counts + 1)
    is_purchase = np.zeros(len(purchase), bool)
    is_purchase[np.cumsum(counts + 1) - 1] = True
    starts = np.searchsorted(purchase, np.flatnonzero(positions == 0))
    place = np.arange(len(purchase)) - np.repeat(starts, np.diff(starts, append=len(purchase)))
    which, _, high, low = draw_words(config.seed, Draw.VIEW, event_keys(users[purchase], place))
    shows_own = is_purchase | (fraction(which) < config.view_informs)
    shown = np.where(shows_own, items[purchase], catalogue.popular(to_uniform(high, low)))
    return ViewedEvents(users[purchase], place, shown, is_purchase)


class ViewQueries(NamedTuple):
    """Queries about a log with views: the purchases before each, and the views since the last of them."""

    purchases: Queries
    view_owner: np.ndarray  # number of the query that a view belongs to
    view_items: np.ndarray

    @classmethod
    def of_events(
        cls, items: np.ndarray, is_purchase: np.ndarray, user_starts: np.ndarray, events: np.ndarray
    ) -> "ViewQueries":
        """Queries for the given rows of a log, of purchases and of views."""
        items, events = np.asarray(items, np.int64), np.asarray(events, np.int64)
        first = user_starts[np.searchsorted(user_starts, events, side="right") - 1]
        bought = np.flatnonzero(is_purchase)
        ends = np.searchsorted(bought, events)  # purchases before each event, of anyone
        before = np.where(ends > 0, bought[ends - 1] + 1, 0) if len(bought) else np.zeros_like(events)
        begins = np.maximum(before, first)
        counts = events - begins
        owner = np.repeat(np.arange(len(events)), counts)
        rows = np.arange(len(owner)) + np.repeat(begins - (np.cumsum(counts) - counts), counts)
        purchases = Queries(items[bought], np.searchsorted(bought, first), ends, items[events])
        return cls(purchases, owner, items[rows])


class ViewOracle:
    """The exact laws of a world with views."""

    def __init__(self, catalogue: WorldCatalogue, oracle: Oracle) -> None:
        self.oracle = oracle
        self.config = catalogue.config
        self.popularity = catalogue.weights(np.arange(self.config.num_items))

    def next_purchase(self, queries: ViewQueries) -> np.ndarray:
        """The probability of every item to be bought next: (queries, items)."""
        chances = self.oracle.conditionals(queries.purchases)
        odds = self.config.view_informs / (1 - self.config.view_informs) / self.popularity[queries.view_items]
        np.multiply.at(chances, (queries.view_owner, queries.view_items), 1 + odds)
        return chances / chances.sum(axis=1, keepdims=True)

    def next_event(self, queries: ViewQueries) -> np.ndarray:
        """The probability of every item to be bought or viewed next: (queries, items)."""
        rate, informs = _purchase_rate(self.config.views_per_purchase), self.config.view_informs
        own = rate + (1 - rate) * informs
        return own * self.next_purchase(queries) + (1 - own) * self.popularity


def _purchase_rate(views_per_purchase: float) -> float:
    return 1 / (1 + views_per_purchase)
