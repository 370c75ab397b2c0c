"""The users table: what is known of a user, always or from a time on, looked up for every event.

An event gets its user's latest row that is not later than the event, so that nothing of a user's future enters.
"""

from typing import TYPE_CHECKING

from habitus.data.kinds import KINDS, Number
from habitus.data.problems import EXAMPLES_SHOWN, Problem, quote_value
from habitus.data.sources import SourceTable, require_columns
from habitus.data.sql import (
    are_comparable,
    check_field_types,
    check_id_type,
    check_time_type,
    id_sql,
    name_sql,
    origin_sql,
    printable_sql,
    scan_sql,
    time_in_range_sql,
    time_sql,
)
from habitus.errors import DataError
from habitus.events import Schema, TimeUnit, UserColumns, user_field
from habitus.typed import Typed

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection


class UserRows(Typed):
    """What became of the rows of a users table."""

    rows: int
    users_without_row: int  # users of the log, whose fields are all missing
    rows_without_events: int  # of users that the log does not have
    rows_after_last_event: int  # known too late for any event of their user

    def warnings(self, num_users: int) -> list[str]:
        """What a user of the dataset should know."""
        lines = []
        if self.users_without_row:
            lines.append(
                f"{self.users_without_row:,} of {num_users:,} users have no row in the users table: "
                "their user fields are missing"
            )
        if self.rows_without_events or self.rows_after_last_event:
            lines.append(
                f"of {self.rows:,} rows of the users table {self.rows_without_events:,} are of users without events "
                f"and {self.rows_after_last_event:,} later than their user's last event: they are not used"
            )
        return lines


