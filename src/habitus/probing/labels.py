"""What a probe predicts: columns of a file, by user or by user and time, or churn from the log itself."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data import MICROSECONDS_PER_DAY, Dataset
from habitus.errors import ConfigError, DataError
from habitus.exporting import Moments, find_users, read_columns, read_times, time_column
from habitus.typed import suggest_name

Task = Literal["classification", "regression"]
MIN_USERS = 20  # with labels
MIN_CLASS_USERS = 10  # of each class
_CHURN = re.compile(r"churn:(\d+(?:\.\d+)?)d")
_CHURN_CLASSES = ("stays", "leaves")


@dataclass(frozen=True)
class Label:
    """One label: a value per row of `moments`, a class's place among `classes` or a number."""

    name: str
    moments: Moments
    values: np.ndarray  # int64 or float64 [n]
    classes: tuple[str, ...]  # empty where numbers are predicted
    left_out: dict[str, int]  # rows that have no say, by reason

    @property
    def task(self) -> Task:
        return "classification" if self.classes else "regression"

    def take(self, keep: np.ndarray, reason: str) -> "Label":
        """The rows that are kept; the others are counted."""
        left_out = {**self.left_out, reason: int((~keep).sum())} if not keep.all() else self.left_out
        return replace(self, moments=self.moments.take(keep), values=self.values[keep], left_out=left_out)


def read_labels(
    path: str | Path, dataset: Dataset, names: Sequence[str] = (), at: int | None = None, task: Task | None = None
) -> list[Label]:
    """The named columns of a file, or all but user and time: texts and truth values are classes, numbers are numbers.

    Rows have a time where the file has such a column, all the time `at` where that is given; without either, labels
    hold after a user's last event. `task` decides instead of the column's type.
    """
    table = read_columns(path)
    users = find_users(table, dataset, path)
    column = time_column(table, dataset)
    if column is not None and at is not None:
        raise ConfigError(
            f"--at was given, and {path} has the times {column!r}", expected="times in the file, or one for all rows"
        )
    times = None if at is None else np.full(table.num_rows, at)
    if column is not None:
        times = read_times(table[column], dataset, f"{path}, column {column!r}")
    _refuse_duplicates(users, times, path)
    roles = (dataset.schema.events.user, column)
    available = [name for name in table.column_names if name not in roles]
    for name in names:
        if name not in available:
            raise ConfigError(f"{path} has no label {name!r} ({suggest_name(name, available)})")
    if not available:
        raise DataError(f"{path} has no labels", expected=f"columns beside {', '.join(filter(None, roles))}")
    known = users >= 0
    if not known.any():
        raise DataError(
            f"{path}: none of its {table.num_rows:,} users is in {dataset.path}",
            expected="users written as in the log",
        )
    moments = Moments.of(dataset, users[known], None if times is None else times[known])
    left_out = {"unknown users": int((~known).sum())} if not known.all() else {}
    rows = table.filter(pa.array(known))
    return [_label(name, rows[name], moments, left_out, task) for name in names or available]


def churn_label(dataset: Dataset, name: str, num_cuts: int) -> Label:
    """'churn:28d': whether a user who was active in the 28 days before a cut has no event in the 28 days from it.

    Cuts are 28 days apart, the last of them 28 days before the log ends, so that what is to be predicted at a cut is
    known at the next.
    """
    match = _CHURN.fullmatch(name)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--label {name!r} is no label of the log", expected="churn:28d, or --labels FILE")
    if dataset.schema.events.time_unit == "order":
        raise ConfigError(f"{dataset.path} has positions instead of times", expected="a log with times for churn")
    if num_cuts < 1:
        raise ConfigError(f"--cuts is {num_cuts}", expected="at least 1")
    horizon = round(float(match[1]) * MICROSECONDS_PER_DAY)
    first, last = dataset.manifest.time_span
    cuts = [last + 1 - number * horizon for number in range(num_cuts, 0, -1)]
    if cuts[0] - horizon < first:
        raise ConfigError(
            f"{num_cuts} cuts of {match[1]} days and as many before the first, but the log spans "
            f"{(last - first) / MICROSECONDS_PER_DAY:,.0f} days",
            expected="fewer --cuts, or fewer days",
        )
    event_users = np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))
    users, times, leaves = [], [], []
    for cut in cuts:
        active = np.unique(event_users[(dataset.times >= cut - horizon) & (dataset.times < cut)])
        later = np.unique(event_users[(dataset.times >= cut) & (dataset.times < cut + horizon)])
        users.append(active)
        times.append(np.full(len(active), cut))
        leaves.append(~np.isin(active, later))
    moments = Moments.of(dataset, np.concatenate(users), np.concatenate(times))
    return Label(name, moments, np.concatenate(leaves).astype(np.int64), _CHURN_CLASSES, {})


