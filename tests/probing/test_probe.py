"""Probes: moments, aggregates and metrics worked by hand, then the command on a log whose users differ by design."""

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import habitus as hb
from habitus.cli import app
from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.events import Schema
from habitus.exporting import Moments
from habitus.probing import Label, ProbeOptions, aggregate, churn_label, probe, read_labels
from habitus.probing.estimators import Folds, predict
from habitus.probing.labels import check_label
from habitus.probing.scores import Answers, draw_scores, interval
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train

from ..data.tables import SCHEMA, make_items, prepared

START = np.datetime64("2026-01-01T00:00:00", "us")
DAY_US = 86_400_000_000
RECIPE: dict[str, Any] = {
    "data": {"seq_len": 32},
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 8, "depth": 1, "head_dim": 4},
    "train": {"batch_sequences": 4, "steps": 20, "learning_rate": 0.02, "precision": "fp32"},
    "evaluate": {"queries": 20},
}


def log(rows: list[tuple[str, int, float, str, float | None]]) -> dict[str, list[Any]]:
    """Events as (user, item, day, type, paid)."""
    user, item, day, kind, paid = zip(*rows, strict=True)
    times = [(START + np.timedelta64(round(d * 24 * 60), "m")).item() for d in day]
    columns = {
        "user_id": user,
        "item_id": [f"i{n}" for n in item],
        "timestamp": times,
        "event_type": kind,
        "paid": paid,
    }
    return {name: list(column) for name, column in columns.items()}


