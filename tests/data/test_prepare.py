from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, prepare
from habitus.data.describe import describe
from habitus.events.schema import Schema

from .tables import SCHEMA, SHARED_DATA, SMALL, make_events, make_items, prepared, write_tables


def test_a_tiny_log_becomes_the_arrays_worked_out_by_hand(tmp_path: Path) -> None:
    def moment(seconds: int) -> object:
        return np.datetime64(seconds, "s").astype("datetime64[us]").item()

    events = {
        "user_id": ["b", "a", "b", "a", "b"],
        "item_id": ["y", "x", "x", "z", "z"],
        # Friday 2 January 1970, and b's last two events at the same second: the file's order decides.
        "timestamp": [moment(90_000), moment(100_000), moment(97_200), moment(103_600), moment(97_200)],
        "event_type": ["buy", "view", None, "view", "buy"],
        "paid": [1.5, None, 2.5, 3.5, None],
    }
    items = {
        "item_id": ["z", "x", "y", "never"],
        "title": ["zed", "ex", None, "  "],
        "brand": ["p", None, "o", "p"],
        "price": [1.0, 2.0, None, 3.0],
        "image": [[1.0, 2.0], None, [3.0, 4.0], [5.0, 6.0]],
    }
    dataset = prepared(tmp_path, events, items)
    assert dataset.user_ids().to_pylist() == ["a", "b"]
    assert dataset.user_offsets.tolist() == [0, 2, 5]
    assert dataset.items.tolist() == [1, 0, 2, 1, 0]  # x z | y x z as rows of the item table
    assert dataset.item_ids()["item_id"].to_pylist() == ["z", "x", "y", "never"]
    assert (dataset.times // 1_000_000).tolist() == [100_000, 103_600, 90_000, 97_200, 97_200]

    fields = {spec.name: spec for spec in dataset.fields.event}
    assert list(fields) == ["event_type", "paid", "time_gap", "hour", "weekday"]
    assert dataset.encoders.event_values["event_type"] == ("buy", "view")
    columns = {name: np.asarray(values) for name, values in dataset.event_fields.items()}
    assert columns["event_type"].tolist() == [2, 2, 1, 0, 1]
    np.testing.assert_array_equal(columns["paid"], np.float32([np.nan, 3.5, 1.5, 2.5, np.nan]))
    np.testing.assert_array_equal(columns["time_gap"], np.float32([np.nan, 3600, np.nan, 7200, 0]))
    assert columns["hour"].tolist() == [4, 5, 2, 4, 4]  # 03:46, 04:46, 01:00, 03:00, counted from one
    assert columns["weekday"].tolist() == [5, 5, 5, 5, 5]  # Monday is 1

    features = dataset.item_features(np.arange(4))
    assert dataset.encoders.item_values["brand"] == ("o", "p")
    assert features.fields["brand"].tolist() == [2, 0, 1, 2]
    np.testing.assert_array_equal(features.fields["price"], np.float32([1, 2, np.nan, 3]))
    np.testing.assert_array_equal(features.fields["image"], np.float32([[1, 2], [np.nan] * 2, [3, 4], [5, 6]]))
    assert features.tokens is not None
    assert (features.tokens > 0).any(axis=1).tolist() == [True, True, False, False]
    assert dataset.manifest.item_fields_filled == {"title": 2, "brand": 3, "price": 3, "image": 3}
    assert dataset.manifest.event_fields_filled["paid"] == 3


def test_number_statistics_come_from_training_events_only(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    paid = {spec.name: spec for spec in dataset.fields.event}["paid"]
    train_length = np.load(tmp_path / "dataset" / "users" / "train_length.npy")
    trains = np.repeat(train_length > 0, np.diff(dataset.user_offsets))
    assert 0 < trains.sum() < len(trains)
    values = np.asarray(dataset.event_fields["paid"], np.float64)[trains]
    values = values[~np.isnan(values)]
    assert paid.mean == pytest.approx(values.mean(), rel=1e-6)
    assert paid.std == pytest.approx(values.std(), rel=1e-6)
    assert paid.log_mean == pytest.approx(np.log1p(values).mean(), rel=1e-6)
    assert dataset.item_train_counts.tolist() == np.bincount(dataset.items[trains], minlength=6).tolist()


def test_parquet_csv_and_json_lines_give_the_same_bytes(tmp_path: Path) -> None:
    manifests = [prepared(tmp_path / kind, kind=kind).manifest for kind in ("parquet", "csv", "jsonl")]
    assert manifests[0].files == manifests[1].files == manifests[2].files


def test_csv_ids_keep_their_leading_zeros(tmp_path: Path) -> None:
    items = make_items(3) | {"item_id": ["007", "7", "07"]}
    events = make_events(5, 3)
    events["item_id"] = [{"i0": "007", "i1": "7", "i2": "07"}[item] for item in events["item_id"]]
    dataset = prepared(tmp_path, events, items, kind="csv")
    assert dataset.item_ids()["item_id"].to_pylist() == ["007", "7", "07"]


def test_one_file_or_several_make_no_difference(tmp_path: Path) -> None:
    whole = prepared(tmp_path / "whole")
    parts = tmp_path / "parts"
    write_tables(parts, make_events(), make_items())
    for name in ("events", "items"):
        table = pq.read_table(parts / f"{name}.parquet")
        for number, (first, last) in enumerate([(0, 2), (2, 5), (5, table.num_rows)]):
            pq.write_table(table.slice(first, last - first), parts / f"{name}-{number}.parquet")
        (parts / f"{name}.parquet").unlink()
    prepare(f"{parts}/events-*.parquet", f"{parts}/items-*.parquet", SCHEMA, parts / "dataset", SMALL)
    assert Dataset.open(parts / "dataset").checksum == whole.checksum


def test_memory_and_threads_change_no_byte(tmp_path: Path) -> None:
    draw = np.random.default_rng(3)
    size = 300_000
    events = {
        "user_id": draw.integers(0, 3000, size),
        "item_id": [f"i{n}" for n in draw.integers(0, 500, size)],
        "timestamp": (draw.integers(0, 10**6, size) * 1_000_000).astype("datetime64[us]"),
        "event_type": np.array(["view", "buy"])[draw.integers(0, 2, size)],
        "paid": draw.random(size).astype(np.float32),
    }
    write_tables(tmp_path, events, make_items(500))  # type: ignore[arg-type]
    seen = set()
    for number, (memory, threads) in enumerate([("1GiB", 2), ("80MiB", 2), ("1GiB", 1)]):
        options = replace(SMALL, memory=memory, threads=threads)
        out = tmp_path / f"out-{number}"
        prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", SCHEMA, out, options)
        seen.add(Dataset.open(out).checksum)
    assert len(seen) == 1


def test_item_times_value_pairs_are_items_of_their_own(tmp_path: Path) -> None:
    schema = Schema.parse(
        {
            "events": {"user": "user_id", "item": ["item_id", "event_type"], "timestamp": "timestamp"},
            "items": {"item": "item_id", "fields": {"title": "text", "price": "number"}},
        },
        "test",
    )
    events = make_events()
    keep = [i for i, kind in enumerate(events["event_type"]) if kind is not None]
    events = {name: [column[i] for i in keep] for name, column in events.items()}
    dataset = prepared(tmp_path, events, make_items(), schema)
    wanted = sorted(set(zip(events["item_id"], events["event_type"], strict=True)))
    ids = dataset.item_ids()
    assert list(zip(ids["item_id"].to_pylist(), ids["event_type"].to_pylist(), strict=True)) == wanted
    features = dataset.item_features(np.arange(dataset.num_items))
    values = dataset.encoders.item_values["event_type"]
    assert [values[code - 1] for code in features.fields["event_type"]] == [pair[1] for pair in wanted]
    prices = dict(zip(make_items()["item_id"], make_items()["price"], strict=True))
    expected = [np.nan if prices[pair[0]] is None else prices[pair[0]] for pair in wanted]
    np.testing.assert_array_equal(features.fields["price"], np.float32(expected))
    users = np.repeat(dataset.user_ids().to_pylist(), np.diff(dataset.user_offsets))
    got = sorted(zip(users, (wanted[row] for row in dataset.items), strict=True))
    assert got == sorted(zip(events["user_id"], zip(events["item_id"], events["event_type"], strict=True), strict=True))


@pytest.mark.parametrize("unit", ["s", "ms", "us", "order"])
def test_numeric_times_are_read_by_their_unit(tmp_path: Path, unit: str) -> None:
    scale = {"s": 1, "ms": 10**3, "us": 10**6, "order": 1}[unit]
    events = make_events()
    seconds = [int(value.timestamp()) for value in events["timestamp"]]  # naive, but only differences matter
    events["timestamp"] = [value * scale for value in seconds]
    schema = SCHEMA.model_copy(update={"events": SCHEMA.events.model_copy(update={"time_unit": unit})})
    dataset = prepared(tmp_path, events, make_items(), schema)
    assert sorted(dataset.times.tolist()) == sorted(v * (1 if unit == "order" else 10**6) for v in seconds)
    has_clock = "hour" in {spec.name for spec in dataset.fields.event}
    assert has_clock == (unit != "order")


def test_times_with_zones_are_instants(tmp_path: Path) -> None:
    events = {
        "user_id": ["u", "u"],
        "item_id": ["i0", "i1"],
        "timestamp": ["2024-05-01T12:00:00+02:00", "2024-05-01 10:30:00"],
        "event_type": ["a", "b"],
        "paid": [1.0, 2.0],
    }
    dataset = prepared(tmp_path, events, make_items())
    assert np.diff(dataset.times).tolist() == [30 * 60 * 10**6]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="the real datasets are not beside this checkout")
@pytest.mark.parametrize(
    "name",
    [
        "movielens_small",
        "movielens_1m_order",
        "online_retail",
        "birmingham_cards",
        pytest.param("amazon_purchases", marks=pytest.mark.slow),
        pytest.param("completejourney", marks=pytest.mark.slow),
    ],
)
def test_real_sets_prepare_with_the_shipped_schema_and_counts_agree(tmp_path: Path, name: str) -> None:
    folder = SHARED_DATA / name
    schema = Schema.read(Path(__file__).parents[2] / "examples" / "schemas" / f"{name}.toml")
    prepare(f"{folder}/events.parquet", f"{folder}/items.parquet", schema, tmp_path / "dataset")
    dataset = Dataset.open(tmp_path / "dataset")
    events, items = pq.read_table(folder / "events.parquet"), pq.read_table(folder / "items.parquet")
    assert dataset.num_events == events.num_rows
    assert dataset.num_items == items.num_rows
    per_user = events.group_by("user_id").aggregate([([], "count_all")]).sort_by("user_id")
    assert dataset.user_ids().to_pylist() == per_user["user_id"].to_pylist()
    assert np.diff(dataset.user_offsets).tolist() == per_user["count_all"].to_pylist()
    per_item = events.group_by("item_id").aggregate([([], "count_all")])
    counted = dict(zip(per_item["item_id"].to_pylist(), per_item["count_all"].to_pylist(), strict=True))
    ours = np.bincount(dataset.items, minlength=dataset.num_items).tolist()
    assert dict(zip(dataset.item_ids()["item_id"].to_pylist(), ours, strict=True)) == {
        item: counted.get(item, 0) for item in items["item_id"].to_pylist()
    }
    for side in (dataset.manifest.train, dataset.manifest.validation):
        assert side.fill(dataset.seq_len) >= 0.98
    found = describe(dataset)
    pairs = events.group_by(["user_id", "item_id"]).aggregate([([], "count_all")]).num_rows
    assert found.popularity.repeat_share == pytest.approx(1 - pairs / events.num_rows)
    assert found.popularity.items_with_events == per_item.num_rows
    assert found.history.largest == max(per_user["count_all"].to_pylist())
