"""Batch jobs: a file of histories in, a file of recommendations out, whatever their size."""

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from habitus.data import SourceTable, add_user_columns, is_disk_full, open_table, quoted_path, require_columns
from habitus.errors import DataError
from habitus.exporting.results import open_results
from habitus.interrupts import hold_interrupts
from habitus.progress import Progress
from habitus.serving import EventOrId, RecommendRequest, RecommendResponse, RequestError, Retriever, UnknownHistoryError
from habitus.typed import Typed, suggest_name
from habitus.units import parse_bytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_HISTORY = "history"  # the column of a table with one history per row
# What a request has of the options.
SHARED_CONDITIONS = ("k", "exclude_seen", "allow", "deny", "ranges", "only_items", "exclude_items")
BATCH = 256
READ_ROWS = 1 << 14


@dataclass(frozen=True)
class RecommendOptions:
    """What to recommend for every history of a file."""

    k: int = 10
    exclude_seen: bool = False
    allow: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # as in RecommendRequest
    deny: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    ranges: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    only_items: Sequence[Any] | None = None
    exclude_items: Sequence[Any] = ()
    on_bad: Literal["error", "skip"] = "error"  # a history with values that cannot be read
    users: str | None = None  # the table of [users], where the histories do not hold its fields
    memory: str = "2GiB"  # of sorting events by user
    replace: bool = False  # whether `out` may exist; it is replaced when the new file is complete


class Recommendations(Typed):
    """What a batch job did."""

    path: str
    users: int
    answered: int
    items: int = Field(description="Recommendations written.")
    by_popularity: int = Field(0, description="Users with an empty history, who got popular items.")
    unknown_only: int = Field(description="Users without an answer: none of their items is known.")
    skipped: int = Field(description="Users without an answer: their events hold values that cannot be read.")
    unknown_events: int = Field(description="Distinct unknown items of each answered user, summed.")
    examples: tuple[str, ...] = Field((), description="Why the first of them have no answer.")
    seconds: float


def recommend_file(
    retriever: Retriever,
    histories: str,
    out: str | Path,
    options: RecommendOptions | None = None,
    progress: Progress | None = None,
) -> Recommendations:
    """Write recommendations for every user of a file, Parquet, CSV or JSON lines. `out` appears complete or not at all.

    The input is an event log with the columns that the run was trained on (events in any order), or has one row per
    user with the column `history`, a list of events or of item ids. Events are sorted by user within a memory limit,
    on disk.
    """
    options, progress = options or RecommendOptions(), progress or (lambda *_: None)
    out = Path(out)
    began = time.perf_counter()
    tally = _Tally()
    try:
        with (
            open_results(out, retriever, replace=options.replace) as results,
            tempfile.TemporaryDirectory(dir=out.parent, prefix=".recommend-") as scratch,
        ):
            skip = options.on_bad != "error"
            users = read_users(retriever, histories, Path(scratch), options.memory, progress, options.users, skip)
            for batch, share in _batches(users):
                for user, response in _recommend(retriever, batch, options):
                    tally.add(user, response, options.on_bad)
                    if isinstance(response, RecommendResponse):
                        results.add(user, response)
                progress("recommending", share)
            tally.check()
    except OSError as error:
        raise DataError(
            f"{out} could not be written: {error.strerror or error}",
            next_step="free some space, or name a file elsewhere",
        ) from error
    return tally.result(out, time.perf_counter() - began)


