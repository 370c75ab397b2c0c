"""Which events are predicted: by value, by a boolean, by a number; what a dataset keeps of it; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.data import Dataset, PrepareOptions, prepare, prepare_world, update
from habitus.errors import ConfigError, DataError
from habitus.events import Schema, World, WorldConfig, schema_of, write_world

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

Table = dict[str, list[Any]]


def with_targets(schema: Schema = SCHEMA, **targets: Any) -> Schema:
    return Schema.parse({**schema.to_values(), "targets": targets}, "schema.toml")


def make_log() -> tuple[Table, Table]:
    """Users a and b; of a's six events the third and the fifth are bought, of b's three none is."""
    kinds = ["view", "buy", "buy", "view", "buy", "view", "view", None, "return"]
    return (
        {
            "user_id": ["a"] * 6 + ["b"] * 3,
            "item_id": ["i0", "i1", "i2", "i3", "i4", "i5", "i0", "i1", "i2"],
            "timestamp": [np.datetime64(1_700_000_000 + n, "s").astype("datetime64[us]").item() for n in range(9)],
            "event_type": kinds,
            "paid": [None] * 9,
            "bought": [None if kind is None else kind == "buy" for kind in kinds],
            "stars": [{"buy": 2.5, "return": -1.0}.get(kind or "", 0.0 if kind else None) for kind in kinds],
        },
        make_items(),
    )


@pytest.fixture(scope="module")
def bought(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    schema = with_targets(column="event_type", weights={"buy": 1.0})
    # Of two users the hash sends both to training.
    return prepared(tmp_path_factory.mktemp("targets"), *make_log(), schema=schema)


def test_weights_come_from_values_from_a_boolean_or_from_a_number(tmp_path: Path) -> None:
    for name, targets, expected in (
        ("values", {"column": "event_type", "weights": {"buy": 1, "return": -0.5}}, [0, 1, 1, 0, 1, 0, 0, 0, -0.5]),
        ("boolean", {"column": "bought"}, [0, 1, 1, 0, 1, 0, 0, 0, 0]),
        ("number", {"column": "stars"}, [0, 2.5, 2.5, 0, 2.5, 0, 0, 0, -1]),
    ):
        dataset = prepared(tmp_path / name, *make_log(), schema=with_targets(**targets))
        assert dataset.target_weight is not None
        np.testing.assert_array_equal(dataset.target_weight, np.array(expected, np.float32))
        np.testing.assert_array_equal(dataset.is_target(np.arange(9)), np.array(expected) > 0)


def test_queries_are_where_the_next_event_is_a_target(bought: Dataset) -> None:
    """The first event of a has none before it; nothing of b is predicted, so no window holds b."""
    counts = bought.counts("train")
    assert (counts.queries, counts.segments, counts.events) == (3, 1, 5)  # a up to its last purchase
    batch = bought.gather("train", np.array([0]))
    assert batch.items[0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert batch.targets[0].tolist() == [1, 2, -1, 4, -1, -1, -1, -1]
    assert batch.target_weights is not None
    assert batch.target_weights[0].tolist() == [1, 1, 0, 1, 0, 0, 0, 0]
    assert bought.item_target_counts.tolist() == [0, 1, 1, 0, 1, 0]
    assert bought.item_train_counts.tolist() == [2, 2, 2, 1, 1, 1]


def test_long_histories_are_cut_as_ever_and_lose_what_nothing_follows(tmp_path: Path) -> None:
    events = make_events(60, seed=4)
    plain = prepared(tmp_path / "plain", events, make_items())
    dataset = prepared(
        tmp_path / "targets", events, make_items(), schema=with_targets(column="event_type", weights={"buy": 1})
    )
    assert dataset.target_weight is not None
    for side in ("train", "validation"):
        segments = dataset.windows(side).segments
        last = dataset.target_weight[segments["start"] + segments["length"] - 1]
        assert (last > 0).all() and len(segments) < len(plain.windows(side).segments) + 1
        batch = dataset.gather(side, np.arange(dataset.counts(side).windows))
        rows = dataset.event_rows(side, np.arange(dataset.counts(side).windows))
        places = np.argwhere(batch.targets >= 0)
        assert len(places) == dataset.counts(side).queries == dataset.queries_per_segment(side).sum()
        following = rows[tuple(places.T)] + 1
        assert (dataset.target_weight[following] > 0).all()
        np.testing.assert_array_equal(batch.targets[tuple(places.T)], dataset.items[following])
    # Every bought event with a history in its stretch of eight is predicted once.
    parts = plain.user_parts
    place = np.arange(plain.num_events) - np.repeat(parts.starts, parts.lengths)
    trains = place < np.repeat(parts.train_lengths, parts.lengths)
    expected = (dataset.target_weight > 0) & trains & (place % 8 > 0)
    assert dataset.counts("train").queries == int(expected.sum())


def test_without_targets_nothing_is_stored(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, *make_log())
    assert "events/target_weight.npy" not in dataset.manifest.files and dataset.target_weight is None
    assert "targets" not in dataset.schema.to_toml()
    assert dataset.is_target(np.arange(9)).all()
    assert dataset.item_target_counts is dataset.item_train_counts and dataset.candidate_rows is None
    assert dataset.num_candidates == dataset.num_items


def test_updates_carry_the_weights_on(tmp_path: Path) -> None:
    events, items = make_events(20, seed=5), make_items()
    order = np.argsort(np.array(events["timestamp"]), kind="stable")
    hours = np.array([moment.timestamp() // 3600 for moment in events["timestamp"]])[order]
    first = int(np.searchsorted(hours, np.median(hours)))
    early, late = ({n: [c[r] for r in part] for n, c in events.items()} for part in (order[:first], order[first:]))
    schema = with_targets(column="event_type", weights={"buy": 2.0})
    before = prepared(tmp_path / "early", early, items, schema=schema)
    write_tables(tmp_path / "late", late, items)
    update(before, *(f"{tmp_path}/late/{name}.parquet" for name in ("events", "items")), tmp_path / "both", SMALL)
    both, whole = Dataset.open(tmp_path / "both"), prepared(tmp_path / "whole", events, items, schema=schema)
    by_event = [
        sorted(zip(d.times.tolist(), d.items.tolist(), d.target_weight.tolist(), strict=True))  # type: ignore[union-attr]
        for d in (both, whole)
    ]
    assert by_event[0] == by_event[1] and {weight for _, _, weight in by_event[0]} == {0.0, 2.0}


def test_a_world_with_views_is_prepared_to_the_same_bytes_with_and_without_files(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=30, num_items=40, events_per_user=8, views_per_purchase=2.0))
    options = PrepareOptions(seq_len=16, text_len=4, vocabulary_size=300, memory="256MiB", threads=1)
    write_world(world, tmp_path / "world", threads=1, progress=lambda *_: None)
    tables = (f"{tmp_path}/world/{name}.parquet" for name in ("events", "items"))
    one = prepare(*tables, Schema.read(tmp_path / "world" / "schema.toml"), tmp_path / "one", options)
    two = prepare_world(world, schema_of(world), tmp_path / "two", options, lambda *_: None)
    assert one.checksum == two.checksum and "events/target_weight.npy" in one.files


def test_pairs_of_item_and_type_stay_possible_and_only_targets_are_candidates(tmp_path: Path) -> None:
    values = SCHEMA.to_values()
    values["events"] |= {"item": ["item_id", "event_type"], "fields": {}}
    events = make_events(seed=6)
    events["event_type"] = [kind or "view" for kind in events["event_type"]]
    schema = with_targets(Schema.parse(values, "schema.toml"), column="event_type", weights={"buy": 1})
    dataset = prepared(tmp_path, events, make_items(), schema=schema)
    names = np.array([None, *dataset.encoders.item_values["event_type"]])
    kinds = names[dataset.item_features(np.arange(dataset.num_items)).fields["event_type"]]
    assert dataset.candidate_rows is not None
    np.testing.assert_array_equal(dataset.candidate_rows, np.flatnonzero(kinds == "buy"))
    np.testing.assert_array_equal(dataset.is_target(np.arange(dataset.num_events)), kinds[dataset.items] == "buy")


def test_candidates_are_items_of_the_given_values(tmp_path: Path) -> None:
    events, items = make_log()
    items["brand"] = ["shop"] * 5 + ["coupon"]
    schema = with_targets(column="event_type", weights={"buy": 1}, candidates={"brand": ["shop"]})
    dataset = prepared(tmp_path, events, items, schema=schema)
    assert dataset.candidate_rows is not None and dataset.candidate_rows.tolist() == [0, 1, 2, 3, 4]
    assert dataset.num_candidates == 5 < dataset.num_items


@pytest.mark.parametrize(
    "targets, message",
    [
        ({"column": "event_type", "weights": {"buy": 0.0, "view": 0.0}}, "nothing would be predicted"),
        ({"column": "event_type", "weights": {"return": -1.0}}, "a weight above 0"),
        ({"column": "event_type", "weights": {"buy": float("nan")}}, "finite number"),
        ({"column": "user_id"}, "is the user, the item or the time"),
        ({"column": "event_type", "weight": {"buy": 1}}, "did you mean 'weights'"),
        ({"column": "event_type", "weights": {"buy": 1}, "candidates": {"brnad": ["x"]}}, "did you mean 'brand'"),
        ({"column": "event_type", "weights": {"buy": 1}, "candidates": {}}, "leave no item"),
    ],
)
def test_schemas_that_cannot_be_are_refused(targets: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        with_targets(**targets)


@pytest.mark.parametrize(
    "targets, message, hint",
    [
        ({"column": "event_typ"}, "column 'event_typ' is missing", "event_type"),
        ({"column": "event_type"}, "has type string", "a boolean or a number"),
        ({"column": "event_type", "weights": {"purchase": 1.0}}, 'no event has "purchase"', '"view"'),
        ({"column": "event_type", "weights": {"buy": 1.0, "sale": 1.0}}, 'no event has "sale"', '"view"'),
        ({"column": "never"}, "no event has a weight above 0", "false"),
        ({"column": "odd"}, "a target weight that is no finite number", "finite weights"),
        (
            {"column": "event_type", "weights": {"buy": 1.0}, "candidates": {"brand": ["brand 7"]}},
            "no item has brand = 'brand 7'",
            "brand 0",
        ),
        (
            {"column": "event_type", "weights": {"buy": 1.0}, "candidates": {"brand": ["brand 1"]}},
            "leave out 3 items that are targets, the first i1",
            "every item that is predicted",
        ),
    ],
)
def test_logs_that_do_not_hold_what_is_to_be_predicted_are_refused(
    tmp_path: Path, targets: dict[str, Any], message: str, hint: str
) -> None:
    events, items = make_log()
    events |= {"never": [False] * 9, "odd": [1.0] * 8 + [float("inf")]}
    with pytest.raises(DataError, match=message) as error:
        prepared(tmp_path, events, items, schema=with_targets(**targets))
    assert hint in str(error.value)
    assert not (tmp_path / "dataset").exists()
