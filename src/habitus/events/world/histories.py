"""Histories drawn from the mixture, without ever writing down a distribution.

Every event either stands on its own (drawn by popularity) or **follows an earlier event of its user**: it copies
that event, continues from it, or is another item of its group, its brand or one of its topics. Which event it
follows depends on positions alone, so all of that is drawn at once; items are then filled in from the roots outwards,
a whole generation of followers at a time. An urn needs no counting here: to draw a group in proportion to how often the
user met it is to follow one of the user's events, chosen evenly, and to draw the group from the prior is to draw
an item by popularity.

The oracle (`oracle.py`) computes the same law by counting. The two share the catalogue and nothing else.
"""

import numpy as np

from habitus.events.world.config import WorldConfig
from habitus.events.world.draws import Draw, draw_words, event_keys, fraction, normals
from habitus.events.world.items import WorldCatalogue, copy_weights, successor_weights
from habitus.randomness import to_uniform

COPY, ITEM_NEXT, KIND_NEXT, KIND, GROUP, BRAND, POPULAR, TOPIC, TOPIC_RECENT = range(9)  # as in MixtureWeights
_ROOT = -1


def history_lengths(config: WorldConfig, first_user: int, last_user: int) -> np.ndarray:
    """Events of each user in [first_user, last_user): int64, log-normal above the minimum."""
    z, _ = normals(config.seed, Draw.LENGTH, np.arange(first_user, last_user))
    sigma = config.length_spread
    mean_above = config.events_per_user - config.min_events_per_user
    above = mean_above * np.exp(sigma * z - sigma**2 / 2)  # has mean mean_above
    # Rounding to nearest keeps the mean; the cap is checked in float, before a long tail could overflow.
    longest = config.max_events_per_user - config.min_events_per_user
    return config.min_events_per_user + np.minimum(np.floor(above + 0.5), longest).astype(np.int64)


def draw_items(catalogue: WorldCatalogue, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The item of each event: int64. Events lie user by user, positions 0, 1, 2... within each user."""
    part, follows, successor, inside = _event_draws(catalogue.config, users, positions)
    items = np.empty(len(users), dtype=np.int64)
    roots = np.flatnonzero(follows == _ROOT)
    items[roots] = catalogue.popular(inside[roots])
    is_drawn = np.zeros(len(users), dtype=bool)
    is_drawn[roots] = True
    topical = np.flatnonzero(part > POPULAR)
    towards = np.zeros((2, len(users)))
    words = draw_words(catalogue.config.seed, Draw.TOPIC, event_keys(users[topical], positions[topical]))
    towards[:, topical] = fraction(words[0]), fraction(words[1])
    waiting = np.flatnonzero(follows != _ROOT)
    while len(waiting):
        ready = is_drawn[follows[waiting]]
        now, waiting = waiting[ready], waiting[~ready]
        draws = successor[now], inside[now], towards[:, now]
        items[now] = _follow(catalogue, part[now], items[follows[now]], *draws)
        is_drawn[now] = True
    return items


def _event_draws(
    config: WorldConfig, users: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each event: its part, the event it follows (or _ROOT), a successor number, a fraction in [0, 1)."""
    which, choice, high, low = draw_words(config.seed, Draw.EVENT, event_keys(users, positions))
    ends = np.cumsum(config.weights.values())
    # A weight of zero is never chosen: side="right" steps over empty intervals, also over the last ones.
    part = np.searchsorted(ends / ends[-1], fraction(which), side="right")
    part = np.where(positions == 0, POPULAR, part)
    choice = fraction(choice)
    lag = np.ones(len(users), dtype=np.int64)

    copies = (part == COPY) | (part == TOPIC_RECENT)
    lag_ends = np.cumsum(copy_weights(config))
    reach = np.minimum(positions[copies], config.copy_window)
    lag[copies] += np.searchsorted(lag_ends, choice[copies] * lag_ends[reach - 1], side="right")

    tastes = (part == KIND) | (part == GROUP) | (part == BRAND) | (part == TOPIC)
    # The urn holds taste_prior balls of the prior and one ball for each earlier event.
    ball = choice[tastes] * (positions[tastes] + config.taste_prior)
    lag[tastes] += np.minimum(ball.astype(np.int64), positions[tastes])
    part[lag > positions] = POPULAR  # a ball of the prior

    successor = np.searchsorted(np.cumsum(successor_weights(config))[:-1], choice, side="right")
    follows = np.where(part == POPULAR, _ROOT, np.arange(len(users)) - lag)
    return part, follows, successor, to_uniform(high, low)


def _follow(
    catalogue: WorldCatalogue,
    part: np.ndarray,
    before: np.ndarray,
    successor: np.ndarray,
    inside: np.ndarray,
    towards: np.ndarray,
) -> np.ndarray:
    """The item of each event, given the item of the event that it follows; `towards`: its topic and kind there."""
    items = before.copy()  # right for copies
    at = np.flatnonzero(part > POPULAR)
    if len(at) and catalogue.topics is not None:
        kinds = catalogue.topics.draw_kinds(catalogue.kind_of_item[before[at]], *towards[:, at])
        items[at] = catalogue.popular_in_kind(kinds, inside[at])
    for number, draw in (
        (ITEM_NEXT, lambda at: catalogue.item_successors(before[at], successor[at])),
        (KIND_NEXT, lambda at: catalogue.kind_successors(catalogue.kind_of_item[before[at]], successor[at])),
        (KIND, lambda at: catalogue.popular_in_kind(catalogue.kind_of_item[before[at]], inside[at])),
        (GROUP, lambda at: catalogue.popular_in_group(catalogue.groups(before[at]), inside[at])),
        (BRAND, lambda at: catalogue.popular_in_brand(catalogue.brands(before[at]), inside[at])),
    ):
        at = np.flatnonzero(part == number)
        items[at] = draw(at)
    return items
