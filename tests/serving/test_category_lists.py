"""Items with several categories, served: filters on single values, new items with lists or texts, both ONNX forms."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.data.fields import Field, Fields
from habitus.events import Schema, World, schema_of
from habitus.exporting.onnx import _embedder_part, _write
from habitus.model import BehaviorModel, save_bundle
from habitus.recipe import Recipe
from habitus.serving import RecommendRequest, Retriever
from habitus.serving.schemas import RequestError

GENRES = [None, "drama", "comedy|drama", "crime", "comedy|crime|noir", ""]  # of item n: number n modulo 6


@pytest.fixture(scope="module")
def served(world: World, recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose items have genres, untrained; not to be written to."""
    folder = tmp_path_factory.mktemp("genres")
    table = pa.concat_tables(list(world.item_blocks()))
    genres = pa.array([GENRES[row % len(GENRES)] for row in range(table.num_rows)])
    pq.write_table(table.append_column("genres", genres), folder / "items.parquet")
    pq.write_table(pa.concat_tables(list(world.event_blocks())), folder / "events.parquet")
    values = schema_of(world).to_values()
    values["items"]["fields"]["genres"] = {"kind": "category", "separator": "|"}
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=400, threads=1)
    tables = f"{folder}/events.parquet", f"{folder}/items.parquet"
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options)
    dataset, recipe = Dataset.open(folder / "dataset"), recipe_of()
    save_bundle(BehaviorModel(dataset.fields, recipe.model), recipe, dataset, folder / "run" / "bundle")
    Retriever.open(folder / "run", data=dataset.path, device="cpu")
    return folder / "run"


def answers(retriever: Retriever, **options: Any) -> set[Any]:
    request = RecommendRequest(history=[{"item_id": 1}, {"item_id": 2}], k=310, **options)
    return {one.item_id for one in retriever.recommend([request])[0].items}


def items_with(*places: int) -> set[int]:
    return {row for row in range(300) if row % len(GENRES) in places}


def test_filters_look_at_single_values(served: Path) -> None:
    retriever = Retriever.open(served, device="cpu")
    assert answers(retriever, allow={"genres": ["drama"]}) == items_with(1, 2)
    assert answers(retriever, allow={"genres": ["noir", "drama"]}) == items_with(1, 2, 4)
    assert answers(retriever, deny={"genres": ["comedy", "crime"]}) == items_with(0, 1, 5)
    assert answers(retriever, allow={"genres": [None]}) == items_with(0, 5)
    assert answers(retriever, allow={"genres": ["drama|comedy"]}) == set()
    assert retriever.item(4).fields["genres"] == ["comedy", "crime", "noir"]
    assert "genres" not in retriever.item(0).fields


def test_new_items_come_with_lists_or_texts(served: Path, tmp_path: Path) -> None:
    retriever = Retriever.open(Path(shutil.copytree(served, tmp_path / "run")), device="cpu")
    given: dict[str, Any] = {"title": "Something new", "price": 3.5}
    retriever.put_item(5001, given | {"genres": " crime| drama"})
    retriever.put_item(5002, given | {"genres": ["drama", "crime", "drama", None]})
    retriever.put_item(5003, given | {"genres": "a genre of tomorrow"})
    retriever.put_item(5004, given | {"genres": []})
    for item in (5001, 5002):
        assert set(retriever.item(item).fields["genres"]) == {"crime", "drama"}
    assert answers(retriever, allow={"genres": ["crime"]}) == items_with(3, 4) | {5001, 5002}
    assert answers(retriever, allow={"genres": ["a genre of tomorrow"]}) == {5003}
    assert answers(retriever, allow={"genres": [None]}) == items_with(0, 5) | {5004}
    same, other, unknown, missing = retriever.embed_items(
        [{**given, "genres": genres} for genres in ("crime|drama", "drama", "a genre of tomorrow", None)]
    )
    again = retriever.embed_items([{**given, "genres": ["drama", "crime"]}])[0]
    np.testing.assert_allclose(again, same, atol=1e-6)  # their order does not count
    assert np.abs(other - same).max() > 1e-3
    np.testing.assert_array_equal(unknown, missing)
    with pytest.raises(RequestError, match=r"field 'genres'\[1\]"):
        retriever.put_item(5005, given | {"genres": ["drama", {"name": "crime"}]})


def model_with_lists(recipe_of: Callable[..., Recipe]) -> BehaviorModel:
    item = (Field(name="brand", kind="category", size=5), Field(name="genres", kind="categories", size=90, width=3))
    return BehaviorModel(Fields(item=item, event=()), recipe_of().model).eval()


def test_the_padded_embedder_reads_lists(recipe_of: Callable[..., Recipe]) -> None:
    part = _embedder_part(model_with_lists(recipe_of))
    inputs = list(part.inputs.values())
    assert part.inputs["field_genres"].shape == (7, 3)
    with torch.no_grad():
        torch.testing.assert_close((part.module(*inputs),), part.original(inputs), atol=2e-6, rtol=0)


@pytest.mark.slow
def test_the_embedder_with_lists_is_exported(recipe_of: Callable[..., Recipe], tmp_path: Path) -> None:
    assert _write(tmp_path / "embedder.onnx", _embedder_part(model_with_lists(recipe_of))) < 1e-4
