"""The exact law of the next event, by counting: p(x | history) in full, its entropy, ranks and best items.

With h = (x₁ … x_t), popularity w, group g and brand b of an item, kind k = (g, b), mixture weights ω:

    p(x | h) = w(x) · f_k(x) + ω_copy · C(x) + ω_item · S(x | x_t) + ω_kind · S(x | k(x_t))
    f_k      = ω_popular + ω_kind-taste · U_k / W_k + ω_group-taste · U_g / W_g + ω_brand-taste · U_b / W_b
               + ω_topic-taste · (α + Σ_i A(k(x_i), k)) / (α + t)
               + ω_topic-recent · Σ_lag c_lag·A(k(x_{t+1−lag}), k) / Σ_lag c_lag
    U_g      = (α·W_g + n_g) / (α + t)      an urn: W_g = Σ w over the group, n_g = events of h in the group
    C(x)     = Σ_lag c_lag·[x_{t+1−lag} = x] / Σ_lag c_lag        lags 1 … min(t, copy_window)
    S(x | y) = Σ_m s_m·[m-th successor of y = x]
    A(j, k)  = Σ_τ a_τ(j) a_τ(k) / π_τ      low rank: a_τ(k) the part of kind k in topic τ, π_τ = Σ W_k a_τ(k)

and p(x | ∅) = w(x). Each part sums to 1 over the catalogue. All but a few dozen items (the recent ones and
the successors: the **extras** of a query) have p = w·f, and f is one number per kind. Hence sums over the
catalogue are sums over kinds, and items of a kind stand in the order of their popularity: entropy, rank and
top-k cost the number of kinds, not the number of items.
"""

from collections.abc import Callable

import numpy as np

from habitus.errors import DataError
from habitus.events.world.items import WorldCatalogue, copy_weights, successor_weights
from habitus.events.world.queries import Queries

_CHUNK_CELLS = 1 << 20  # queries times kinds (or history events) held at once: 8 MiB for each array
_TOPIC_EVENTS = 1 << 14  # history events whose topics are held at once
_NO_ITEM = -1


