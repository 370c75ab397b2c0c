"""Questions about runs in Python: the answers of the commands of the same name."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import habitus as hb
from habitus.errors import ConfigError

RECIPE: dict[str, Any] = {
    "data": {"seq_len": 32},
    "model": {"joint_dim": 8, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 8},
    "train": {"batch_sequences": 8, "steps": 4, "learning_rate": 3e-3, "precision": "fp32"},
    "evaluate": {"queries": 100},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> hb.Run:
    """A run on the first part of a world's time."""
    folder = tmp_path_factory.mktemp("questions")
    shop = hb.world(folder / "shop", num_users=200, num_items=60, events_per_user=12, seq_len=32, split="time")
    return hb.train(RECIPE, shop, out=folder / "run", device="cpu")


def test_a_run_is_older_on_later_days(run: hb.Run) -> None:
    [table] = hb.age(run, run.dataset, metric="recall@10", days=[30, 2000], queries=500, device="cpu")
    assert (table.run, table.metric, table.trained_until) == (str(run.path), "recall@10", run.record.trained_until)
    assert {row.days for row in table.rows} <= {(0, 30), (30, 2000)}
    assert sum(row.mean.n for row in table.rows) > 100  # what tests is later than what trained


def test_a_recipe_is_shown_and_compared(run: hb.Run, tmp_path: Path) -> None:
    knobs = {knob.name: knob for knob in hb.show(run, device="cpu")}
    assert knobs["train.steps"].value == 4
    assert knobs["train.steps"].change is not None
    assert knobs["train.steps"].change.flops == 2
    hb.Recipe.parse({**RECIPE, "model": {**RECIPE["model"], "width": 32}}, "test").write(tmp_path / "wide.toml")
    compared = hb.diff(run, tmp_path / "wide.toml", dataset=None, device="cpu")
    assert [(one.name, one.first, one.second) for one in compared.knobs] == [("model.width", 16, 32)]


def test_users_are_exported_as_they_were(run: hb.Run, tmp_path: Path) -> None:
    user, time = run.dataset.user_ids()[0].as_py(), int(run.dataset.times[3])
    pq.write_table(pa.table({"user_id": [user], "time": pa.array([time], pa.timestamp("us"))}), tmp_path / "at.parquet")
    exported = pq.read_table(hb.export(run, tmp_path / "out.parquet", what="users", at=tmp_path / "at.parquet"))
    assert exported.column_names == ["user_id", "time", "mean_item_vector", "vector"]
    vectors = run.item_vectors()["vector"].to_pylist()
    expected = np.mean([vectors[item] for item in run.dataset.items[:3]], axis=0)  # three events come before
    np.testing.assert_allclose(exported["mean_item_vector"][0].as_py(), expected, atol=1e-6)


def test_an_unknown_option_of_a_probe_is_refused_with_the_nearest(run: hb.Run) -> None:
    with pytest.raises(ConfigError, match=r"'fold' is unknown .*folds"):
        hb.probe(run, run.dataset, label="churn:1d", fold=3)
