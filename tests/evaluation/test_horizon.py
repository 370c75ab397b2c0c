"""Horizons: worked by hand, against RecTools on 1,000 users, and through training and the command."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset
from habitus.errors import ConfigError, DataError
from habitus.evaluation import EvaluateOptions, evaluate_runs
from habitus.evaluation.baselines import Popularity
from habitus.evaluation.horizon import HorizonQueries, PerUser, score_horizon
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train

from ..data.tables import SMALL, prepared

GOLDEN = Path(__file__).parent / "golden" / "horizon_metrics.json"
# (user, item, day): ten events train, then nine; the last of all is on day 40.
BEFORE = [(0, 0, 0), (1, 3, 0), (0, 1, 1), (4, 1, 1), (0, 0, 2), (4, 1, 2), (0, 2, 3), (4, 1, 3), (1, 4, 4), (2, 5, 5)]
AFTER = [(0, 0, 10), (0, 3, 11), (3, 0, 11), (0, 3, 12), (2, 5, 12), (1, 1, 13), (0, 4, 18), (4, 2, 25), (0, 5, 40)]


@pytest.fixture(scope="module")
def by_time(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    start = np.datetime64("2026-01-01T00:00:00", "us")
    rows = BEFORE + AFTER
    events: dict[str, list[Any]] = {
        "user_id": [f"u{user}" for user, _, _ in rows],
        "item_id": [f"i{item}" for _, item, _ in rows],
        "timestamp": [(start + np.timedelta64(day, "D")).item() for _, _, day in rows],
        "event_type": ["view"] * len(rows),
        "paid": [1.0] * len(rows),
    }
    options = replace(SMALL, split="time", validation_share=len(AFTER) / len(rows))
    return prepared(tmp_path_factory.mktemp("horizon"), events, options=options)


def test_metrics_equal_those_of_rectools() -> None:
    golden = json.loads(GOLDEN.read_text())
    top, relevant = np.array(golden["top"]), golden["relevant"]
    hits = np.stack([np.isin(row, items) for row, items in zip(top, relevant, strict=True)])
    values = PerUser(np.arange(len(top)), np.array([len(items) for items in relevant]), top, hits)
    assert len(top) == 1000
    for name, expected in golden["expected"].items():
        metric, _, k = name.partition("@")
        np.testing.assert_allclose(values.metric(metric, int(k)), expected, rtol=0, atol=1e-9, err_msg=name)


def test_a_week_by_hand(by_time: Dataset) -> None:
    queries = HorizonQueries(by_time, "7d")
    assert queries.users.tolist() == [0, 1, 2]  # u3 has no history, u4 came back after the week
    assert queries.num_new_users == 1
    # Popularity: i1 four times, i0 twice, the others once each.
    values = score_horizon(queries, Popularity(by_time), (1, 2), batch_sequences=1)
    assert values.user.tolist() == [0, 1, 2]
    assert values.relevant.tolist() == [2, 1, 1]  # {i0, i3}, {i1}, {i5}: i3 twice is one item
    assert values.top.tolist() == [[1, 0]] * 3
    assert values.metric("recall", 2).tolist() == [1 / 2, 1, 0]
    assert values.metric("map", 2).tolist() == [1 / 4, 1, 0]
    second = 1 / np.log2(3)
    assert values.metric("ndcg", 2) == pytest.approx([second / (1 + second), 1, 0], abs=1e-15)
    assert values.metric("ndcg", 1).tolist() == [0, 1, 0]


def test_repeats_left_out_are_neither_listed_nor_relevant(by_time: Dataset) -> None:
    queries = HorizonQueries(by_time, "7d_new")
    assert queries.users.tolist() == [0, 1]  # i5 is no news to u2
    values = score_horizon(queries, Popularity(by_time), (2,), batch_sequences=8)
    assert values.top.tolist() == [[3, 4], [1, 0]]
    assert values.hits.tolist() == [[True, False], [True, False]]
    assert values.relevant.tolist() == [1, 1]
    longest = score_horizon(queries, Popularity(by_time), (6,), batch_sequences=8)
    assert longest.top.tolist() == [[3, 4, 5, -1, -1, -1], [1, 0, 2, 5, -1, -1]]


def test_a_longer_horizon_has_more_users_and_items(by_time: Dataset) -> None:
    queries = HorizonQueries(by_time, "28d")
    assert queries.users.tolist() == [0, 1, 2, 4]
    values = score_horizon(queries, Popularity(by_time), (1,), batch_sequences=8)
    assert values.relevant.tolist() == [3, 1, 1, 1]
    assert HorizonQueries(by_time, "24h").users.tolist() == [0]
    assert len({HorizonQueries(by_time, one).checksum() for one in ("7d", "7d_new", "28d")}) == 3


def test_differences_are_paired_by_user(by_time: Dataset) -> None:
    options = EvaluateOptions(regimes=(), horizons=("7d",), cutoffs=(1, 2))
    popularity, _, repeating, item_to_item = evaluate_runs([], by_time, options, with_baselines=True)
    assert popularity.less_than_first == {}
    assert popularity.metrics["horizon7d/recall@2"].value == 1 / 2
    assert popularity.metrics["horizon7d/recall@2"].n == popularity.specification["horizon7d"].queries == 3
    # Repeating lists i2 and i0 for u0 (weights 1, 1/2 + 1/4), i4 and i3 for u1, i5 for u2: a half, nothing, one.
    assert repeating.metrics["horizon7d/recall@2"].value == 1 / 2
    lead = repeating.less_than_first["horizon7d/recall@2"]
    assert lead.value == pytest.approx(0)
    # Differences 0, 1, -1: their standard error is sqrt(1/3).
    assert lead.high == pytest.approx(1.959964 / 3**0.5)
    assert lead.low == pytest.approx(-1.959964 / 3**0.5)
    assert set(item_to_item.less_than_first) == set(item_to_item.metrics)


def test_horizons_that_the_log_does_not_cover_are_refused(by_time: Dataset, dataset: Dataset) -> None:
    with pytest.raises(DataError, match=r"2026-01-11T00:00 \+ 31d is 2026-02-11T00:00, .* covers 30.0 days, until"):
        HorizonQueries(by_time, "31d")
    assert len(HorizonQueries(by_time, "30d").users) == 4
    with pytest.raises(DataError, match="is split by 'user', so there is no cut"):
        HorizonQueries(dataset, "7d")
    with pytest.raises(DataError, match="has no test side"):
        HorizonQueries(by_time, "7d", "test")
    with pytest.raises(ConfigError, match="the horizon is 'week'"):
        HorizonQueries(by_time, "week")
    with pytest.raises(DataError, match=r"no user .* has a target item that is new to them in the 12h after it"):
        HorizonQueries(by_time, "12h_new")


def test_a_record_carries_what_the_command_measures(by_time: Dataset, tmp_path: Path) -> None:
    values = {
        "data": {"seq_len": 8},
        "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 8, "depth": 1, "head_dim": 4},
        "train": {"batch_sequences": 4, "steps": 3, "learning_rate": 1e-3, "precision": "fp32"},
        "evaluate": {"queries": 5},
    }
    plain = Recipe.parse(values, "test")
    recipe = Recipe.parse(values | {"evaluate": {"queries": 5, "horizons": ["7d", "28d_new"]}}, "test")
    assert "horizons" not in plain.to_values()["evaluate"]
    assert plain.hash("x") != recipe.hash("x")
    with pytest.raises(ConfigError, match="'weekly' is not a horizon"):
        Recipe.parse(values | {"evaluate": {"horizons": ["weekly"]}}, "test")
    record = train(recipe, by_time, tmp_path / "run", options=TrainOptions(device="cpu", threads=1, card=False))
    assert record.metrics["horizon7d/ndcg@10"].n == 3
    assert record.metrics["horizon28d_new/map@5"].n == 3  # u0, u1 and u4

    command = ["evaluate", f"{tmp_path}/run", "--data", str(by_time.path), "--horizon", "7d", "--device", "cpu"]
    result = CliRunner().invoke(app, [*command, "--baselines", "--json", "--per-query", f"{tmp_path}/users.parquet"])
    assert result.exit_code == 0, result.output
    run, *baselines = json.loads(result.stdout)
    assert run["metrics"]["horizon7d/ndcg@10"]["value"] == record.metrics["horizon7d/ndcg@10"].value
    assert [one["scorer"] for one in baselines] == ["popularity", "recent popularity", "repeat recent", "item to item"]
    assert pq.read_table(tmp_path / "users.parquet")["user"].to_pylist() == [0, 1, 2] * 5
    printed = CliRunner().invoke(app, [*command, "--baselines"])
    assert "3 users, each with one list of 6 items, made at the cut" in printed.stdout
    assert "left out: 1 who first came after it" in printed.stderr
    single = CliRunner().invoke(app, [*command, "--repeats", "leave-out"])
    assert "horizon7d_new" in single.stdout


def test_options_that_a_horizon_would_ignore_are_refused(by_time: Dataset) -> None:
    command = ["evaluate", "--data", str(by_time.path), "--baselines"]
    for options, problem in (
        (["--repeats", "count"], "--repeats was given without --horizon"),
        (["--horizon", "7d", "--queries", "5"], "--queries was given with --horizon"),
        (["--horizon", "7"], "--horizon '7'"),
        (["--horizon", "7d", "--repeats", "no"], "--repeats"),
        (["--horizon", "365d"], "covers 30.0 days"),
    ):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code != 0
        assert problem in str(result.exception), result.output
