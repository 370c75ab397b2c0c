"""Vectors and graphs that leave: the same numbers as inside."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from habitus.cli.app import app
from habitus.data import Dataset
from habitus.data.batch import ItemFeatures
from habitus.errors import ConfigError
from habitus.exporting.onnx import PaddedEmbedder
from habitus.exporting.vectors import export_items, export_users
from habitus.model import item_tensors
from habitus.model.bundle import load_bundle
from habitus.serving import RecommendRequest, Retriever

Log = dict[int, list[dict[str, Any]]]


def vectors_in(path: Path) -> tuple[list[Any], np.ndarray]:
    table = pq.read_table(path)
    flat = table["vector"].combine_chunks().flatten().to_numpy()
    return table.column(0).to_pylist(), flat.reshape(table.num_rows, -1)


def test_exported_items_score_as_the_retriever_does(
    run: Path, log: Log, items: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from habitus.exporting import vectors as export

    monkeypatch.setattr(export, "ROWS", 70)
    retriever = Retriever.open(run, device="cpu")
    retriever.put_item(500, {name: value for name, value in items[9].items() if name != "item_id"})
    retriever.delete_item(4)
    told: list[float] = []
    made = export_items(retriever, tmp_path / "items.parquet", progress=lambda _, share: told.append(share))
    assert made.rows == 300
    assert told[-1] == 1.0
    ids, vectors = vectors_in(tmp_path / "items.parquet")
    assert ids == [item for item in range(300) if item != 4] + [500]
    query = retriever.embed_histories([log[3]])[0]
    answer = {one.item_id: one.score for one in retriever.recommend([RecommendRequest(history=log[3], k=300)])[0].items}
    np.testing.assert_allclose(vectors @ query, [answer[item] for item in ids], atol=1e-5)
    with pytest.raises(ConfigError, match="exists already"):
        export_items(retriever, tmp_path / "items.parquet")


def test_exported_users_are_the_queries_of_their_histories(
    run: Path, dataset: Dataset, log: Log, items: list[dict[str, Any]], tmp_path: Path
) -> None:
    retriever = Retriever.open(run, device="cpu")
    retriever.put_item(log[0][-1]["item_id"], {name: value for name, value in items[9].items() if name != "item_id"})
    made = export_users(retriever, tmp_path / "users.parquet", data=dataset.path)
    assert made.rows == dataset.num_users
    ids, vectors = vectors_in(tmp_path / "users.parquet")
    for place in range(0, len(ids), 60):
        expected = retriever.embed_histories([log[ids[place]]])[0]
        np.testing.assert_allclose(vectors[place], expected, atol=2e-6)
    rows = [event for user in (3, 1, 2) for event in log[user]] + [{"user_id": 77, "item_id": 9999}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "log.parquet")
    some = export_users(retriever, tmp_path / "some.parquet", histories=str(tmp_path / "log.parquet"))
    assert (some.rows, some.left_out) == (3, 1)
    found, listed = vectors_in(tmp_path / "some.parquet")
    assert found == [1, 2, 3]
    by_id = dict(zip(ids, vectors, strict=True))
    np.testing.assert_allclose(listed, np.stack([by_id[user] for user in found]), atol=2e-6)
    with pytest.raises(ConfigError, match="without their histories"):
        export_users(retriever, tmp_path / "more.parquet")


def test_padded_text_is_packed_text(run: Path) -> None:
    model = load_bundle(run).model
    random = np.random.default_rng(0)
    fields = model.fields.item
    tokens = random.integers(1, fields[0].size, (50, 6))
    tokens[np.arange(6) >= random.integers(0, 7, 50)[:, None]] = 0
    values: dict[str, np.ndarray] = {}
    for field in fields[1:]:
        if field.kind == "category":
            values[field.name] = random.integers(0, field.size, 50).astype(np.int32)
        else:
            shape = (50, field.size) if field.kind == "vector" else (50,)
            values[field.name] = random.normal(size=shape).astype(np.float32)
            values[field.name][::7] = np.nan
    features = ItemFeatures(tokens.astype(np.int32), values)
    with torch.no_grad():
        packed = model.embed_items(item_tensors(features, model.recipe))
        inputs = [torch.from_numpy(tokens), *(torch.from_numpy(column) for column in values.values())]
        padded = PaddedEmbedder(model.embedder, fields)(*inputs)
    torch.testing.assert_close(padded, packed, atol=2e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["trained_run", "copying_run"])
def test_onnx_files_answer_as_the_model_does(
    which: str, request: pytest.FixtureRequest, tmp_path: Path, log: Log, items: list[dict[str, Any]]
) -> None:
    import onnxruntime

    run = Path(shutil.copytree(request.getfixturevalue(which), tmp_path / "run"))
    done = CliRunner().invoke(app, ["export", str(run), "--onnx", str(run / "onnx"), "--json"])
    assert done.exit_code == 0, done.output
    made = json.loads(done.stdout)
    assert all(off < 1e-4 for off in made["largest_difference"].values())
    retriever = Retriever.open(run, device="cpu")
    embedder = onnxruntime.InferenceSession(str(run / "onnx" / "embedder.onnx"))
    bundle = retriever.bundle
    columns = {name: [item[name] for item in items] for name in bundle.encoders.item_kinds}
    features = bundle.encoders.encode_items(pa.RecordBatch.from_pydict(columns), bundle.tokenizer)
    assert features.tokens is not None
    given = {"tokens": features.tokens.astype(np.int64)}
    for field in bundle.encoders.fields.item[1:]:
        kind = np.int64 if field.kind == "category" else np.float32
        given[f"field_{field.name}"] = features.fields[field.name].astype(kind)
    vectors = embedder.run(None, given)[0]
    np.testing.assert_allclose(vectors, retriever.embed_items(items), atol=1e-4)
    contextualizer = onnxruntime.InferenceSession(str(run / "onnx" / "contextualizer.onnx"))
    histories = [retriever.encode_history(log[user]) for user in range(20)]
    longest = max(len(history.rows) for history in histories)
    events = np.zeros((20, longest, 16), np.float32)
    inputs: dict[str, np.ndarray] = {
        "events": events,
        "lengths": np.array([len(history.rows) for history in histories], np.int64),
    }
    for field in bundle.encoders.fields.event:
        kind = np.int64 if field.kind == "category" else np.float32
        inputs[f"field_{field.name}"] = np.zeros((20, longest), kind)
    for place, history in enumerate(histories):
        length = len(history.rows)
        events[place, :length] = retriever.candidates.vectors(history.rows).numpy()
        for name, column in history.fields.items():
            inputs[f"field_{name}"][place, :length] = column
    queries, *said = contextualizer.run(None, inputs)
    expected = retriever.embed_histories([log[user] for user in range(20)])
    np.testing.assert_allclose(queries, expected, atol=1e-4)
    assert len(said) == (which == "copying_run")
    if said:  # an item's score, put together from the two graphs alone
        answer = retriever.recommend([RecommendRequest(history=log[4], k=1)])[0].items[0]
        rows = histories[4].rows
        added = np.exp(said[0][4][: len(rows)][rows == answer.item_id]).sum()
        plain = retriever.candidates.vectors(np.array([answer.item_id])).numpy()[0] @ queries[4]
        assert np.log(np.exp(plain) + added) == pytest.approx(answer.score, abs=1e-3)
    assert (run / "onnx" / "tokenizer.json").exists()


def test_the_command_exports_vectors(run: Path, dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "items.parquet"
    arguments = ["export", str(run), "--device", "cpu", "--out", str(out)]
    done = CliRunner().invoke(app, [*arguments, "--vectors", "items"])
    assert done.output == f"{out}: 300 vectors of width 16\n"
    users = [*arguments, "--vectors", "users", "--data", str(dataset.path), "--replace", "--json"]
    assert json.loads(CliRunner().invoke(app, users).stdout)["rows"] == dataset.num_users


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "neither --vectors nor --onnx"),
        (["--vectors", "items", "--onnx", "x"], "both"),
        (["--vectors", "events", "--out", "x.parquet"], "--vectors 'events'"),
        (["--vectors", "items"], "no --out"),
        (["--vectors", "items", "--out", "x.csv"], "no known suffix"),
        (["--vectors", "users", "--out", "x.parquet"], "without their histories"),
    ],
)
def test_the_command_refuses_in_words(
    run: Path, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["export", str(run), "--device", "cpu", *arguments])
    assert done.exit_code == 1
    assert message in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("copying", [False, True])
def test_a_model_without_text_or_event_fields_is_padded_too(
    recipe_of: Callable[..., Any], copying: bool, tmp_path: Path
) -> None:
    from habitus.data.fields import Field, Fields
    from habitus.exporting.onnx import _contextualizer_part, _embedder_part, _write
    from habitus.model import BehaviorModel

    fields = Fields(item=(Field(name="a b", kind="category", size=5), Field(name="a_b", kind="number")), event=())
    model = BehaviorModel(fields, recipe_of(copying=copying).model).eval()
    for part in (_embedder_part(model), _contextualizer_part(model, 64)):
        with torch.no_grad():
            inputs = list(part.inputs.values())
            found = part.module(*inputs)
            found = found if isinstance(found, tuple) else (found,)
            assert len(found) == len(part.outputs)
            torch.testing.assert_close(found, part.original(inputs), atol=2e-6, rtol=0)
    assert list(_embedder_part(model).inputs) == ["field_a_b", "field_a_b_"]
    assert _write(tmp_path / "contextualizer.onnx", _contextualizer_part(model, 64)) < 1e-4
