"""The event log in DuckDB: checked and joined to the catalogue, within a memory limit.

Everything that touches every event before it is sorted happens here, as SQL. The result is a query, whose rows
partitions.py sorts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.column_surveys import MAX_CATEGORIES, too_many_categories
from habitus.data.columns import to_categories
from habitus.data.earlier import Earlier
from habitus.data.event_checks import EventCheck, check_types, list_checks
from habitus.data.event_contents import CONTENT_KINDS, EventContent
from habitus.data.event_sql import event_columns, select_events
from habitus.data.kinds import KINDS
from habitus.data.partitions import EventQuery
from habitus.data.problems import EXAMPLES_SHOWN, Problem, quote_value, refuse
from habitus.data.sources import SourceTable, quoted_path, require_columns
from habitus.data.sql import (
    are_comparable,
    id_sql,
    origin_sql,
    scan_sql,
    time_in_range_sql,
)
from habitus.data.users_table import UserRows, UsersTable
from habitus.errors import DataError
from habitus.events import Schema, Targets, user_field

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_VALUES_AT_ONCE = 1 << 14  # distinct texts or vectors in a group of their file: vectors may be long


class EventLog:
    """Views over the two tables, and the questions that preparation asks of them."""

    def __init__(
        self,
        con: "DuckDBPyConnection",
        schema: Schema,
        events: SourceTable,
        items: SourceTable,
        earlier: Earlier | None = None,
        earlier_events: Path | None = None,
        users: SourceTable | None = None,
    ) -> None:
        self.con = con
        self.earlier = earlier  # the dataset that these events are added to, and its events as a file
        self.earlier_events = earlier_events
        self.schema = schema
        self.events = events
        self.items = items
        self.dropped: dict[str, int] = {}
        self.num_usable = 0  # events that are kept, once they are checked
        step = None if earlier is None else f"name the columns as {earlier.dataset.path} has them, or prepare all again"
        if schema.events.user not in events.types and schema.events.user in items.types:
            step = "give the events first, then the items"
        require_columns(events, event_columns(schema), step)
        require_columns(items, [schema.items.item, *schema.items.fields, *(schema.items.display or ())], step)
        check_types(schema, events, items)
        self.users: UsersTable | None = None
        if users is not None and schema.users is not None:
            aliases = {name: self._field(user_field(name)) for name in schema.users.fields}
            self.users = UsersTable(con, schema, users, events, aliases)
        self._create_views()

    # --- the catalogue -----------------------------------------------------------------------------------

    def make_catalogue(self, drop: bool) -> np.ndarray:
        """Number the items; returns the rows of the item table that are left out, as `drop` allows.

        Items that an earlier dataset has keep their numbers and the features that they have there.
        """
        self.con.execute(
            "CREATE TEMP TABLE unusable AS SELECT origin, item, item IS NULL AS is_null FROM items WHERE item IS NULL "
            "UNION ALL SELECT origin, item, false FROM items SEMI JOIN "
            "(SELECT item FROM items WHERE item IS NOT NULL GROUP BY item HAVING count(*) > 1) USING (item) "
            "QUALIFY row_number() OVER (PARTITION BY item ORDER BY origin) > 1"
        )
        problems = []
        for is_null, what, expected in (
            (True, "no item id", "an id in every row"),
            (False, "an item id that an earlier row has", "one row per item"),
        ):
            rows = self._rows(f"SELECT origin, item FROM unusable WHERE is_null = {is_null} ORDER BY origin")
            if rows:
                examples = tuple(f"{self.items.place(row)}: {quote_value(item)}" for row, item in rows[:EXAMPLES_SHOWN])
                remedy = "leaves out item rows without an id and keeps the first of several rows of one item"
                problems.append(Problem("items", self.schema.items.item, what, len(rows), examples, expected, remedy))
        self._settle(problems, drop)
        self._create_known_items()
        in_either = "SELECT origin FROM unusable UNION SELECT origin FROM items SEMI JOIN known USING (item)"
        left_out = [row for (row,) in self._rows(f"{in_either} ORDER BY origin")]
        first = self._rows("SELECT count(*) FROM known")[0][0]
        row = "origin" if not len(left_out) else "row_number() OVER (ORDER BY origin) - 1"
        self.con.execute(
            f"CREATE TEMP TABLE catalogue AS SELECT item_row, item FROM known UNION ALL "
            f"SELECT {first} + {row} AS item_row, item FROM items "
            "ANTI JOIN unusable USING (origin) ANTI JOIN known USING (item)"
        )
        return np.asarray(left_out, np.int64)

    def _create_known_items(self) -> None:
        """The items of the earlier dataset, as the catalogue has them; none without one."""
        source = "SELECT 0 AS item_row, item FROM items WHERE false"
        if self.earlier is not None:
            (name,) = pq.read_schema(self.earlier.item_ids).names
            item = id_sql(name, self.items.types[self.schema.items.item], self._same_item_types)
            source = (
                f"SELECT file_row_number AS item_row, {item} AS item "
                f"FROM read_parquet('{quoted_path(self.earlier.item_ids)}', file_row_number = true)"
            )
        self.con.execute(f"CREATE TEMP TABLE known AS {source}")

    def make_pairs(self) -> tuple[np.ndarray, dict[str, pa.Array]]:
        """For item×value prediction: the item row and the values of every pair that occurs, in order."""
        pairs = [f"pair_{i}" for i in range(len(self.schema.events.pair_columns))]
        columns = ", ".join(["item_row", *pairs])
        self.con.execute(
            f"CREATE TEMP TABLE pairs AS SELECT row_number() OVER (ORDER BY {columns}) - 1 AS pair_row, {columns} "
            f"FROM (SELECT DISTINCT {columns} FROM joined WHERE {self._usable()})"
        )
        table = self.con.sql(f"SELECT {columns} FROM pairs ORDER BY pair_row").to_arrow_table()
        values = {
            name: table[pair].combine_chunks()
            for name, pair in zip(self.schema.events.pair_columns, pairs, strict=True)
        }
        return table["item_row"].to_numpy(), values

    # --- the events --------------------------------------------------------------------------------------

    def check_events(self, drop: bool) -> None:
        """Count what is wrong in one pass over the events; refuse, or remember what is to be dropped."""
        checks = self._checks()
        *counts_bad, num_usable = self._count_rows(checks)
        problems = [self._problem(check, rows) for check, rows in zip(checks, counts_bad, strict=True) if rows]
        problems += self._category_problems()
        self._settle(problems, drop)
        if num_usable == 0:
            raise DataError(
                "events: no usable row is left"
                + (" after dropping" if drop else "")
                + "".join(f"\n  - {problem}" for problem in problems),
                expected="events whose items are in the item table",
            )
        self.dropped["event_rows"] = self.events.num_rows - num_usable
        self.num_usable = self.num_rows - self.dropped["event_rows"]
        if self.schema.targets is not None and self.earlier is None:
            self._check_targets(self.schema.targets)

    def _check_targets(self, targets: Targets) -> None:
        """Refuse a log in which something that is to be predicted never happens."""
        weights, value = targets.weights or {}, "w_raw" if targets.weights else "NULL"  # a number may have any value
        counting = f"SELECT {value}, max(w) FROM joined WHERE {self._usable()} AND w <> 0 GROUP BY 1"
        found = dict(self._rows(counting))
        missing = [name for name, weight in weights.items() if weight and name not in found]
        if missing or not any(weight > 0 for weight in found.values()):
            what = " or ".join(map(quote_value, missing)) if missing else "a weight above 0"
            frequent = self._rows(
                f"SELECT w_raw, count(*) FROM joined WHERE {self._usable()} GROUP BY 1 ORDER BY 2 DESC, 1 "
                f"LIMIT {EXAMPLES_SHOWN}"
            )
            occurring = ", ".join(f"{quote_value(name)} ({count:,})" for name, count in frequent)
            raise DataError(
                f"events: column {targets.column!r} of [targets]: no event has {what}",
                expected=f"values that occur; the most frequent: {occurring}",
                next_step="correct [targets] in the schema",
            )

    def time_at(self, share: float) -> int:
        """The time, in microseconds, at which that share of the events has passed."""
        cut = self._rows(f"SELECT quantile_disc(t, {share}) FROM joined WHERE {self._usable()}")
        return int(cut[0][0])

    def event_values(self) -> dict[str, tuple[str, ...]]:
        """The values of each event category, in order; of too many, the most frequent.

        After those of an earlier dataset, new ones stand in the order in which they first occur.
        """
        values = {}
        for name in self._categories():
            column = self._field(name)
            order = "count(*) DESC" if self.earlier is None else "min(t)"
            raw = self.con.sql(
                f"SELECT {column} AS v FROM {self._usable_rows(name)} AND {column} IS NOT NULL GROUP BY 1 "
                f"ORDER BY {order}, 1 LIMIT {MAX_CATEGORIES}"
            ).to_arrow_table()
            strings = to_categories(plain_strings(raw["v"])).to_pylist()
            if self.earlier is None:
                values[name] = tuple(sorted(set(strings)))
            else:
                values[name] = self.earlier.event_values(name, strings)
        return values

    def number_contents(self, drop: bool, scratch: Path) -> tuple[EventContent, ...]:
        """Number the distinct texts and vectors of the events in the order in which they first occur.

        They are written to `scratch`, and never all in memory.
        """
        contents = []
        for name in self._contents():
            column = self._field(name)
            self.con.execute(
                f"CREATE TEMP TABLE content_{column} AS SELECT row_number() OVER (ORDER BY origin) AS number, * FROM "
                f"(SELECT {column} AS value, min(origin) AS origin, count(*) AS times FROM joined "
                f"WHERE {column} IS NOT NULL AND {self._usable()} GROUP BY 1)"
            )
            path = scratch / f"content_{column}.parquet"
            self.con.execute(
                f"COPY (SELECT value, origin, times FROM content_{column} ORDER BY number) TO '{quoted_path(path)}' "
                f"(FORMAT parquet, ROW_GROUP_SIZE {_VALUES_AT_ONCE})"
            )
            contents.append(EventContent.of(name, self.schema.events.fields[name], path))
        self._settle([problem for content in contents for problem in content.problems(self.events.place)], drop)
        return tuple(contents)

    def usable_events(self) -> EventQuery:
        """User, t, item_row, the fields and the original row of every event that is kept.

        Texts and vectors come as their numbers. Of an earlier dataset's events the categories come as codes, in columns
        of their own (k_*).
        """
        pairs = self.schema.events.pair_columns
        row, source = "item_row", "joined"
        if pairs:
            row = "pair_row"
            using = ", ".join(["item_row", *(f"pair_{i}" for i in range(len(pairs)))])
            source = f"joined JOIN pairs USING ({using})"
        for column in map(self._field, self._contents()):
            numbers = f"SELECT number AS n_{column}, value AS v_{column} FROM content_{column}"
            source = f"{source} LEFT JOIN ({numbers}) ON {column} = v_{column}"
        fields = [
            f"coalesce(n_{c}, 0) AS {c}"
            if name in self._contents()
            else c
            if name in self._categories()
            else f"CASE WHEN isfinite({c}) THEN {c} END AS {c}"
            for name in self.schema.event_fields
            for c in [self._field(name)]
        ]
        fields += ["w"] if self.schema.targets else []
        columns = ", ".join([f"u, t, {row} AS item_row", *fields])
        events = f"SELECT {columns}, origin FROM {source} WHERE {self._usable()}"
        kept = ["u", "t", "item_row", *(self._field(name) for name in self.schema.event_fields)]
        kept += ["w"] if self.schema.targets else []
        if self.earlier_events is not None:
            events = (
                f"{events} UNION ALL BY NAME SELECT *, file_row_number AS origin "
                f"FROM read_parquet('{quoted_path(self.earlier_events)}', file_row_number = true)"
            )
            kept += [self._field(name).replace("f_", "k_") for name in self._categories()]
        return EventQuery(events, tuple(kept))

    def all_users(self) -> str:
        """A query for the user (u) of every event, usable or not."""
        users = "SELECT u FROM events_view"
        if self.earlier_events is not None:
            users += f" UNION ALL SELECT u FROM read_parquet('{quoted_path(self.earlier_events)}')"
        return users

    @property
    def num_rows(self) -> int:
        """Events of the log, usable or not, and of the earlier dataset."""
        return self.events.num_rows + (self.earlier.dataset.num_events if self.earlier is not None else 0)

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        """All rows of a query; DuckDB wants a result read to its end before the next one."""
        return self.con.execute(sql).fetchall()

    def _settle(self, problems: list[Problem], drop: bool) -> None:
        if not drop:
            refuse(problems)
        for problem in problems:
            key = f"{problem.table}.{problem.column}: {problem.what}"
            self.dropped[key] = problem.rows

    def _count_rows(self, checks: Sequence[EventCheck]) -> list[int]:
        """How many events fail each check, and how many can be used."""
        counts = ", ".join(f"count(*) FILTER ({check.condition})" for check in checks)
        return list(self._rows(f"SELECT {counts}, count(*) FILTER ({self._usable()}) FROM joined")[0])

    def _examples(self, check: EventCheck) -> list[tuple[Any, ...]]:
        """The first events that fail a check: original row, value."""
        return self._rows(
            f"SELECT origin, {check.value} FROM joined WHERE {check.condition} ORDER BY origin LIMIT {EXAMPLES_SHOWN}"
        )

    def _problem(self, check: EventCheck, rows: int) -> Problem:
        quoted = tuple(f"{self.events.place(row)}: {quote_value(value)}" for row, value in self._examples(check))
        remedy = "leaves out such events" if check.drops_row else "makes bad numbers missing"
        return Problem("events", check.column, check.what, rows, quoted, check.expected, remedy)

    def _category_problems(self) -> list[Problem]:
        problems = []
        for name in self._categories():
            column = self._field(name)
            source = "events_view" if name in self.schema.events.fields else "joined"
            distinct = self._rows(
                f"SELECT count(*) FROM (SELECT DISTINCT {column} FROM {source} WHERE {column} IS NOT NULL)"
            )[0][0]
            if distinct > MAX_CATEGORIES:
                rows = self.con.execute(f"SELECT DISTINCT CAST({column} AS VARCHAR) FROM {source} LIMIT 3").fetchall()
                problems.append(too_many_categories("events", name, distinct, [row[0] for row in rows]))
        return problems

    def _categories(self) -> list[str]:
        return [name for name, kind in self.schema.event_fields.items() if KINDS[kind].encoded_as == "category"]

    def _contents(self) -> list[str]:
        return [name for name, kind in self.schema.events.fields.items() if kind in CONTENT_KINDS]

    def _field(self, name: str) -> str:
        return f"f_{list(self.schema.event_fields).index(name)}"

    def _usable_rows(self, name: str) -> str:
        """Where a field of the usable events is read: not from the join where no event is left out."""
        if self.dropped["event_rows"] == 0 and name in self.schema.events.fields:
            return "events_view WHERE true"
        return f"joined WHERE {self._usable()}"

    def _usable(self) -> str:
        return " AND ".join(f"NOT ({check.condition})" for check in self._checks() if check.drops_row)

    def _checks(self) -> list[EventCheck]:
        last = None if self.earlier is None else self.earlier.dataset.manifest.time_span[1]
        return list_checks(self.schema, self._field, last)

    def _create_views(self) -> None:
        schema = self.schema
        source, origin = self._scan_events()
        columns = [*select_events(schema, self.events.types, self._same_item_types, self._field), f"{origin} AS origin"]
        self.con.execute(
            f"CREATE TEMP VIEW events_view AS SELECT *, {time_in_range_sql('t_parsed', schema.events.time_unit)} AS t "
            f"FROM (SELECT {', '.join(columns)} FROM {source})"
        )
        item = id_sql(schema.items.item, self.items.types[schema.items.item], self._same_item_types)
        self.con.execute(
            f"CREATE TEMP VIEW items AS SELECT {item} AS item, {origin_sql(self.items)} AS origin "
            f"FROM {scan_sql(self.items)}"
        )

    @property
    def _same_item_types(self) -> bool:
        """Whether the ids of both tables can be compared as they are."""
        item_types = self.events.types[self.schema.events.item_column], self.items.types[self.schema.items.item]
        return are_comparable(*item_types)

    def _scan_events(self) -> tuple[str, str]:
        """The event table in SQL, and the row of the log that each event is."""
        return scan_sql(self.events), origin_sql(self.events)

    def read_users(self, drop: bool) -> None:
        """Read the users table, if there is one; refuse what is wrong with it, or leave it out as `drop` allows."""
        if self.users is not None:
            self._settle(self.users.read(), drop)

    def count_users(self) -> UserRows | None:
        """What became of the rows of the users table; the users are those of an earlier dataset, too."""
        if self.users is None:
            return None
        events = f"SELECT u, t FROM joined WHERE {self._usable()}"
        if self.earlier_events is not None:
            events += f" UNION ALL SELECT u, t FROM read_parquet('{quoted_path(self.earlier_events)}')"
        return self.users.count(f"SELECT u, max(t) AS last_t FROM ({events}) GROUP BY u")

    def join(self) -> None:
        """Look every event's item up in the catalogue, and its user's fields; events without one keep a null."""
        joined = "SELECT * FROM events_view LEFT JOIN catalogue ON events_view.i = catalogue.item"
        if self.earlier is not None and self.schema.events.time_unit != "order":
            joined = joined.replace("*", f"*, {self.earlier.dataset.manifest.time_span[1]} AS last_t", 1)
        elif self.earlier_events is not None:  # positions count by user
            lasts = f"SELECT u, max(t) AS last_t FROM read_parquet('{quoted_path(self.earlier_events)}') GROUP BY u"
            joined = f"SELECT * FROM ({joined}) LEFT JOIN ({lasts}) USING (u)"
        if self.users is not None:
            joined = self.users.join_sql(joined)
        self.con.execute(f"CREATE TEMP VIEW joined AS {joined}")


def plain_strings(column: pa.ChunkedArray) -> pa.Array:
    """A column of a query as one array, DuckDB's string views as strings."""
    array = column.combine_chunks()
    return array.cast(pa.string()) if pa.types.is_string_view(array.type) else array
