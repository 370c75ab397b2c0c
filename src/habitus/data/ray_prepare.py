"""Preparing on a Ray cluster: the events are checked, partitioned and sorted by tasks; the bytes are the same.

Each task has a DuckDB of its own and works on a share of the rows or on one part, writes its files under a new name
and renames them, so that a lost worker repeats its own task and nothing else. Tasks and driver meet in the folder
beside --out, which all nodes must see under one path. What must be one stream to be the same bytes everywhere
(statistics, ids, splits) stays on the driver, which reads the sorted parts in order.
"""

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.column_surveys import MAX_CATEGORIES, too_many_categories
from habitus.data.columns import to_categories
from habitus.data.connection import connect, duckdb_memory
from habitus.data.log import EventCheck, EventLog, plain_strings
from habitus.data.partitions import (
    EventQuery,
    choose_bounds,
    count_parts,
    part_files,
    rows_within,
    scan_files,
    sort_part,
    write_parts,
)
from habitus.data.problems import EXAMPLES_SHOWN, Problem
from habitus.data.ray_driver import RayDriver
from habitus.data.sources import SourceTable, is_disk_full, quoted_path
from habitus.errors import DataError, HabitusError
from habitus.events import Schema
from habitus.files import staged_file
from habitus.progress import Progress

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_SHARES_PER_CPU = 2
_SAMPLED_USERS = 1 << 16
_OF_THE_DRIVER = ("known", "unusable", "all_user_rows")  # tables that no task asks for


@dataclass(frozen=True)
class _Inputs:
    """What every task needs to know of the log."""

    schema: Schema
    events: SourceTable
    items: SourceTable
    users: SourceTable | None
    tables: Path  # the driver's tables (catalogue, rows of users, ...), as Parquet
    memory: str


class _Survey(NamedTuple):
    """What one share of the events holds."""

    counts: list[int]  # of rows that fail each check, then of usable rows
    examples: list[list[tuple[int, Any]]]  # by check: original row and value
    values: dict[str, pa.Table]  # by category: value, num_usable
    users: pa.Table  # a sample


class _Failure(NamedTuple):
    """An error of a task, as its driver raises it."""

    problem: str
    expected: str = ""
    next_step: str = ""


