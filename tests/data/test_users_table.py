"""The users table: what an event knows of its user is what was known at its time, and nothing is lost silently."""

from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import habitus as hb
from habitus.cli import app
from habitus.data import Dataset, PrepareOptions, guess_schema, prepare, update
from habitus.errors import ConfigError, DataError
from habitus.events import Schema

from .tables import SCHEMA, SMALL, make_events, make_items, write_tables

STATIC = {"user": "user_id", "fields": {"plan": "category", "age": "number"}}
TIMED = {**STATIC, "timestamp": "since"}
NOON = datetime(2024, 5, 1, 12)
Table = dict[str, list[Any]]


def schema_with(users: dict[str, Any] | None) -> Schema:
    return Schema.parse({**SCHEMA.to_values(), **({"users": users} if users else {})}, "test")


def log_of(*events: tuple[str, int]) -> Table:
    """Events by (user, hours after noon)."""
    return {
        "user_id": [user for user, _ in events],
        "item_id": [f"i{number % 6}" for number in range(len(events))],
        "timestamp": [NOON + timedelta(hours=hours) for _, hours in events],
        "event_type": ["view"] * len(events),
        "paid": [1.0] * len(events),
    }


def users_of(*rows: tuple[str | None, int | None, str | None, float | None]) -> Table:
    """Rows by (user, hours after noon, plan, age)."""
    return {
        "user_id": [row[0] for row in rows],
        "since": [None if row[1] is None else NOON + timedelta(hours=row[1]) for row in rows],
        "plan": [row[2] for row in rows],
        "age": [row[3] for row in rows],
    }


def prepared(
    folder: Path, events: Table, users: Table, roles: dict[str, Any], options: PrepareOptions = SMALL
) -> Dataset:
    write_tables(folder, events, make_items())
    pq.write_table(pa.table(users), folder / "users.parquet")
    tables = f"{folder}/events.parquet", f"{folder}/items.parquet"
    prepare(*tables, schema_with(roles), folder / "dataset", options, users=f"{folder}/users.parquet")
    return Dataset.open(folder / "dataset")


def known(dataset: Dataset) -> dict[str, list[tuple[str | None, float]]]:
    """Plan and age that each event knows, in order, by user."""
    plans = (None, *dataset.encoders.event_values["user.plan"])
    codes, ages = dataset.event_fields["user.plan"], dataset.event_fields["user.age"]
    offsets = dataset.user_offsets
    return {
        user: [(plans[codes[row]], float(ages[row])) for row in range(offsets[place], offsets[place + 1])]
        for place, user in enumerate(dataset.user_ids().to_pylist())
    }


def test_every_event_of_a_user_knows_its_row(tmp_path: Path) -> None:
    users = users_of(("b", 0, "free", 30.0), ("z", 0, "paid", 99.0), ("a", 0, "paid", None))
    dataset = prepared(tmp_path, log_of(("a", 0), ("a", 1), ("b", 0), ("c", 0)), users, STATIC)
    facts = known(dataset)
    assert [plan for plan, _ in facts["a"]] == ["paid", "paid"]
    assert np.isnan([age for _, age in facts["a"]]).all()
    assert facts["b"] == [("free", 30.0)]
    assert facts["c"][0][0] is None  # no row: missing, not zero
    assert np.isnan(facts["c"][0][1])
    assert dataset.encoders.event_values["user.plan"] == ("free", "paid")
    assert [spec.name for spec in dataset.fields.event][:4] == ["event_type", "paid", "user.plan", "user.age"]
    assert dataset.manifest.event_fields_filled["user.plan"] == 3
    rows = dataset.manifest.user_rows
    assert rows is not None
    assert (rows.rows, rows.users_without_row, rows.rows_without_events, rows.rows_after_last_event) == (3, 1, 1, 0)
    warnings = "\n".join(dataset.manifest.warnings())
    assert "1 of 3 users have no row" in warnings
    assert "1 are of users without events" in warnings


