"""The verb `describe`: what is in a prepared dataset, as numbers that bear on training."""

from collections.abc import Iterator
from datetime import UTC, datetime

import numpy as np

from habitus.data.dataset import Dataset
from habitus.store import SplitName
from habitus.typed import Typed

_CHUNK_EVENTS = 1 << 22
_CHUNK_ITEMS = 1 << 17
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Quantiles(Typed):
    mean: float
    median: float
    p90: float
    p99: float
    largest: int


class ItemPopularity(Typed):
    """How events spread over items, in the whole log."""

    items_with_events: int
    top_1_percent_share: float
    top_10_percent_share: float
    zipf_slope: float | None = None  # absent where too few items have events
    repeat_share: float  # events whose user had the item before
    cold_items: int  # in the catalogue but not in training


class Repetition(Typed):
    """What training on D events would see again."""

    events: int
    window_epochs: float
    times_item_of_an_event_is_seen: float  # mean over events


class TargetEvents(Typed):
    """What the schema's [targets] predict, in the whole log."""

    column: str
    events: int
    share: float  # of all events
    refused: int  # events of a weight below 0
    candidates: int  # items that may be ranked or recommended


class SplitSize(Typed):
    users: int
    events: int
    queries: int
    windows: int
    slots_filled: float
    events_left_out: int


class Description(Typed):
    users: int
    events: int
    items: int
    seq_len: int
    first_time: str
    last_time: str
    history: Quantiles
    popularity: ItemPopularity
    targets: TargetEvents | None = None  # absent where every event is predicted
    repetition: tuple[Repetition, ...]
    train: SplitSize
    validation: SplitSize
    test: SplitSize | None = None  # absent where there is no test side
    duplicates: int  # events with user, item and time of one before them
    items_alike: int  # whose fields are all those of another: only histories tell them apart
    item_fields_filled: dict[str, float]
    event_fields_filled: dict[str, float]
    dropped: dict[str, int]
    checksum: str


def describe(dataset: Dataset) -> Description:
    """The description of a dataset, from its manifest and one pass over its events."""
    manifest = dataset.manifest
    counts, repeats, duplicates = _item_counts(dataset)
    is_time = dataset.schema.events.time_unit != "order"
    return Description(
        users=dataset.num_users,
        events=dataset.num_events,
        items=dataset.num_items,
        seq_len=dataset.seq_len,
        first_time=_moment(manifest.time_span[0], is_time),
        last_time=_moment(manifest.time_span[1], is_time),
        history=_quantiles(np.diff(dataset.user_offsets)),
        popularity=ItemPopularity(
            items_with_events=int((counts > 0).sum()),
            top_1_percent_share=top_share(counts, 0.01),
            top_10_percent_share=top_share(counts, 0.10),
            zipf_slope=zipf_slope(counts),
            repeat_share=repeats / dataset.num_events,
            cold_items=int((dataset.item_train_counts == 0).sum()),
        ),
        targets=_targets(dataset),
        repetition=_repetition(dataset),
        train=_split_size(dataset, "train"),
        validation=_split_size(dataset, "validation"),
        test=_split_size(dataset, "test") if dataset.manifest.test else None,
        duplicates=duplicates,
        items_alike=_count_alike(dataset),
        item_fields_filled={n: c / dataset.num_items for n, c in manifest.item_fields_filled.items()},
        event_fields_filled={n: c / dataset.num_events for n, c in manifest.event_fields_filled.items()},
        dropped=manifest.dropped,
        checksum=dataset.checksum,
    )


def _targets(dataset: Dataset) -> TargetEvents | None:
    weights, targets = dataset.target_weight, dataset.schema.targets
    if weights is None or targets is None:
        return None
    events = int((weights > 0).sum())
    return TargetEvents(
        column=targets.column,
        events=events,
        share=events / dataset.num_events,
        refused=int((weights < 0).sum()),
        candidates=dataset.num_candidates,
    )


