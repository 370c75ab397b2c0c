"""What a retriever is asked and what it answers; errors here have messages that may be shown to a client."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from habitus.errors import HabitusError

ItemId = Any  # an int or a text; for item×field pairs a mapping of column to value


class RequestError(HabitusError):
    """A request that cannot be answered as it is."""


class UnknownItemError(RequestError):
    """An item that the catalogue does not hold."""


class StorageError(HabitusError):
    """An item that could not be written durably: nothing has changed, neither on disk nor in memory."""


class ReadOnlyError(RequestError):
    """A change asked of a retriever that was opened to be read."""


@dataclass(frozen=True)
class Limits:
    """What a request may ask for."""

    window: int  # events that the model sees: of longer histories the newest ones
    max_history: int = 10_000  # events in a request
    max_k: int = 1_000
    max_filter_values: int = 1_000  # values in allow and deny together
    max_text: int = 100_000  # characters of a text or a category value


@dataclass(frozen=True)
class Request:
    """One history and what is wanted for it.

    Events are mappings with the columns of the log: the item (and the pair's columns where an item×field pair is
    predicted), the time, the event fields. The user's column may be there and is not read.
    """

    history: tuple[Mapping[str, Any], ...]
    k: int = 10
    exclude_seen: bool = False
    allow: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # category -> values; every category must match
    deny: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # category -> values; none may match


@dataclass(frozen=True)
class Scored:
    """One item of an answer."""

    item_id: ItemId
    score: float
    probability: float  # softmax over all items that may now be recommended, whatever the request's filters


@dataclass(frozen=True)
class Response:
    """The best items, best first; fewer than k where the filters leave fewer."""

    items: tuple[Scored, ...]
    events_used: int  # of the history: the newest, without those of unknown items
    unknown_items: tuple[ItemId, ...] = ()  # of the history's events that were left out
    notes: tuple[str, ...] = ()  # what a client should know, such as a filter value that no item has


@dataclass(frozen=True)
class ItemState:
    """What is known of one item."""

    item_id: ItemId
    live: bool  # whether it may be recommended
    fields: Mapping[str, Any] | None  # as put at run time; None for an item as it was trained