@dataclass
class _Tally:
    users: int = 0
    answered: int = 0
    items: int = 0
    by_popularity: int = 0
    unknown_only: int = 0
    skipped: int = 0
    unknown_events: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, user: Any, response: RecommendResponse | RequestError, on_bad: str) -> None:
        """Count a response, or why there is none; a history that cannot be read may be an error."""
        self.users += 1
        if isinstance(response, RecommendResponse):
            self.answered += 1
            self.items += len(response.items)
            self.by_popularity += response.because is not None
            self.unknown_events += len(response.unknown_items)
            return
        unknown = isinstance(response, UnknownHistoryError)
        if not unknown and on_bad == "error":
            raise DataError(
                f"histories, user {str(user)[:60]!r}: {response.problem}",
                expected=response.expected,
                next_step="correct the file, or pass --on-bad skip to leave such users out",
            ) from response
        self.unknown_only += unknown
        self.skipped += not unknown
        if len(self.examples) < 3:
            self.examples.append(f"user {str(user)[:60]!r}: {response.problem}")

    def check(self) -> None:
        """Refuse a file of which no history can be read."""
        if self.users and self.skipped == self.users:
            raise DataError(
                f"histories: none of {self.users:,} users has events that can be read; {'; '.join(self.examples)}",
                expected="events as the run was trained on",
            )

    def result(self, out: Path, seconds: float) -> Recommendations:
        return Recommendations(
            path=str(out),
            users=self.users,
            answered=self.answered,
            items=self.items,
            by_popularity=self.by_popularity,
            unknown_only=self.unknown_only,
            skipped=self.skipped,
            unknown_events=self.unknown_events,
            examples=tuple(self.examples),
            seconds=round(seconds, 3),
        )


def _recommend(
    retriever: Retriever, batch: list[tuple[Any, list[EventOrId]]], options: RecommendOptions
) -> Iterator[tuple[Any, RecommendResponse | RequestError]]:
    shared = {name: getattr(options, name) for name in SHARED_CONDITIONS}
    requests = [RecommendRequest(history=events, **shared) for _, events in batch]
    for (user, _), response in zip(batch, retriever.recommend_each(requests), strict=True):
        yield user, response


def _batches(
    users: Iterator[tuple[Any, list[EventOrId], float]],
) -> Iterator[tuple[list[tuple[Any, list[EventOrId]]], float]]:
    batch: list[tuple[Any, list[EventOrId]]] = []
    share = 0.0
    for user, events, share in users:
        batch.append((user, events))
        if len(batch) == BATCH:
            yield batch, share
            batch = []
    if batch:
        yield batch, share


def read_users(
    retriever: Retriever,
    histories: str,
    scratch: Path,
    memory: str = "2GiB",
    progress: Progress = lambda *_: None,
    users: str | None = None,
    skip: bool = False,
) -> Iterator[tuple[Any, list[EventOrId], float]]:
    """(user, events, share of the file) one after another; `scratch` is for files in between.

    `users` is a users table, whose fields are added to the events as they were known at their times. `skip` leaves out
    rows without a user.
    """
    with hold_interrupts():
        import duckdb

    config = {
        "memory_limit": f"{int(parse_bytes(memory) * 0.75 / 2**20)}MiB",
        "temp_directory": str(scratch / "spill"),
        "threads": 2,
    }
    with duckdb.connect(":memory:", config=config) as con:
        con.execute("SET TimeZone = 'UTC'")  # of times without a zone, whatever the machine's is
        table = open_table("histories", histories, con, scratch)
        roles = retriever.bundle.schema.events
        user_fields = [name for name in retriever.bundle.schema.event_fields if name not in roles.fields]
        if _HISTORY in table.types and roles.item_column not in table.types:
            if users is not None:
                raise DataError(
                    f"{histories} holds a list of events per user, and a users table was given",
                    expected="an event log beside it, or events that say user.NAME themselves",
                )
            require_columns(table, [roles.user, _HISTORY])
            yield from _listed(table, roles.user)
            return
        needed = [roles.user, roles.item_column, *roles.pair_columns]
        require_columns(table, needed)
        optional = [roles.timestamp, *roles.fields, *([] if users else user_fields)]
        if users is None and user_fields and not any(name in table.types for name in user_fields):
            progress(f"no fields of users ({', '.join(user_fields)}): they count as missing", 0.0)
        absent = [name for name in roles.fields if name not in table.types]
        if absent and len(absent) == len(roles.fields) and roles.fields:
            hint = suggest_name(absent[0], sorted(table.types))
            progress(f"no event fields ({hint})", 0.0)
        columns = list(dict.fromkeys(needed + [name for name in optional if name in table.types]))
        progress("sorting by user", 0.0)
        path = scratch / "sorted.parquet"
        add = None
        if users is not None:
            user_table = open_table("users", users, con, scratch)
            add = partial(add_user_columns, con, retriever.bundle.schema, user_table, table)
        _sort(con, table, columns, roles.user, path, add, skip)
    yield from _grouped(path, roles.user)