def test_an_event_knows_nothing_of_its_users_future(tmp_path: Path) -> None:
    users = users_of(("a", 5, "paid", 41.0), ("a", 1, "free", 40.0), ("a", 9, "gone", 42.0), ("b", 3, "new", 20.0))
    events = log_of(("a", 0), ("a", 1), ("a", 4), ("a", 5), ("a", 6), ("b", 2))
    dataset = prepared(tmp_path, events, users, TIMED)
    plans = {user: [plan for plan, _ in facts] for user, facts in known(dataset).items()}
    assert plans == {"a": [None, "free", "free", "paid", "paid"], "b": [None]}
    assert [age for _, age in known(dataset)["a"]][1:] == [40.0, 40.0, 41.0, 41.0]
    # What is known too late for any event is in no vocabulary, in no statistics, and counted.
    assert dataset.encoders.event_values["user.plan"] == ("free", "paid")
    rows = dataset.manifest.user_rows
    assert rows is not None
    assert (rows.users_without_row, rows.rows_without_events, rows.rows_after_last_event) == (0, 0, 2)
    assert "2 later than their user's last event" in "\n".join(dataset.manifest.warnings())


@pytest.mark.parametrize("own", [True, False], ids=["of the users", "of the events"])
def test_times_of_users_are_read_in_the_form_that_the_schema_gives(own: bool, tmp_path: Path) -> None:
    events, form = log_of(("a", 0), ("a", 48), ("b", 0)), "%d.%m.%Y %H:%M"
    users = users_of(("a", -24, "free", 30.0), ("a", 24, "paid", 31.0), ("b", -1, "free", 40.0))
    plain = prepared(tmp_path / "plain", events, users, TIMED)
    written = users | {"since": [f"{value:{form}}" for value in users["since"]]}
    if not own:
        events = events | {"timestamp": [f"{value:{form}}" for value in events["timestamp"]]}
    write_tables(tmp_path / "a", events, make_items())
    pq.write_table(pa.table(written), tmp_path / "a" / "users.parquet")
    values = SCHEMA.to_values() | {"users": TIMED | ({"time_format": form} if own else {})}
    if not own:
        values["events"] = values["events"] | {"time_format": form}
    tables = f"{tmp_path}/a/events.parquet", f"{tmp_path}/a/items.parquet"
    prepare(*tables, Schema.parse(values, "test"), tmp_path / "a" / "d", SMALL, users=f"{tmp_path}/a/users.parquet")
    read = Dataset.open(tmp_path / "a" / "d").manifest.files
    assert {name for name, file in plain.manifest.files.items() if read[name] != file} == {"schema.toml"}


