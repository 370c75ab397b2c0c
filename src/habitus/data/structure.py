"""The structure of a log, measured alike on a real log and on a synthetic world: what a next-event model can learn.

The list of statistics is fixed, each has a standard error, and users are the unit of chance. A quarter of the users is
held out; counts and factors come from the others. What repeats is measured apart: every gain below is of events whose
item is **new to the user**, in nats per event over popularity, for

    p(y | h) ∝ p(y) · max(1 + β·mean_x ⟨u_x, v_y⟩, floor)        x over the last events of h

with u, v from a truncated SVD of co-occurrence within five events, d_x^-½ N d_y^-½ with 100 added to the degrees, so
that 1 + ⟨u_x, v_y⟩ estimates p(x, y) / p(x)p(y), shrunk where an item is rare. Fields predict u and v of an item by
ridge regressions that the item had no part in. β is the best of a list on the held-out events: one number for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from habitus.data.batch import ItemFeatures
from habitus.data.dataset import Dataset
from habitus.data.describe import top_share, zipf_slope
from habitus.data.fields import PADDING_TOKEN
from habitus.errors import DataError
from habitus.typed import Typed

if TYPE_CHECKING:
    from scipy import sparse

MAX_EVENTS = 1_000_000
HELD_OUT = 0.25  # share of the users
LAGS = (1, 5, 20, 100)  # a repeat at most so many events back, and beyond the last
WINDOWS = (1, 5, 20, 100)  # events of the history that are averaged
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
RANK_WINDOW = 20
ENOUGH = 0.9  # of the best gain: the rank that next items need
_PAIR_LAGS = range(1, 6)
_SHRINK = 100.0
_FLOOR = 0.02
_BETAS = np.array([0.1, 0.2, 0.35, 0.6, 1.0, 1.6, 2.5, 4.0, 6.5])
_BACK_OFF = 4.0 ** np.arange(10)
_QUERIES = 3_000
_CANDIDATES = 8_192  # drawn by popularity where the catalogue is larger
_GROUPS = 20  # of users, for the jackknife of what is counted
_RESAMPLES = 200


class Statistic(Typed):
    value: float
    se: float


class Structure(Typed):
    """What a log is made of. Gains are in nats per event new to its user, beyond popularity."""

    users: int  # that were measured; all of them, or as many as hold MAX_EVENTS events
    events: int
    items: int  # with events of these users
    is_sample: bool
    statistics: dict[str, Statistic]
    checksum: str


def structure(dataset: Dataset, *, max_events: int = MAX_EVENTS, seed: int = 0) -> Structure:
    """The fixed list of statistics of a log or a world, on at most `max_events` events of whole users."""
    log = _read_log(dataset, max_events, seed)
    probe = _Probe(log, dataset.item_features, seed)
    statistics = _counted(log) | probe.statistics()
    return Structure(
        users=log.num_users,
        events=len(log.items),
        items=len(np.unique(log.items)),
        is_sample=log.num_users < dataset.num_users,
        statistics={name: statistics[name] for name in NAMES},
        checksum=dataset.checksum,
    )


def _repeat_names() -> list[str]:
    return [f"repeats/lag<={lag}" for lag in LAGS] + [f"repeats/lag>{LAGS[-1]}"]


NAMES = (
    "popularity/top_1_percent",
    "popularity/zipf_slope",
    "popularity/effective_items",
    "repeats/all",
    *_repeat_names(),
    "cold/events",
    "pair/information",
    *(f"history/gain@{window}" for window in WINDOWS),
    "history/beyond_last",
    *(f"rank/gain@{rank}" for rank in RANKS),
    "rank/needed",
    "fields/gain",
    "fields/with_id_gain",
    "fields/share",
)


@dataclass(frozen=True)
class _Log:
    """Histories of the measured users, one after the other; users are numbered anew, held-out ones first."""

    items: np.ndarray
    users: np.ndarray
    positions: np.ndarray
    lags: np.ndarray  # to the user's last event with this item; 0: none
    num_users: int
    num_items: int  # of the catalogue
    num_held_out: int

    @property
    def is_new(self) -> np.ndarray:
        """Events that have a history, on an item that is new to the user."""
        return (self.positions > 0) & (self.lags == 0)

    @property
    def is_held_out(self) -> np.ndarray:
        return self.users < self.num_held_out


def _read_log(dataset: Dataset, max_events: int, seed: int) -> _Log:
    order = np.random.default_rng(seed).permutation(dataset.num_users)
    lengths = np.diff(dataset.user_offsets)[order]
    count = max(4, int(np.searchsorted(np.cumsum(lengths), max_events, side="right")))
    order, lengths = order[:count], lengths[:count]
    before = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(before, lengths)
    items = dataset.items[np.repeat(dataset.user_offsets[:-1][order], lengths) + positions].astype(np.int64)
    users = np.repeat(np.arange(len(order)), lengths)
    keys = users * dataset.num_items + items
    by_key = np.argsort(keys, kind="stable")
    same = keys[by_key][1:] == keys[by_key][:-1]
    lags = np.zeros(len(items), np.int64)
    lags[by_key[1:][same]] = np.diff(by_key)[same]
    num_held_out = int(len(order) * HELD_OUT)
    log = _Log(items, users, positions, lags, len(order), dataset.num_items, num_held_out)
    if num_held_out < 2 or not (log.is_new & log.is_held_out).any() or not (log.is_new & ~log.is_held_out).any():
        raise DataError(
            f"{dataset.path} has {dataset.num_users:,} users and too few events that are new to their user",
            expected="at least eight users who have several different items each",
        )
    return log


def _counted(log: _Log) -> dict[str, Statistic]:
    """Popularity and repeats, with standard errors by a jackknife over groups of users."""
    groups = log.users % min(_GROUPS, log.num_users)
    num_groups = int(groups.max()) + 1
    counts = np.stack([np.bincount(log.items[groups == g], minlength=log.num_items) for g in range(num_groups)])
    total = counts.sum(axis=0)

    def jackknife(values: Callable[[np.ndarray], float]) -> Statistic:
        left = np.array([values(total - own) for own in counts])
        return Statistic(value=values(total), se=_jackknife_se(left))

    found = {
        "popularity/top_1_percent": jackknife(lambda counts: top_share(counts, 0.01)),
        "popularity/zipf_slope": jackknife(lambda counts: zipf_slope(counts) or 0.0),
        "popularity/effective_items": jackknife(_effective_share),
    }
    has_history = log.positions > 0
    events = np.bincount(groups[has_history], minlength=num_groups)
    repeated = log.lags[has_history]
    lows, highs = (0, 0, *LAGS), (np.inf, *LAGS, np.inf)
    for name, low, high in zip(("repeats/all", *_repeat_names()), lows, highs, strict=True):
        # 'lag<=5' is beyond the lag before it: the parts add up to all
        hits = np.bincount(groups[has_history][(repeated > low) & (repeated <= high)], minlength=num_groups)
        left = (hits.sum() - hits) / (events.sum() - events)
        found[name] = Statistic(value=float(hits.sum() / events.sum()), se=_jackknife_se(left))
    return found


def _effective_share(counts: np.ndarray) -> float:
    """exp(entropy) of the items' frequencies, as a share of the items that have events: 1 where all are equal."""
    held = counts[counts > 0] / counts.sum()
    return float(np.exp(-(held @ np.log(held))) / len(held))