class RayEventLog(EventLog):
    """An EventLog that asks tasks on the cluster what takes a pass over all events."""

    def __init__(
        self,
        con: "DuckDBPyConnection",
        schema: Schema,
        events: SourceTable,
        items: SourceTable,
        users: SourceTable | None,
        driver: RayDriver,
        scratch: Path,
        memory: str,
        num_parts: int | None,
        progress: Progress,
    ) -> None:
        super().__init__(con, schema, events, items, users=users)
        self.driver = driver
        self.scratch, self.progress, self.num_parts = scratch.resolve(), progress, num_parts
        tables = _absolute(events), _absolute(items), None if users is None else _absolute(users)
        self.inputs = _Inputs(schema, *tables, self.scratch / "tables", memory)
        self.surveys: list[_Survey] = []

    def join(self) -> None:
        super().join()
        self._export_tables()
        self.progress("checking events", 0.0)
        self.surveys = list(self._run(_survey, self._shares(), "checking events"))

    def write_parts(self) -> int:
        """Write the usable events in parts, by tasks; returns how many parts there are."""
        self._export_tables()
        events = self.usable_events()
        rows_in_memory = rows_within(duckdb_memory(self.inputs.memory), len(events.columns) + 1)
        num_parts = self.num_parts or max(count_parts(self.num_rows, rows_in_memory), self.driver.num_cpus)
        self.progress("partitioning events", 0.0)
        users = pa.concat_tables(survey.users for survey in self.surveys)
        self.con.register("sampled_users", users)
        bounds = choose_bounds(self.con, "SELECT u FROM sampled_users", users.num_rows, num_parts)
        self.con.unregister("sampled_users")
        shares = [(*share, number, bounds, rows_in_memory) for number, share in enumerate(self._shares())]
        list(self._run(_write_share, shares, "partitioning events"))
        return len(bounds) + 1

    def sorted_files(self, num_parts: int) -> Iterator[Path]:
        """The sorted parts in order, each in a file that is gone when the next one is asked for.

        A few are sorted ahead, by as many tasks as there are CPUs.
        """
        folders = sorted((self.scratch / "parts").iterdir())
        files = [found for number in range(num_parts) if (found := part_files(folders, number))]
        columns = self.usable_events().columns
        parts = [(found, columns, self.scratch / f"sorted-{n}.parquet") for n, found in enumerate(files)]
        for path in self._run(_sort, parts, None, ahead=self.driver.num_cpus + 1):
            yield path
            path.unlink()

    # --- what tasks found, in place of a query over all events -------------------------------------------

    def _count_rows(self, checks: Sequence[EventCheck]) -> list[int]:
        return [sum(counts) for counts in zip(*(survey.counts for survey in self.surveys), strict=True)]

    def _examples(self, check: EventCheck) -> list[tuple[Any, ...]]:
        number = self._checks().index(check)
        found = [example for survey in self.surveys for example in survey.examples[number]]
        return sorted(found, key=lambda example: example[0])[:EXAMPLES_SHOWN]

    def _category_problems(self) -> list[Problem]:
        problems = []
        for name in self._categories():
            values = self._merge_values(name)["value"]
            if len(values) > MAX_CATEGORIES:
                examples = values.slice(0, EXAMPLES_SHOWN).cast(pa.string()).to_pylist()
                problems.append(too_many_categories("events", name, len(values), examples))
        return problems

    def event_values(self) -> dict[str, tuple[str, ...]]:
        values = {}
        for name in self._categories():
            merged = self._merge_values(name)
            kept = merged.filter(pc.greater(merged["num_usable"], 0))
            kept = kept.sort_by([("num_usable", "descending"), ("value", "ascending")]).slice(0, MAX_CATEGORIES)
            values[name] = tuple(sorted(set(to_categories(plain_strings(kept["value"])).to_pylist())))
        return values

    def _merge_values(self, name: str) -> pa.Table:
        tables = pa.concat_tables(survey.values[name] for survey in self.surveys)
        return tables.group_by("value").aggregate([("num_usable", "sum")]).rename_columns(["value", "num_usable"])

    # --- tasks ------------------------------------------------------------------------------------------

    def _export_tables(self) -> None:
        """Write the driver's tables that tasks have not got yet."""
        self.inputs.tables.mkdir(exist_ok=True)
        for (name,) in self._rows("SELECT table_name FROM duckdb_tables() WHERE temporary"):
            path = self.inputs.tables / f"{name}.parquet"
            if name not in _OF_THE_DRIVER and not path.exists():
                self.con.execute(f"COPY {name} TO '{quoted_path(path)}' (FORMAT parquet)")

    def _shares(self) -> list[tuple[int, int]]:
        """Rows (first, stop) of the whole table, in shares of one size."""
        num_shares = max(1, min(_SHARES_PER_CPU * self.driver.num_cpus, self.events.num_rows))
        cuts = [self.events.num_rows * number // num_shares for number in range(num_shares + 1)]
        return list(pairwise(cuts))

    def _run(
        self, function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]], phase: str | None, ahead: int | None = None
    ) -> Iterator[Any]:
        """The results of function(inputs, scratch, *job), in order; at most `ahead` are computed early."""
        tasks = [(function, self.inputs, self.scratch, *job) for job in jobs]
        for done, result in enumerate(self.driver.run(_guarded, tasks, ahead), 1):
            if isinstance(result, _Failure):
                raise DataError(result.problem, expected=result.expected, next_step=result.next_step)
            if phase is not None:
                self.progress(phase, done / len(jobs))
            yield result


def _absolute(table: SourceTable) -> SourceTable:
    """The table with paths that mean the same in every working directory."""
    return replace(table, sources=tuple(replace(s, parquet=s.parquet.absolute()) for s in table.sources))


# --- in the worker processes ---------------------------------------------------------------------------------


