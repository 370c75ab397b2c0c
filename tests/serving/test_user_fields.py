"""Serving a model that reads fields of its users: from the request, or from each event as the log has them."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import DataError
from habitus.events import Schema, World, schema_of
from habitus.exporting import RecommendOptions, recommend_file
from habitus.exporting.onnx import _contextualizer_part
from habitus.model import BehaviorModel, load_bundle, save_bundle
from habitus.recipe import Recipe
from habitus.serving import RecommendRequest, Retriever
from habitus.serving.schemas import RequestError
from habitus.serving.users import ValidationUsers

HISTORY: list[dict[str, Any]] = [{"item_id": 1}, {"item_id": 2}, {"item_id": 3}]


@pytest.fixture(scope="module")
def user_dataset(world: World, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The world with a plan and an age of its users, some of whom have neither."""
    folder = tmp_path_factory.mktemp("user-fields")
    events = pa.concat_tables(list(world.event_blocks()))
    ids = sorted(set(events["user_id"].to_pylist()))[:800]
    rows = {"user_id": ids, "plan": [("free", "paid")[n % 2] for n in ids], "age": [20.0 + n % 50 for n in ids]}
    pq.write_table(events, folder / "events.parquet")
    pq.write_table(pa.concat_tables(list(world.item_blocks())), folder / "items.parquet")
    pq.write_table(pa.table(rows), folder / "users.parquet")
    values = schema_of(world).to_values()
    values["users"] = {"user": "user_id", "fields": {"plan": "category", "age": "number"}}
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, threads=1)
    tables = f"{folder}/events.parquet", f"{folder}/items.parquet"
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options, users=f"{folder}/users.parquet")
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="module")
def retriever(
    user_dataset: Dataset, recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory
) -> Retriever:
    """A run that is untrained: what it answers depends on all that it reads."""
    run = tmp_path_factory.mktemp("user-run") / "run"
    save_bundle(BehaviorModel(user_dataset.fields, recipe_of().model), recipe_of(), user_dataset, run / "bundle")
    return Retriever.open(run, data=user_dataset.path, device="cpu")


def scores(retriever: Retriever, history: list[dict[str, Any]], **options: Any) -> dict[Any, float]:
    response = retriever.recommend([RecommendRequest(history=history, k=300, **options)])[0]
    return {one.item_id: one.score for one in response.items}


def test_the_user_of_a_request_is_that_of_its_events(retriever: Retriever) -> None:
    known = scores(retriever, HISTORY, user={"plan": "paid", "age": 33})
    by_event = scores(retriever, [{**event, "user.plan": "paid", "user.age": 33.0} for event in HISTORY])
    assert known == by_event
    unknown = scores(retriever, HISTORY)
    assert max(abs(known[item] - unknown[item]) for item in known) > 1e-3
    assert scores(retriever, HISTORY, user={"plan": None}) == unknown
    # What an event says of its own time counts more than what is known now.
    own = [*HISTORY[:2], {**HISTORY[2], "user.plan": "free"}]
    assert scores(retriever, own, user={"plan": "paid", "age": 33}) == scores(
        retriever, HISTORY, user={"plan": "free", "age": 33}
    )


def test_fields_that_no_user_has_are_refused(retriever: Retriever, trained_run: Path) -> None:
    with pytest.raises(RequestError, match=r"user names 'plam'.*did you mean 'plan'"):
        scores(retriever, HISTORY, user={"plam": "paid"})
    with pytest.raises(RequestError, match=r"user\.age"):
        scores(retriever, HISTORY, user={"age": "old"})
    with pytest.raises(RequestError, match="knows no user fields"):
        scores(Retriever.open(trained_run, device="cpu"), HISTORY, user={"plan": "paid"})


def test_a_user_of_the_log_is_encoded_as_it_was_prepared(retriever: Retriever, user_dataset: Dataset) -> None:
    users = ValidationUsers(user_dataset)
    user = users.find("", 50).users[0]
    events = [one.event for one in users.history(str(user), retriever).events]
    encoded = retriever.encode_history(events)
    place = user_dataset.user_ids().to_pylist().index(user)
    start = int(user_dataset.user_offsets[place])
    for name in ("user.plan", "user.age"):
        stored = user_dataset.event_fields[name][start : start + len(events)]
        np.testing.assert_array_equal(encoded.fields[name], stored[-len(encoded.rows) :])


