"""Later events added to a dataset: the same bytes in any number of pieces, and what a whole preparation knows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, prepare_world, update
from habitus.errors import ConfigError, DataError
from habitus.events import Schema, World, WorldConfig, schema_of

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

DISPLAYED = Schema.parse({**SCHEMA.to_values(), "items": {**SCHEMA.to_values()["items"], "display": ["title"]}}, "test")
Table = dict[str, list[Any]]


@pytest.fixture(scope="module")
def log() -> tuple[Table, Table]:
    """A log in which users, items, brands and event types appear that the first half does not have."""
    events, items = make_events(30, 9, seed=3), make_items(9)
    items["brand"] = [None if n == 1 else f"brand {n // 2 % 4}" for n in range(9)]
    order = np.argsort(np.array(events["timestamp"]), kind="stable")
    events = {name: [column[row] for row in order] for name, column in events.items()}
    for row in range(len(order)):
        if row < len(order) // 2:
            events["item_id"][row] = f"i{int(events['item_id'][row][1:]) % 5}"
            events["user_id"][row] = f"u{int(events['user_id'][row][1:]) % 20}"
        elif row % 7 == 0:
            events["event_type"][row] = f"kind {row % 3}"
    return events, items


def rows(table: Table, keep: np.ndarray) -> Table:
    return {name: [column[row] for row in keep] for name, column in table.items()}


def cut(log: tuple[Table, Table], num_pieces: int) -> list[tuple[Table, Table]]:
    """The log as a first half and so many later pieces, cut between hours; items come with their first piece."""
    events, items = log
    hours = np.array([np.datetime64(moment, "h") for moment in events["timestamp"]])
    first = hours[len(hours) // 2]
    later = np.unique(hours[hours >= first])
    begins = [piece[0] for piece in np.array_split(later, num_pieces)]
    pieces = np.searchsorted(begins, hours, side="right")
    known = [int(item[1:]) for item in events["item_id"]]
    seen = [n for n in range(9) if n in set(np.array(known)[pieces == 0])]
    parts = []
    for piece in range(num_pieces + 1):
        mine = np.flatnonzero(pieces == piece)
        new = [n for n in dict.fromkeys(np.array(known)[mine]) if n not in seen]
        parts.append((rows(events, mine), rows(items, np.array(seen + new if piece else seen))))
        seen += new
    return parts


def updated(folder: Path, parts: list[tuple[Table, Table]]) -> Dataset:
    dataset = prepared(folder / "0", *parts[0], schema=DISPLAYED)
    for number, (events, items) in enumerate(parts[1:], 1):
        write_tables(folder / str(number), events, items)
        tables = (f"{folder}/{number}/{name}.parquet" for name in ("events", "items"))
        update(dataset, *tables, folder / f"{number}" / "dataset", SMALL)
        dataset = Dataset.open(folder / f"{number}" / "dataset")
    return dataset


def decoded(dataset: Dataset) -> list[tuple[Any, ...]]:
    """Every event in words: user, time, item, fields, and the side that it is on."""
    users = dataset.user_ids().take(pa.array(np.repeat(np.arange(dataset.num_users), np.diff(dataset.user_offsets))))
    items = dataset.item_ids()["item_id"].to_numpy()[dataset.items]
    kinds = np.array([None, *dataset.encoders.event_values["event_type"]])[dataset.event_fields["event_type"]]
    paid = [None if np.isnan(value) else float(value) for value in dataset.event_fields["paid"]]
    trains = np.arange(dataset.num_events) - np.repeat(dataset.user_offsets[:-1], np.diff(dataset.user_offsets))
    sides = trains < np.repeat(dataset.user_parts.train_lengths, np.diff(dataset.user_offsets))
    return list(zip(users.to_pylist(), dataset.times.tolist(), items, kinds, paid, sides.tolist(), strict=True))


def described(dataset: Dataset) -> dict[str, tuple[Any, ...]]:
    """Every item in words: brand, price, image, name, and how often it trains."""
    features = dataset.item_features(np.arange(dataset.num_items))
    brands = np.array([None, *dataset.encoders.item_values["brand"]])[features.fields["brand"]]
    numbers = [
        tuple(None if np.isnan(value) else float(value) for value in row)
        for row in np.column_stack([features.fields["price"], features.fields["image"]])
    ]
    display = dataset.item_display()
    assert display is not None
    names = display["title"].to_pylist()
    words = zip(brands, numbers, names, dataset.item_train_counts.tolist(), strict=True)
    return dict(zip(dataset.item_ids()["item_id"].to_pylist(), words, strict=True))


def files_of(dataset: Dataset) -> dict[str, bytes]:
    names = [*dataset.manifest.files, "manifest.json"]
    return {name: (dataset.path / name).read_bytes() for name in names}


def test_the_bytes_do_not_depend_on_the_number_of_updates(log: tuple[Table, Table], tmp_path: Path) -> None:
    once, often = updated(tmp_path / "once", cut(log, 1)), updated(tmp_path / "often", cut(log, 7))
    assert often.path.parent.name == "7"
    assert files_of(often) == files_of(once)


def test_an_update_holds_what_a_whole_preparation_holds(log: tuple[Table, Table], tmp_path: Path) -> None:
    parts = cut(log, 4)
    grown, first = updated(tmp_path, parts), Dataset.open(tmp_path / "0" / "dataset")
    whole = prepared(tmp_path / "whole", *log, schema=DISPLAYED)
    assert decoded(grown) == decoded(whole)
    occurring = described(grown)
    assert {item: facts for item, facts in described(whole).items() if item in occurring} == occurring
    assert grown.manifest.train == whole.manifest.train
    assert grown.manifest.event_fields_filled == whole.manifest.event_fields_filled
    # What was there keeps its place, and what the model reads of it.
    old, new = first.encoders, grown.encoders
    for before, after in ((old.item_values, new.item_values), (old.event_values, new.event_values)):
        for name, values in before.items():
            assert after[name][: len(values)] == values
    assert len(new.event_values["event_type"]) > len(old.event_values["event_type"])
    assert len(new.item_values["brand"]) > len(old.item_values["brand"])
    assert new.up_to(old) == old
    assert grown.item_ids()["item_id"].to_pylist()[: first.num_items] == first.item_ids()["item_id"].to_pylist()
    assert grown.manifest.files["tokenizer.json"] == first.manifest.files["tokenizer.json"]
    assert np.array_equal(
        grown.item_features(np.arange(first.num_items)).tokens, first.item_features(np.arange(first.num_items)).tokens
    )


def test_positions_are_later_for_each_user_alone(tmp_path: Path) -> None:
    schema = Schema.parse(
        {
            "events": {"user": "user_id", "item": "item_id", "timestamp": "place", "time_unit": "order"},
            "items": {"item": "item_id", "fields": {"title": "text"}},
        },
        "test",
    )
    first = {"user_id": ["a", "a", "b"], "item_id": ["i0", "i1", "i2"], "place": [0, 9, 0]}
    dataset = prepared(tmp_path, first, make_items(3), schema)
    later = {"user_id": ["b", "c", "c"], "item_id": ["i1", "i0", "i2"], "place": [1, 0, 1]}
    write_tables(tmp_path / "later", later, make_items(3))
    update(dataset, f"{tmp_path}/later/events.parquet", f"{tmp_path}/later/items.parquet", tmp_path / "grown", SMALL)
    grown = Dataset.open(tmp_path / "grown")
    assert grown.user_ids().to_pylist() == ["a", "b", "c"]
    assert grown.items.tolist() == [0, 1, 2, 1, 0, 2]


def test_what_is_no_update_is_refused_and_the_dataset_stays(log: tuple[Table, Table], tmp_path: Path) -> None:
    parts = cut(log, 2)
    dataset = prepared(tmp_path / "0", *parts[0], schema=DISPLAYED)
    before = files_of(dataset)
    later, items = parts[1]
    numbered = {**later, "user_id": [int(user[1:]) for user in later["user_id"]]}
    cases: list[tuple[Table, Table, str]] = [
        (*parts[0], "not after the events that the dataset has"),  # twice the same, and older
        ({name: column for name, column in later.items() if name != "paid"}, items, "paid"),
        (numbered, items, "user ids are int64 here and string"),
        (later, {**items, "image": [[1.0, 2.0, 3.0]] * len(items["item_id"])}, "a vector of length 3"),
        (later, rows(items, np.arange(1)), "an item that the item table lacks"),
    ]
    for number, (events, catalogue, message) in enumerate(cases):
        write_tables(tmp_path / f"case {number}", events, catalogue)
        tables = (f"{tmp_path}/case {number}/{name}.parquet" for name in ("events", "items"))
        with pytest.raises(DataError, match=message):
            update(dataset, *tables, tmp_path / "out", SMALL)
    assert not (tmp_path / "out").exists()
    assert files_of(Dataset.open(dataset.path)) == before
    world = World(WorldConfig(num_users=20, num_items=30, events_per_user=5))
    prepare_world(world, schema_of(world), tmp_path / "world", SMALL, lambda *_: None)
    with pytest.raises(DataError, match="synthetic world"):
        update(Dataset.open(tmp_path / "world"), "x", "y", tmp_path / "out", SMALL)


def test_the_command_updates_and_refuses_what_the_dataset_has_decided(log: tuple[Table, Table], tmp_path: Path) -> None:
    parts = cut(log, 1)
    dataset = prepared(tmp_path / "0", *parts[0], schema=DISPLAYED)
    write_tables(tmp_path / "1", *parts[1])
    command = ["prepare", f"{tmp_path}/1/events.parquet", f"{tmp_path}/1/items.parquet", "--out", f"{tmp_path}/grown"]
    result = CliRunner().invoke(app, [*command, "--update", str(dataset.path), "--split", "time"])
    assert isinstance(result.exception, ConfigError)
    assert "--update and --split" in str(result.exception)
    result = CliRunner().invoke(app, [*command, "--update", str(dataset.path), "--memory", "256MiB", "--threads", "1"])
    assert result.exit_code == 0, result.output
    assert Dataset.open(tmp_path / "grown").num_events == len(log[0]["user_id"])