class Oracle:
    """The exact conditional of a world, for one history or for many."""

    def __init__(self, catalogue: WorldCatalogue) -> None:
        self.catalogue = catalogue
        self.config = catalogue.config
        self.copy_weights = copy_weights(self.config)
        self.successor_weights = successor_weights(self.config)
        self.topics = catalogue.topics
        weights = self.config.weights
        self.urns = (  # weight, the label that the urn counts for each kind, popularity of each label
            (weights.kind_taste, np.arange(catalogue.num_kinds), catalogue.kind_mass),
            (weights.group_taste, catalogue.kind_group, catalogue.group_mass),
            (weights.brand_taste, catalogue.kind_brand, catalogue.brand_mass),
        )
        first = catalogue.kind_first_slot[:-1]
        self.kind_head = catalogue.weight_of_slot[first]  # the weight of each kind's most popular item
        self.kind_w_log_w = np.add.reduceat(_x_log_x(catalogue.weight_of_slot), first)

    def conditional(self, history: np.ndarray) -> np.ndarray:
        """The probability of every item of the catalogue to come next: float64, in item order."""
        history = np.asarray(history).reshape(-1)
        if len(history) and history.dtype.kind not in "iu":
            raise DataError(f"a history of type {history.dtype}", expected="item ids: integers, oldest first")
        history = history.astype(np.int64)
        nothing = np.zeros(1, dtype=np.int64)
        return self.conditionals(Queries(history, nothing, nothing + len(history), nothing))[0]

    def conditionals(self, queries: Queries) -> np.ndarray:
        """The probability of every item after each history: (queries, items), for small catalogues."""
        dense = self._over_chunks(queries, self._chunk_conditionals, self.config.num_items)
        return dense.reshape(queries.count, self.config.num_items)

    def log_probs(self, queries: Queries) -> np.ndarray:
        """log p(target | history) of each query: float64, −inf where the target cannot come next."""
        with np.errstate(divide="ignore"):
            return np.log(self._over_chunks(queries, self._target_probs, self.config.copy_window))

    def entropies(self, queries: Queries) -> np.ndarray:
        """The exact entropy of each query's conditional, in nats. Targets play no part."""
        return self._over_chunks(queries, self._chunk_entropies, self.catalogue.num_kinds)

    def ranks(self, queries: Queries) -> np.ndarray:
        """The rank of each target among all items by their conditional: int64 from 1; ties count against it."""
        return self._over_chunks(queries, self._chunk_ranks, self.catalogue.num_kinds).astype(np.int64)

    def top(self, queries: Queries, k: int) -> tuple[np.ndarray, np.ndarray]:
        """The k most probable items of each query, best first, and their probabilities: (queries, k) each."""
        if not 1 <= k <= self.config.num_items:
            raise DataError(f"k = {k}", expected=f"1 to {self.config.num_items}, the number of items")
        candidates = k * min(k, self.catalogue.num_kinds)
        if candidates < self.config.num_items:
            best, cells = self._chunk_top, max(self.catalogue.num_kinds, candidates)
        else:
            best, cells = self._chunk_top_of_all, self.config.num_items
        both = self._over_chunks(queries, lambda part: best(part, k), cells)
        both = both.reshape(queries.count, 2, k)
        return both[:, 0].astype(np.int64), both[:, 1]

    def _over_chunks(
        self, queries: Queries, compute: Callable[[Queries], np.ndarray], cells_per_query: int
    ) -> np.ndarray:
        self._check_items(queries.items)
        self._check_items(queries.targets)
        parts = [compute(part) for part in queries.chunks(_CHUNK_CELLS, cells_per_query)]
        return np.concatenate(parts) if parts else np.empty(0)

    def _check_items(self, items: np.ndarray) -> None:
        if len(items) and not (items.min() >= 0 and items.max() < self.config.num_items):
            wrong = items[(items < 0) | (items >= self.config.num_items)]
            raise DataError(
                f"{len(wrong)} items are not in the catalogue, the first {int(wrong[0])}",
                expected=f"item ids from 0 to {self.config.num_items - 1}",
            )

    def _target_probs(self, queries: Queries) -> np.ndarray:
        catalogue, targets, lengths = self.catalogue, queries.targets, queries.lengths
        owner, events = queries.expand()
        factor = np.full(queries.count, self.config.weights.popular)
        for weight, label_of_kind, mass in self.urns:
            label = label_of_kind[catalogue.kind_of_item[targets]]
            same = label_of_kind[catalogue.kind_of_item[events]] == label[owner]
            met = np.bincount(owner, same, queries.count)
            factor += weight * self._urn(met, mass[label], lengths)
        factor += self._target_topics(queries, owner, events)
        factor[lengths == 0] = 1.0
        items, masses = self._extras(queries)
        extra = np.sum(masses * (items == targets[:, None]), axis=1)
        return catalogue.weights(targets) * factor + extra

    def _chunk_conditionals(self, queries: Queries) -> np.ndarray:
        catalogue = self.catalogue
        weights = catalogue.weight_of_slot[catalogue.slot_of_item]
        probabilities = self._factors(queries)[:, catalogue.kind_of_item] * weights
        items, masses = self._extras(queries)
        rows, places = np.nonzero(items != _NO_ITEM)
        probabilities[rows, items[rows, places]] += masses[rows, places]
        return probabilities

    def _chunk_entropies(self, queries: Queries) -> np.ndarray:
        factors = self._factors(queries)
        plain = _x_log_x(factors) @ self.catalogue.kind_mass + factors @ self.kind_w_log_w
        items, masses = self._extras(queries)
        without = self._plain(items, factors)
        change = _x_log_x(without + masses) - _x_log_x(without)
        return -(plain + np.sum(change * (items != _NO_ITEM), axis=1))

    def _chunk_ranks(self, queries: Queries) -> np.ndarray:
        factors = self._factors(queries)
        items, masses = self._extras(queries)
        without = self._plain(items, factors)
        target = self._plain(queries.targets[:, None], factors)
        target += np.sum(masses * (items == queries.targets[:, None]), axis=1, keepdims=True)
        counted = self._num_at_least(factors, target)
        # The extras were counted without what copying and successors add to them.
        moved = (without + masses >= target).astype(np.int64) - (without >= target)
        return counted + np.sum(moved * (items != _NO_ITEM), axis=1)

    def _chunk_top(self, queries: Queries, k: int) -> np.ndarray:
        """Items and probabilities as (queries, 2, k).

        An item that is no extra and among the k best is also among the k best of its kind, and its kind's
        head is among the k best heads: extras only rise. So k heads times k items are enough.
        """
        catalogue = self.catalogue
        factors = self._factors(queries)
        heads = factors * self.kind_head
        kinds = np.argpartition(-heads, min(k, heads.shape[1]) - 1, axis=1)[:, :k]
        slots = catalogue.kind_first_slot[kinds][:, :, None] + np.arange(k)
        inside = slots < catalogue.kind_first_slot[kinds + 1][:, :, None]
        regular = np.where(inside, catalogue.item_of_slot[np.where(inside, slots, 0)], _NO_ITEM)
        regular = regular.reshape(queries.count, -1)
        extras, masses = self._extras(queries)
        items, masses = _merge(
            np.concatenate([regular, extras], axis=1),
            np.concatenate([np.zeros(regular.shape), masses], axis=1),
        )
        probabilities = np.where(items != _NO_ITEM, self._plain(items, factors) + masses, -1.0)
        return _sorted_top(items, probabilities, k)

    def _chunk_top_of_all(self, queries: Queries, k: int) -> np.ndarray:
        probabilities = self._chunk_conditionals(queries)
        items = np.broadcast_to(np.arange(self.config.num_items), probabilities.shape)
        return _sorted_top(items, probabilities, k)

    def _factors(self, queries: Queries) -> np.ndarray:
        """f of the module's docstring: (queries, kinds)."""
        owner, events = queries.expand()
        kinds = self.catalogue.kind_of_item[events]
        lengths = queries.lengths[:, None]
        factors = np.full((queries.count, self.catalogue.num_kinds), self.config.weights.popular)
        for weight, label_of_kind, mass in self.urns:
            cells = owner * len(mass) + label_of_kind[kinds]
            met = np.bincount(cells, minlength=queries.count * len(mass)).reshape(queries.count, -1)
            factors += weight * self._urn(met, mass, lengths)[:, label_of_kind]
        if self.topics is not None:
            prior, weights = self.config.taste_prior, self.config.weights
            cells = owner * self.catalogue.num_kinds + kinds
            met = np.bincount(cells, minlength=factors.size).reshape(factors.shape)
            recent, copied = self._recent(queries)
            lately = np.einsum("ql,qlr->qr", copied, self.topics.of_kind[self.catalogue.kind_of_item[recent]])
            profile = weights.topic_taste / (prior + lengths) * (met @ self.topics.of_kind)
            factors += (profile + weights.topic_recent * lately) @ self.topics.lift.T
            factors += weights.topic_taste * prior / (prior + lengths)
        return np.where(lengths > 0, factors, 1.0)

    def _target_topics(self, queries: Queries, owner: np.ndarray, events: np.ndarray) -> np.ndarray | float:
        """What topics add to f at the target's kind of each query."""
        if self.topics is None:
            return 0.0
        prior, weights, kind_of_item = self.config.taste_prior, self.config.weights, self.catalogue.kind_of_item
        wanted = self.topics.lift[kind_of_item[queries.targets]]
        alike = np.empty(len(events))
        for first in range(0, len(events), _TOPIC_EVENTS):
            part = slice(first, first + _TOPIC_EVENTS)
            of_event = self.topics.of_kind[kind_of_item[events[part]]]
            alike[part] = np.einsum("er,er->e", of_event, wanted[owner[part]])
        taste = (prior + np.bincount(owner, alike, queries.count)) / (prior + queries.lengths)
        recent, copied = self._recent(queries)
        lately = np.einsum("ql,qlr->qr", copied, self.topics.of_kind[kind_of_item[recent]])
        return weights.topic_taste * taste + weights.topic_recent * np.einsum("qr,qr->q", lately, wanted)

    def _recent(self, queries: Queries) -> tuple[np.ndarray, np.ndarray]:
        """The last items of each history, latest first, and the weight of each: 0 beyond the history's start."""
        lags = np.arange(1, self.config.copy_window + 1)
        reached = lags <= queries.lengths[:, None]
        rows = np.where(reached, queries.ends[:, None] - lags, 0)
        recent = queries.items[rows] if len(queries.items) else rows
        copied = self.copy_weights * reached
        return recent, copied / np.maximum(copied.sum(axis=1, keepdims=True), self.copy_weights[0])

    def _urn(self, met: np.ndarray, mass: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """U / W of the module's docstring. Groups and brands without items are met by nobody."""
        prior = self.config.taste_prior
        return (prior + met / np.where(mass > 0, mass, 1.0)) / (prior + lengths)

    def _extras(self, queries: Queries) -> tuple[np.ndarray, np.ndarray]:
        """Recent items and successors of each query, each once, and what they gain: (queries, extras)."""
        weights = self.config.weights
        recent, copied = self._recent(queries)
        reached = copied > 0
        started = (queries.lengths > 0)[:, None]
        last = recent[:, :1]
        numbers = np.arange(self.config.num_successors)
        after_item = self.catalogue.item_successors(last, numbers)
        after_kind = self.catalogue.kind_successors(self.catalogue.kind_of_item[last], numbers)
        following = self.successor_weights * started
        items = np.concatenate([recent, after_item, after_kind], axis=1)
        masses = [weights.copy_recent * copied, weights.item_successor * following]
        masses.append(weights.kind_successor * following)
        valid = np.concatenate([reached] + [np.broadcast_to(started, after_item.shape)] * 2, axis=1)
        return _merge(np.where(valid, items, _NO_ITEM), np.concatenate(masses, axis=1))

    def _plain(self, items: np.ndarray, factors: np.ndarray) -> np.ndarray:
        """w·f of each item, with the factors of its row. _NO_ITEM gives the value of some item."""
        rows = np.arange(len(factors))[:, None]
        return self.catalogue.weights(items) * factors[rows, self.catalogue.kind_of_item[items]]

    def _num_at_least(self, factors: np.ndarray, threshold: np.ndarray) -> np.ndarray:
        """How many items of the catalogue have w·f at or above each row's threshold."""
        weight, first_slot = self.catalogue.weight_of_slot, self.catalogue.kind_first_slot
        rows, kinds = np.nonzero(factors * self.kind_head >= threshold)
        factor, threshold = factors[rows, kinds], threshold[rows, 0]
        # Bisection inside each kind. The product is compared, never the quotient, so that rounding cannot
        # part an item from itself.
        low, high = first_slot[kinds], first_slot[kinds + 1] - 1  # `low` is at the threshold or above it
        while np.any(low < high):
            middle = (low + high + 1) // 2
            enough = weight[middle] * factor >= threshold
            low, high = np.where(enough, middle, low), np.where(enough, high, middle - 1)
        return np.bincount(rows, low - first_slot[kinds] + 1, len(factors)).astype(np.int64)


def _sorted_top(items: np.ndarray, probabilities: np.ndarray, k: int) -> np.ndarray:
    """The k best of each row, items and probabilities, as (rows, 2, k). Equals keep their order.

    Item numbers up to 10^8 are exact in float64, so that both fit one array.
    """
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :k]
    chosen = np.take_along_axis(items, best, axis=1).astype(np.float64)
    return np.stack([chosen, np.take_along_axis(probabilities, best, axis=1)], axis=1)


def _merge(items: np.ndarray, masses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each item once per row with the sum of its masses; other places hold _NO_ITEM and 0. Rows get sorted."""
    order = np.argsort(items, axis=1, kind="stable")
    items = np.take_along_axis(items, order, axis=1)
    masses = np.take_along_axis(masses, order, axis=1)
    first = np.ones(items.shape, dtype=bool)
    first[:, 1:] = items[:, 1:] != items[:, :-1]
    totals = np.bincount(np.cumsum(first.reshape(-1)) - 1, masses.reshape(-1))
    is_item = first & (items != _NO_ITEM)
    merged = np.zeros(items.shape)
    merged[first] = totals
    return np.where(is_item, items, _NO_ITEM), np.where(is_item, merged, 0.0)


def _x_log_x(x: np.ndarray) -> np.ndarray:
    """x·log x, with 0 at 0."""
    return x * np.log(np.where(x > 0, x, 1.0))