class UsersTable:
    """The rows of the users as a table of DuckDB, `user_rows`: user_key, user_t and the fields under their aliases."""

    def __init__(
        self,
        con: "DuckDBPyConnection",
        schema: Schema,
        table: SourceTable,
        events: SourceTable,
        aliases: dict[str, str],
    ) -> None:
        assert schema.users is not None
        self.con, self.table, self.aliases = con, table, aliases  # field -> its column in the joined events
        self.roles: UserColumns = schema.users
        self.unit = self.roles.time_unit or schema.events.time_unit
        self.time_format = _time_format(schema)
        roles = self.roles
        _check_columns(table, roles, self.unit)
        self.same_types = are_comparable(table.types[roles.user], events.types[schema.events.user])

    def read(self) -> list[Problem]:
        """Make `user_rows` of the rows that can be used; returns what is wrong with the others."""
        con, roles = self.con, self.roles
        con.execute(
            f"CREATE TEMP TABLE all_user_rows AS SELECT *, {time_in_range_sql('user_t_parsed', self.unit)} AS user_t "
            f"FROM (SELECT {', '.join(self._columns())} FROM {scan_sql(self.table)})"
        )
        same = "user_key" if roles.timestamp is None else "user_key, user_t"
        con.execute(
            f"CREATE TEMP TABLE user_rows AS SELECT *, row_number() OVER (PARTITION BY {same} ORDER BY origin) > 1 "
            "AS is_repeated FROM all_user_rows"
        )
        checks = [("user_key IS NULL", roles.user, "user_key", "no user id", "an id in every row", True)]
        if roles.timestamp is not None:
            expected = _expected_times(self.unit, self.time_format)
            checks.append(("user_t IS NULL", roles.timestamp, "user_t_raw", "no time that can be read", expected, True))
        what, expected = "a user that an earlier row has", "one row per user; several need a timestamp in [users]"
        if roles.timestamp is not None:
            what, expected = "a user and time that an earlier row has", "one row per user and time"
        checks.append(("user_key IS NOT NULL AND is_repeated", roles.user, "user_key", what, expected, True))
        for name, kind_name in roles.fields.items():
            kind, column = KINDS[kind_name], self.aliases[name]
            if isinstance(kind, Number):
                condition = f"{column}_raw IS NOT NULL AND NOT coalesce(isfinite({column}), false)"
                expected = kind.fault.expected
                checks.append((condition, name, f"{column}_raw", kind.fault.what, expected, False))
        problems = [problem for check in checks if (problem := self._problem(*check)) is not None]
        unusable = " OR ".join(f"({condition})" for condition, *_, drops in checks if drops)
        con.execute(f"DELETE FROM user_rows WHERE {unusable}")
        return problems

    def join_sql(self, events: str) -> str:
        """The events of a query with the fields of their users, as known at each event's time."""
        fields = ", ".join(self.aliases.values())
        rows = f"(SELECT user_key, user_t, {fields} FROM user_rows)"
        if self.roles.timestamp is None:
            return f"SELECT * FROM ({events}) AS e LEFT JOIN {rows} AS r ON {self._on_event('e')} = r.user_key"
        return (
            f"SELECT * FROM ({events}) AS e ASOF LEFT JOIN {rows} AS r "
            f"ON {self._on_event('e')} = r.user_key AND e.t >= r.user_t"
        )

    def count(self, users: str) -> UserRows:
        """What became of the rows, given a query of every user (u) and the time of its last event (last_t)."""
        late = "false" if self.roles.timestamp is None else "user_t > last_t"
        without_events, too_late = self.con.execute(
            f"SELECT count(*) FILTER (u IS NULL), count(*) FILTER (u IS NOT NULL AND {late}) "
            f"FROM user_rows LEFT JOIN ({users}) AS l ON {self._on_event('l')} = user_key"
        ).fetchall()[0]
        num_users, without_row = self.con.execute(
            f"SELECT count(*), count(*) FILTER (NOT EXISTS (SELECT 1 FROM user_rows WHERE user_key = "
            f"{self._on_event('l')})) FROM ({users}) AS l"
        ).fetchall()[0]
        if without_row == num_users:
            examples = self.con.execute("SELECT CAST(user_key AS VARCHAR) FROM user_rows LIMIT 3").fetchall()
            ids = ", ".join(quote_value(key) for (key,) in examples)
            raise DataError(
                f"users: none of the {num_users:,} users of the events has a row; "
                + (f"the table's ids are {ids}, ..." if ids else "no row of the table can be used"),
                expected="ids as the events have them" if ids else "rows with a user and a time that can be read",
                next_step=("correct the column user of [users]" if ids else "run without --on-bad drop to see why")
                + ", or leave --users and [users] out",
            )
        return UserRows(
            rows=self.table.num_rows,
            users_without_row=without_row,
            rows_without_events=without_events,
            rows_after_last_event=too_late,
        )

    def _on_event(self, table: str) -> str:
        """The user of a table's events as the rows name it."""
        return f"{table}.u" if self.same_types else f"CAST({table}.u AS VARCHAR)"

    def _columns(self) -> list[str]:
        """Roles and fields under names of our own."""
        roles, types = self.roles, self.table.types
        selected = [
            f"{id_sql(roles.user, types[roles.user], self.same_types)} AS user_key",
            f"{origin_sql(self.table)} AS origin",
        ]
        if roles.timestamp is None:
            selected += ["NULL AS user_t_raw", "NULL AS user_t_parsed"]
        else:
            time, type_ = name_sql(roles.timestamp), types[roles.timestamp]
            selected += [
                f"{printable_sql(time, type_)} AS user_t_raw",
                f"{time_sql(time, type_, self.unit, self.time_format)} AS user_t_parsed",
            ]
        for name, kind in roles.fields.items():
            column, alias = name_sql(name), self.aliases[name]
            number = KINDS[kind].event_sql(column, types[name])
            if number is None:
                selected.append(f"{column} AS {alias}")
            else:
                selected += [f"{column} AS {alias}_raw", f"{number} AS {alias}"]
        return selected

    def _problem(
        self, condition: str, column: str, value: str, what: str, expected: str, drops_row: bool
    ) -> Problem | None:
        ((rows,),) = self.con.execute(f"SELECT count(*) FROM user_rows WHERE {condition}").fetchall()
        if not rows:
            return None
        first = self.con.execute(
            f"SELECT origin, {value} FROM user_rows WHERE {condition} ORDER BY origin LIMIT {EXAMPLES_SHOWN}"
        ).fetchall()
        examples = tuple(f"{self.table.place(row)}: {quote_value(value)}" for row, value in first)
        remedy = "leaves out such rows of the users table" if drops_row else "makes bad numbers missing"
        return Problem("users", column, what, rows, examples, expected, remedy)