def test_later_rows_change_no_byte_of_the_events(tmp_path: Path) -> None:
    events = make_events(20)
    last = max(events["timestamp"])
    ids = sorted(set(events["user_id"]))
    rows = {"user_id": ids, "since": [min(events["timestamp"])] * len(ids), "plan": ["free", "paid"] * (len(ids) // 2)}
    rows["age"] = [float(number) for number in range(len(ids))]
    future = {
        "user_id": rows["user_id"] * 2,
        "since": [*rows["since"], *[last + timedelta(seconds=1)] * len(ids)],
        "plan": [*rows["plan"], *["never"] * len(ids)],
        "age": [*rows["age"], *[1e9] * len(ids)],
    }
    first = prepared(tmp_path / "one", events, rows, TIMED)
    second = prepared(tmp_path / "two", events, future, TIMED)
    for name in ("events/records.npy", "encoders.json"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_a_batch_carries_the_fields_of_its_users(tmp_path: Path) -> None:
    users = users_of(("a", 0, "free", 30.0), ("b", 0, "paid", 50.0))
    events = log_of(*((user, hour) for user in "ab" for hour in range(3)))
    dataset = prepared(tmp_path, events, users, STATIC, PrepareOptions(**{**vars(SMALL), "validation_share": 1e-9}))
    batch = dataset.batch("train", 1)
    filled = batch.segments[0] >= 0
    assert filled.sum() == 6
    by_segment = {batch.users[0, 0]: 0, batch.users[0, 1]: 1}
    for user, segment in by_segment.items():
        slots = batch.segments[0] == segment
        assert set(batch.fields["user.age"][0][slots]) == {[30.0, 50.0][user]}
        assert set(batch.fields["user.plan"][0][slots]) == {user + 1}
    assert not batch.fields["user.plan"][0][~filled].any()


@pytest.mark.parametrize(
    ("users", "roles", "message", "kept"),
    [
        (users_of(("a", 0, "x", 1.0), ("a", 1, "y", 2.0)), STATIC, "a user that an earlier row has", ["x", "x"]),
        (
            users_of(("a", 0, "x", 1.0), ("a", 0, "y", 2.0)),
            TIMED,
            "a user and time that an earlier row has",
            ["x", "x"],
        ),
        (users_of((None, 0, "x", 1.0), ("a", 0, "y", 2.0)), STATIC, "no user id", ["y", "y"]),
        (users_of(("a", None, "x", 1.0), ("a", 0, "y", 2.0)), TIMED, "no time that can be read", ["y", "y"]),
        (users_of(("a", 0, "x", np.inf)), STATIC, "NaN, infinite or unreadable numbers", ["x", "x"]),
    ],
    ids=["twice", "twice at a time", "no id", "no time", "infinite"],
)
def test_bad_rows_are_refused_or_dropped_and_counted(
    tmp_path: Path, users: Table, roles: dict[str, Any], message: str, kept: list[str]
) -> None:
    events = log_of(("a", 0), ("a", 1))
    with pytest.raises(DataError, match=message) as refused:
        prepared(tmp_path / "refused", events, users, roles)
    assert "users.parquet row" in str(refused.value)
    assert not (tmp_path / "refused" / "dataset").exists()
    dropping = PrepareOptions(**{**vars(SMALL), "on_bad": "drop"})
    dataset = prepared(tmp_path / "dropped", events, users, roles, dropping)
    assert [plan for plan, _ in known(dataset)["a"]] == kept
    assert any(key.startswith("users.") and message in key for key in dataset.manifest.dropped)
    if "infinite" in message:
        assert np.isnan(known(dataset)["a"][0][1])


def test_a_table_of_other_users_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'none of the 1 users of the events has a row; the table\'s ids are "A"'):
        prepared(tmp_path, log_of(("a", 0), ("a", 1)), users_of(("A", 0, "x", 1.0)), STATIC)


def test_a_table_without_a_usable_row_is_not_said_to_have_other_ids(tmp_path: Path) -> None:
    users = users_of(("a", 0, "free", 30.0)) | {"since": ["07.12.2019 10:00"]}
    with pytest.raises(DataError, match=r"has a row; no row of the table can be used(.|\n)*without --on-bad drop"):
        prepared(tmp_path, log_of(("a", 0)), users, TIMED, replace(SMALL, on_bad="drop"))


def test_ids_of_another_type_meet_as_text(tmp_path: Path) -> None:
    users: Table = {"user_id": [7], "since": [NOON], "plan": ["free"], "age": [3.0]}
    dataset = prepared(tmp_path, log_of(("7", 0), ("7", 1)), users, STATIC)
    assert known(dataset)["7"] == [("free", 3.0), ("free", 3.0)]


def test_a_table_and_its_section_come_together(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(), make_items())
    tables = f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet"
    with pytest.raises(ConfigError, match=r"the schema has no \[users\]"):
        prepare(*tables, SCHEMA, tmp_path / "out", SMALL, users="users.parquet")
    with pytest.raises(ConfigError, match=r"user fields \(plan, age\), and no users table"):
        prepare(*tables, schema_with(STATIC), tmp_path / "out", SMALL)
    pq.write_table(pa.table({"user_id": ["u1"], "plan": ["x"]}), tmp_path / "users.parquet")
    with pytest.raises(DataError, match="users: column 'age' is missing"):
        prepare(*tables, schema_with(STATIC), tmp_path / "out", SMALL, users=f"{tmp_path}/users.parquet")


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ({"user": "user_id", "fields": {}}, "no user fields"),
        ({"user": "user_id", "fields": {"user_id": "category"}}, "cannot be a field"),
        ({"user": "user_id", "fields": {"a": "category"}, "time_unit": "s"}, "timestamp is not"),
        ({"user": "user_id", "fields": {"bio": "text"}}, "a user field cannot be a text"),
        ({**TIMED, "time_unit": "order"}, "users.time_unit is 'order' and events.time_unit 'datetime'"),
    ],
)
def test_a_section_that_makes_no_sense_is_refused(users: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schema_with(users)


def test_a_guess_proposes_the_section(tmp_path: Path) -> None:
    events = make_events(60)
    ids = sorted(set(events["user_id"]))
    write_tables(tmp_path, events, make_items(60))
    rows = {"user_id": ids, "plan": [f"p{number % 3}" for number in range(60)], "age": [20.5 + n for n in range(60)]}
    pq.write_table(pa.table(rows), tmp_path / "once.parquet")
    twice = {name: column * 2 for name, column in rows.items()} | {"date": [NOON] * 60 + [NOON + timedelta(1)] * 60}
    pq.write_table(pa.table(twice), tmp_path / "twice.parquet")
    tables = f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet"
    assert guess_schema(*tables, f"{tmp_path}/once.parquet").users == schema_with(STATIC).users
    guessed = guess_schema(*tables, f"{tmp_path}/twice.parquet").users
    assert guessed is not None
    assert (guessed.timestamp, guessed.time_unit, guessed.fields) == ("date", None, STATIC["fields"])
    pq.write_table(pa.table({**twice, "date": [1] * 60 + [2] * 60}), tmp_path / "counted.parquet")
    counted = guess_schema(*tables, f"{tmp_path}/counted.parquet").users
    assert counted is not None and counted.timestamp is None  # positions say nothing about times


def test_an_update_keeps_what_was_known_and_adds_new_values(tmp_path: Path) -> None:
    first = prepared(
        tmp_path, log_of(("a", 0), ("a", 1), ("b", 1)), users_of(("a", 0, "free", 40.0), ("b", 0, "free", 20.0)), TIMED
    )
    later = tmp_path / "later"
    write_tables(later, log_of(("a", 24), ("c", 25)), make_items())
    # That 'a' was 'paid' from the beginning is learned only now: its earlier events stay as they were.
    now = users_of(("a", -1, "paid", 41.0), ("c", 0, "trial", 33.0), ("d", 0, "free", 1.0))
    pq.write_table(pa.table(now), later / "users.parquet")
    tables = f"{later}/events.parquet", f"{later}/items.parquet"
    with pytest.raises(ConfigError, match="no users table was given"):
        update(first, *tables, tmp_path / "grown", SMALL)
    update(first, *tables, tmp_path / "grown", SMALL, users=f"{later}/users.parquet")
    grown = Dataset.open(tmp_path / "grown")
    plans = {user: [plan for plan, _ in facts] for user, facts in known(grown).items()}
    assert plans == {"a": ["free", "free", "paid"], "b": ["free"], "c": ["trial"]}
    assert grown.encoders.event_values["user.plan"] == ("free", "paid", "trial")
    rows = grown.manifest.user_rows
    assert rows is not None
    assert (rows.users_without_row, rows.rows_without_events) == (1, 1)  # b and d


def test_python_takes_a_users_table_in_memory(tmp_path: Path) -> None:
    events, users = pa.table(log_of(("a", 0), ("a", 1))), pa.table(users_of(("a", 0, "free", 40.0)))
    values = schema_with(STATIC).to_values()
    dataset = hb.prepare(events, pa.table(make_items()), values, users=users, out=tmp_path / "dataset")
    assert known(dataset)["a"] == [("free", 40.0), ("free", 40.0)]


def test_the_command_reads_a_users_table_and_says_what_it_did_not_use(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(20), make_items())
    rows = {"user_id": [f"u{n}" for n in range(5, 25)], "plan": ["a", "b"] * 10, "age": [1.0] * 20}
    pq.write_table(pa.table(rows), tmp_path / "users.parquet")
    schema_with(STATIC).write(tmp_path / "schema.toml")
    command = ["prepare", f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", "--seq-len", "8"]
    command += ["--users", f"{tmp_path}/users.parquet", "--schema", f"{tmp_path}/schema.toml"]
    done = CliRunner().invoke(app, [*command, "--out", f"{tmp_path}/dataset"])
    assert done.exit_code == 0, done.output
    assert "5 of 20 users have no row in the users table" in done.output
    assert "5 are of users without events" in done.output
    assert "user.plan" in CliRunner().invoke(app, ["describe", f"{tmp_path}/dataset"]).output
    assert "user.plan" in (tmp_path / "dataset" / "README.md").read_text()
