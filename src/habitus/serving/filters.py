"""Filters by category value: which rows a request may be answered with."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from habitus.serving import values
from habitus.serving.live import LiveItems
from habitus.serving.requests import Limits, Request, RequestError

Conditions = tuple[tuple[str, frozenset[str | None]], ...]
KEPT_MASKS = 16


@dataclass(frozen=True)
class Filter:
    """Values by category: of `allow` each category must match, of `deny` none may. None stands for a missing value."""

    allow: Conditions = ()
    deny: Conditions = ()

    def __bool__(self) -> bool:
        return bool(self.allow or self.deny)

    def passes(self, categories: Mapping[str, str | None]) -> bool:
        """Whether an item with these categories may be an answer."""
        return all(categories.get(name) in wanted for name, wanted in self.allow) and not any(
            categories.get(name) in refused for name, refused in self.deny
        )


class Filters:
    """The filters of requests over the catalogue of one run; masks over the catalogue are kept for a while."""

    def __init__(self, item_values: Mapping[str, Sequence[str]], live: LiveItems, limits: Limits) -> None:
        self.live = live
        self.limits = limits
        self.codes = {name: {value: code for code, value in enumerate(item_values[name], 1)} for name in item_values}
        self._masks: OrderedDict[Filter, np.ndarray] = OrderedDict()

    def of(self, request: Request) -> tuple[Filter, list[str]]:
        """The filter of a request, and notes about values that no item of the trained catalogue has."""
        notes: list[str] = []
        count = sum(len(part) for given in (request.allow, request.deny) for part in self._checked(given).values())
        if count > self.limits.max_filter_values:
            raise RequestError(
                f"allow and deny hold {count:,} values", expected=f"at most {self.limits.max_filter_values:,}"
            )
        return Filter(
            self._conditions("allow", request.allow, notes), self._conditions("deny", request.deny, [])
        ), notes

    def mask(self, chosen: Filter) -> np.ndarray:
        """Which rows of the trained catalogue pass, bool [V]."""
        if chosen in self._masks:
            self._masks.move_to_end(chosen)
            return self._masks[chosen]
        mask = np.ones(self.live.num_base, bool)
        for name, wanted in chosen.allow:
            mask &= self._matches(name, wanted)
        for name, refused in chosen.deny:
            mask &= ~self._matches(name, refused)
        self._masks[chosen] = mask
        if len(self._masks) > KEPT_MASKS:
            self._masks.popitem(last=False)
        return mask

    def passing(self, chosen: Filter, rows: np.ndarray) -> np.ndarray:
        """Which of the given rows pass, bool."""
        base = self.live.num_base
        passes = np.empty(len(rows), bool)
        trained = rows < base
        passes[trained] = self.mask(chosen)[rows[trained]]
        for place in np.flatnonzero(~trained):
            passes[place] = chosen.passes(self.live.fields[rows[place] - base])
        return passes

    def rows(self, chosen: Filter) -> np.ndarray:
        """All rows that pass and may be found, in order."""
        base = self.live.num_base
        mask = self.mask(chosen)
        hidden = [row for row in self.live.hidden if row < base]
        if hidden:
            mask = mask.copy()
            mask[hidden] = False
        extra = [
            base + place
            for place, categories in enumerate(self.live.fields)
            if base + place not in self.live.hidden and chosen.passes(categories)
        ]
        return np.concatenate([np.flatnonzero(mask), np.array(extra, np.int64)])

    def _matches(self, name: str, wanted: frozenset[str | None]) -> np.ndarray:
        known = self.codes[name]
        codes = {0 if value is None else known.get(value, -1) for value in wanted}
        column = self.live.catalogue.codes[name]
        table = np.zeros(len(known) + 1, bool)
        table[[code for code in codes if code >= 0]] = True
        return table[column]

    def _checked(self, given: Any) -> Mapping[str, Sequence[Any]]:
        values.check_mapping("allow or deny", given)
        values.check_names("a filter", given, self.codes)
        for name, listed in given.items():
            if not isinstance(listed, Sequence) or isinstance(listed, str | bytes):
                raise values.refuse(f"the filter on {name}", listed, "a list of values")
        found: Mapping[str, Sequence[Any]] = given
        return found

    def _conditions(self, what: str, given: Mapping[str, Sequence[Any]], notes: list[str]) -> Conditions:
        found = []
        for name in sorted(given):
            texts = frozenset(values.category(f"{what}.{name}", value, self.limits.max_text) for value in given[name])
            found.append((name, texts))
            for value in sorted(str(text) for text in texts if text is not None and text not in self.codes[name]):
                notes.append(f"no item of the trained catalogue has {name} = {value[:60]!r}")
        return tuple(found)
