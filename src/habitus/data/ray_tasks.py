"""What runs on the nodes of a Ray cluster while a log is prepared: each task has a DuckDB of its own.

A task writes its files under new names and renames them, so that the one that repeats it finds all of them or none.
"""

import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa

from habitus.data.connection import connect
from habitus.data.log import EventLog, plain_strings
from habitus.data.partitions import EventQuery, part_files, scan_files, sort_part, write_parts
from habitus.data.sources import SourceTable, check_readable, is_disk_full
from habitus.data.sql import name_sql, origin_sql, parquet_sql, scan_sql
from habitus.errors import HabitusError
from habitus.events import Schema
from habitus.files import scratch_folder, staged_file

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_SAMPLED_USERS = 1 << 16


@dataclass(frozen=True)
class TaskInputs:
    """What every task needs to know of the log. All paths mean the same on every node."""

    schema: Schema
    events: SourceTable
    items: SourceTable
    users: SourceTable | None
    event_types: dict[str, str]  # what DuckDB makes of the columns of all event files together
    scratch: Path  # where tasks and driver meet
    memory: str  # of a task
    tables: tuple[Path, ...] = ()  # the driver's tables (catalogue, rows of users, ...), as Parquet


class Survey(NamedTuple):
    """What one share of the events holds."""

    counts: list[int]  # of rows that fail each check, then of usable rows
    examples: list[list[tuple[int, Any]]]  # by check: original row and value
    values: dict[str, pa.Table]  # by category: value, num_usable
    users: pa.Table  # a sample


class Failure(NamedTuple):
    """An error of a task, for the driver to raise."""

    problem: str
    expected: str = ""
    next_step: str = ""


def run_task(function: Callable[..., Any], inputs: TaskInputs, *job: Any) -> Any:
    """The result of function(inputs, *job), or its error in words that name the node."""
    try:
        return function(inputs, *job)
    except HabitusError as error:
        return Failure(f"{error.problem} (on node {socket.gethostname()})", error.expected, error.next_step)
    except Exception as error:
        return _explain(error, inputs)


def survey_share(inputs: TaskInputs, first: int, stop: int) -> Survey:
    """Check the rows first..stop of the events, and count the values of their categories."""
    with _open_share(inputs, first, stop) as share:
        return share.survey()


def write_share(
    inputs: TaskInputs, first: int, stop: int, number: int, bounds: list[str], rows_in_memory: int
) -> list[list[Path]]:
    """Write a share in parts, to a folder of its own: all of it, or nothing. Returns the files of each part."""
    final = inputs.scratch / "parts" / f"{number:05d}"
    final.parent.mkdir(exist_ok=True)
    if not final.exists():  # a lost worker may just have finished
        stage = Path(tempfile.mkdtemp(prefix=".writing-", dir=inputs.scratch))
        try:
            with _open_share(inputs, first, stop) as share:
                write_parts(share.con, share.usable_events(), bounds, stage / "parts", rows_in_memory=rows_in_memory)
            (stage / "parts").mkdir(exist_ok=True)  # no event of the share is usable
            if not final.exists():
                (stage / "parts").rename(final)
        finally:
            shutil.rmtree(stage, ignore_errors=True)
    return [part_files([final], part) for part in range(len(bounds) + 1)]


def sort_files(inputs: TaskInputs, files: list[Path], columns: tuple[str, ...], path: Path) -> Path:
    """Sort one part into the file `path`, and remove what it was."""
    if not path.exists():
        with _open_database(inputs) as con, staged_file(path) as partial:
            sort_part(con, EventQuery(scan_files(files), columns), partial)
    for file in files:
        file.unlink(missing_ok=True)
    return path


@contextmanager
def _open_database(inputs: TaskInputs) -> Iterator["DuckDBPyConnection"]:
    """A DuckDB of one thread that spills to the disk of its node."""
    with (
        scratch_folder(Path(tempfile.gettempdir(), "habitus-task")) as folder,
        connect(folder, inputs.memory, 1, lambda phase, done: None) as con,
    ):
        yield con


