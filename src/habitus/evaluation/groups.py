"""A value for every query to take it apart by: of its target, of its user, of a table that the caller brings.

Q  queries
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from habitus.data import Dataset
from habitus.errors import ConfigError
from habitus.evaluation.key_tables import KeyTable
from habitus.evaluation.per_query import PerQuery
from habitus.events import WEEKDAY
from habitus.typed import suggest_name
from habitus.units import format_seconds

NO_VALUE = "(no value)"
OTHERS = "(others: "  # begins the label of the values that are not shown
_DAY_US = 86_400_000_000
_EPOCH_WEEKDAY = 3  # 1 January 1970 was a Thursday
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LONGEST_LABEL = 60


@dataclass(frozen=True)
class GroupOptions:
    """How values become groups."""

    bins: int = 5  # of numbers, with as many queries each
    most: int = 20  # values shown; the queries of others are one group


@dataclass(frozen=True)
class Groups:
    """The group of each query."""

    by: str
    source: str  # what the value is of
    labels: tuple[str, ...]
    codes: np.ndarray  # int64 [Q]: the place of the query's label


def query_groups(
    dataset: Dataset,
    values: PerQuery,
    names: Sequence[str],
    file: str | Path | None = None,
    options: GroupOptions | None = None,
) -> list[Groups]:
    """The groups of the queries by each name: see docs/evaluate.md for what a name may be."""
    columns = _Columns(dataset, values, None if file is None else KeyTable(Path(file), dataset))
    return [columns.groups(name, options or GroupOptions()) for name in dict.fromkeys(names)]


def check_names(dataset: Dataset, names: Sequence[str], file: str | Path | None = None) -> None:
    """Refuse names and files before anything is scored."""
    columns = _Columns(dataset, None, None if file is None else KeyTable(Path(file), dataset))
    for name in names:
        columns.find(name)


@dataclass(frozen=True)
class _Columns:
    """All columns that queries can be taken apart by."""

    dataset: Dataset
    values: PerQuery | None
    table: KeyTable | None

    def groups(self, name: str, options: GroupOptions) -> Groups:
        source, make = self.find(name)
        assert self.values is not None
        labels, codes = make(self.values, options)
        labels, codes = _pool_rare(name, labels, codes, self.values.user, options.most)
        return Groups(name, source, tuple(label[:_LONGEST_LABEL] for label in labels), codes)

    def find(self, name: str) -> tuple[str, "_Make"]:
        """What a column is of, and what makes its labels and codes; refuses an unknown or ambiguous name."""
        if name in _DERIVED:
            source, make = _DERIVED[name]
            if name in ("weekday", "gap") and self.dataset.schema.events.time_unit == "order":
                raise ConfigError(f"--by {name}: the log has positions and no times", expected="another column")
            return source, lambda values, options: make(self.dataset, values, options)
        kind, _, bare = name.partition(".")
        offered = self._offered()
        places = [kind] if kind in offered and bare in offered[kind] else [k for k in offered if name in offered[k]]
        bare = bare if places == [kind] and bare in offered.get(kind, {}) else name
        if len(places) > 1:
            choices = ", ".join(f"{place}.{name}" for place in places)
            raise ConfigError(f"--by {name} is a column of several tables", expected=f"one of {choices}")
        if not places:
            field_kind = self.dataset.encoders.item_kinds.get(name)
            if field_kind is not None:
                raise ConfigError(
                    f"--by {name} is an item field of kind {field_kind}",
                    expected="a field of kind category, number or time",
                    next_step="group its values in a table of your own: --by-file TABLE.parquet",
                )
            known = list(dict.fromkeys([*_DERIVED, *(column for columns in offered.values() for column in columns)]))
            raise ConfigError(
                f"--by {name} is not a column here ({suggest_name(name, known)})",
                expected=f"some of {', '.join(known)}",
                next_step="" if self.table else "a column of another table: --by-file TABLE.parquet",
            )
        return offered[places[0]][bare]

    def _offered(self) -> dict[str, dict[str, tuple[str, "_Make"]]]:
        fields, schema = self.dataset.fields, self.dataset.schema
        item_kinds, event_kinds = self.dataset.encoders.item_kinds, schema.event_fields
        offered: dict[str, dict[str, tuple[str, _Make]]] = {"item": {}, "event": {}, "file": {}}
        for spec in fields.item:
            if spec.kind in ("category", "number"):
                is_time = item_kinds.get(spec.name) == "time"
                offered["item"][spec.name] = "item field of the target", self._item_field(spec.name, is_time)
        for spec in fields.event:
            if spec.name != WEEKDAY and spec.kind in ("category", "number"):
                is_time = event_kinds.get(spec.name) == "time"
                offered["event"][spec.name] = "event field of the target event", self._event_field(spec.name, is_time)
        if self.table is not None:
            for column in self.table.columns:
                offered["file"][column] = self.table.source, self._file_column(column)
        return offered

    def _item_field(self, name: str, is_time: bool) -> "_Make":
        def make(values: PerQuery, options: GroupOptions) -> tuple[list[str], np.ndarray]:
            column = self.dataset.item_features(values.target).fields[name]
            return _encoded(column, self.dataset.encoders.item_values.get(name), options.bins, is_time)

        return make

    def _event_field(self, name: str, is_time: bool) -> "_Make":
        def make(values: PerQuery, options: GroupOptions) -> tuple[list[str], np.ndarray]:
            column = self.dataset.event_fields[name][values.event + 1]  # the target is the next row
            return _encoded(column, self.dataset.encoders.event_values.get(name), options.bins, is_time)

        return make

    def _file_column(self, name: str) -> "_Make":
        def make(values: PerQuery, options: GroupOptions) -> tuple[list[str], np.ndarray]:
            assert self.table is not None
            column = self.table.lookup(name, values)
            if column.dtype.kind == "f":
                return bin_numbers(column, options.bins)
            return _name_values(column)

        return make


_Make = Callable[[PerQuery, GroupOptions], tuple[list[str], np.ndarray]]


def _write_number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _write_day(day: float) -> str:
    """2024-02-29, from days since 1970."""
    return str(np.datetime64(int(day), "D"))


def _write_gap(seconds: float) -> str:
    return format_seconds(seconds) if seconds < 2 * 86_400 else f"{seconds / 86_400:.3g} d"


def bin_numbers(
    numbers: np.ndarray, bins: int, write: Callable[[float], str] = _write_number
) -> tuple[list[str], np.ndarray]:
    """Labels and codes of numbers: each a group where there are few, else bins with about as many queries each."""
    numbers = np.asarray(numbers, np.float64)
    known = np.isfinite(numbers)
    distinct = np.unique(numbers[known])
    if len(distinct) <= 2 * bins:
        labels = [write(value) for value in distinct.tolist()]
        codes = np.searchsorted(distinct, np.where(known, numbers, 0.0))
    else:
        inner = np.unique(np.quantile(numbers[known], np.arange(1, bins) / bins, method="inverted_cdf"))
        inner = inner[inner < distinct[-1]]  # a bin ends at its largest value
        codes = np.searchsorted(inner, np.where(known, numbers, 0.0))
        labels = []
        for code in range(len(inner) + 1):
            inside = numbers[known & (codes == code)]
            low, high = write(float(inside.min())), write(float(inside.max()))
            labels.append(low if low == high else f"{low} to {high}")
    if not known.all():
        codes = np.where(known, codes, len(labels))
        labels.append(NO_VALUE)
    return labels, codes.astype(np.int64)


def _by_popularity(dataset: Dataset, values: PerQuery, _: GroupOptions) -> tuple[list[str], np.ndarray]:
    """Deciles of the training events: the most popular items that take the first tenth of them, and so on."""
    counts = np.asarray(dataset.item_train_counts)
    order = np.argsort(-counts, kind="stable")
    before = np.cumsum(counts[order]) - counts[order]
    decile = np.empty(len(counts), np.int64)
    decile[order] = np.minimum(10 * before // max(int(counts.sum()), 1), 9)
    decile[counts == 0] = 10
    sizes = np.bincount(decile, minlength=11)
    names = [*map(str, range(1, 11)), "new"]
    labels = [
        f"{name} ({size:,} {'item' if size == 1 else 'items'})"
        for name, size in zip(names, sizes.tolist(), strict=True)
    ]
    return labels, decile[values.target]


def _by_weekday(dataset: Dataset, values: PerQuery, _: GroupOptions) -> tuple[list[str], np.ndarray]:
    return list(_WEEKDAYS), (dataset.times[values.event + 1] // _DAY_US + _EPOCH_WEEKDAY) % 7


def _by_gap(dataset: Dataset, values: PerQuery, options: GroupOptions) -> tuple[list[str], np.ndarray]:
    seconds = (dataset.times[values.event + 1] - dataset.times[values.event]) * 1e-6
    return bin_numbers(seconds, options.bins, _write_gap)


def _by_history(_: Dataset, values: PerQuery, options: GroupOptions) -> tuple[list[str], np.ndarray]:
    return bin_numbers(values.history, options.bins)


def _by_cold(_: Dataset, values: PerQuery, __: GroupOptions) -> tuple[list[str], np.ndarray]:
    return ["warm", "cold"], values.cold.astype(np.int64)


def _by_repeat(_: Dataset, values: PerQuery, __: GroupOptions) -> tuple[list[str], np.ndarray]:
    return ["first", "repeat"], values.repeat.astype(np.int64)


_DERIVED: dict[str, tuple[str, Callable[[Dataset, PerQuery, GroupOptions], tuple[list[str], np.ndarray]]]] = {
    "popularity": ("decile of the training events, the most popular targets first", _by_popularity),
    "history": ("events that the query sees", _by_history),
    "weekday": ("day of the target event", _by_weekday),
    "gap": ("time from the last visible event to the target", _by_gap),
    "cold": ("whether the target was ever in training", _by_cold),
    "repeat": ("whether the target is in the visible history", _by_repeat),
}


def _encoded(
    column: np.ndarray, vocabulary: Sequence[str] | None, bins: int, is_time: bool
) -> tuple[list[str], np.ndarray]:
    """Labels and codes of a field as it is stored: codes of categories, numbers, or times as days since 1970."""
    if is_time:
        return bin_numbers(np.floor(column), bins, _write_day)
    if vocabulary is None:
        return bin_numbers(column, bins)
    present, codes = np.unique(column, return_inverse=True)
    return _most_frequent_first([vocabulary[code - 1] if code else NO_VALUE for code in present.tolist()], codes)


def _name_values(column: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Labels and codes of texts; None is no value."""
    texts = np.array([NO_VALUE if value is None else str(value) for value in column.tolist()], object)
    labels, codes = np.unique(texts, return_inverse=True)
    return _most_frequent_first(labels.tolist(), codes)


