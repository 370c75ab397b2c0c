"""Serving a model that reads fields of its users: from the request, or from each event as the log has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.events import Schema, World, schema_of
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
