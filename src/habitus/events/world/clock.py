"""When things happen, and how: timestamps with days and nights, the kind of event, the price paid.

None of this says anything about the next item beyond the items themselves: it is drawn after them, by draws of
its own. Time runs on an **activity clock** that ticks fast when people are awake; gaps between events are drawn
on that clock in whole seconds, and its weekly dial is then turned into wall-clock time. So hours and weekdays
have the profile below whatever the gaps, and time never runs backwards.
"""

import numpy as np

from habitus.events.world.config import POSITION_BITS, WorldConfig
from habitus.events.world.draws import Draw, fraction, uniforms, words

EVENT_TYPES = ("view", "cart", "purchase")
_TYPE_ENDS = np.array([0.75, 0.88])  # the rest are purchases
PURCHASE = EVENT_TYPES.index("purchase")

START = 1_736_121_600  # Monday 2025-01-06 00:00:00, seconds since 1970
_HOUR = 3_600
_WEEK = 7 * 24 * _HOUR
_NEW_VISIT = 0.25  # share of events that open a visit
_MIN_GAP = 5  # activity seconds; times the fastest dial (below) this is more than one second of wall clock
_VISIT_GAP = 90.0  # activity seconds between events of a visit, on average, above the least
_BETWEEN_VISITS = 1_800  # activity seconds, the least

# Relative activity per hour of the day, from midnight; Monday to Sunday scale it.
_HOURS = np.array([3, 2, 1, 1, 1, 2, 4, 7, 9, 10, 11, 12, 13, 12, 11, 11, 12, 13, 15, 17, 18, 16, 11, 6.0])
_WEEKDAYS = np.array([1.0, 0.95, 0.95, 1.0, 1.05, 1.2, 1.25])


def timestamps(config: WorldConfig, users: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Seconds since 1970 of each event: int64, strictly increasing within each user.

    Events lie user by user, each user's whole history, positions 0, 1, 2... within each user.
    """
    which, size, _, _ = words(config.seed, Draw.TIME, (users << POSITION_BITS) + positions)
    exponential = -np.log1p(-fraction(size))
    starts = np.flatnonzero(positions == 0)
    lengths = np.diff(starts, append=len(users))
    span = config.span_days * 24 * _HOUR
    first = np.floor(uniforms(config.seed, Draw.USER_START, users[starts]) * (span / 2))
    # Long histories are dense ones: everybody's visits spread over most of what is left of the span.
    between = 0.8 * (span - first) / (_NEW_VISIT * lengths)

    opens = fraction(which) < _NEW_VISIT
    gap = _MIN_GAP + _VISIT_GAP * exponential
    # Half the square of an exponential has mean 1 and a heavy tail.
    gap[opens] = _BETWEEN_VISITS + np.repeat(between, lengths)[opens] * exponential[opens] ** 2 / 2
    gap[starts] = first
    ticks = np.cumsum(np.floor(gap).astype(np.int64))  # integers: the same whatever else is in the block
    ticks -= np.repeat(ticks[starts] - first.astype(np.int64), lengths)
    return START + wall_clock(ticks)


def event_types_and_discounts(
    config: WorldConfig, users: np.ndarray, positions: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The number of each event's type in EVENT_TYPES, and the share of the list price that was paid."""
    _, _, kind, discount = words(config.seed, Draw.TIME, (users << POSITION_BITS) + positions)
    paid = 1.0 - 0.3 * np.maximum(fraction(discount) - 0.6, 0.0) / 0.4  # 60% pay in full, nobody below 70%
    return np.searchsorted(_TYPE_ENDS, fraction(kind), side="right").astype(np.int8), paid


def wall_clock(ticks: np.ndarray) -> np.ndarray:
    """Seconds of wall clock since a Monday midnight, for seconds of the activity clock; both int64."""
    week, inside = np.divmod(ticks, _WEEK)
    dial, hours = _dial()
    return week * _WEEK + np.floor(np.interp(inside, dial, hours)).astype(np.int64)


def _dial() -> tuple[np.ndarray, np.ndarray]:
    """Activity seconds and wall-clock seconds at each full hour of a week; both end at one week."""
    profile = np.outer(_WEEKDAYS, _HOURS).reshape(-1)
    dial = np.concatenate([[0.0], np.cumsum(profile)]) * (_WEEK / profile.sum())
    return dial, np.arange(len(dial)) * float(_HOUR)
