"""Input that is odd but right, or wrong in ways that a reader could swallow: nothing may be lost or mixed up."""

import contextlib
import gzip
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, prepare
from habitus.data.column_surveys import Moments
from habitus.data.columns import to_categories
from habitus.data.guess import guess_schema
from habitus.errors import ConfigError, DataError
from habitus.events.schema import Schema

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

PLAIN = Schema.parse(
    {
        "events": {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "time_unit": "order"},
        "items": {"item": "item_id", "fields": {"title": "text"}},
    },
    "test",
)


def plain_events(users: Any, items: Any = None, **more: Any) -> pa.Table:
    count = len(users)
    columns = {"user_id": users, "item_id": items or ["a"] * count, "timestamp": list(range(count)), **more}
    return pa.table(columns)


def write_items(folder: Path, ids: list[Any] | None = None, **more: Any) -> None:
    ids = ids or ["a"]
    pq.write_table(pa.table({"item_id": ids, "title": [f"item {n}" for n in ids], **more}), folder / "items.parquet")


def run(folder: Path, events: str, schema: Schema = PLAIN, items: str = "items.parquet") -> Dataset:
    prepare(f"{folder}/{events}", f"{folder}/{items}", schema, folder / "dataset", SMALL)
    return Dataset.open(folder / "dataset")


def test_ids_that_only_sixty_four_bits_tell_apart_stay_apart(tmp_path: Path) -> None:
    write_items(tmp_path)
    signed = [2**62, 2**62 + 1, -(2**63), 2**63 - 1]
    pq.write_table(plain_events(pa.array(signed, pa.int64())), tmp_path / "a.parquet")
    assert run(tmp_path, "a.parquet").user_ids().to_pylist() == sorted(signed)
    pq.write_table(plain_events(pa.array([2**63 + 1, 2**63 + 2], pa.uint64())), tmp_path / "b.parquet")
    with pytest.raises(DataError, match=r"'user_id' is int64 in .*a\.parquet and uint64 in .*b\.parquet"):
        prepare(f"{tmp_path}/[ab].parquet", f"{tmp_path}/items.parquet", PLAIN, tmp_path / "o", SMALL)


def test_integers_of_several_widths_and_all_null_parts_are_one_column(tmp_path: Path) -> None:
    write_items(tmp_path)
    schema = PLAIN.model_copy(update={"events": PLAIN.events.model_copy(update={"fields": {"kind": "category"}})})
    parts = [(pa.int8(), ["x", "y"]), (pa.int32(), pa.nulls(2)), (pa.int64(), ["x", None])]
    for number, (kind, values) in enumerate(parts):
        users = pa.array([number, 100], kind)
        pq.write_table(plain_events(users, kind=values, unused=["u"] * 2), tmp_path / f"e{number}.parquet")
    dataset = run(tmp_path, "e*.parquet", schema)
    assert dataset.user_ids().to_pylist() == [0, 1, 2, 100]
    assert sorted(dataset.event_fields["kind"].tolist()) == [0, 0, 0, 1, 1, 2]


def test_columns_that_the_schema_does_not_use_cannot_stand_in(tmp_path: Path) -> None:
    write_items(tmp_path, ["a", "b"])
    names = ("t", "t_parsed", "t_raw", "origin", "u", "i", "item", "item_row", "f_0", "pair_0")
    extra = {name: [7, 7, 7] for name in names}
    pq.write_table(plain_events(["p", "p", "q"], ["b", "a", "b"], **extra), tmp_path / "e.parquet")
    dataset = run(tmp_path, "e.parquet")
    assert dataset.times.tolist() == [0, 1, 2]
    assert dataset.items.tolist() == [1, 0, 1]


