"""Bad input: each case is one error that names the file, the column, the rows and what to do."""

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, column_surveys, prepare
from habitus.errors import ConfigError, DataError, HabitusError
from habitus.events.schema import Schema

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

DROP = replace(SMALL, on_bad="drop")


def spoiled(column: list[Any], values: dict[int, Any]) -> list[Any]:
    return [values.get(i, value) for i, value in enumerate(column)]


def message_of(tmp_path: Path, events: Any = None, items: Any = None, schema: Schema = SCHEMA) -> str:
    with pytest.raises(HabitusError) as caught:
        prepared(tmp_path, events, items, schema)
    assert not (tmp_path / "dataset").exists()
    assert not list(tmp_path.glob(".dataset*"))
    return str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere/\*.parquet does not exist"):
        prepare(f"{tmp_path}/nowhere/*.parquet", "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_an_unknown_suffix_and_a_folder(tmp_path: Path) -> None:
    (tmp_path / "events.txt").write_text("")
    with pytest.raises(DataError, match="no known suffix"):
        prepare(f"{tmp_path}/events.txt", "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    with pytest.raises(DataError, match=r"is a folder(.|\n)*\*\.parquet"):
        prepare(str(tmp_path), "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_a_file_that_is_not_parquet(tmp_path: Path) -> None:
    (tmp_path / "events.parquet").write_bytes(b"not a table")
    with pytest.raises(DataError, match=r"events\.parquet cannot be read as Parquet"):
        prepare(f"{tmp_path}/events.parquet", "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_damaged_pages_are_refused_by_file(tmp_path: Path) -> None:
    """Single bits, wherever they flip: a dataset, or an error that names the file; never another exception."""
    write_tables(tmp_path, make_events(), make_items())
    draw = np.random.default_rng(0)
    refused = 0
    for name in ("events", "items"):
        path = tmp_path / f"{name}.parquet"
        content = path.read_bytes()
        data_ends = pq.read_metadata(path).row_group(0).total_byte_size
        for place in draw.integers(4, min(data_ends, len(content)), 25):
            damaged = bytearray(content)
            damaged[place] ^= 1 << int(draw.integers(8))
            path.write_bytes(damaged)
            try:
                prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
                shutil.rmtree(tmp_path / "dataset")
            except DataError as error:
                refused += f"{name}.parquet cannot be read" in str(error)
        path.write_bytes(content)
    assert refused >= 10


def test_an_empty_table(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(), make_items())
    for name in ("events", "items"):
        path = tmp_path / f"{name}.parquet"
        whole = pq.read_table(path)
        pq.write_table(whole.slice(0, 0), path)
        with pytest.raises(DataError, match=f"{name}.*holds no rows"):
            prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
        pq.write_table(whole, path)


def test_a_missing_column_is_named_with_the_nearest(tmp_path: Path) -> None:
    events = make_events()
    events["usr_id"] = events.pop("user_id")
    message = message_of(tmp_path, events)
    assert "'user_id' is missing" in message
    assert "events.parquet" in message
    assert "did you mean 'usr_id'" in message


def test_one_of_several_files_lacks_a_column_or_has_another_type(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(), make_items())
    table = pq.read_table(tmp_path / "events.parquet")
    pq.write_table(table.drop_columns("paid"), tmp_path / "events2.parquet")
    with pytest.raises(DataError, match=r"'paid' is missing from .*events2\.parquet"):
        prepare(f"{tmp_path}/events*.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    changed = table.set_column(table.schema.get_field_index("paid"), "paid", pa.array(["x"] * table.num_rows))
    pq.write_table(changed, tmp_path / "events2.parquet")
    with pytest.raises(DataError, match=r"'paid' is double in .* and string in"):
        prepare(f"{tmp_path}/events*.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)


@pytest.mark.parametrize(
    ("table", "column", "values", "expected"),
    [
        ("events", "user_id", [1.5], "an id: integers or text"),
        ("events", "timestamp", [17], "a datetime; for numbers set time_unit"),
        ("events", "paid", [[1.0]], "a number"),
        ("events", "event_type", [[1.0]], "a category"),
        ("items", "image", [1.0], "a vector: a list of numbers"),
        ("items", "title", [[1.0]], "a text"),
    ],
)
def test_a_wrong_type(tmp_path: Path, table: str, column: str, values: list[Any], expected: str) -> None:
    events, items = make_events(), make_items()
    target = events if table == "events" else items
    target[column] = values * len(target[column])
    message = message_of(tmp_path, events, items)
    assert f"column '{column}'" in message
    assert f"{table}.parquet" in message
    assert expected in message
    assert f"{len(target[column])}" in message


def test_null_users_and_items(tmp_path: Path) -> None:
    events = make_events()
    events["user_id"] = spoiled(events["user_id"], {3: None, 7: None})
    events["item_id"] = spoiled(events["item_id"], {5: None})
    message = message_of(tmp_path / "a", events)
    assert "column 'user_id': 2 rows with no user id" in message
    assert "events.parquet row 4" in message
    assert "events.parquet row 8" in message
    assert "column 'item_id': 1 row with no item id" in message
    assert "--on-bad drop" in message
    dataset = prepared(tmp_path / "b", events, options=DROP)
    assert dataset.num_events == len(events["user_id"]) - 3
    assert dataset.manifest.dropped["event_rows"] == 3
    assert dataset.manifest.dropped["events.user_id: no user id"] == 2


def test_events_with_unknown_items(tmp_path: Path) -> None:
    events = make_events()
    events["item_id"] = spoiled(events["item_id"], {0: "ghost", 9: "phantom"})
    message = message_of(tmp_path / "a", events)
    assert "2 rows with an item that the item table lacks" in message
    assert 'row 1: "ghost"' in message
    assert prepared(tmp_path / "b", events, options=DROP).num_events == len(events["user_id"]) - 2


def test_when_every_item_is_unknown_nothing_is_left(tmp_path: Path) -> None:
    events = make_events()
    events["item_id"] = ["ghost"] * len(events["item_id"])
    with pytest.raises(
        DataError, match=r"no usable row is left after dropping\n  - .*an item that the item table lacks"
    ):
        prepared(tmp_path, events, options=DROP)


def with_events(**values: Any) -> Schema:
    """The schema of these tests with other values of [events]."""
    plain = SCHEMA.to_values()
    return Schema.parse(plain | {"events": plain["events"] | values}, "test")


@pytest.mark.parametrize("form", ["%d.%m.%Y %H:%M", "%m/%d/%Y %H:%M", "%d %b %Y, %H:%M"])
def test_times_are_read_in_the_form_that_the_schema_gives(form: str, tmp_path: Path) -> None:
    events = make_events()
    events["timestamp"] = [value.replace(second=0) for value in events["timestamp"]]
    texts = [f"{value:{form}}" for value in events["timestamp"]]
    texts[3] = events["timestamp"][3].isoformat()  # and in ISO form
    written = with_events(time_format=form)
    dataset = prepared(tmp_path / "a", events | {"timestamp": texts}, schema=written)
    read, plain = dataset.manifest.files, prepared(tmp_path / "b", events).manifest.files
    assert {name for name in read if read[name] != plain[name]} == {"schema.toml"}
    texts[5] = "31.31.2025 10:00"
    with pytest.raises(DataError, match=r"1 row with a time that cannot be read") as caught:
        prepared(tmp_path / "c", events | {"timestamp": texts}, schema=written)
    assert f"Expected times as time_format = {form!r} says, or in ISO form." in str(caught.value)


def test_a_form_of_times_is_of_times(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"time_format is of times that are text, and time_unit is 's'"):
        with_events(time_format="%d.%m.%Y", time_unit="s")
    with pytest.raises(ConfigError, match=r"no year in it: expected as in %d.%m.%Y"):
        with_events(time_format="dd.mm.yyyy")
    # What Python and DuckDB read differently is not taken at all.
    for odd, fault in {
        "%Q.%m.%Y": "%Q is no part of a time here",
        "%d.%m.%Y %Z": "%Z is no part of a time here",
        "%d.%m.%Y %": "% is no part of a time here",
        "%Y %m %d %H:%M %H": "a part stands twice",
        "%d.%m.%Y %H:%M %p": "%I and %p belong together",
        "%d.%m.%Y %I:%M": "%I and %p belong together",
    }.items():
        with pytest.raises(ConfigError, match=f"{fault}: expected as in %d.%m.%Y"):
            with_events(time_format=odd)
    assert with_events(time_format="100%% %d.%m.%y %I:%M %p").events.time_format is not None


def test_days_and_months_of_json_lines_are_those_of_the_form(tmp_path: Path) -> None:
    """DuckDB would read 03-04-2025 as it likes, and differently from file to file."""
    (tmp_path / "items.jsonl").write_text('{"item": "a", "title": "x"}\n{"item": "b", "title": "y"}\n')
    (tmp_path / "events.jsonl").write_text(
        "".join(f'{{"user": "u", "item": "a", "time": "{day}"}}\n' for day in ("03-04-2025", "03-05-2025"))
    )
    roles = {"user": "user", "item": "item", "timestamp": "time", "time_format": "%m-%d-%Y"}
    schema = Schema.parse({"events": roles, "items": {"item": "item", "fields": {"title": "text"}}}, "test")
    prepare(f"{tmp_path}/events.jsonl", f"{tmp_path}/items.jsonl", schema, tmp_path / "dataset", SMALL)
    first, last = (np.datetime64(day, "us").astype(np.int64) for day in ("2025-03-04", "2025-03-05"))
    assert Dataset.open(tmp_path / "dataset").manifest.time_span == (first, last)


def test_german_times_and_numbers_are_refused_with_the_form_that_is_read(tmp_path: Path) -> None:
    events = make_events()
    events["timestamp"] = [f"{value:%d.%m.%Y %H:%M}" for value in events["timestamp"]]
    events["paid"] = ["12,50"] * len(events["paid"])
    message = message_of(tmp_path / "a", events)
    assert "Expected times in ISO form, as 2025-03-01 10:00:00, or time_format under [events]" in message
    form = 'finite numbers as 12.50, or as 12,50 by decimal = "," in the schema; missing values as nulls'
    assert f"Expected {form}." in message
    with pytest.raises(DataError, match=r"no usable row is left after dropping\n  - .*a time that cannot be read"):
        prepared(tmp_path / "b", events, options=DROP)


def test_a_field_without_a_value_is_a_warning(tmp_path: Path) -> None:
    items = make_items()
    items["price"] = ["12,50"] * len(items["price"])
    (warning,) = prepared(tmp_path, items=items, options=DROP).manifest.warnings()
    rows = len(items["price"])
    assert warning.startswith(f"items.price has no value at all ({rows} × NaN, infinite or unreadable numbers): ")


def test_swapped_tables_and_an_empty_file_are_named(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(), make_items())
    with pytest.raises(DataError, match="give the events first, then the items"):
        prepare(f"{tmp_path}/items.parquet", f"{tmp_path}/events.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    (tmp_path / "empty.csv").touch()
    with pytest.raises(DataError, match=r"empty\.csv is empty"):
        prepare(f"{tmp_path}/empty.csv", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_unparsable_missing_and_out_of_range_times(tmp_path: Path) -> None:
    events = make_events()
    events["timestamp"] = spoiled(
        [str(value) for value in events["timestamp"]],
        {1: "yesterday", 2: "2024-13-45", 3: "0001-01-01 00:00:00", 4: None},
    )
    message = message_of(tmp_path / "a", events)
    assert "column 'timestamp': 2 rows with a time that cannot be read" in message
    assert 'row 2: "yesterday"' in message
    assert "1 row with a time out of range" in message
    assert "1 row with no time" in message
    assert prepared(tmp_path / "b", events, options=DROP).num_events == len(events["user_id"]) - 4


def test_seconds_given_as_milliseconds_are_out_of_range(tmp_path: Path) -> None:
    events = make_events()
    events["timestamp"] = [int(value.timestamp() * 1000) for value in events["timestamp"]]
    schema = SCHEMA.model_copy(update={"events": SCHEMA.events.model_copy(update={"time_unit": "s"})})
    assert "is time_unit right?" in message_of(tmp_path, events, schema=schema)


@pytest.mark.parametrize(("unit", "factor", "better"), [("ms", 1, "s"), ("us", 1, "s"), ("us", 1000, "ms")])
def test_times_in_a_coarser_unit_than_declared_are_warned_of(
    tmp_path: Path, unit: str, factor: int, better: str
) -> None:
    events = make_events()
    events["timestamp"] = [int(value.timestamp()) * factor for value in events["timestamp"]]
    schema = SCHEMA.model_copy(update={"events": SCHEMA.events.model_copy(update={"time_unit": unit})})
    warning = prepared(tmp_path / "a", events, schema=schema).manifest.warnings()[0]
    assert warning.startswith("all times of 'timestamp' read as 1970-01-")
    assert f"is time_unit = {unit!r} right? As time_unit = {better!r} they are of this age" in warning
    right = SCHEMA.model_copy(update={"events": SCHEMA.events.model_copy(update={"time_unit": better})})
    assert not any("time_unit" in line for line in prepared(tmp_path / "b", events, schema=right).manifest.warnings())


def test_one_event_is_warned_of(tmp_path: Path) -> None:
    events = {name: values[:1] for name, values in make_events().items()}
    manifest = prepared(tmp_path, events).manifest
    assert [counts.windows for counts in manifest.sides().values()] == [0, 0]
    assert "the train side has no queries" in manifest.warnings()[0]
    assert "the validation side has no queries" in manifest.warnings()[1]


def test_a_csv_column_that_stands_twice_is_named(tmp_path: Path) -> None:
    (tmp_path / "events.csv").write_text("user_id,item_id,timestamp,user_id\na,b,2020-01-01,c\n")
    with pytest.raises(DataError, match=r"events\.csv has two columns 'user_id'"):
        prepare(f"{tmp_path}/events.csv", "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)


@pytest.mark.parametrize("name", ["events.csv", "events.parquet", "events.jsonl"])
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match="is not a regular file"):
        prepare(f"{tmp_path}/{name}", "x.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_duplicate_and_null_item_rows(tmp_path: Path) -> None:
    items = make_items()
    items["item_id"] = spoiled(items["item_id"], {2: "i0", 4: None})
    events = make_events()
    events["item_id"] = [{"i2": "i0", "i4": "i1"}.get(item, item) for item in events["item_id"]]
    message = message_of(tmp_path / "a", events, items)
    assert "1 row with an item id that an earlier row has" in message
    assert 'items.parquet row 3: "i0"' in message
    assert "1 row with no item id" in message
    dataset = prepared(tmp_path / "b", events, items, options=DROP)
    assert dataset.item_ids()["item_id"].to_pylist() == ["i0", "i1", "i3", "i5"]
    np.testing.assert_array_equal(dataset.item_features(np.arange(4)).fields["price"], np.float32([0, 1, 3, 5]))
    assert dataset.num_events == len(events["user_id"])


def test_a_category_with_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The limit is 2^20; the logic is the same at 3.
    monkeypatch.setattr("habitus.data.column_surveys.MAX_CATEGORIES", 3)
    monkeypatch.setattr("habitus.data.log.MAX_CATEGORIES", 3)
    events, items = make_events(), make_items()
    events["event_type"] = [f"type {n % 5}" if n % 7 else "often" for n in range(len(events["user_id"]))]
    items["brand"] = ["a", "b", "c", "d", "d", "c"]
    message = message_of(tmp_path / "a", events, items)
    assert "events, column 'event_type'" in message
    assert "6 distinct values" in message
    assert "declare it as text" in message
    message = message_of(tmp_path / "a2", make_events(), items)
    assert "items, column 'brand'" in message
    dataset = prepared(tmp_path / "b", events, items, options=DROP)
    assert len(dataset.encoders.event_values["event_type"]) == 3
    assert dataset.encoders.item_values["brand"] == ("a", "c", "d")


@pytest.mark.slow
def test_a_category_with_ten_million_values(tmp_path: Path) -> None:
    size = 10_000_000
    table = pa.table(
        {
            "user_id": pa.array(np.arange(size) // 100),
            "item_id": pa.array(np.zeros(size, np.int64)),
            "timestamp": pa.array(np.arange(size)),
            "session": pa.array(np.arange(size)),
        }
    )
    pq.write_table(table, tmp_path / "events.parquet")
    pq.write_table(pa.table({"item_id": [0], "title": ["a"]}), tmp_path / "items.parquet")
    schema = Schema.parse(
        {
            "events": {
                "user": "user_id",
                "item": "item_id",
                "timestamp": "timestamp",
                "time_unit": "order",
                "fields": {"session": "category"},
            },
            "items": {"item": "item_id", "fields": {"title": "text"}},
        },
        "test",
    )
    with pytest.raises(DataError, match="one of 10,000,000 distinct values"):
        prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", schema, tmp_path / "dataset", SMALL)
    assert column_surveys.MAX_CATEGORIES == 1 << 20


def test_text_with_control_characters_is_refused_and_right_to_left_text_is_welcome(tmp_path: Path) -> None:
    items = make_items()
    items["title"] = spoiled(items["title"], {1: "a\x00b", 4: "bell\x07 \u202e", 5: "tab\tand\nline"})
    message = message_of(tmp_path / "a", items=items)
    assert "column 'title': 2 rows with NUL or other control characters" in message
    assert r"a\u0000b" in message
    assert r"bell\u0007 \u202e" in message, "what an error prints must not steer the terminal"
    dataset = prepared(tmp_path / "b", items=items, options=DROP)
    clean = prepared(
        tmp_path / "c", items=make_items() | {"title": spoiled(items["title"], {1: "a b", 4: "bell \u202e"})}
    )
    np.testing.assert_array_equal(dataset.item_features(np.arange(6)).tokens, clean.item_features(np.arange(6)).tokens)
    items["title"] = ["حذاء أحمر", "נעל", "\u200fmixed نص", "a", "b", "c"]
    tokens = prepared(tmp_path / "d", items=items).item_features(np.arange(6)).tokens
    assert tokens is not None
    assert (tokens[:, 0] > 1).all()


def test_text_cannot_spell_the_special_tokens(tmp_path: Path) -> None:
    items = make_items()
    items["title"] = ["<pad>", "<sep>", "[PAD]", "</s>", "\\x00", "x"]
    tokens = prepared(tmp_path, items=items).item_features(np.arange(6)).tokens
    assert tokens is not None
    assert (tokens[:, 0] > 1).all()


def test_vectors_of_the_wrong_length_or_with_bad_entries(tmp_path: Path) -> None:
    items = make_items()
    items["image"] = spoiled(items["image"], {0: [1.0, 2.0, 3.0], 4: [1.0, float("nan")]})
    message = message_of(tmp_path / "a", items=items)
    assert "column 'image': 1 row with a vector of another length" in message
    assert "row 1: length 3" in message
    assert "Expected length 2" in message
    assert "1 row with NaN or infinite entries" in message
    dataset = prepared(tmp_path / "b", items=items, options=DROP)
    missing = np.isnan(dataset.item_features(np.arange(6)).fields["image"]).all(axis=1)
    assert missing.tolist() == [True, False, False, True, True, False]


def test_nan_and_infinite_numbers(tmp_path: Path) -> None:
    events, items = make_events(), make_items()
    events["paid"] = spoiled(events["paid"], {2: float("inf"), 3: float("nan"), 4: 1e300})
    items["price"] = spoiled(items["price"], {0: float("-inf")})
    message = message_of(tmp_path / "a", events)
    assert "events, column 'paid': 3 rows with NaN, infinite or unreadable numbers" in message
    assert "row 3: inf" in message
    message = message_of(tmp_path / "a2", None, items)
    assert "items, column 'price': 1 row" in message
    dataset = prepared(tmp_path / "b", events, items, options=DROP)
    assert dataset.num_events == len(events["user_id"])
    assert not np.isinf(dataset.event_fields["paid"]).any()
    assert np.isnan(dataset.item_features(np.arange(6)).fields["price"]).tolist() == [True, False, True] + [False] * 3


def test_csv_numbers_that_are_not(tmp_path: Path) -> None:
    events = make_events()
    events["paid"] = spoiled([str(value) for value in events["paid"]], {0: "cheap"})
    events["paid"] = [None if value == "None" else value for value in events["paid"]]
    write_tables(tmp_path, events, make_items(), "csv")
    with pytest.raises(DataError, match=r"events\.csv row 1: \"cheap\""):
        prepare(f"{tmp_path}/events.csv", f"{tmp_path}/items.csv", SCHEMA, tmp_path / "dataset", SMALL)


def test_broken_csv_and_json_name_the_file(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(), make_items())
    (tmp_path / "events.jsonl").write_text('{"user_id": 1}\n{broken\n')
    with pytest.raises(DataError, match=r"events\.jsonl cannot be read"):
        prepare(f"{tmp_path}/events.jsonl", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)
    (tmp_path / "events.csv").write_bytes(b"user_id,item_id\n\xff\xfe,1\n" * 3)
    with pytest.raises(DataError, match=r"events\.csv"):
        prepare(f"{tmp_path}/events.csv", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / "dataset", SMALL)


def test_an_output_that_exists(tmp_path: Path) -> None:
    (tmp_path / "dataset").mkdir()
    with pytest.raises(DataError, match="exists already"):
        prepared(tmp_path)
    assert list((tmp_path / "dataset").iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory": "lots"}, "is not a size"),
        ({"memory": "1KiB"}, "out of range"),
        ({"memory": "1..2GiB"}, "is not a size"),
        ({"memory": "99999999999TiB"}, "out of range"),
        ({"seq_len": 1}, "at least 2"),
        ({"text_len": 0}, "text_len is 0"),
        ({"vocabulary_size": 5}, "at least 258"),
        ({"threads": -1}, "threads is -1"),
        ({"validation_share": 1.0}, "validation_share"),
    ],
)
def test_options_that_cannot_work(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(tmp_path, options=replace(SMALL, **change))


def test_split_by_time_needs_times(tmp_path: Path) -> None:
    events = make_events() | {"timestamp": list(range(len(make_events()["user_id"])))}
    schema = SCHEMA.model_copy(update={"events": SCHEMA.events.model_copy(update={"time_unit": "order"})})
    with pytest.raises(ConfigError, match="time_unit = 'order'"):
        prepared(tmp_path, events, schema=schema, options=replace(SMALL, split="time"))


def test_a_schema_with_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text('[events]\nusr = "a"\nitem = "b"\ntimestamp = "c"\n[items]\nitem = "b"\n')
    with pytest.raises(ConfigError, match=r"'events\.usr' \(did you mean 'user'\?\)"):
        Schema.read(tmp_path / "schema.toml")


def test_changed_bytes_are_refused_by_name(tmp_path: Path) -> None:
    prepared(tmp_path)
    for name in ("events/records.npy", "encoders.json", "users/train_length.npy", "users/ids.parquet"):
        path = tmp_path / "dataset" / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(DataError, match=f"{name} has changed"):
            Dataset.open(tmp_path / "dataset")
        path.write_bytes(whole[:-1])
        with pytest.raises(DataError, match=rf"{name} has [\d,]+ bytes"):
            Dataset.open(tmp_path / "dataset", verify=False)
        path.unlink()
        with pytest.raises(DataError, match=f"{name} is missing"):
            Dataset.open(tmp_path / "dataset")
        path.write_bytes(whole)
    assert Dataset.open(tmp_path / "dataset").num_events > 0


def test_a_changed_manifest_and_one_of_another_version_are_refused(tmp_path: Path) -> None:
    prepared(tmp_path)
    path = tmp_path / "dataset" / "manifest.json"
    whole = path.read_text()
    path.write_text(whole.replace('"seq_len": 8', '"seq_len": 4'))
    with pytest.raises(DataError, match=r"manifest\.json has changed"):
        Dataset.open(tmp_path / "dataset")
    path.write_text(whole.replace('"format_version": 2', '"format_version": 99, "new": true'))
    with pytest.raises(DataError, match="format version 99"):
        Dataset.open(tmp_path / "dataset")


def test_a_folder_that_is_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no manifest\.json"):
        Dataset.open(tmp_path)
    with pytest.raises(DataError, match=r"nowhere does not exist"):
        Dataset.open(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def larger_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("larger")
    draw = np.random.default_rng(0)
    size = 400_000
    events = {
        "user_id": draw.integers(0, 4000, size),
        "item_id": [f"i{n}" for n in draw.integers(0, 2000, size)],
        "timestamp": (draw.integers(0, 10**8, size) * 1_000_000).astype("datetime64[us]"),
        "event_type": np.array(["view", "buy"])[draw.integers(0, 2, size)],
        "paid": draw.random(size).astype(np.float32),
    }
    write_tables(folder, events, make_items(2000))  # type: ignore[arg-type]
    SCHEMA.write(folder / "schema.toml")
    return folder


def kill_at_random(tables: Path, tmp_path: Path, times: int) -> None:
    """Kill preparation at random moments; the output is whole or absent, and the next run succeeds."""
    command = [sys.executable, "-m", "habitus", "prepare", f"{tables}/events.parquet", f"{tables}/items.parquet"]
    command += ["--schema", f"{tables}/schema.toml", "--seq-len", "64", "--memory", "256MiB"]
    began = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path / "whole")], check=True, capture_output=True)
    duration = time.monotonic() - began
    expected = Dataset.open(tmp_path / "whole").checksum
    draw = np.random.default_rng(times)
    interrupted = 0
    for _ in range(times):
        out = tmp_path / "out"
        process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL)
        time.sleep(float(draw.uniform(0.2, 1.0)) * duration)
        process.send_signal(signal.SIGKILL)
        process.wait()
        interrupted += not out.exists()
        if not out.exists():
            subprocess.run([*command, "--out", str(out)], check=True, capture_output=True)
        assert Dataset.open(out).checksum == expected
        left = sorted(path.name for path in tmp_path.iterdir())
        assert left == ["out", "whole"], "leftovers of a killed run stay behind"
        subprocess.run(["rm", "-r", str(out)], check=True)
    assert interrupted >= times // 3


def test_a_killed_run_leaves_nothing_and_the_next_succeeds(larger_tables: Path, tmp_path: Path) -> None:
    kill_at_random(larger_tables, tmp_path, 3)


@pytest.mark.soak
def test_fifty_killed_runs(larger_tables: Path, tmp_path: Path) -> None:
    kill_at_random(larger_tables, tmp_path, 50)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk takes root")
@pytest.mark.parametrize("size", ["1m", "6m", "14m"])
def test_a_full_disk_is_one_clear_error(larger_tables: Path, tmp_path: Path, size: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("this system does not let tests mount a tmpfs")
    try:
        with pytest.raises(DataError, match="is full"):
            prepare(
                f"{larger_tables}/events.parquet",
                f"{larger_tables}/items.parquet",
                SCHEMA,
                disk / "dataset",
                replace(SMALL, memory="256MiB"),
            )
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
