"""When things happen, and how: timestamps with days and nights, the kind of event, the price paid.

None of this says anything about the next item beyond the items themselves: it is drawn after them, by draws of
its own. Time runs on an **activity clock** that ticks fast when people are awake; gaps between events are drawn
on that clock in whole seconds, and its weekly dial is then turned into wall-clock time. So hours and weekdays
have the profile below whatever the gaps, and time never runs backwards.
"""

from typing import NamedTuple

import numpy as np

from habitus.events.world.config import WorldConfig
from habitus.events.world.draws import Draw, draw_words, event_keys, fraction, uniforms

EVENT_TYPES = ("view", "cart", "purchase")
_TYPE_ENDS = np.array([0.75, 0.88])  # the rest are purchases
VIEW, PURCHASE = EVENT_TYPES.index("view"), EVENT_TYPES.index("purchase")

_START = 1_736_121_600  # Monday 2025-01-06 00:00:00, seconds since 1970
_HOUR = 3_600
_WEEK = 7 * 24 * _HOUR
_NEW_VISIT = 0.25  # share of events that open a visit
_MIN_GAP = 5  # activity seconds; times the fastest dial (below) this is more than one second of wall clock
_VISIT_GAP = 90.0  # activity seconds between events of a visit, on average, above the least
_PAUSE_UNIT = 1 << 20  # pauses are summed as integers of this fineness

# Relative activity per hour of the day, from midnight; Monday to Sunday scale it.
_HOURS = np.array([3, 2, 1, 1, 1, 2, 4, 7, 9, 10, 11, 12, 13, 12, 11, 11, 12, 13, 15, 17, 18, 16, 11, 6.0])
_WEEKDAYS = np.array([1.0, 0.95, 0.95, 1.0, 1.05, 1.2, 1.25])


class Occasions(NamedTuple):
    """When and how each event happened."""

    seconds: np.ndarray  # since 1970: int64, strictly increasing within each user
    types: np.ndarray  # number in EVENT_TYPES: int8
    paid_share: np.ndarray  # of the list price: float64


def occasions(config: WorldConfig, users: np.ndarray, positions: np.ndarray) -> Occasions:
    """When and how each event happened. Events lie user by user, each history whole and from its start."""
    visit, gap, kind, discount = map(fraction, draw_words(config.seed, Draw.TIME, event_keys(users, positions)))
    types = np.searchsorted(_TYPE_ENDS, kind, side="right").astype(np.int8)
    paid_share = 1.0 - 0.3 * np.maximum(discount - 0.6, 0.0) / 0.4  # 60% pay in full, nobody below 70%
    return Occasions(_seconds(config, users, positions, visit < _NEW_VISIT, gap), types, paid_share)


def _seconds(
    config: WorldConfig, users: np.ndarray, positions: np.ndarray, opens_visit: np.ndarray, gap: np.ndarray
) -> np.ndarray:
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(users))
    span = config.span_days * 24 * _HOUR
    first = np.floor(uniforms(config.seed, Draw.USER_START, users[starts]) * (span / 2)).astype(np.int64)

    exponential = -np.log1p(-gap)
    within = np.floor(_MIN_GAP + _VISIT_GAP * exponential).astype(np.int64)
    # Half the square of an exponential has mean 1 and a heavy tail. A user's pauses, and one more of average
    # length at the end, share what is left of the span: long histories are dense ones.
    pause = np.where(opens_visit, exponential**2 / 2 * _PAUSE_UNIT, 0.0).astype(np.int64)
    pauses = _sums_so_far(pause, starts, lengths)
    total = np.repeat(pauses[starts + lengths - 1] + _PAUSE_UNIT, lengths)
    away = np.repeat(span - first, lengths) * (pauses / total)
    ticks = _sums_so_far(within, starts, lengths) + np.floor(away).astype(np.int64)
    return _START + _wall_clock(np.repeat(first, lengths) + ticks)


def _sums_so_far(values: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Sums of integers over each user's events after the first: the same whatever else is in the block."""
    sums = np.cumsum(values)
    return sums - np.repeat(sums[starts], lengths)


def _wall_clock(ticks: np.ndarray) -> np.ndarray:
    """Seconds of wall clock since a Monday midnight, for seconds of the activity clock; both int64."""
    week, inside = np.divmod(ticks, _WEEK)
    dial, hours = _dial()
    return week * _WEEK + np.floor(np.interp(inside, dial, hours)).astype(np.int64)


def _dial() -> tuple[np.ndarray, np.ndarray]:
    """Activity seconds and wall-clock seconds at each full hour of a week; both end at one week."""
    profile = np.outer(_WEEKDAYS, _HOURS).reshape(-1)
    dial = np.concatenate([[0.0], np.cumsum(profile)]) * (_WEEK / profile.sum())
    return dial, np.arange(len(dial)) * float(_HOUR)