def is_churn(name: str) -> bool:
    return name.startswith("churn:")


def check_label(label: Label) -> Label:
    """The rows of users with a history, of classes that enough users have; refuses what leaves nothing to learn."""
    label = label.take(label.moments.known, "no event before the time")
    if label.classes:
        pairs = np.unique(np.column_stack([label.values, label.moments.users]), axis=0)
        per_class = np.bincount(pairs[:, 0], minlength=len(label.classes))
        kept = np.flatnonzero(per_class >= MIN_CLASS_USERS)
        rare = [name for code, name in enumerate(label.classes) if code not in kept]
        label = label.take(np.isin(label.values, kept), f"classes of fewer than {MIN_CLASS_USERS} users")
        label = replace(
            label,
            values=np.searchsorted(kept, label.values),
            classes=tuple(label.classes[code] for code in kept),
        )
        if len(kept) < 2:
            raise DataError(
                f"label {label.name!r} has {len(kept)} class{'es' * (len(kept) != 1)} of {MIN_CLASS_USERS} users or "
                f"more" + (f"; too rare: {', '.join(rare[:5])}" if rare else ""),
                expected="at least two",
            )
    elif len(label.values) and np.ptp(label.values) == 0:
        raise DataError(f"label {label.name!r} is {label.values[0]:g} in every row", expected="different values")
    num_users = len(np.unique(label.moments.users))
    if num_users < MIN_USERS:
        raise DataError(
            f"label {label.name!r} has {num_users:,} users with a value and a history", expected=f"{MIN_USERS} or more"
        )
    return label


def _label(name: str, column: pa.ChunkedArray, moments: Moments, left_out: dict[str, int], task: Task | None) -> Label:
    kind = column.type
    is_number = pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_decimal(kind)
    if pa.types.is_nested(kind) or pa.types.is_temporal(kind) or pa.types.is_null(kind):
        raise DataError(f"label {name!r} is {kind}", expected="texts, truth values or numbers")
    if task == "regression" and not is_number:
        raise ConfigError(f"label {name!r} is {kind}", expected="numbers for --task regression")
    if is_number and task != "classification":
        numbers = np.asarray(column.cast(pa.float64(), safe=False).to_numpy(), np.float64)
        return Label(name, moments, numbers, (), left_out).take(np.isfinite(numbers), "no value")
    texts = column.cast(pa.string())
    classes = tuple(sorted(pc.unique(texts.drop_null()).to_pylist()))
    codes = np.asarray(pc.fill_null(pc.index_in(texts, pa.array(classes, pa.string())), -1).to_numpy(), np.int64)
    return Label(name, moments, codes, classes, left_out).take(codes >= 0, "no value")


def _refuse_duplicates(users: np.ndarray, times: np.ndarray | None, path: str | Path) -> None:
    known = users >= 0
    keys = users[known][:, None] if times is None else np.column_stack([users, times])[known]
    twice = len(keys) - len(np.unique(keys, axis=0))
    if twice:
        what = "users" if times is None else "users and times"
        raise DataError(
            f"{path} has {twice:,} rows of {what} that an earlier row has",
            expected="one row per user" + ("" if times is None else " and time"),
            next_step="keep one of them" + (", or add a column 'time'" if times is None else ""),
        )
