"""`describe --structure` on logs whose structure is known: worked by hand, or planted in a world."""

import json
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
from typer.testing import CliRunner

from habitus.cli import app
from habitus.data import Dataset, Structure, prepare_world, structure
from habitus.errors import DataError
from habitus.events import MixtureWeights, World, WorldConfig, schema_of

from .tables import SMALL, make_items, prepared

TOPICS = {"num_topics": 8, "topic_sharpness": 12.0, "taste_prior": 2.0}
WORLDS = {
    "popularity": {"weights": {"popular": 1.0}},
    "8 topics": {**TOPICS, "weights": {"topic_taste": 0.9, "popular": 0.1}},
    "32 topics": {**TOPICS, "num_topics": 32, "weights": {"topic_taste": 0.9, "popular": 0.1}},
    "8 topics that no field tells": {
        **TOPICS, "features_tell": 0.0, "weights": {"topic_taste": 0.9, "popular": 0.1},
    },
    "successors": {"weights": {"item_successor": 0.6, "popular": 0.4}, "num_successors": 4},
}  # fmt: skip


@cache
def dataset_of(name: str) -> Path:
    values = WORLDS[name]
    weights = MixtureWeights(**dict.fromkeys(MixtureWeights.model_fields, 0.0) | values["weights"])  # type: ignore[call-overload]
    world = World(
        WorldConfig(
            num_items=400, num_users=3_000, events_per_user=32, num_groups=40, num_brands=10, zipf_exponent=0.6,
            **values | {"weights": weights},
        )
    )  # fmt: skip
    out = Path(mkdtemp()) / "dataset"
    prepare_world(world, schema_of(world), out, SMALL, lambda *_: None)
    return out


@cache
def measured(name: str) -> Structure:
    return structure(Dataset.open(dataset_of(name)))


def value(name: str, statistic: str) -> float:
    return measured(name).statistics[statistic].value


def test_popularity_alone_leaves_nothing_to_gain() -> None:
    found = measured("popularity").statistics
    for name in ("pair/information", "history/gain@20", "rank/gain@8", "fields/gain"):
        assert abs(found[name].value) < 0.01, name
    assert 0.4 < found["popularity/zipf_slope"].value < 0.7
    # w ∝ (r + 1.4)^-0.6 over 400 items, worked out: the top four of them have 4.6% and 72% would be as many
    weights = (np.arange(400) + 1.4) ** -0.6
    weights /= weights.sum()
    assert found["popularity/top_1_percent"].value == pytest.approx(weights[:4].sum(), abs=0.003)
    effective = np.exp(-(weights @ np.log(weights))) / 400
    assert found["popularity/effective_items"].value == pytest.approx(effective, abs=0.02)


def test_the_rank_that_is_needed_follows_the_topics() -> None:
    few, many = measured("8 topics").statistics, measured("32 topics").statistics
    assert 2 < few["rank/needed"].value < 8 < many["rank/needed"].value < 32
    assert few["rank/gain@8"].value > 0.1
    assert few["history/beyond_last"].value > 4 * few["history/beyond_last"].se > 0


def test_fields_tell_what_they_show() -> None:
    assert value("8 topics", "fields/share") > 0.7
    assert value("8 topics that no field tells", "fields/share") < 0.1
    assert value("8 topics that no field tells", "fields/with_id_gain") > 0.1


def test_successors_are_information_of_pairs_of_a_high_rank() -> None:
    assert value("successors", "pair/information") > 0.8
    assert value("successors", "history/beyond_last") == 0.0
    assert value("successors", "rank/needed") > 40


def test_standard_errors_cover_other_users_of_the_same_world() -> None:
    dataset = Dataset.open(dataset_of("8 topics"))
    one, other = (structure(dataset, max_events=45_000, seed=seed) for seed in (1, 2))
    assert one.is_sample and one.users < 1_600 and not measured("8 topics").is_sample
    for name, found in one.statistics.items():
        error = np.hypot(found.se, other.statistics[name].se)
        assert abs(found.value - other.statistics[name].value) <= 5 * error + 0.01 * abs(found.value), name


def test_repeats_are_counted_by_the_lag_to_the_last_time(tmp_path: Path) -> None:
    # 0 1 1 0 2 0: five events have a history; lags 1 (the second 1), 3 (the second 0), 2 (the third 0)
    history = [0, 1, 1, 0, 2, 0]
    items = make_items(9)
    users = [f"u{user}" for user in range(40) for _ in history]
    events = {
        "user_id": users,
        "item_id": [items["item_id"][item] for _ in range(40) for item in history],
        "timestamp": [np.datetime64("2025-01-01") + np.timedelta64(n, "s") for n in range(len(users))],
        "event_type": ["view"] * len(users),
        "paid": [1.0] * len(users),
    }
    found = structure(prepared(tmp_path, events, items)).statistics
    assert found["repeats/all"].value == pytest.approx(3 / 5)
    assert found["repeats/lag<=1"].value == pytest.approx(1 / 5)
    assert found["repeats/lag<=5"].value == pytest.approx(2 / 5)
    assert found["repeats/lag<=20"].value == found["repeats/lag>100"].value == 0
    assert found["cold/events"].value == 0


def test_a_log_of_four_users_is_refused(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=4, num_items=20, events_per_user=6))
    prepare_world(world, schema_of(world), tmp_path / "d", SMALL, lambda *_: None)
    with pytest.raises(DataError, match="at least eight users"):
        structure(Dataset.open(tmp_path / "d"))


def test_the_command_prints_every_statistic() -> None:
    path = str(dataset_of("8 topics"))
    result = CliRunner().invoke(app, ["describe", path, "--structure", "--json"])
    assert json.loads(result.stdout) == json.loads(measured("8 topics").to_json())
    table = CliRunner().invoke(app, ["describe", path, "--structure"]).stdout
    assert "rank/needed" in table and "all users" in table