@contextmanager
def _open_share(inputs: TaskInputs, first: int, stop: int) -> Iterator["_Share"]:
    """A share as a log of its own. Of a query that fails the cause is found: a file that cannot be read."""
    with _open_database(inputs) as con:
        try:
            yield _Share(con, inputs, first, stop)
        except Exception as error:
            if not isinstance(error, HabitusError) and not is_disk_full(error) and not _is_memory(error):
                for piece in inputs.events.pieces(first, stop):
                    for source in piece.sources:
                        check_readable(source)
            raise


class _Share(EventLog):
    """The rows first..stop of the events as a log of their own, joined to the driver's tables."""

    def __init__(self, con: "DuckDBPyConnection", inputs: TaskInputs, first: int, stop: int) -> None:
        self.first, self.stop, self.event_types = first, stop, inputs.event_types
        super().__init__(con, inputs.schema, inputs.events, inputs.items, users=inputs.users)
        for path in inputs.tables:
            con.execute(f"CREATE TEMP VIEW {path.stem} AS SELECT * FROM {parquet_sql([path])}")
        self.join()

    def _scan_events(self) -> tuple[str, str]:
        """The rows of the share, in the types of the whole table: single files may have others."""
        types = ((name_sql(name), kind) for name, kind in self.event_types.items())
        columns = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in types)
        scans = []
        for piece in self.events.pieces(self.first, self.stop):
            scan = f"SELECT {columns}, {origin_sql(piece)} AS filename FROM {scan_sql(piece)}"
            if len(piece.sources) == 1:  # row groups outside are not read
                first, stop = self.first - piece.first_row, self.stop - piece.first_row
                scan += f" WHERE file_row_number >= {first} AND file_row_number < {stop}"
            scans.append(scan)
        return f"({' UNION ALL '.join(scans)})", "filename"  # a name that no column of a log may have

    def survey(self) -> Survey:
        checks = self._checks()
        counts = self._count_rows(checks)
        is_clean = not any(counts[:-1])
        examples = [self._examples(check) if rows else [] for check, rows in zip(checks, counts[:-1], strict=True)]
        values = {name: self._count_values(name, is_clean) for name in self._categories()}
        users = self.con.sql(f"SELECT u FROM events_view USING SAMPLE {_SAMPLED_USERS}").to_arrow_table()
        return Survey(counts, examples, values, users)

    def _count_values(self, name: str, is_clean: bool) -> pa.Table:
        """How often each value of a category occurs in usable events; those of other events have 0."""
        column = self._field(name)
        source, usable = "joined", self._usable()
        if is_clean and name in self.schema.events.fields:  # the join is not needed
            source, usable = "events_view", "true"
        counts = self.con.sql(
            f"SELECT {column} AS value, count(*) FILTER ({usable}) AS num_usable FROM {source} "
            f"WHERE {column} IS NOT NULL GROUP BY 1"
        ).to_arrow_table()
        return pa.table({"value": plain_strings(counts["value"]), "num_usable": counts["num_usable"]})


def _explain(error: Exception, inputs: TaskInputs) -> Failure:
    node, reason = socket.gethostname(), (str(error).strip().splitlines() or [type(error).__name__])[0]
    if not inputs.scratch.exists():
        return Failure(
            f"node {node} does not see {inputs.scratch.parent}",
            "an --out on storage that all nodes see under one path; with an --out in an object store, such a TMPDIR",
            "choose another --out, or leave out --backend ray",
        )
    if is_disk_full(error):
        where = "" if _is_memory(error) else f" ({reason})"
        return Failure(
            f"a disk is full on node {node}{where}; nothing was written",
            f"room in {tempfile.gettempdir()} of every node, and beside --out for a compressed copy of the log",
            "free some space, set TMPDIR on that node, or choose another --out",
        )
    if _is_memory(error):
        return Failure(f"{inputs.memory} of memory is too little for a task on these tables", "", "raise --memory")
    names = [source.name for source in inputs.events.sources]
    where = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}"
    return Failure(
        f"a part of {where} cannot be read on node {node}: {reason}",
        "complete, undamaged tables that every node can read",
        "check the files on that node, then run the command again",
    )


def _is_memory(error: Exception) -> bool:
    return type(error).__name__ == "OutOfMemoryException"  # DuckDB's, which is imported only where it is used