def _sort(
    con: "DuckDBPyConnection",
    table: SourceTable,
    columns: list[str],
    user: str,
    path: Path,
    add: Callable[[str], str] | None,
    skip: bool,
) -> None:
    """Write the events sorted by user; `add` makes a query with further columns of a query of them."""
    with hold_interrupts():
        import duckdb

    names = ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
    files = ", ".join(f"'{quoted_path(source.parquet)}'" for source in table.sources)
    key = '"' + user.replace('"', '""') + '"'
    try:
        (missing,) = con.execute(f"SELECT count(*) FROM read_parquet([{files}]) WHERE {key} IS NULL").fetchone() or (0,)
        if missing and not skip:
            raise DataError(
                f"histories: {missing:,} rows have no {user!r}",
                expected="a user in every row",
                next_step="correct the file, or pass --on-bad skip to leave such rows out",
            )
        events = (
            f"FROM read_parquet([{files}], union_by_name = true, hive_partitioning = false) WHERE {key} IS NOT NULL"
        )
        query = f"SELECT {names} {events} ORDER BY {key}, file_index, file_row_number"
        if add is not None:
            rows = f"SELECT {names}, file_index AS file_, file_row_number AS row_ {events}"
            query = f"SELECT * EXCLUDE (file_, row_) FROM ({add(rows)}) ORDER BY {key}, file_, row_"
        con.execute(f"COPY ({query}) TO '{quoted_path(path)}' (FORMAT parquet, ROW_GROUP_SIZE 65536)")
    except duckdb.Error as error:
        if is_disk_full(error):
            raise DataError("the disk is full", next_step="free some space, or name a file elsewhere") from error
        raise DataError(
            f"histories: cannot be sorted by {user!r}: {str(error).splitlines()[0]}",
            next_step="raise --memory if it is too little",
        ) from error


def _grouped(path: Path, user: str) -> Iterator[tuple[Any, list[EventOrId], float]]:
    events: list[EventOrId] = []
    current: Any = None
    done = 0
    with pq.ParquetFile(path) as file:
        total = file.metadata.num_rows
        for batch in file.iter_batches(READ_ROWS):
            for event in batch.to_pylist():
                if events and event[user] != current:
                    yield current, events, done / total
                    events = []
                current = event[user]
                events.append(event)
                done += 1
    if events:
        yield current, events, 1.0


def _listed(table: SourceTable, user: str) -> Iterator[tuple[Any, list[EventOrId], float]]:
    kind = table.types[_HISTORY]
    value = kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else None
    if value is None or not (pa.types.is_struct(value) or pa.types.is_null(value) or _is_id(value)):
        raise DataError(
            f"histories: the column {_HISTORY!r} is {kind}", expected="a list of events or item ids per row"
        )
    done = 0
    for batch in table.batches([user, _HISTORY]):
        for row in batch.to_pylist():
            done += 1
            events = [_without_missing(event) for event in row[_HISTORY] or []]
            yield row[user], events, done / table.num_rows


def _is_id(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)


def _without_missing(event: Any) -> EventOrId:
    """An event by what it holds; an id as it is."""
    if event is None:
        return {}
    return {k: v for k, v in event.items() if v is not None} if isinstance(event, dict) else event