@pytest.mark.parametrize("name", ["file_row_number", "File_Index"])
def test_reserved_column_names_are_refused(tmp_path: Path, name: str) -> None:
    write_items(tmp_path, ["a", "b"], **{name: [0, 0]})
    pq.write_table(plain_events(["p"]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=f"items.parquet has a column '{name}'"):
        run(tmp_path, "e.parquet")


def test_names_that_differ_in_case_only_are_refused(tmp_path: Path) -> None:
    write_items(tmp_path)
    pq.write_table(plain_events(["p"], User_ID=["other"]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="'user_id' and 'User_ID'"):
        run(tmp_path, "e.parquet")


def test_a_wrong_case_is_offered_the_right_one(tmp_path: Path) -> None:
    write_items(tmp_path)
    table = plain_events(["p"])
    pq.write_table(table.rename_columns(["USER_ID", "item_id", "timestamp"]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="did you mean 'USER_ID'"):
        run(tmp_path, "e.parquet")


def test_file_names_are_names_and_folders_say_nothing(tmp_path: Path) -> None:
    write_items(tmp_path)
    pq.write_table(plain_events(["right"]), tmp_path / "e[1].parquet")
    pq.write_table(plain_events(["wrong"]), tmp_path / "e1.parquet")
    assert run(tmp_path, "e[1].parquet").user_ids().to_pylist() == ["right"]
    both = tmp_path / "both"
    prepare(f"{tmp_path}/e*.parquet", f"{tmp_path}/items.parquet", PLAIN, both, SMALL)
    assert Dataset.open(both).user_ids().to_pylist() == ["right", "wrong"]
    for number in (7, 8):
        (tmp_path / f"user_id={number}").mkdir()
        pq.write_table(plain_events([f"own {number}"]), tmp_path / f"user_id={number}" / "e.parquet")
    hive = tmp_path / "hive"
    prepare(f"{tmp_path}/user_id=*/e.parquet", f"{tmp_path}/items.parquet", PLAIN, hive, SMALL)
    assert Dataset.open(hive).user_ids().to_pylist() == ["own 7", "own 8"]


def test_what_appears_late_in_json_lines_is_not_lost(tmp_path: Path) -> None:
    schema = PLAIN.model_copy(
        update={"events": PLAIN.events.model_copy(update={"fields": {"brand": "category", "price": "number"}})}
    )
    write_items(tmp_path)
    with (tmp_path / "e.jsonl").open("w") as file:
        for number in range(30_000):
            row = {"user_id": "u", "item_id": "a", "timestamp": number, "brand": None, "price": 1}
            file.write(json.dumps(row) + "\n")
        file.write(
            json.dumps({"user_id": "u", "item_id": "a", "timestamp": 1e6, "brand": "late", "price": 2.75}) + "\n"
        )
    dataset = run(tmp_path, "e.jsonl", schema)
    assert dataset.encoders.event_values["brand"] == ("late",)
    assert dataset.event_fields["price"][-1] == 2.75


@pytest.mark.parametrize("users", [[str(uuid.UUID(int=n)) for n in (5, 3, 5)], ["u0", 7, "u0"]])
def test_json_ids_of_odd_types_are_text(tmp_path: Path, users: list[Any]) -> None:
    write_items(tmp_path)
    rows = [{"user_id": user, "item_id": "a", "timestamp": n} for n, user in enumerate(users)]
    (tmp_path / "e.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "e.json").write_text(json.dumps(rows))
    expected = sorted({str(user) for user in users})
    assert run(tmp_path, "e.jsonl").user_ids().to_pylist() == expected
    prepare(f"{tmp_path}/e.json", f"{tmp_path}/items.parquet", PLAIN, tmp_path / "array", SMALL)
    assert Dataset.open(tmp_path / "array").user_ids().to_pylist() == expected


def test_uuids_in_parquet_are_refused_with_advice(tmp_path: Path) -> None:
    write_items(tmp_path)
    ids = pa.array([uuid.uuid4().bytes], pa.uuid())
    pq.write_table(plain_events(ids), tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"uuid(.|\n)*cast the column"):
        run(tmp_path, "e.parquet")


CSV_ROWS = [("#a", "u 1", "0"), ("b;c", 'say "hi"', "1"), ("line\nbreak", "ü", "2"), ("a|b,c", "#u", "3")]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("style", ["plain", "gzip", "bom", "crlf"])
def test_every_row_of_a_csv_arrives(tmp_path: Path, delimiter: str, style: str) -> None:
    def quoted(value: str) -> str:
        return '"' + value.replace('"', '""') + '"'

    rows = [*([("a", "u", str(n)) for n in range(10, 3000)]), *CSV_ROWS]  # the odd ones beyond any sample
    end = "\r\n" if style == "crlf" else "\n"
    lines = [delimiter.join(["item_id", "user_id", "timestamp"])]
    lines += [delimiter.join(quoted(value) if not value.isalnum() else value for value in row) for row in rows]
    content = (end.join(lines) + end).encode("utf-8-sig" if style == "bom" else "utf-8")
    path = tmp_path / ("e.csv.gz" if style == "gzip" else "e.csv")
    path.write_bytes(gzip.compress(content) if style == "gzip" else content)
    write_items(tmp_path, ["a", "#a", "b;c", "line\nbreak", "a|b,c"])
    dataset = run(tmp_path, path.name)
    assert dataset.num_events == len(rows)
    assert set(dataset.user_ids().to_pylist()) == {row[1] for row in rows}
    assert (np.bincount(dataset.items, minlength=5) > 0).all()


def test_a_ragged_csv_names_the_line(tmp_path: Path) -> None:
    write_items(tmp_path)
    lines = ["user_id,item_id,timestamp", *(f"u,a,{n}" for n in range(50)), "u,a"]
    (tmp_path / "e.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"e\.csv cannot be read: (.|\n)*u,a"):
        run(tmp_path, "e.csv")


def test_an_empty_text_is_no_id(tmp_path: Path) -> None:
    write_items(tmp_path)
    pq.write_table(plain_events(["u", "", ""]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="2 rows with no user id"):
        run(tmp_path, "e.parquet")


def test_positions_must_be_whole_numbers(tmp_path: Path) -> None:
    write_items(tmp_path)
    table = plain_events(["u", "u", "u"]).set_column(2, "timestamp", pa.array([0.0, 0.4, 2.0]))
    pq.write_table(table, tmp_path / "e.parquet")
    with pytest.raises(DataError, match="1 row with a time that cannot be read"):
        run(tmp_path, "e.parquet")


def test_float_categories_read_as_people_write_them() -> None:
    column = pa.array([3.0, 3.5, float("nan"), None, 1e300, 2e300, -0.0])
    assert to_categories(column).to_pylist() == ["3", "3.5", None, None, "1e+300", "2e+300", "0"]


def test_values_of_dropped_rows_get_no_code(tmp_path: Path) -> None:
    events = make_events()
    events["item_id"][0], events["event_type"][0] = "ghost", "ghost category"
    dataset = prepared(tmp_path, events, options=replace(SMALL, on_bad="drop"))
    assert dataset.encoders.event_values["event_type"] == ("buy", "view")


def test_vectors_are_judged_as_they_are_stored(tmp_path: Path) -> None:
    items = make_items() | {"image": [[1e300], [1.0], [None], None, [2.0], [3.0]]}
    with pytest.raises(DataError, match="2 rows with NaN or infinite entries"):
        prepared(tmp_path / "a", items=items)
    dataset = prepared(tmp_path / "b", items=items, options=replace(SMALL, on_bad="drop"))
    expected = np.float32([[np.nan], [1], [np.nan], [np.nan], [2], [3]])
    np.testing.assert_array_equal(dataset.item_features(np.arange(6)).fields["image"], expected)


def test_any_column_name_will_do(tmp_path: Path) -> None:
    items = {"item_id": ["a"], "title": ["one"], "text": ["t"], 'we"ird, name': [1.0], "field_00": ["z"]}
    fields = {"title": "text", "text": "category", 'we"ird, name': "number", "field_00": "text"}
    schema = Schema.parse(
        {
            "events": {"user": "us'er id", "item": "item.id", "timestamp": "t i", "time_unit": "order"},
            "items": {"item": "item_id", "fields": fields},
        },
        "test",
    )
    pq.write_table(pa.table(items), tmp_path / "items.parquet")
    pq.write_table(pa.table({"us'er id": ["u"], "item.id": ["a"], "t i": [0]}), tmp_path / "e.parquet")
    dataset = run(tmp_path, "e.parquet", schema)
    features = dataset.item_features(np.array([0]))
    assert features.fields["text"].tolist() == [1]
    assert features.tokens is not None
    assert 1 in features.tokens[0]  # the separator between the two texts


def test_item_times_keep_to_the_microsecond_and_bad_ones_are_told_as_times(tmp_path: Path) -> None:
    schema = PLAIN.model_copy(
        update={"items": PLAIN.items.model_copy(update={"fields": {"title": "text", "released": "time"}})}
    )
    pq.write_table(plain_events(["u"]), tmp_path / "e.parquet")
    write_items(tmp_path, ["a", "b"], released=pa.array([86_400_000_000_001, None], pa.timestamp("ns")))
    dataset = run(tmp_path, "e.parquet", schema)
    np.testing.assert_array_equal(dataset.item_features(np.arange(2)).fields["released"], np.float32([1, np.nan]))
    write_items(tmp_path, ["a", "b"], released=["2024-05-01", "someday"])
    with pytest.raises(DataError, match="1 row with times that cannot be read"):
        prepare(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet", schema, tmp_path / "o", SMALL)


def test_a_small_spread_around_a_large_mean_is_not_lost() -> None:
    moments = Moments()
    for chunk in ([1.7e9, 1.7e9 + 500], [1.7e9 + 1000]):
        moments.add(np.array(chunk))
    field = moments.to_field("x")
    assert field.mean == pytest.approx(1.7e9 + 500)
    assert field.std == pytest.approx(np.std([0, 500, 1000]))
    constant = Moments()
    constant.add(np.full(5, 3.25))
    assert constant.to_field("x").std == 1.0


def test_roles_must_be_different_columns() -> None:
    values = PLAIN.to_values()
    for change in ({"user": "item_id"}, {"timestamp": "user_id"}, {"item": []}):
        with pytest.raises(ConfigError):
            Schema.parse({**values, "events": {**values["events"], **change}}, "test")


@pytest.mark.parametrize("out", ["file/below", "dangling"])
def test_an_output_that_cannot_be_made_is_one_message(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    write_tables(tmp_path, make_events(), make_items())
    with pytest.raises(DataError):
        prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, tmp_path / out, SMALL)


def test_too_little_memory_says_what_to_do(tmp_path: Path) -> None:
    size = 1_500_000
    draw = np.random.default_rng(0)
    table = plain_events(draw.integers(0, 10**6, size), ["a"] * size, session=draw.integers(0, 10**6, size))
    pq.write_table(table, tmp_path / "e.parquet")
    write_items(tmp_path)
    schema = PLAIN.model_copy(update={"events": PLAIN.events.model_copy(update={"fields": {"session": "category"}})})
    options = replace(SMALL, memory="64MiB", threads=2)
    try:
        prepare(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet", schema, tmp_path / "dataset", options)
    except DataError as error:
        assert "raise --memory" in str(error)
        assert not (tmp_path / "dataset").exists()
    else:  # DuckDB managed after all: then the dataset must be whole
        assert Dataset.open(tmp_path / "dataset").num_events == size


@pytest.mark.slow
def test_spilling_to_disk_changes_no_byte(tmp_path: Path) -> None:
    size = 3_000_000
    draw = np.random.default_rng(1)
    table = plain_events(draw.integers(0, 50_000, size), draw.integers(0, 1000, size).tolist(), w=draw.random(size))
    pq.write_table(table, tmp_path / "e.parquet")
    write_items(tmp_path, list(range(1000)))
    schema = PLAIN.model_copy(update={"events": PLAIN.events.model_copy(update={"fields": {"w": "number"}})})
    spilled = {"tight": 0, "wide": 0}

    def watch(name: str, stop: threading.Event) -> None:
        while not stop.wait(0.01):
            with contextlib.suppress(FileNotFoundError):  # a file, or the folder, may go while it is looked at
                for path in tmp_path.glob(f".{name}.partial*/.scratch/spill/*"):
                    spilled[name] = max(spilled[name], path.stat().st_size)

    for name, memory in (("tight", "96MiB"), ("wide", "4GiB")):
        stop = threading.Event()
        watcher = threading.Thread(target=watch, args=(name, stop))
        watcher.start()
        options = replace(SMALL, memory=memory, threads=2)
        prepare(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet", schema, tmp_path / name, options)
        stop.set()
        watcher.join()
    assert spilled["tight"] > 0 == spilled["wide"]
    assert Dataset.open(tmp_path / "tight").checksum == Dataset.open(tmp_path / "wide").checksum


def test_two_runs_to_one_output_leave_one_whole_dataset(tmp_path: Path) -> None:
    write_tables(tmp_path, make_events(200), make_items())
    SCHEMA.write(tmp_path / "schema.toml")
    command = [sys.executable, "-m", "habitus", "prepare", "events.parquet", "items.parquet", "--out", "dataset"]
    runs = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    codes = [run.returncode for run in runs]
    assert 0 in codes
    for code, error in zip(codes, errors, strict=True):
        assert code == 0 or ("exists already" in error and "Traceback" not in error)
    assert Dataset.open(tmp_path / "dataset").num_users == 200
    assert not list(tmp_path.glob(".dataset*"))


def test_a_leftover_with_this_very_process_id_does_not_disturb(tmp_path: Path) -> None:
    import socket

    leftover = tmp_path / f".dataset.partial-{socket.gethostname()}-{os.getpid()}-cafe"
    leftover.mkdir()
    time.sleep(0.01)
    prepared(tmp_path)
    assert not leftover.exists()


@pytest.mark.parametrize(
    "columns",
    [
        {"user_id": ["u"], "item_id": ["a"], "timestamp": [1], "nothing": pa.nulls(1)},
        {"user_id": ["u"], "item_id": ["a"], "timestamp": [1], "clock": pa.array([5], pa.time64("us"))},
        {"user_id": ["u"], "item_id": ["a"], "Date": [True], "ts": [1]},
    ],
)
def test_guess_copes_with_columns_that_say_nothing(tmp_path: Path, columns: dict[str, Any]) -> None:
    write_items(tmp_path)
    pq.write_table(pa.table(columns), tmp_path / "e.parquet")
    schema = guess_schema(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet")
    assert schema.events.user == "user_id"
    run(tmp_path, "e.parquet", schema)


def test_guess_refuses_what_prepare_would_refuse(tmp_path: Path) -> None:
    pq.write_table(plain_events(["u"]), tmp_path / "e.parquet")
    pq.write_table(pa.table({"item_id": ["a"]}), tmp_path / "items.parquet")
    with pytest.raises(ConfigError, match="no item fields"):
        guess_schema(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet")
    write_items(tmp_path)
    pq.write_table(plain_events([1.0]), tmp_path / "e.parquet")
    with pytest.raises(DataError, match="looks like the user"):
        guess_schema(f"{tmp_path}/e.parquet", f"{tmp_path}/items.parquet")


def test_a_world_is_prepared_where_duckdb_is_not_installed(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['duckdb'] = None\n"
        "from habitus.cli import main\n"
        "sys.argv = ['habitus', 'world', 'direct', '--prepared', '--users', '50', '--items', '40', '--seq-len', '16']\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert Dataset.open(tmp_path / "direct").num_users == 50