def _most_frequent_first(labels: list[str], codes: np.ndarray) -> tuple[list[str], np.ndarray]:
    """The same groups by falling number of queries; those without a value last."""
    counts = np.bincount(codes, minlength=len(labels))
    counts[[place for place, label in enumerate(labels) if label == NO_VALUE]] = 0
    order = np.argsort(-counts, kind="stable")
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return [labels[code] for code in order.tolist()], place[codes]


def _pool_rare(
    name: str, labels: list[str], codes: np.ndarray, users: np.ndarray, most: int
) -> tuple[list[str], np.ndarray]:
    """Only labels with queries, and at most so many: those with the fewest queries become one group, the last."""
    counts = np.bincount(codes, minlength=len(labels))
    present = np.flatnonzero(counts)
    if len(present) <= most + 1:
        kept = present
    else:
        kept = np.sort(present[np.argsort(-counts[present], kind="stable")[:most]])
        pairs = np.unique(np.stack([codes, users]), axis=1)
        if np.bincount(pairs[0], minlength=len(labels))[kept].max() < 2:
            raise ConfigError(
                f"--by {name} has {len(present):,} values for {len(codes):,} queries, none of them of two users",
                expected="a column whose values repeat: a few groups, each of many users",
                next_step="bin the values, or take a column that groups them",
            )
    place = np.full(len(labels), len(kept))
    place[kept] = np.arange(len(kept))
    shown = [labels[code] for code in kept.tolist()]
    if len(kept) < len(present):
        shown.append(f"{OTHERS}{len(present) - len(kept):,} values)")
    return shown, place[codes]
