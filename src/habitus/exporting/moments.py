"""Users at given times: which events of a dataset come strictly before each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from habitus.data import TIME_UNIT_US, Dataset, read_form
from habitus.errors import ConfigError, DataError
from habitus.typed import suggest_name

TIME_COLUMN = "time"  # beside the schema's own name for it
_TIMES = "times, as in 2026-01-31 or 2026-01-31T12:00:00"


@dataclass(frozen=True)
class Moments:
    """Users at times, one row each. Only events strictly before a row's time are known to it."""

    users: np.ndarray  # int64 [n]: places among the dataset's users
    times: np.ndarray | None  # int64 [n] as Dataset.times has them; None: after the last event
    starts: np.ndarray  # int64 [n]: the user's first event
    stops: np.ndarray  # int64 [n]: behind the last event before the time

    def __len__(self) -> int:
        return len(self.users)

    @property
    def known(self) -> np.ndarray:
        """Rows whose user has an event before the time, bool [n]."""
        return self.stops > self.starts

    def take(self, rows: np.ndarray) -> "Moments":
        times = None if self.times is None else self.times[rows]
        return Moments(self.users[rows], times, self.starts[rows], self.stops[rows])

    @classmethod
    def of(cls, dataset: Dataset, users: np.ndarray, times: np.ndarray | None) -> "Moments":
        """The rows of users, at times or after all of their events."""
        starts, ends = dataset.user_offsets[users], dataset.user_offsets[users + 1]
        if times is None:
            return cls(users, None, starts, ends)
        stops = starts.copy()
        for row, (start, end, time) in enumerate(zip(starts.tolist(), ends.tolist(), times.tolist(), strict=True)):
            stops[row] += np.searchsorted(dataset.times[start:end], time, side="left")
        return cls(users, times, starts, stops)


def read_moments(path: str | Path, dataset: Dataset) -> tuple[Moments, pa.Table]:
    """Users and times of a file, for each of its rows, and the two columns as they are there."""
    table = read_columns(path)
    column = time_column(table, dataset)
    if column is None:
        raise DataError(
            f"{path} has no column of times ({suggest_name(dataset.schema.events.timestamp, table.column_names)})",
            expected=f"the columns {dataset.schema.events.user!r} and {TIME_COLUMN!r}",
        )
    users = find_users(table, dataset, path)
    if (users < 0).any():
        row = int(np.argmax(users < 0))
        user = table[dataset.schema.events.user][row].as_py()
        raise DataError(
            f"{path} has {int((users < 0).sum()):,} rows of users that {dataset.path} lacks, the first {user!r} "
            f"in row {row + 1}",
            expected="users of the dataset, written as in the log",
        )
    moments = Moments.of(dataset, users, read_times(table[column], dataset, f"{path}, column {column!r}"))
    return moments, table.select([dataset.schema.events.user, column])


def read_columns(path: str | Path) -> pa.Table:
    """A Parquet or CSV file with at least a row."""
    path = Path(path)
    try:
        table = pyarrow.csv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist", expected="a Parquet or CSV file") from None
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read: {str(error).splitlines()[0]}", expected="a Parquet or CSV file"
        ) from None
    if not table.num_rows:
        raise DataError(f"{path} holds no rows", expected="a row per user, or per user and time")
    return table


def time_column(table: pa.Table, dataset: Dataset) -> str | None:
    """The column with the time of each row, if there is one."""
    names = (dataset.schema.events.timestamp, TIME_COLUMN)
    return next((name for name in names if name in table.column_names), None)


def find_users(table: pa.Table, dataset: Dataset, path: str | Path) -> np.ndarray:
    """The place of each row's user among the dataset's, -1 where it has none."""
    name, ids = dataset.schema.events.user, dataset.user_ids()
    if name not in table.column_names:
        raise DataError(
            f"{path} has no column {name!r} ({suggest_name(name, table.column_names)})",
            expected="a column of users, named as in the log",
        )
    column = table[name]
    if column.null_count:
        raise DataError(f"{path} has {column.null_count:,} rows without {name!r}", expected="a user in every row")
    kind = pa.int64() if pa.types.is_integer(column.type) and pa.types.is_integer(ids.type) else pa.string()
    places = pc.fill_null(pc.index_in(column.cast(kind), ids.cast(kind)), -1)
    return np.asarray(places.to_numpy()).astype(np.int64)


def read_times(column: pa.ChunkedArray, dataset: Dataset, source: str) -> np.ndarray:
    """Times as the dataset has them, int64: microseconds since 1970, or positions."""
    unit = dataset.schema.events.time_unit
    column = read_form(column, dataset.schema.events.time_format)
    if column.null_count:
        raise DataError(f"{source}: {column.null_count:,} rows have no time", expected="a time in every row")
    is_whole = pa.types.is_integer(column.type)
    expected = {"order": "whole numbers", "datetime": _TIMES}.get(unit, f"{_TIMES}, or whole numbers in {unit}")
    if (is_whole and unit == "datetime") or (not is_whole and unit == "order"):
        raise DataError(f"{source} is {column.type}", expected=expected)
    if is_whole:
        return np.asarray(column.cast(pa.int64()).to_numpy()) * TIME_UNIT_US.get(unit, 1)
    try:
        zone = column.type.tz if pa.types.is_timestamp(column.type) else None
        moments = column.cast(pa.timestamp("us", zone), safe=False)
    except pa.ArrowException as error:
        raise DataError(f"{source}: {str(error).splitlines()[0]}", expected=expected) from None
    return np.asarray(moments.cast(pa.int64()).to_numpy())


def parse_time(text: str, dataset: Dataset) -> int:
    """A time of an option, as the dataset has times."""
    value: Any = int(text) if text.lstrip("-").isdigit() else text
    try:
        return int(read_times(pa.chunked_array([[value]]), dataset, repr(text))[0])
    except DataError as error:
        raise ConfigError(f"--at {error.problem}", expected=error.expected) from None