def at_day(day: float) -> int:
    return int(START.astype(np.int64)) + round(day * DAY_US)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Sixty users, a day apart in pace: those with an even number buy items 0 to 2, the others 3 to 5.

    Of three users one leaves on day 30, one on day 50, and one stays until day 60.
    """
    rows = [
        (f"u{user}", (user % 2) * 3 + (user + place) % 3, day, "buy" if user % 2 else "view", float(user))
        for user in range(60)
        for place, day in enumerate(np.arange(user / 60, (30, 50, 60)[user % 3], 2.5))
    ]
    return prepared(tmp_path_factory.mktemp("probe"), log(rows), make_items(6))


@pytest.fixture(scope="module")
def run(shop: Dataset) -> Path:
    folder = shop.path.parent / "run"
    train(Recipe.parse(RECIPE, "test"), shop, folder, options=TrainOptions(device="cpu"))
    return folder


@pytest.fixture(scope="module")
def labels(shop: Dataset) -> Path:
    path = shop.path.parent / "labels.parquet"
    users = [f"u{n}" for n in range(60)]
    kinds = ["even" if n % 2 == 0 else "odd" for n in range(60)]
    pq.write_table(pa.table({"user_id": users, "kind": kinds, "number": [float(n) for n in range(60)]}), path)
    return path


def test_aggregates_by_hand(tmp_path: Path) -> None:
    rows = [("a", 0, 0, "view", 3.0), ("a", 0, 1, "buy", None), ("a", 1, 9, "buy", -5.0), ("a", 2, 10, "view", 100.0)]
    dataset = prepared(tmp_path, log([*rows, ("b", 2, 9.5, "view", 7.0)]), make_items(6))
    moments = Moments.of(dataset, np.array([0, 0, 1]), np.array([at_day(10), at_day(1), at_day(20)]))
    values, names = aggregate(dataset, moments)
    table = dict(zip(names, values.T, strict=True))

    def same(name: str, expected: list[float]) -> None:
        np.testing.assert_allclose(table[name], expected, err_msg=name)

    log1p = np.log1p
    same("events", [log1p(3), log1p(1), log1p(1)])
    same("different items", [log1p(2), log1p(1), log1p(1)])
    same("days since the last event", [log1p(1), log1p(1), log1p(10.5)])
    same("days since the first event", [log1p(10), log1p(1), log1p(10.5)])
    same("events in 7 days", [log1p(1), log1p(1), 0])
    same("events in 28 days", [log1p(3), log1p(1), log1p(1)])
    same("paid: sum", [-log1p(2), log1p(3), log1p(7)])
    same("paid: mean", [-1, 3, 7])
    # Only values that occur before the earliest time, day 1, are counted: 'view', and the brand of item 0.
    [view] = [name for name in names if name.startswith("event_type")]
    same(view, [log1p(1), log1p(1), log1p(1)])
    assert not np.isnan(values[:, [names.index("events"), names.index("paid: sum")]]).any()


def test_items_of_several_categories_count_for_each(tmp_path: Path) -> None:
    values = SCHEMA.to_values()
    values["items"]["fields"] = {"brand": {"kind": "category", "separator": "|"}}
    items = {"item_id": ["i0", "i1"], "brand": ["x|y", "y|z"]}
    rows = [("a", 0, 0, "view", 1.0), ("a", 0, 1, "view", 1.0), ("a", 1, 2, "view", 1.0)]
    dataset = prepared(tmp_path, log(rows), items, Schema.parse(values, "test"))
    features, names = aggregate(dataset, Moments.of(dataset, np.array([0, 0]), np.array([at_day(5), at_day(2)])))
    brands = sorted(tuple(features[:, place]) for place, name in enumerate(names) if name.startswith("brand"))
    # Of the events before day 2, which name the values to count, none has z.
    assert brands == [(np.log1p(2), np.log1p(2)), (np.log1p(3), np.log1p(2))]


def test_churn_by_hand(tmp_path: Path) -> None:
    rows = [("stays", 0, day, "view", 1.0) for day in range(31)]
    rows += [("leaves", 1, day, "view", 1.0) for day in range(15)]  # until day 14
    rows += [("gone", 2, 3, "view", 1.0), ("returns", 1, 19, "view", 1.0), ("returns", 1, 30, "view", 1.0)]
    dataset = prepared(tmp_path, log(rows), make_items(6))
    label = churn_label(dataset, "churn:10d", 2)
    # The log ends on day 30: cuts are a microsecond after days 10 and 20.
    assert label.moments.times is not None
    names = dataset.user_ids().to_pylist()
    told = [
        (names[user], (time - at_day(0) - 1) / DAY_US, label.classes[value])
        for user, time, value in zip(label.moments.users, label.moments.times, label.values, strict=True)
    ]
    assert told == [
        ("gone", 10, "leaves"), ("leaves", 10, "stays"), ("stays", 10, "stays"),
        ("leaves", 20, "leaves"), ("returns", 20, "stays"), ("stays", 20, "stays"),
    ]  # fmt: skip
    last = dict(zip(names, np.diff(dataset.user_offsets), strict=True))
    assert (label.moments.stops - label.moments.starts).tolist() == [1, 11, 11, last["leaves"], 1, 21]
    for name, cuts, message in (
        ("churn:10", 2, "is no label of the log"),
        ("churn:0d", 2, "is no label of the log"),
        ("churn:10d", 0, "--cuts is 0"),
        ("churn:10d", 3, "the log spans 30 days"),
    ):
        with pytest.raises(ConfigError, match=message):
            churn_label(dataset, name, cuts)


def test_metrics_by_hand() -> None:
    values, users = np.array([0, 0, 1, 1, 1]), np.arange(5)
    scores = np.array([0.1, 0.6, 0.6, 0.4, 0.9])
    answers = Answers(values, users, np.zeros(5, np.int64), 2)
    predictions = {"one": np.column_stack([1 - scores, scores])}
    drawn = draw_scores(answers, predictions, draws=200, seed=0)
    # Pairs won: .6 beats .1 and ties with .6; .4 beats .1 alone; .9 beats both.
    assert drawn["AUC"]["one"][0] == (1.5 + 1 + 2) / 6
    assert drawn["accuracy"]["one"][0] == 3 / 5
    split = answers._replace(folds=np.array([0, 1, 0, 1, 1]))  # pairs are made within folds
    assert draw_scores(split, predictions, draws=100, seed=0)["AUC"]["one"][0] == (1 + 0 + 1) / 3
    numbers = Answers(np.array([1.0, 2.0, 4.0, 5.0]), np.array([0, 0, 1, 1]), np.zeros(4, np.int64), 0)
    exact, off = np.array([[1.0], [2.0], [4.0], [5.0]]), np.array([[1.0], [2.0], [4.0], [7.0]])
    drawn = draw_scores(numbers, {"exact": exact, "off": off}, draws=100, seed=0)
    assert (drawn["R²"]["exact"][0], drawn["R²"]["off"][0]) == (1.0, 1 - 4 / 10)
    # Two users can be drawn in three ways: each twice, or both.
    assert set(np.round(drawn["R²"]["off"], 6)) == {0.6, 1.0, round(1 - 8 / 1, 6)}
    assert interval(drawn["R²"]["exact"]) == (1.0, 1.0, 1.0)
    three = Answers(np.array([0, 1, 2, 2]), np.arange(4), np.zeros(4, np.int64), 3)
    certain = np.eye(3)[[0, 1, 2, 1]]
    # Class 0 wins all pairs, class 1 loses half a pair of 3, class 2 has 2 pairs won and 2 tied of 4.
    assert draw_scores(three, {"p": certain}, draws=100, seed=0)["AUC"]["p"][0] == (1 + 2.5 / 3 + 2 * 3 / 4) / 4


def test_the_bootstrap_agrees_with_scikit_learn() -> None:
    from sklearn.metrics import r2_score, roc_auc_score

    draw = np.random.default_rng(1)
    values, scores = draw.integers(0, 2, 400), np.round(draw.random(400), 2)
    answers = Answers(values, np.arange(400) // 4, np.zeros(400, np.int64), 2)
    drawn = draw_scores(answers, {"p": np.column_stack([1 - scores, scores])}, draws=300, seed=3)["AUC"]["p"]
    assert drawn[0] == pytest.approx(roc_auc_score(values, scores), abs=1e-12)
    random, expected = np.random.default_rng(3), []
    for counts in random.multinomial(100, np.full(100, 0.01), 300):
        expected.append(roc_auc_score(values, scores, sample_weight=np.repeat(counts, 4)))
    np.testing.assert_allclose(drawn[1:], expected, atol=1e-12)
    numbers = answers._replace(values=scores * 1e3, num_classes=0)
    guess = scores[:, None] * 900 + 7
    assert draw_scores(numbers, {"p": guess}, draws=100, seed=0)["R²"]["p"][0] == pytest.approx(
        r2_score(numbers.values, guess[:, 0]), abs=1e-12
    )


def test_no_fold_is_fitted_to_its_own_users_or_to_later_rows() -> None:
    users, times = np.repeat(np.arange(60), 3), np.tile([10, 20, 30], 60)
    moments = Moments(users, times, np.zeros(180, np.int64), np.ones(180, np.int64))
    label = Label("x", moments, np.arange(180) % 2, ("a", "b"), {})
    folds = Folds(label, 4, 0)
    assert folds.split_time == 20
    asked = []
    for fitted, rows in folds:
        assert not set(users[fitted]) & set(users[rows])
        assert set(times[fitted]) == {10, 20}
        assert set(times[rows]) == {30}
        asked += rows.tolist()
    assert sorted(asked) == np.flatnonzero(times == 30).tolist()
    whole = Folds(Label("x", Moments(users, None, users, users), moments.users * 1.0, (), {}), 4, 0)
    assert whole.split_time is None
    assert sorted(row for _, rows in whole for row in rows) == list(range(180))


def test_a_fold_may_have_nobody_to_ask() -> None:
    """Of forty users two have a later row: at least three of five folds hold neither."""
    users, times = np.array([*range(40), 0, 1]), np.array([1] * 40 + [2] * 2)
    moments = Moments(users, times, np.zeros(42, np.int64), np.ones(42, np.int64))
    label = Label("x", moments, np.arange(42) % 2, ("a", "b"), {})
    folds = Folds(label, 5, 0)
    found = predict(np.column_stack([label.values, label.values]).astype(float), label, folds, "linear", 0)
    assert np.flatnonzero(folds.asked).tolist() == [40, 41]
    assert found[40:].argmax(1).tolist() == [0, 1]
    assert np.isnan(found[:40]).all()


@pytest.mark.parametrize("kind", ["linear", "boosted"])
def test_what_the_vectors_know_is_found(shop: Dataset, run: Path, labels: Path, kind: Any) -> None:
    kinds, numbers = probe(run, shop.path, ProbeOptions(labels=labels, probe=kind, draws=100, device="cpu"))
    assert (kinds.label, kinds.task, kinds.classes) == ("kind", "classification", ("even", "odd"))
    assert (kinds.rows, kinds.users, kinds.asked_rows, kinds.split_time) == (60, 60, 60, None)
    assert (kinds.num_vectors, kinds.chance) == (16, {"AUC": 0.5, "accuracy": 0.5})
    scores = {(one.features, one.metric): one.value for one in kinds.scores}
    assert min(scores.values()) > 0.9, scores  # what they buy tells it, in either form
    assert (numbers.label, numbers.task, numbers.warnings) == ("number", "regression", ())
    r_squared = {one.features: one for one in numbers.scores}
    assert r_squared["aggregates"].value > 0.8  # the number is what they pay
    assert r_squared["aggregates"].low <= r_squared["aggregates"].value <= r_squared["aggregates"].high
    difference = next(one for one in numbers.differences if one.first == "vectors")
    assert difference.value == pytest.approx(r_squared["vectors"].value - r_squared["aggregates"].value)


def test_random_labels_are_not_found(shop: Dataset, run: Path, tmp_path: Path) -> None:
    draw = np.random.default_rng(0).permutation(60)
    table = pa.table({"user_id": [f"u{n}" for n in range(60)], "coin": [bool(n % 2) for n in draw]})
    pq.write_table(table, tmp_path / "coin.parquet")
    [coin] = probe(run, shop.path, ProbeOptions(labels=tmp_path / "coin.parquet", draws=200, device="cpu"))
    vectors = next(one for one in coin.scores if one.features == "vectors" and one.metric == "AUC")
    assert vectors.low < 0.5 < vectors.high or vectors.value < 0.5


def test_the_command_probes_churn_warns_and_writes(shop: Dataset, run: Path, labels: Path, tmp_path: Path) -> None:
    command = ["probe", str(run), "--data", str(shop.path), "--device", "cpu", "--draws", "100"]
    churn = [*command, "--label", "churn:9d", "--cuts", "4", "--out", str(tmp_path / "churn.json")]
    result = CliRunner().invoke(app, churn)
    assert result.exit_code == 0, result.output
    assert "both − aggregates" in result.output
    assert "warning: the model was trained until 2026-0" in result.output
    [written] = json.loads((tmp_path / "churn.json").read_text())
    assert written["classes"] == ["stays", "leaves"]
    assert written["asked_users"] < written["users"]
    result = CliRunner().invoke(
        app, [*command, "--labels", str(labels), "--label", "kind", "--at", "2026-01-10", "--json"]
    )
    assert result.exit_code == 0, result.output
    [printed] = json.loads(result.output)
    assert printed["warnings"]
    [object_] = hb.probe(run, shop, pq.read_table(labels), label="kind", at="2026-01-10", draws=100, device="cpu")
    assert object_.to_values() == printed
    assert "kind (2 classes): 60 rows of 60 users; linear probe" in repr(object_)


def test_only_earlier_events_enter(shop: Dataset, run: Path, labels: Path, tmp_path: Path) -> None:
    """A log that goes another way after the labels' time gives the same result, to the last bit of its features."""
    events = pq.read_table(shop.path.parent / "events.parquet").to_pydict()
    cut = (START + np.timedelta64(10, "D")).item()
    for row, time in enumerate(events["timestamp"]):
        if time >= cut:
            events["paid"][row] = 1e6
            events["event_type"][row] = "view"
    other = prepared(tmp_path, events, make_items(6))
    for moment, same in ((at_day(10), True), (at_day(11), False)):
        both = [aggregate(one, Moments.of(one, np.arange(60), np.full(60, moment)))[0] for one in (shop, other)]
        assert np.array_equal(*both, equal_nan=True) == same


