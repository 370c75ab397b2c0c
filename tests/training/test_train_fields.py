"""Training with a users table and items of several categories: what only they tell is learned, captured or not."""

from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.events import Schema
from habitus.training import TrainOptions, train
from habitus.training.device_batches import DeviceEvents, DeviceItems
from habitus.training.items import HostItems
from habitus.training.journal import read_journal

NUM_USERS, NUM_ITEMS = 900, 21


def prepared(folder: Path) -> Dataset:
    """Every user takes item 0, then one of the ten items of its side, which only the users table tells."""
    draw = np.random.default_rng(0)
    sides = draw.integers(0, 2, NUM_USERS)
    noon = datetime(2024, 5, 1, 12)
    events = {
        "user_id": np.repeat(np.arange(NUM_USERS), 2),
        "item_id": np.stack([np.zeros(NUM_USERS, int), 1 + 10 * sides + draw.integers(0, 10, NUM_USERS)], 1).ravel(),
        "timestamp": [noon + timedelta(minutes=minute) for _ in range(NUM_USERS) for minute in (0, 1)],
    }
    items = {"item_id": np.arange(NUM_ITEMS), "tags": [[f"t{n % 4}", f"s{n % 3}"][: n % 3] for n in range(NUM_ITEMS)]}
    items["number"] = [f"n{n}" for n in range(NUM_ITEMS)]
    users = {"user_id": np.arange(NUM_USERS), "side": [f"side {side}" for side in sides]}
    folder.mkdir()
    for name, table in (("events", events), ("items", items), ("users", users)):
        pq.write_table(pa.table(table), folder / f"{name}.parquet")
    values: dict[str, Any] = {
        "events": {"user": "user_id", "item": "item_id", "timestamp": "timestamp"},
        "items": {"item": "item_id", "fields": {"number": "category", "tags": "categories"}},
        "users": {"user": "user_id", "fields": {"side": "category"}},
    }
    options = PrepareOptions(seq_len=32, validation_share=0.2, test_share=0, threads=1)
    tables = f"{folder}/events.parquet", f"{folder}/items.parquet"
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options, users=f"{folder}/users.parquet")
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="module")
def with_users(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return prepared(tmp_path_factory.mktemp("users") / "log")


def test_what_only_the_users_table_tells_is_learned(
    with_users: Dataset, recipe_of: Callable[..., Any], tmp_path: Path
) -> None:
    recipe = recipe_of(steps=60, batch_sequences=4, learning_rate=2e-2, evaluate={"regimes": ["catalogue"]})
    record = train(recipe, with_users, tmp_path / "run", options=TrainOptions(device="cpu", threads=1))
    # Ten items are as likely as each other; without the table twenty would be.
    assert record.metrics["catalogue/loss"].value == pytest.approx(np.log(10), abs=0.3)


def test_a_device_holds_what_the_host_reads(with_users: Dataset, recipe_of: Callable[..., Any]) -> None:
    recipe, cpu = recipe_of(), torch.device("cpu")
    device, host = DeviceItems.of(with_users, recipe, cpu), HostItems(with_users, recipe, cpu)
    rows = np.array([5, 0, 2, 20])
    ours = device.read(torch.from_numpy(rows), torch.tensor(4), 0).fields["tags"]
    assert torch.equal(ours, host.tensors(rows, 0).fields["tags"])
    assert ours.shape == (4, 2)
    events = DeviceEvents(with_users, cpu)
    batch = events.assemble(torch.arange(3), device.lengths)
    expected = with_users.gather("train", np.arange(3)).fields["user.side"]
    np.testing.assert_array_equal(batch.fields[events.names.index("user.side")].numpy(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_read_users_and_several_categories(
    with_users: Dataset, recipe_of: Callable[..., Any], tmp_path: Path, compiled: bool
) -> None:
    recipe = recipe_of(optimizer="adamw", field_dropout=0.2)
    losses = {}
    for name, options in (
        ("captured", {"device": "cuda", "compile": compiled}),
        ("plain", {"device": "cuda", "capture": False}),
        ("cpu", {"device": "cpu"}),
    ):
        record = train(recipe, with_users, tmp_path / name, options=TrainOptions(**options))
        assert record.hardware["engine"] == ("captured" if name == "captured" else "eager")
        lines = read_journal(tmp_path / name / "journal.jsonl")
        losses[name] = torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)
    torch.testing.assert_close(losses["captured"], losses["plain"], rtol=5e-4, atol=0)
    torch.testing.assert_close(losses["captured"], losses["cpu"], rtol=2e-3, atol=0)
