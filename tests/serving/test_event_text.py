"""A query typed now: served, it changes the answer as evaluation says; exported, it is an input of the graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import ConfigError
from habitus.events import Schema
from habitus.exporting.onnx import _contextualizer_part, export_onnx
from habitus.model import load_bundle
from habitus.recipe import Recipe
from habitus.serving import RecommendRequest, Retriever
from habitus.serving.schemas import RequestError
from habitus.serving.users import ValidationUsers
from habitus.training import TrainOptions, train

WORDS = ["apple", "bread", "cheese", "dates", "eggs", "figs", "grapes", "honey", "iceberg", "jam"]
SCHEMA = Schema.parse(
    {
        "events": {
            "user": "user_id",
            "item": "item_id",
            "timestamp": "position",
            "time_unit": "order",
            "no_item": "(search)",
            "fields": {"query": "text", "picture": "vector"},
        },
        "items": {"item": "item_id", "fields": {"title": "text"}},
        "targets": {"column": "kind", "weights": {"buy": 1.0}},
    },
    "test",
)


@pytest.fixture(scope="module")
def searches(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Every user buys something, searches for one of ten things, and buys it."""
    folder = tmp_path_factory.mktemp("searches")
    draw = np.random.default_rng(0)
    first, second = draw.integers(0, len(WORDS), (2, 600)).tolist()
    events: dict[str, list[Any]] = {
        "user_id": [user for user in range(600) for _ in range(3)],
        "position": [0, 1, 2] * 600,
        "kind": ["first", "search", "buy"] * 600,
        "item_id": [item for a, b in zip(first, second, strict=True) for item in (f"i{a}", None, f"i{b}")],
        "query": [text for b in second for text in (None, WORDS[b], None)],
        "picture": [None, [1.0, 0.0], None] * 600,
    }
    pq.write_table(pa.table(events), folder / "events.parquet")
    items = {"item_id": [f"i{n}" for n in range(len(WORDS))], "title": [f"fresh {word}" for word in WORDS]}
    pq.write_table(pa.table(items), folder / "items.parquet")
    options = PrepareOptions(seq_len=12, text_len=6, vocabulary_size=300, validation_share=0.2, test_share=0, threads=1)
    prepare(f"{folder}/events.parquet", f"{folder}/items.parquet", SCHEMA, folder / "dataset", options)
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="module", params=["own", "shared"])
def trained(request: pytest.FixtureRequest, searches: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run on the searches: its folder and its Record."""
    values: dict[str, Any] = {
        "data": {"seq_len": 12},
        "model": {"joint_dim": 16, "text_len": 4, "text_depth": 1, "width": 32, "depth": 1, "head_dim": 16},
        "train": {"batch_sequences": 8, "steps": 70, "learning_rate": 2e-2, "precision": "fp32"},
        "evaluate": {"regimes": ["catalogue"], "contexts": [1, 2]},
    }
    values["model"]["event_text"] = request.param
    folder = tmp_path_factory.mktemp("typed") / "run"
    return folder, train(Recipe.parse(values, "test"), searches, folder, options=TrainOptions(device="cpu", threads=1))


@pytest.fixture(scope="module")
def retriever(trained: Any, searches: Dataset) -> Retriever:
    return Retriever.open(trained[0], data=searches.path, device="cpu")


def best(retriever: Retriever, *histories: list[dict[str, Any]]) -> list[Any]:
    responses = retriever.recommend([RecommendRequest(history=history, k=1) for history in histories])
    return [response.items[0].item_id for response in responses]


def test_a_typed_query_is_answered_as_evaluation_says(trained: Any, retriever: Retriever, searches: Dataset) -> None:
    metrics = trained[1].metrics
    assert metrics["catalogue/loss"].value < 0.5  # without the texts it would be log 10 = 2.3
    users = ValidationUsers(searches)
    ids = users.find("", 1_000).users
    logged = [[one.event for one in users.history(str(user), retriever).events] for user in ids]
    assert all(search["query"] in WORDS for _, search, _ in logged)
    answers = best(retriever, *([first, search] for first, search, _ in logged))
    hits = np.mean([answer == buy["item_id"] for answer, (_, _, buy) in zip(answers, logged, strict=True)])
    assert len(answers) == metrics["catalogue/recall@1"].n
    assert hits == pytest.approx(metrics["catalogue/recall@1"].value, abs=1e-9)
    # The newest events alone, as many as `contexts` says: evaluation asks what serving answers.
    assert metrics["catalogue/loss/context=2"].value == pytest.approx(metrics["catalogue/loss"].value, rel=1e-4)
    alone = [RecommendRequest(history=[search], k=10) for _, search, _ in logged]
    ranks = [
        1 + [item.item_id for item in answer.items].index(buy["item_id"])
        for answer, (_, _, buy) in zip(retriever.recommend(alone), logged, strict=True)
    ]
    ndcg = np.mean(1 / np.log2(1 + np.array(ranks)))
    assert metrics["catalogue/ndcg@10/context=1"].value == pytest.approx(ndcg, abs=1e-6)
    # Something else is typed, and the event has no item.
    typed = [(WORDS.index(search["query"]) + 3) % len(WORDS) for _, search, _ in logged]
    asked = ([one[0], {"query": WORDS[word], "position": 1}] for one, word in zip(logged, typed, strict=True))
    others = [answer == f"i{word}" for answer, word in zip(best(retriever, *asked), typed, strict=True)]
    assert np.mean(others) == pytest.approx(hits, abs=0.05)


def test_windows_longer_than_any_history_hold_many_users(searches: Dataset, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "data": {"seq_len": 60},  # histories have three events
        "model": {"joint_dim": 16, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 16},
        "train": {"batch_sequences": 2, "steps": 2, "learning_rate": 1e-2, "precision": "fp32"},
        "evaluate": {"regimes": ["catalogue"]},
    }
    record = train(Recipe.parse(values, "test"), searches, tmp_path / "run", options=TrainOptions(device="cpu"))
    assert record.slots_seen == 2 * 2 * 60 and record.events_seen > 0.9 * record.slots_seen  # the last has room
    retriever = Retriever.open(tmp_path / "run", data=searches.path, device="cpu")
    assert retriever.window == 60
    assert record.metrics["catalogue/loss"].n == searches.counts("validation").queries
    values["data"]["seq_len"] = 1
    with pytest.raises(ConfigError, match=r"data\.seq_len"):
        Recipe.parse(values, "test")


def test_a_search_stands_among_pairs_of_item_and_type(tmp_path: Path) -> None:
    kinds = ["search", "view", "purchase", "view"] * 100
    events: dict[str, list[Any]] = {
        "user_id": [n // 10 for n in range(400)],
        "position": list(range(400)),
        "event_type": kinds,
        "item_id": [None if kind == "search" else n % 6 for n, kind in enumerate(kinds)],
        "query": ["shoes" if kind == "search" else None for kind in kinds],
    }
    pq.write_table(pa.table(events), tmp_path / "events.parquet")
    pq.write_table(pa.table({"item_id": list(range(6)), "title": WORDS[:6]}), tmp_path / "items.parquet")
    roles = {"user": "user_id", "item": ["item_id", "event_type"], "timestamp": "position", "time_unit": "order"}
    schema = Schema.parse(
        {
            "events": {**roles, "no_item": -1, "fields": {"query": "text"}},
            "items": {"item": "item_id", "fields": {"title": "text"}},
            "targets": {"column": "event_type", "weights": {"purchase": 1.0}},
        },
        "test",
    )
    options = PrepareOptions(seq_len=8, text_len=4, vocabulary_size=300, test_share=0, threads=1)
    prepare(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet", schema, tmp_path / "dataset", options)
    values: dict[str, Any] = {
        "data": {"seq_len": 8},
        "model": {"joint_dim": 16, "text_len": 4, "text_depth": 1, "width": 16, "depth": 1, "head_dim": 16},
        "train": {"batch_sequences": 4, "steps": 2, "learning_rate": 1e-2, "precision": "fp32"},
        "evaluate": {"regimes": ["catalogue"]},
    }
    dataset = Dataset.open(tmp_path / "dataset")
    train(Recipe.parse(values, "test"), dataset, tmp_path / "run", options=TrainOptions(device="cpu"))
    retriever = Retriever.open(tmp_path / "run", data=dataset.path, device="cpu")
    history = [{"item_id": 1, "event_type": "view"}, {"event_type": "search", "query": "words of today"}]
    (answer,) = retriever.recommend([RecommendRequest(history=history, k=20)])
    assert {item.item_id["item_id"] for item in answer.items} == {0, 2, 4}  # those that were bought
    assert {item.item_id["event_type"] for item in answer.items} == {"purchase"}
    with pytest.raises(RequestError, match=r"history\[1\]\.item_id, event_type is None"):
        retriever.recommend([RecommendRequest(history=[history[0], {"query": "shoes"}], k=1)])


def test_what_a_request_cannot_say_is_refused(retriever: Retriever) -> None:
    first = {"item_id": "i1"}
    for event, message in (
        ({"query": ["a"]}, r"history\[1\]\.query is \['a'\]"),
        ({"query": "a" * 2_000_000}, r"history\[1\]\.query has 2,000,000 characters"),
        ({"query": "\ud83d"}, "half of a surrogate pair"),
        ({"picture": [1.0]}, r"history\[1\]\.picture is a list of length 1"),
        ({"picture": [1.0, None]}, r"history\[1\]\.picture has a missing entry"),
        ({"querry": "a"}, "did you mean 'query'"),
    ):
        with pytest.raises(RequestError, match=message):
            retriever.recommend([RecommendRequest(history=[first, event], k=1)])
    assert best(retriever, [first, {"query": None}]) == best(retriever, [first, {"query": " \u3000\n"}])
    long = "grapes " + "and more of them " * 3_000  # the first tokens are read
    assert best(retriever, [first, {"query": long}]) == best(retriever, [first, {"query": long[:100]}])
    assert best(retriever, [first, {"query": "gra\u0000pes"}]) == best(retriever, [first, {"query": "gra pes"}])
    assert (
        len(retriever.recommend([RecommendRequest(history=[{"query": "figs"}], k=5)])[0].items) == 5
    )  # nothing before
    many_scripts = retriever.recommend([RecommendRequest(history=[first, {"query": "靴 حذاء наушники 👟"}], k=20)])[0]
    assert {one.item_id for one in many_scripts.items} == {f"i{n}" for n in range(10)}  # never the search itself


def test_the_padded_contextualizer_has_inputs_for_texts_and_vectors(retriever: Retriever) -> None:
    part = _contextualizer_part(load_bundle(retriever.bundle.path).model, 12)
    assert part.inputs["field_query"].shape[2:] == (4,)
    assert part.inputs["field_picture"].shape[2:] == (2,)
    inputs = list(part.inputs.values())
    with torch.no_grad():
        torch.testing.assert_close(part.module(*inputs), part.original(inputs), atol=2e-6, rtol=0)


@pytest.mark.slow
def test_the_exported_graph_answers_a_typed_query_as_the_server_does(retriever: Retriever, tmp_path: Path) -> None:
    import onnxruntime

    assert all(off < 1e-4 for off in export_onnx(retriever.bundle, tmp_path / "onnx").largest_difference.values())
    graph = onnxruntime.InferenceSession(str(tmp_path / "onnx" / "contextualizer.onnx"))
    events = [{"item_id": "i1"}, {"query": "grapes", "picture": [1.0, 0.0]}]
    history = retriever.encode_history(events)
    inputs = {
        "events": retriever.candidates.vectors(history.rows).numpy()[None],
        "lengths": np.array([2]),
        "field_query": history.fields["query"][None, :, :4].astype(np.int64),  # as many tokens as the model reads
        "field_picture": history.fields["picture"][None],
    }
    np.testing.assert_allclose(graph.run(None, inputs)[0], retriever.embed_histories([events]), atol=1e-4)


def test_a_device_holds_what_the_host_reads(searches: Dataset) -> None:
    from habitus.training.device_batches import DeviceEvents, text_capacity

    events = DeviceEvents(searches, torch.device("cpu"))
    batch = events.assemble(torch.arange(4), torch.zeros(searches.num_items, dtype=torch.int16))
    host = searches.gather("train", np.arange(4)).fields
    for name in ("query", "picture"):
        np.testing.assert_array_equal(batch.fields[events.names.index(name)].numpy(), host[name])
    capacity = text_capacity(searches, 4, text_len=4)
    assert capacity is not None
    texts = host["query"].reshape(-1, 4)
    assert len(np.unique(texts, axis=0)) <= capacity.texts <= 11
    assert np.count_nonzero(texts) <= capacity.tokens


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("event_text", ["own", "shared"])
@pytest.mark.parametrize("compiled", [False, True])
def test_captured_steps_read_texts_and_vectors(
    searches: Dataset, tmp_path: Path, event_text: str, compiled: bool
) -> None:
    from habitus.training.journal import read_journal

    values: dict[str, Any] = {
        "data": {"seq_len": 12},
        "model": {"joint_dim": 16, "text_len": 4, "text_depth": 1, "width": 32, "depth": 1, "head_dim": 16},
        "train": {"batch_sequences": 8, "steps": 20, "learning_rate": 3e-3, "optimizer": "adamw", "precision": "fp32"},
    }
    values["model"]["event_text"] = event_text
    recipe, losses = Recipe.parse(values, "test"), {}
    for name, options in (
        ("captured", {"device": "cuda", "compile": compiled}),
        ("plain", {"device": "cuda", "capture": False}),
        ("cpu", {"device": "cpu"}),
    ):
        record = train(recipe, searches, tmp_path / name, options=TrainOptions(**options))  # type: ignore[arg-type]
        assert record.hardware["engine"] == ("captured" if name == "captured" else "eager")
        lines = read_journal(tmp_path / name / "journal.jsonl")
        losses[name] = torch.tensor([line["loss"] for line in lines if "loss" in line], dtype=torch.float64)
    torch.testing.assert_close(losses["captured"], losses["plain"], rtol=5e-4, atol=0)
    torch.testing.assert_close(losses["captured"], losses["cpu"], rtol=2e-3, atol=0)