def test_the_padded_contextualizer_has_inputs_for_users(retriever: Retriever, user_dataset: Dataset) -> None:
    part = _contextualizer_part(load_bundle(retriever.bundle.path).model, 64)
    assert {"field_user_plan", "field_user_age"} <= set(part.inputs)
    inputs = list(part.inputs.values())
    with torch.no_grad():
        torch.testing.assert_close(part.module(*inputs), part.original(inputs), atol=2e-6, rtol=0)


@pytest.mark.parametrize("timed", [False, True], ids=["static", "timed"])
def test_a_file_of_histories_meets_its_users_table(
    retriever: Retriever, log: dict[int, list[dict[str, Any]]], tmp_path: Path, timed: bool
) -> None:
    users = [3, 5, 8]
    pq.write_table(pa.Table.from_pylist([event for user in users for event in log[user]]), tmp_path / "log.parquet")
    middle = {user: log[user][len(log[user]) // 2]["timestamp"] for user in users}
    rows = [{"user_id": 3, "plan": "paid", "age": 33.0}, {"user_id": 8, "plan": "free", "age": 60.0}]
    rows += [{"user_id": 99, "plan": "free", "age": 1.0}]  # of nobody
    if timed:  # only from the middle of each history on, and something else after its end
        end = max(event["timestamp"] for user in users for event in log[user])
        rows = [{**row, "since": middle.get(int(row["user_id"]), end)} for row in rows]
        rows += [{"user_id": 3, "plan": "free", "age": 99.0, "since": end + timedelta(days=1)}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "users.parquet")
    schema = retriever.bundle.schema
    assert schema.users is not None
    roles = schema.users.model_copy(update={"timestamp": "since" if timed else None})
    bundle = replace(retriever.bundle, schema=schema.model_copy(update={"users": roles}))
    served = copy(retriever)
    served.bundle = bundle
    options = RecommendOptions(k=5, users=f"{tmp_path}/users.parquet")
    recommend_file(served, f"{tmp_path}/log.parquet", tmp_path / "out.parquet", options)
    answers = pq.read_table(tmp_path / "out.parquet").to_pylist()
    for user in users:
        fields = {"user.plan": "paid" if user == 3 else "free", "user.age": 33.0 if user == 3 else 60.0}
        known = [
            {**event, **(fields if user != 5 and (not timed or event["timestamp"] >= middle[user]) else {})}
            for event in log[user]
        ]
        expected = retriever.recommend([RecommendRequest(history=known, k=5)])[0].items
        got = [(row["item_id"], row["score"]) for row in answers if row["user_id"] == user]
        assert [item for item, _ in got] == [one.item_id for one in expected]
        np.testing.assert_allclose([score for _, score in got], [one.score for one in expected], rtol=1e-6)
    with pytest.raises(DataError, match="stand twice"):
        pq.write_table(pa.Table.from_pylist(rows + rows), tmp_path / "users.parquet")
        recommend_file(served, f"{tmp_path}/log.parquet", tmp_path / "again.parquet", options)


@pytest.mark.parametrize(
    ("since", "message"),
    [
        ([datetime(2024, 1, 1), None], "1 rows of .* have no 'since' that can be read"),
        (["2024-01-01", "some day"], "1 rows of .* have no 'since' that can be read"),
        ([1_704_067_200, 1_704_067_201], "column 'since' of .* has type int64"),
    ],
    ids=["missing", "no time", "seconds"],
)
def test_rows_of_users_whose_times_cannot_be_read_are_refused(
    retriever: Retriever, log: dict[int, list[dict[str, Any]]], tmp_path: Path, since: list[Any], message: str
) -> None:
    pq.write_table(pa.Table.from_pylist(log[3]), tmp_path / "log.parquet")
    rows = {"user_id": [3, 3], "plan": ["paid", "free"], "age": [33.0, 34.0], "since": since}
    pq.write_table(pa.table(rows), tmp_path / "users.parquet")
    schema = retriever.bundle.schema
    assert schema.users is not None
    roles = schema.users.model_copy(update={"timestamp": "since"})
    served = copy(retriever)
    served.bundle = replace(retriever.bundle, schema=schema.model_copy(update={"users": roles}))
    options = RecommendOptions(k=5, users=f"{tmp_path}/users.parquet")
    with pytest.raises(DataError, match=message):
        recommend_file(served, f"{tmp_path}/log.parquet", tmp_path / "out.parquet", options)
    assert not (tmp_path / "out.parquet").exists()