def _jackknife_se(left_out: np.ndarray) -> float:
    return float(np.sqrt((len(left_out) - 1) * np.mean((left_out - left_out.mean()) ** 2)))


class _Probe:
    """Gains over popularity of held-out events that are new to their users."""

    def __init__(self, log: _Log, features: Callable[[np.ndarray], ItemFeatures], seed: int) -> None:
        self.log, self.features = log, features
        self.rng = np.random.default_rng(seed)
        counts = np.bincount(log.items[log.is_new & ~log.is_held_out], minlength=log.num_items)
        self.rows = np.flatnonzero(counts)  # of the catalogue: the items that the fit knows
        self.number = np.full(log.num_items, -1)
        self.number[self.rows] = np.arange(len(self.rows))
        self.counts = counts[self.rows]
        self.popularity = self.counts / self.counts.sum()
        self.known = self.number[log.items]
        new = np.flatnonzero(log.is_new & log.is_held_out)
        self.cold = self.known[new] < 0, log.users[new]
        new = new[self.known[new] >= 0]
        self.queries = np.sort(self.rng.choice(new, min(_QUERIES, len(new)), replace=False))
        self.targets, self.query_users = self.known[self.queries], log.users[self.queries]
        size = len(self.rows)
        if size <= _CANDIDATES:
            self.candidates, self.candidate_weights = np.arange(size), self.popularity
        else:
            self.candidates = self.rng.choice(size, _CANDIDATES, p=self.popularity)
            self.candidate_weights = np.full(_CANDIDATES, 1 / _CANDIDATES)

    def statistics(self) -> dict[str, Statistic]:
        contexts, targets = self.factors
        by_rank = [self.gains(contexts[:, :rank], targets[:, :rank], RANK_WINDOW) for rank in RANKS]
        # Beyond the best rank there is noise, more of it the smaller the log.
        best = RANKS[int(np.argmax([gain.mean() for gain in by_rank]))]
        contexts, targets = contexts[:, :best], targets[:, :best]
        by_window = [self.gains(contexts, targets, window) for window in WINDOWS]
        told, both = self.field_factors(contexts, targets)
        from_fields, from_both = self.gains(*told, RANK_WINDOW), self.gains(*both, RANK_WINDOW)
        values = np.stack([self.pair_gains(), *by_window, *by_rank, from_fields, from_both])
        names = ["pair/information", *(f"history/gain@{w}" for w in WINDOWS), *(f"rank/gain@{r}" for r in RANKS)]
        names += ["fields/gain", "fields/with_id_gain"]
        ranks, windows = slice(1 + len(WINDOWS), -2), slice(1, 1 + len(WINDOWS))
        derived: dict[str, Callable[[np.ndarray], float]] = {
            "history/beyond_last": lambda mean: float(mean[windows].max() - mean[1]),
            "rank/needed": lambda mean: _rank_needed(mean[ranks]),
            "fields/share": lambda mean: float(np.clip(mean[-2] / max(mean[-1], 1e-9), 0, 1)),
        }
        is_cold, cold_users = self.cold
        found = {
            "cold/events": _by_users(is_cold[None].astype(float), cold_users, self.rng)(lambda mean: float(mean[0]))
        }
        estimate = _by_users(values, self.query_users, self.rng)
        for number, name in enumerate(names):
            found[name] = estimate(lambda mean, number=number: float(mean[number]))  # type: ignore[misc]
        return found | {name: estimate(of_means) for name, of_means in derived.items()}

    def pair_gains(self) -> np.ndarray:
        """Of the counts of (last item, next item), backed off to popularity."""
        table = self._pairs(range(1, 2))
        last = self.known[self.queries - 1]
        seen = last >= 0
        last = np.maximum(last, 0)
        together = np.where(seen, np.asarray(table[last, self.targets]).reshape(-1), 0.0)
        total = np.where(seen, np.asarray(table.sum(axis=1)).reshape(-1)[last], 0.0)
        popularity = self.popularity[self.targets]
        gains = [np.log((together / popularity + back_off) / (total + back_off)) for back_off in _BACK_OFF]
        return max(gains, key=np.mean)

    def _pairs(self, lags: Sequence[int]) -> "sparse.csr_matrix":
        """How often the fit's users had an item, new to them, so many events after another: [items, items]."""
        from scipy import sparse

        log, size = self.log, len(self.rows)
        events = np.flatnonzero(log.is_new & ~log.is_held_out)
        table = sparse.csr_matrix((size, size), dtype=np.float32)
        for lag in lags:
            later = events[log.positions[events] >= lag]
            before, after = self.known[later - lag], self.known[later]
            held = before >= 0
            ones = np.ones(int(held.sum()), np.float32)
            table += sparse.csr_matrix((ones, (before[held], after[held])), shape=(size, size))
        return table

    @cached_property
    def _degrees(self) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.asarray(self._near.sum(axis=axis)).reshape(-1) for axis in (1, 0))  # type: ignore[return-value]

    @cached_property
    def _near(self) -> "sparse.csr_matrix":
        return self._pairs(_PAIR_LAGS)

    @cached_property
    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """u of items as context and v of items as targets, strongest direction first: [items, rank] each."""
        from scipy import sparse

        scales = [(1 / np.sqrt(degree + _SHRINK)).astype(np.float32) for degree in self._degrees]
        matrix = sparse.diags(scales[0]) @ self._near @ sparse.diags(scales[1])
        rank = min(RANKS[-1] + 1, len(self.rows))
        left, strength, right = _svd(matrix.astype(np.float32).tocsr(), rank, self.rng)
        spread = np.sqrt(strength * float(self._near.sum()))
        # the first direction is popularity itself
        u, v = ((part * scale[:, None] * spread)[:, 1:] for part, scale in zip((left, right), scales, strict=True))
        return u, v

    def field_factors(
        self, contexts: np.ndarray, targets: np.ndarray
    ) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
        """What fields tell of u and v, and u and v shrunk towards that where an item is rare."""
        table = _field_table(self.features(self.rows))
        folds = self.rng.integers(0, 2, len(self.rows))
        told, both = [], []
        for factor, degree in zip((contexts, targets), self._degrees, strict=True):
            trust = (degree / (degree + _SHRINK)).astype(np.float32)[:, None]
            guess = _ridge(table, factor / np.maximum(trust, 1e-3), trust[:, 0], folds)
            told.append(guess)
            both.append(factor + (1 - trust) * guess)
        return (told[0], told[1]), (both[0], both[1])

    def gains(self, contexts: np.ndarray, targets: np.ndarray, window: int) -> np.ndarray:
        """log p(y | h) / p(y) of each query under the best β."""
        profile = self._profiles(contexts, window)
        of_target = np.einsum("qr,qr->q", profile, targets[self.targets])
        of_all = profile @ targets[self.candidates].T
        best = np.zeros(len(self.queries))
        for beta in _BETAS:
            mass = np.maximum(1 + beta * of_all, _FLOOR) @ self.candidate_weights.astype(np.float32)
            gain = np.log(np.maximum(1 + beta * of_target, _FLOOR) / mass)
            if gain.mean() > best.mean():
                best = gain
        return best

    def _profiles(self, contexts: np.ndarray, window: int) -> np.ndarray:
        """The mean of u over the last events of each query's history."""
        total = np.zeros((len(self.queries), contexts.shape[1]), np.float32)
        number = np.zeros(len(self.queries))
        for lag in range(1, window + 1):
            reached = np.flatnonzero(self.log.positions[self.queries] >= lag)
            before = self.known[self.queries[reached] - lag]
            reached, before = reached[before >= 0], before[before >= 0]
            total[reached] += contexts[before]
            number[reached] += 1
        return total / np.maximum(number, 1).astype(np.float32)[:, None]