def _time_format(schema: Schema) -> str | None:
    """Of the times of users: their own, else that of the events."""
    assert schema.users is not None
    return schema.users.time_format or schema.events.time_format


def _expected_times(unit: str, time_format: str | None) -> str:
    if unit != "datetime":
        return f"times as time_unit = {unit!r} says, from 1900 to 2199"
    form = "another form by time_format under [users]" if time_format is None else f"as time_format = {time_format!r}"
    return f"times from 1900 to 2199 in ISO form, or {form}"


def _check_columns(table: SourceTable, roles: UserColumns, unit: TimeUnit) -> None:
    """Refuse a users table that lacks a column of the schema, or has one of a type that cannot serve."""
    require_columns(table, [roles.user, *([roles.timestamp] if roles.timestamp else []), *roles.fields])
    check_id_type(table, roles.user)
    if roles.timestamp is not None:
        check_time_type(table, roles.timestamp, unit)
    check_field_types(table, roles.fields)


def add_user_columns(
    con: "DuckDBPyConnection", schema: Schema, users: SourceTable, events: SourceTable, query: str
) -> str:
    """A query of raw events with raw columns user.NAME of a users table: what was known at each event's time.

    Events without a time get the latest row. A user that stands twice and times that cannot be read are refused.
    """
    roles = schema.users
    if roles is None:
        raise DataError("a users table was given, and the model knows no user fields", next_step="leave it out")
    unit, time = roles.time_unit or schema.events.time_unit, schema.events.timestamp
    _check_columns(users, roles, unit)
    same = are_comparable(users.types[roles.user], events.types[schema.events.user])
    key, moment = id_sql(roles.user, users.types[roles.user], same), "0"
    if roles.timestamp is not None:
        type_, form = users.types[roles.timestamp], _time_format(schema)
        moment = f"({time_sql(name_sql(roles.timestamp), type_, unit, form)})"
    fields = ", ".join(f"{name_sql(name)} AS {name_sql(user_field(name))}" for name in roles.fields)
    con.execute(
        f"CREATE TEMP TABLE user_rows AS SELECT {key} AS user_key, {time_in_range_sql(moment, unit)} AS user_t, "
        f"{fields} FROM {scan_sql(users)} WHERE {key} IS NOT NULL"
    )
    unread = con.execute("SELECT count(*) FROM user_rows WHERE user_t IS NULL").fetchall()[0][0]
    if unread:
        raise DataError(
            f"users: {unread:,} rows of {users.sources[0].name} have no {roles.timestamp!r} that can be read",
            expected=_expected_times(unit, _time_format(schema)),
            next_step="correct or leave out these rows",
        )
    twice = con.execute(
        "SELECT user_key FROM user_rows GROUP BY user_key, user_t HAVING count(*) > 1 LIMIT 3"
    ).fetchall()
    if twice:
        raise DataError(
            f"users: {', '.join(quote_value(key) for (key,) in twice)} stand twice in {users.sources[0].name}",
            expected="one row per user" + ("" if roles.timestamp is None else " and time"),
            next_step="keep one of the rows",
        )
    on = f"{id_sql(schema.events.user, events.types[schema.events.user], same)} = r.user_key"
    rows, join = "user_rows", "LEFT JOIN"
    if roles.timestamp is not None and time in events.types:
        check_time_type(events, time, schema.events.time_unit)
        known = time_sql(name_sql(time), events.types[time], schema.events.time_unit, schema.events.time_format)
        join, on = "ASOF LEFT JOIN", f"{on} AND {known} >= r.user_t"
    elif roles.timestamp is not None:
        rows = "(FROM user_rows QUALIFY row_number() OVER (PARTITION BY user_key ORDER BY user_t DESC) = 1)"
    return f"SELECT e.*, r.* EXCLUDE (user_key, user_t) FROM ({query}) AS e {join} {rows} AS r ON {on}"
