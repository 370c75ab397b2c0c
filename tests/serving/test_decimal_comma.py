"""A run of a log with decimal commas: histories, users and items are asked with as the log writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.errors import DataError
from habitus.events import Schema
from habitus.exporting import RecommendOptions, recommend_file
from habitus.model import BehaviorModel, embed_table, load_bundle, save_bundle
from habitus.recipe import Recipe
from habitus.serving import RecommendRequest, RequestError, Retriever
from habitus.serving.values import read_number

SCHEMA = {
    "events": {"user": "user", "item": "item", "timestamp": "time", "decimal": ",", "fields": {"paid": "number"}},
    "items": {"item": "item", "decimal": ",", "fields": {"title": "text", "price": "number"}},
    "users": {"user": "user", "decimal": ",", "fields": {"income": "number"}},
}


@pytest.fixture(scope="module")
def folder(recipe_of: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tables and the run of an untrained model: what it answers depends on all that it reads."""
    folder = tmp_path_factory.mktemp("commas")
    sales = [f"u{n % 8};a{n % 9};2025-03-{n % 28 + 1:02d};{n % 9},{n % 4}5" for n in range(160)]
    items = [f"a{n};shoe {n};{n}0,50" for n in range(1, 10)] + ["a0;shoe 0;1.000,50"]
    users = [f"u{n};{n}.000,50" for n in range(1, 9)] + ["u0;900,50"]
    for name, header, rows in (
        ("sales", "user;item;time;paid", sales),
        ("items", "item;title;price", items),
        ("users", "user;income", users),
    ):
        (folder / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    options = PrepareOptions(seq_len=16, text_len=6, vocabulary_size=300, test_share=0, threads=1)
    tables = f"{folder}/sales.csv", f"{folder}/items.csv"
    prepare(*tables, Schema.parse(SCHEMA, "test"), folder / "dataset", options, users=f"{folder}/users.csv")
    dataset = Dataset.open(folder / "dataset")
    recipe = recipe_of(seq_len=16)
    save_bundle(BehaviorModel(dataset.fields, recipe.model), recipe, dataset, folder / "run" / "bundle")
    return folder


@pytest.fixture(scope="module")
def retriever(folder: Path) -> Retriever:
    return Retriever.open(folder / "run", data=folder / "dataset", device="cpu")


def scores(retriever: Retriever, history: list[dict[str, Any]], **options: Any) -> dict[Any, float]:
    response = retriever.recommend([RecommendRequest(history=history, k=9, **options)])[0]
    return {one.item_id: one.score for one in response.items}


def test_a_request_may_write_numbers_as_json_or_as_the_log_does(retriever: Retriever) -> None:
    plain = scores(retriever, [{"item": "a1", "paid": 1012.5}], user={"income": 2500.0})
    assert scores(retriever, [{"item": "a1", "paid": "1.012,50"}], user={"income": "2.500,00"}) == plain
    assert scores(retriever, [{"item": "a1", "paid": 10.125}], user={"income": 2500.0}) != plain
    with pytest.raises(
        RequestError, match=r"history\[0\]\.paid is '12\.50'(.|\n)*a text with a decimal comma as 12,50"
    ):
        scores(retriever, [{"item": "a1", "paid": "12.50"}])


def test_files_of_histories_and_users_are_read_as_the_log(folder: Path, retriever: Retriever, tmp_path: Path) -> None:
    options = RecommendOptions(k=9, users=f"{folder}/users.csv")
    recommend_file(retriever, f"{folder}/sales.csv", tmp_path / "out.parquet", options)
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    answer = {row["item"]: row["score"] for row in rows if row["user"] == "u3"}
    events = [line.split(";") for line in (folder / "sales.csv").read_text().splitlines() if line.startswith("u3;")]
    history = [
        {"item": item, "time": time, "paid": float(paid.replace(",", ".")), "user.income": 3000.5}
        for _, item, time, paid in events
    ]
    assert answer == pytest.approx(scores(retriever, history), rel=1e-5)


def test_new_items_are_read_as_the_log_has_them(folder: Path, retriever: Retriever, tmp_path: Path) -> None:
    (by_point,) = retriever.embed_items([{"title": "shoe", "price": 1234.5}])
    (by_comma,) = retriever.embed_items([{"title": "shoe", "price": "1.234,50"}])
    assert by_comma.tolist() == by_point.tolist()
    bundle = load_bundle(folder / "run")
    (tmp_path / "new.csv").write_text("item;title;price\nnew;shoe;1.234,50\n")
    embed_table(bundle, str(tmp_path / "new.csv"), tmp_path / "new.parquet")
    (row,) = pq.read_table(tmp_path / "new.parquet").to_pylist()
    np.testing.assert_allclose(row["vector"], by_point, rtol=1e-6)
    (tmp_path / "odd.csv").write_text("item;title;price\nnew;shoe;1.250\n")
    with pytest.raises(DataError, match=r'odd\.csv row 1: "1\.250 \(without a decimal comma\)"'):
        embed_table(bundle, str(tmp_path / "odd.csv"), tmp_path / "odd.parquet")


@pytest.mark.parametrize(
    ("text", "number"), [("12,50", 12.5), (" -1.234,5 ", -1234.5), ("7", 7.0), (",5", 0.5), ("1,5e3", 1500.0)]
)
def test_numbers_with_a_comma_by_hand(text: str, number: float) -> None:
    assert read_number("paid", text, comma=True) == number
    assert np.isnan(read_number("paid", None, comma=True))


@pytest.mark.parametrize("text", ["12.50", "1.250", "1.2,5", "12,5,0", "", "abc", "nan", "1" * 120])
def test_what_is_no_number_with_a_comma_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="with a decimal comma as 12,50"):
        read_number("paid", text, comma=True)