def _by_users(
    values: np.ndarray, users: np.ndarray, rng: np.random.Generator
) -> Callable[[Callable[[np.ndarray], float]], Statistic]:
    """A function of the means of `values` [statistics, queries], with its error by a bootstrap over users."""
    _, label = np.unique(users, return_inverse=True)
    number = int(label.max()) + 1
    sums = np.stack([np.bincount(label, row, number) for row in values], axis=1)
    sizes = np.bincount(label, minlength=number)
    weights = rng.multinomial(number, np.full(number, 1 / number), _RESAMPLES)
    weights = weights[weights @ sizes > 0]
    means = (weights @ sums) / (weights @ sizes)[:, None]
    mean = sums.sum(axis=0) / sizes.sum()

    def estimate(of_means: Callable[[np.ndarray], float]) -> Statistic:
        spread = np.std([of_means(row) for row in means], ddof=1)
        return Statistic(value=of_means(mean), se=float(spread))

    return estimate


def _rank_needed(gains: np.ndarray) -> float:
    """The rank that has 90% of the best gain, between the ranks tried on a logarithmic scale."""
    wanted = ENOUGH * gains.max()
    first = int(np.argmax(gains >= wanted))
    if first == 0:
        return float(RANKS[0])
    part = (wanted - gains[first - 1]) / max(gains[first] - gains[first - 1], 1e-12)
    return float(RANKS[first - 1] * (RANKS[first] / RANKS[first - 1]) ** part)