def test_bad_labels_are_refused(shop: Dataset, run: Path, labels: Path, tmp_path: Path) -> None:
    users = [f"u{n}" for n in range(60)]
    numbers = list(range(60))
    day = (START + np.timedelta64(20, "D")).item()
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"user": users, "x": numbers}, {}, "no column 'user_id'"),
        ({"user_id": users}, {}, "has no labels"),
        ({"user_id": [*users, "u1"], "x": [*numbers, 1]}, {}, "1 rows of users that an earlier row has"),
        ({"user_id": ["v1", "v2"], "x": [1, 2]}, {}, "none of its 2 users is in"),
        ({"user_id": users, "x": [1.0] * 60}, {}, "is 1 in every row"),
        ({"user_id": users, "x": ["a"] * 55 + ["b"] * 5}, {}, "1 class of 10 users or more; too rare: b"),
        ({"user_id": users[:9], "x": numbers[:9]}, {}, "9 users with a value and a history"),
        ({"user_id": users, "x": [[1]] * 60}, {}, "label 'x' is list"),
        ({"user_id": users, "x": ["a", "b"] * 30}, {"task": "regression"}, "numbers for --task regression"),
        ({"user_id": users, "x": numbers}, {"names": ("y",)}, "no label 'y'"),
        ({"user_id": users, "time": [day] * 60, "x": numbers}, {"at": "2026-01-05"}, "--at was given, and"),
        ({"user_id": users, "x": numbers}, {"at": "soon"}, "--at 'soon'"),
        ({"user_id": users, "x": numbers}, {"at": "2025-01-01"}, "0 users with a value and a history"),
        ({"user_id": users, "x": numbers}, {"folds": 1}, "at least 2 folds"),
        ({"user_id": users, "x": numbers}, {"folds": 61}, "--folds is 61, and label 'x' has 60 users"),
        ({"user_id": users, "x": ["a", "b"] * 30}, {"folds": 31}, "has 30 users in its most frequent class"),
        (
            {"user_id": users, "time": [day] * 3 + [day.replace(day=25)] * 57, "x": numbers},
            {},
            "a fold has earlier rows of [0-3] users to fit to",
        ),
    ]
    for columns, options, message in cases:
        pq.write_table(pa.table(columns), tmp_path / "labels.parquet")
        with pytest.raises((ConfigError, DataError), match=message):
            probe(run, shop.path, ProbeOptions(labels=tmp_path / "labels.parquet", device="cpu", **options))
    for options, message in (
        ({}, "no label was given"),
        ({"names": ("income",)}, "without --labels"),
        ({"names": ("churn:9d",), "at": "2026-01-05"}, "churn, which has times of its own"),
        ({"labels": tmp_path / "absent.parquet"}, "does not exist"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            probe(run, shop.path, ProbeOptions(**options))
    several = {"user_id": users * 2, "time": [day] * 60 + [day.replace(day=25)] * 60, "x": ["a", "b"] * 30 + ["a"] * 60}
    pq.write_table(pa.table(several), tmp_path / "labels.parquet")
    with pytest.raises(DataError, match="the 60 rows that are asked about are all of one class"):
        probe(run, shop.path, ProbeOptions(labels=tmp_path / "labels.parquet", device="cpu"))


def test_rows_without_a_say_are_counted(shop: Dataset, tmp_path: Path) -> None:
    columns = {
        "user_id": [*(f"u{n}" for n in range(60)), "stranger"],
        "time": [(START + np.timedelta64(12, "h")).item()] * 61,  # half of the users have begun
        "x": [None, None, *(["a", "b"] * 28), "b", "rare", "a"],
    }
    pq.write_table(pa.table(columns), tmp_path / "labels.parquet")
    [label] = [check_label(one) for one in read_labels(tmp_path / "labels.parquet", shop)]
    assert label.left_out == {"unknown users": 1, "no value": 2, "no event before the time": 30}
    assert label.classes == ("a", "b")
    assert len(label.values) == 28


def test_without_scikit_learn_the_error_says_what_to_install(
    shop: Dataset, run: Path, labels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def refuse(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name.partition(".")[0] == "sklearn":
            raise ImportError("No module named 'sklearn'")
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"habitus\[probe\]"):
        probe(run, shop.path, ProbeOptions(labels=labels))