def _count_alike(dataset: Dataset) -> int:
    """Items with a twin, by a 64-bit hash of all that a model reads of them."""
    num_items = dataset.num_items
    hashes = np.empty(num_items, np.uint64)
    for start in range(0, num_items, _CHUNK_ITEMS):
        rows = np.arange(start, min(start + _CHUNK_ITEMS, num_items))
        features = dataset.item_features(rows)
        found = np.zeros(len(rows), np.uint64)
        for values in (features.tokens, *features.fields.values()):
            if values is not None:
                words = np.ascontiguousarray(values).reshape(len(rows), -1).view(np.uint32)
                for column in words.T:
                    found = (found ^ column) * _HASH_FACTOR
                    found ^= found >> np.uint64(29)
        hashes[rows] = found
    _, counts = np.unique(hashes, return_counts=True)
    return int(counts[counts > 1].sum())


def top_share(counts: np.ndarray, share: float) -> float:
    """The share of events on the most popular `share` of the items that have events."""
    popular = np.sort(counts[counts > 0])[::-1]
    return float(popular[: max(1, round(share * len(popular)))].sum() / popular.sum())


def zipf_slope(counts: np.ndarray) -> float | None:
    """Minus the slope of log count on log rank, over log-spaced ranks whose items occur five times or more."""
    popular = np.sort(counts[counts >= 5])[::-1]
    if len(popular) < 20:
        return None
    ranks = np.unique(np.geomspace(1, len(popular), 60).round().astype(np.int64))
    return -float(np.polyfit(np.log(ranks), np.log(popular[ranks - 1]), 1)[0])


def _item_counts(dataset: Dataset) -> tuple[np.ndarray, int, int]:
    """How often each item occurs, and how many events repeat an item of the same user, and of the same moment."""
    counts = np.zeros(dataset.num_items, np.int64)
    repeats = duplicates = 0
    for first, last in _user_blocks(dataset.user_offsets):
        offsets = dataset.user_offsets[first : last + 1]
        items = dataset.items[offsets[0] : offsets[-1]]
        np.add.at(counts, items, 1)
        user = np.repeat(np.arange(last - first), np.diff(offsets))
        repeats += len(items) - len(np.unique(user * dataset.num_items + items))
        times = dataset.times[offsets[0] : offsets[-1]]
        moment = np.cumsum((np.diff(user, prepend=0) != 0) | (np.diff(times, prepend=times[0]) != 0))
        duplicates += len(items) - len(np.unique(moment * dataset.num_items + items))
    return counts, repeats, duplicates


def _user_blocks(offsets: np.ndarray) -> Iterator[tuple[int, int]]:
    """Ranges of whole users that hold about _CHUNK_EVENTS events each."""
    first = 0
    while first < len(offsets) - 1:
        last = int(np.searchsorted(offsets, offsets[first] + _CHUNK_EVENTS, side="right")) - 1
        last = min(max(last, first + 1), len(offsets) - 1)
        yield first, last
        first = last


def _repetition(dataset: Dataset) -> tuple[Repetition, ...]:
    counts = dataset.item_train_counts.astype(np.float64)
    total = counts.sum()
    events_in_windows = dataset.counts("train").events
    if total == 0:
        return ()
    shares = counts / total
    concentration = float(shares @ shares)  # chance that two events show the same item
    sizes = sorted({10**power for power in range(4, 12) if 0.01 < 10**power / total < 20} | {int(total)})
    return tuple(
        Repetition(
            events=size,
            window_epochs=size / events_in_windows if events_in_windows else 0.0,
            times_item_of_an_event_is_seen=1 + (size - 1) * concentration,
        )
        for size in sizes
    )


def _split_size(dataset: Dataset, name: SplitName) -> SplitSize:
    counts = dataset.counts(name)
    return SplitSize(
        users=counts.users,
        events=counts.events,
        queries=counts.queries,
        windows=counts.windows,
        slots_filled=counts.fill(dataset.seq_len),
        events_left_out=counts.left_out,
    )


def _quantiles(lengths: np.ndarray) -> Quantiles:
    median, p90, p99 = np.quantile(lengths, [0.5, 0.9, 0.99])
    return Quantiles(
        mean=float(lengths.mean()), median=float(median), p90=float(p90), p99=float(p99), largest=int(lengths.max())
    )


def _moment(value: int, is_time: bool) -> str:
    return f"{datetime.fromtimestamp(value / 1e6, UTC):%Y-%m-%d %H:%M:%S}" if is_time else f"position {value}"