def _svd(matrix: "sparse.csr_matrix", rank: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A truncated SVD by random directions and two power steps."""
    directions = min(rank + 10, *matrix.shape)
    basis = matrix @ rng.standard_normal((matrix.shape[1], directions), dtype=np.float32)
    for _ in range(2):
        basis = matrix @ (matrix.T @ np.linalg.qr(basis)[0])
    basis = np.linalg.qr(basis)[0]
    left, strength, right = np.linalg.svd((matrix.T @ basis).T, full_matrices=False)
    return (basis @ left)[:, :rank], strength[:rank], right[:rank].T


def _field_table(features: ItemFeatures) -> "sparse.csr_matrix":
    """Items' fields as one sparse table: tokens, codes and pairs of codes as indicators, numbers standardised."""
    from scipy import sparse

    columns: list[sparse.csr_matrix] = []
    codes: list[np.ndarray] = []
    if features.tokens is not None:
        rows, places = np.nonzero(features.tokens != PADDING_TOKEN)
        columns.append(_indicators(rows, features.tokens[rows, places], len(features.tokens)))
    for values in features.fields.values():
        if values.dtype.kind in "iu" and values.ndim == 2:
            rows, places = np.nonzero(values)
            columns.append(_indicators(rows, values[rows, places], len(values)))
        elif values.dtype.kind in "iu":
            codes.append(values.astype(np.int64))
        else:
            numbers = np.nan_to_num(values.reshape(len(values), -1))
            numbers = np.sign(numbers) * np.log1p(np.abs(numbers))
            columns.append(sparse.csr_matrix((numbers - numbers.mean(axis=0)) / (numbers.std(axis=0) + 1e-6)))
    pairs = [a * (b.max() + 1) + b for place, a in enumerate(codes) for b in codes[:place]]
    for labels in (*codes, *pairs):
        columns.append(_indicators(np.arange(len(labels)), labels, len(labels)))
    if not columns:
        return sparse.csr_matrix((len(features.tokens) if features.tokens is not None else 0, 0))
    return sparse.hstack(columns, dtype=np.float32).tocsr()


def _indicators(rows: np.ndarray, labels: np.ndarray, num_rows: int) -> "sparse.csr_matrix":
    """1 where a row has a label that two rows or more have."""
    from scipy import sparse

    _, label, counts = np.unique(labels, return_inverse=True, return_counts=True)
    shared = counts[label] > 1
    ones = np.ones(int(shared.sum()), np.float32)
    table = sparse.csr_matrix((ones, (rows[shared], label[shared])), shape=(num_rows, len(counts)))
    return table[:, np.flatnonzero(counts > 1)]


def _ridge(table: "sparse.csr_matrix", values: np.ndarray, weights: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """What the fields of each item say of its values, by a ridge regression on the items of the other fold."""
    from scipy import sparse

    guess = np.zeros_like(values)
    for fold in (0, 1):
        fit, own = folds != fold, folds == fold
        root = np.sqrt(weights[fit])
        design = sparse.diags(root) @ table[fit]
        solution = _conjugate_gradient(design.astype(np.float32).tocsr(), values[fit] * root[:, None])
        guess[own] = table[own] @ solution
    return guess


def _conjugate_gradient(design: "sparse.csr_matrix", values: np.ndarray, penalty: float = 3.0) -> np.ndarray:
    """(XᵀX + penalty)⁻¹ Xᵀ values after a dozen steps, which is a little regularisation more."""
    transposed = design.T.tocsr()
    solution = np.zeros((design.shape[1], values.shape[1]), np.float32)
    residual = transposed @ values
    direction, power = residual.copy(), (residual**2).sum(axis=0)
    for _ in range(12):
        image = transposed @ (design @ direction) + penalty * direction
        step = power / np.maximum((direction * image).sum(axis=0), 1e-12)
        solution += step * direction
        residual -= step * image
        power, before = (residual**2).sum(axis=0), power
        direction = residual + power / np.maximum(before, 1e-12) * direction
    return solution
