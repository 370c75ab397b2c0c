"""How fast a model ages: worked by hand, then through the command on a log that was updated."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, update
from habitus.errors import ConfigError, DataError
from habitus.evaluation import PerQuery, measure_ageing
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train

from ..data.tables import SMALL, make_events, make_items, prepared, write_tables

HOUR_US, DAY_US = 3_600_000_000, 86_400_000_000
RECIPE: dict[str, Any] = {
    "data": {"seq_len": 64},  # longer than every history
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 8, "depth": 1, "head_dim": 4},
    "train": {"batch_sequences": 4, "steps": 3, "learning_rate": 1e-3, "precision": "fp32"},
    "evaluate": {"queries": 20},
}


def hourly(num_users: int, num_events: int) -> dict[str, list[Any]]:
    """Every user has an event every twelve hours."""
    start = np.datetime64("2026-01-01T00:00:00", "us")
    rows = [(user, place) for user in range(num_users) for place in range(num_events)]
    return {
        "user_id": [f"u{user}" for user, _ in rows],
        "item_id": [f"i{(user + place) % 6}" for user, place in rows],
        "timestamp": [(start + np.timedelta64(12 * place, "h")).item() for _, place in rows],
        "event_type": ["view"] * len(rows),
        "paid": [1.0] * len(rows),
    }


def answers(dataset: Dataset, ranks: np.ndarray) -> PerQuery:
    """Given ranks of every event but a user's first, user after user."""
    lengths = np.diff(dataset.user_offsets)
    rows = np.concatenate(
        [np.arange(start, start + n - 1) for start, n in zip(dataset.user_offsets, lengths, strict=False)]
    )
    user = np.repeat(np.arange(dataset.num_users), lengths - 1)
    zeros = np.zeros(len(rows), np.int64)
    return PerQuery(
        batch=zeros, user=user, event=rows, target=dataset.items[rows + 1], history=zeros, cold=zeros > 0,
        repeat=zeros > 0, rank=ranks, loss=None, entropy=None, top=zeros[:, None], candidates=zeros + 6,
    )  # fmt: skip


def test_ages_and_differences_by_hand(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, hourly(2, 6))  # targets at 12, 24, 36, 48, 60 hours
    first = int(dataset.times[0])
    # Trained until 12 h: targets are 12, 24, 36 and 48 hours old, the first is not later. Hits are ranks up to 1.
    old = answers(dataset, np.array([1, 1, 1, 2, 2, 1, 1, 2, 2, 2]))
    new = answers(dataset, np.array([1, 1, 1, 1, 2, 1, 1, 1, 1, 1]))
    runs = {"new": (first + 36 * HOUR_US, new), "old": (first + 12 * HOUR_US, old)}
    before, after = measure_ageing(dataset, runs, "recall@1", [1, 2], min_users=2)
    assert (before.run, after.run) == ("old", "new")
    assert [(row.days, row.mean.n, row.users) for row in before.rows] == [((0, 1), 4, 2), ((1, 2), 4, 2)]
    assert [row.mean.value for row in before.rows] == [3 / 4, 0.0]
    # Only targets after 36 h have a fresher run: 48 and 60 h, hit by the new one in three of four cases.
    assert before.rows[0].lost is None
    assert before.rows[1].lost is not None
    assert before.rows[1].lost.value == -3 / 4
    assert [row.mean.value for row in after.rows] == [3 / 4]
    assert after.rows[0].lost is None
    assert measure_ageing(dataset, runs, "recall@1", [1, 2])[0].updates == ()  # two users are too few
    [every_day] = before.updates
    further = measure_ageing(dataset, runs, "recall@1", [1, 2, 50], min_users=2)[0]  # no query is older than two days
    assert further.updates == before.updates
    assert (every_day.every_days, every_day.value) == (1, 3 / 4)
    assert every_day.gain.value == 3 / 4 - 3 / 8
    assert every_day.gain.low is not None
    assert every_day.gain.low <= every_day.gain.value <= every_day.gain.high


def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, hourly(2, 6))
    values = answers(dataset, np.ones(10, np.int64))
    with pytest.raises(DataError, match="was trained until 2026-01-03T12:00:00, and no query of"):
        measure_ageing(dataset, {"run": (int(dataset.times.max()), values)}, "recall@1")
    for edges in ([], [0, 1], [2, 1]):
        with pytest.raises(ConfigError, match="days are"):
            measure_ageing(dataset, {"run": (0, values)}, "recall@1", edges)


def test_runs_on_an_updated_log_age_by_command(tmp_path: Path) -> None:
    events = make_events(60, 6, seed=1)
    order = np.argsort(np.array(events["timestamp"]), kind="stable")
    half = events["timestamp"][order[len(order) // 2]]
    is_early = [events["timestamp"][row] <= half for row in order]
    early, late = (
        {name: [column[row] for row, one in zip(order, is_early, strict=True) if one == wanted] for name, column in log}
        for log, wanted in ((events.items(), True), (events.items(), False))
    )
    first = prepared(tmp_path / "first", early)
    write_tables(tmp_path / "late", late, make_items())
    update(first, f"{tmp_path}/late/events.parquet", f"{tmp_path}/late/items.parquet", tmp_path / "grown", SMALL)
    grown = Dataset.open(tmp_path / "grown")
    options = TrainOptions(device="cpu", threads=1)
    record = train(Recipe.parse(RECIPE, "test"), first, tmp_path / "old", options=options)
    assert record.trained_until is not None
    assert record.trained_until <= first.manifest.time_span[1] < grown.trained_until  # type: ignore[operator]
    continued = {**RECIPE, "train": {**RECIPE["train"], "parent": record.recipe_hash}}
    train(Recipe.parse(continued, "test"), grown, tmp_path / "new", parent=tmp_path / "old", options=options)
    command = ["age", f"{tmp_path}/old", f"{tmp_path}/new", "--data", f"{tmp_path}/grown", "--side", "validation"]
    result = CliRunner().invoke(app, [*command, "--device", "cpu", "--days", "0.5,2", "--json"])
    assert result.exit_code == 0, result.output
    old, new = json.loads(result.stdout)
    assert old["trained_until"] == record.trained_until
    is_first = np.isin(np.arange(grown.num_events), grown.user_offsets[:-1])
    validates = np.repeat(grown.user_parts.train_lengths == 0, np.diff(grown.user_offsets))
    later = validates & ~is_first & (grown.times > record.trained_until)
    assert sum(row["queries"] for row in old["rows"]) == later.sum() > 0
    assert new["trained_until"] == grown.trained_until
    printed = CliRunner().invoke(app, [*command, "--device", "cpu", "--days", "0.5,2"]).stdout
    assert "trained until 2023-11-1" in printed
    assert "replaced every" in printed
