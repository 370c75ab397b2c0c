"""Preparing on a Ray cluster: the events are checked, partitioned and sorted by tasks; the bytes are the same.

Tasks and driver meet in the folder beside --out, which all nodes must see under one path; a lost worker repeats its
own task and nothing else. What must be one stream to be the same bytes everywhere (statistics, ids, splits) stays on
the driver, which reads the sorted parts in order.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.column_surveys import MAX_CATEGORIES, too_many_categories
from habitus.data.columns import to_categories
from habitus.data.connection import duckdb_memory
from habitus.data.event_checks import EventCheck
from habitus.data.event_sql import event_columns
from habitus.data.log import EventLog, plain_strings
from habitus.data.partitions import choose_bounds, count_parts, rows_within
from habitus.data.problems import EXAMPLES_SHOWN, Problem
from habitus.data.ray_driver import RayDriver
from habitus.data.ray_tasks import Failure, Survey, TaskInputs, run_task, sort_files, survey_share, write_share
from habitus.data.sources import SourceTable, quoted_path
from habitus.data.sql import name_sql, scan_sql
from habitus.errors import DataError
from habitus.events import Schema
from habitus.progress import Progress
from habitus.units import parse_bytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_SHARES_PER_CPU = 2
_OF_THE_DRIVER = ("known", "unusable", "all_user_rows")  # tables that no task asks for


@dataclass(frozen=True)
class RayWork:
    """A cluster, and how tasks are to use it."""

    driver: RayDriver
    scratch: Path  # on storage that all nodes see
    memory: str  # of a task
    num_parts: int | None  # in which events are sorted; None: as many as memory and CPUs demand
    progress: Progress


class RayEventLog(EventLog):
    """An EventLog that asks tasks on the cluster what takes a pass over all events."""

    def __init__(
        self,
        con: "DuckDBPyConnection",
        schema: Schema,
        events: SourceTable,
        items: SourceTable,
        users: SourceTable | None,
        work: RayWork,
    ) -> None:
        super().__init__(con, schema, events, items, users=users)
        self.work = replace(work, scratch=work.scratch.resolve())
        tables = _absolute(events), _absolute(items), None if users is None else _absolute(users)
        self.inputs = TaskInputs(schema, *tables, self._event_types(), self.work.scratch, work.memory)
        self.surveys: list[Survey] = []
        self.parts: list[list[Path]] = []  # the files of each part that has events

    def join(self) -> None:
        super().join()
        self._export_tables()
        self.surveys = list(self._run(survey_share, self._shares(), phase="checking events"))

    def write_parts(self) -> int:
        """Write the usable events in parts, by tasks; returns how many parts there are."""
        self._export_tables()  # pairs and numbered texts are new
        work, events = self.work, self.usable_events()
        rows_in_memory = rows_within(duckdb_memory(work.memory), len(events.columns) + 1)
        num_parts = work.num_parts or max(count_parts(self.num_rows, rows_in_memory), work.driver.num_cpus)
        users = pa.concat_tables(survey.users for survey in self.surveys)
        self.con.register("sampled_users", users)
        bounds = choose_bounds(self.con, "SELECT u FROM sampled_users", users.num_rows, num_parts)
        self.con.unregister("sampled_users")
        jobs = [(*share, number, bounds, rows_in_memory) for number, share in enumerate(self._shares())]
        written = self._run(write_share, jobs, phase="partitioning events")
        parts = zip(*written, strict=True)  # one entry of each share
        self.parts = [files for part in parts if (files := [file for share in part for file in share])]
        return len(self.parts)

    def sorted_files(self) -> Iterator[Path]:
        """The sorted parts in order, each in a file that is gone when the next one is asked for.

        A few are sorted ahead, by as many tasks as there are CPUs.
        """
        columns, scratch = self.usable_events().columns, self.work.scratch
        jobs = [(files, columns, scratch / f"sorted-{number}.parquet") for number, files in enumerate(self.parts)]
        for path in self._run(sort_files, jobs, ahead=self.work.driver.num_cpus + 1):
            yield path
            path.unlink()

    # --- what tasks found, in place of a query over all events -------------------------------------------

    def _count_rows(self, checks: Sequence[EventCheck]) -> list[int]:
        return [sum(counts) for counts in zip(*(survey.counts for survey in self.surveys), strict=True)]

    def _examples(self, check: EventCheck) -> list[tuple[Any, ...]]:
        number = self._checks().index(check)
        examples = [example for survey in self.surveys for example in survey.examples[number]]
        return sorted(examples, key=lambda example: example[0])[:EXAMPLES_SHOWN]

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
            if kept.num_rows > MAX_CATEGORIES:
                kept = kept.sort_by([("num_usable", "descending"), ("value", "ascending")]).slice(0, MAX_CATEGORIES)
            values[name] = tuple(sorted(set(to_categories(plain_strings(kept["value"])).to_pylist())))
        return values

    def _merge_values(self, name: str) -> pa.Table:
        tables = pa.concat_tables(survey.values[name] for survey in self.surveys)
        return tables.group_by("value").aggregate([("num_usable", "sum")]).rename_columns(["value", "num_usable"])

    # --- tasks ------------------------------------------------------------------------------------------

    def _event_types(self) -> dict[str, str]:
        columns = ", ".join(map(name_sql, event_columns(self.schema)))
        described = self._rows(f"DESCRIBE SELECT {columns} FROM {scan_sql(self.events)}")
        return {name: kind for name, kind, *_ in described}

    def _export_tables(self) -> None:
        """Write the driver's tables that tasks have not got yet."""
        folder = self.work.scratch / "tables"
        folder.mkdir(exist_ok=True)
        tables = list(self.inputs.tables)
        for (name,) in self._rows("SELECT table_name FROM duckdb_tables() WHERE temporary"):
            path = folder / f"{name}.parquet"
            if name not in _OF_THE_DRIVER and path not in tables:
                self.con.execute(f"COPY {name} TO '{quoted_path(path)}' (FORMAT parquet)")
                tables.append(path)
        self.inputs = replace(self.inputs, tables=tuple(tables))

    def _shares(self) -> list[tuple[int, int]]:
        """Rows (first, stop) of the whole table, in shares of one size."""
        num_shares = max(1, min(_SHARES_PER_CPU * self.work.driver.num_cpus, self.events.num_rows))
        cuts = [self.events.num_rows * number // num_shares for number in range(num_shares + 1)]
        return list(pairwise(cuts))

    def _run(
        self,
        function: Callable[..., Any],
        jobs: Sequence[tuple[Any, ...]],
        *,
        phase: str | None = None,
        ahead: int | None = None,
    ) -> Iterator[Any]:
        """The results of function(inputs, *job), in order; at most `ahead` are computed early."""
        if phase is not None:
            self.work.progress(phase, 0.0)
        tasks = [(function, self.inputs, *job) for job in jobs]
        results = self.work.driver.run(run_task, tasks, parse_bytes(self.work.memory), ahead)
        for done, result in enumerate(results, 1):
            if isinstance(result, Failure):
                raise DataError(result.problem, expected=result.expected, next_step=result.next_step)
            if phase is not None:
                self.work.progress(phase, done / len(jobs))
            yield result


def _absolute(table: SourceTable) -> SourceTable:
    """The table with paths that mean the same in every working directory."""
    return replace(table, sources=tuple(replace(s, parquet=s.parquet.absolute()) for s in table.sources))