def _guarded(function: Callable[..., Any], inputs: _Inputs, scratch: Path, *job: Any) -> Any:
    """The result of a task, or its error as text that names the node."""
    try:
        return function(inputs, scratch, *job)
    except HabitusError as error:
        return _Failure(error.problem, error.expected, error.next_step)
    except Exception as error:
        node = socket.gethostname()
        if not scratch.exists():
            return _Failure(
                f"node {node} does not see {scratch.parent}",
                "an --out on storage that all nodes see under one path",
                "choose another --out, or leave out --backend ray",
            )
        if is_disk_full(error):
            return _Failure(
                f"a disk is full on node {node}: {_first_line(error)}; nothing was written",
                f"room in {tempfile.gettempdir()} of every node, and beside --out for a compressed copy of the log",
                "free some space, set TMPDIR on that node, or choose another --out",
            )
        if type(error).__name__ == "OutOfMemoryException":
            return _Failure(f"{inputs.memory} of memory is too little for a task", "", "raise --memory")
        names = [source.name for source in inputs.events.sources]
        where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
        return _Failure(
            f"a part of {where} cannot be read on node {node}: {_first_line(error)}",
            "complete, undamaged tables that every node can read",
            "check the files on that node, then run the command again",
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def _database(inputs: _Inputs) -> Iterator["DuckDBPyConnection"]:
    """A DuckDB of one thread that spills to the disk of its node."""
    with (
        tempfile.TemporaryDirectory(prefix="habitus-task-") as folder,
        connect(Path(folder), inputs.memory, 1, lambda phase, done: None) as con,
    ):
        yield con


class _Share(EventLog):
    """The rows first..stop of the events as a log of their own, joined to the driver's tables."""

    def __init__(self, con: "DuckDBPyConnection", inputs: _Inputs, first: int, stop: int) -> None:
        super().__init__(con, inputs.schema, inputs.events.share(first, stop), inputs.items, users=inputs.users)
        con.execute("ALTER VIEW events_view RENAME TO files_of_share")
        con.execute(
            f"CREATE TEMP VIEW events_view AS SELECT * FROM files_of_share WHERE origin >= {first} AND origin < {stop}"
        )
        for path in inputs.tables.glob("*.parquet"):
            con.execute(f"CREATE TEMP VIEW {path.stem} AS SELECT * FROM read_parquet('{quoted_path(path)}')")
        self.join()

    def survey(self) -> _Survey:
        checks = self._checks()
        counts = self._count_rows(checks)
        is_clean = not any(counts[:-1])
        examples = [self._examples(check) if rows else [] for check, rows in zip(checks, counts[:-1], strict=True)]
        values = {name: self._count_values(name, is_clean) for name in self._categories()}
        users = self.con.sql(f"SELECT u FROM events_view USING SAMPLE {_SAMPLED_USERS}").to_arrow_table()
        return _Survey(counts, examples, values, users)

    def _count_values(self, name: str, is_clean: bool) -> pa.Table:
        """How often each value of a category occurs in usable events; those of other events have 0."""
        column = self._field(name)
        source, usable = "joined", self._usable()
        if is_clean and name in self.schema.events.fields:  # the join is not needed
            source, usable = "events_view", "true"
        found = self.con.sql(
            f"SELECT {column} AS value, count(*) FILTER ({usable}) AS num_usable FROM {source} "
            f"WHERE {column} IS NOT NULL GROUP BY 1"
        ).to_arrow_table()
        return pa.table({"value": plain_strings(found["value"]), "num_usable": found["num_usable"]})


def _survey(inputs: _Inputs, scratch: Path, first: int, stop: int) -> _Survey:
    with _database(inputs) as con:
        return _Share(con, inputs, first, stop).survey()


def _write_share(
    inputs: _Inputs, scratch: Path, first: int, stop: int, number: int, bounds: list[str], rows_in_memory: int
) -> None:
    """Write a share in parts, to a folder of its own: all of it, or nothing."""
    final = scratch / "parts" / f"{number:05d}"
    final.parent.mkdir(exist_ok=True)
    if final.exists():  # a lost worker had just finished
        return
    stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=scratch))
    try:
        with _database(inputs) as con:
            events = _Share(con, inputs, first, stop).usable_events()
            write_parts(con, events, bounds, stage / "parts", rows_in_memory=rows_in_memory)
        (stage / "parts").mkdir(exist_ok=True)  # no event of the share is usable
        if not final.exists():
            (stage / "parts").rename(final)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _sort(inputs: _Inputs, scratch: Path, files: list[Path], columns: tuple[str, ...], path: Path) -> Path:
    """Sort one part into the file `path`, and remove what it was."""
    if not path.exists():
        with _database(inputs) as con, staged_file(path) as partial:
            sort_part(con, EventQuery(scan_files(files), columns), partial)
    for file in files:
        file.unlink(missing_ok=True)
    return path
