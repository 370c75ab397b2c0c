"""Items that the schema's [targets] leave out of the candidates are read in histories and never recommended."""

from pathlib import Path
from typing import Any

import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.evaluation import EvaluateOptions, catalogue_subset, query_set
from habitus.events import Schema
from habitus.model import save_bundle
from habitus.serving import RecommendRequest, Retriever

from .conftest import small_recipe, trained


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Users buy things 0 to 19 and get coupons 20 to 29, which are items of the same table."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder, draw = tmp_path_factory.mktemp("coupons"), np.random.default_rng(0)
    rows = [(user, int(draw.integers(30))) for user in range(40) for _ in range(10)]
    users, items = zip(*rows, strict=True)
    kinds = ["buy" if item < 20 else "coupon" for item in items]
    events = {"user": users, "item": items, "time": np.arange(len(rows)), "kind": kinds}
    pq.write_table(pa.table(events), folder / "events.parquet")
    sorts = ["thing"] * 20 + ["coupon"] * 10
    pq.write_table(
        pa.table({"item": np.arange(30), "number": np.arange(30.0), "sort": sorts}), folder / "items.parquet"
    )
    values: dict[str, Any] = {
        "events": {
            "user": "user", "item": "item", "timestamp": "time", "time_unit": "order", "fields": {"kind": "category"},
        },
        "items": {"item": "item", "fields": {"item": "category", "number": "number", "sort": "category"}},
        "targets": {"column": "kind", "weights": {"buy": 1.0}, "candidates": {"sort": ["thing"]}},
    }  # fmt: skip
    options = PrepareOptions(seq_len=16, validation_share=0.3, test_share=0, memory="256MiB", threads=1)
    tables = str(folder / "events.parquet"), str(folder / "items.parquet")
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options)
    return Dataset.open(folder / "dataset")


@pytest.fixture(scope="module")
def run(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that has learnt next to nothing, so that nothing but the schema keeps an item out."""
    folder = tmp_path_factory.mktemp("coupons") / "run"
    recipe = small_recipe(steps=1, seq_len=16, copying=True)
    save_bundle(trained(dataset, recipe), recipe, dataset, folder / "bundle")
    return folder


@pytest.mark.parametrize("exclude_seen", [False, True])
def test_coupons_are_read_and_not_recommended(dataset: Dataset, run: Path, exclude_seen: bool) -> None:
    retriever = Retriever.open(run, data=dataset.path, device="cpu")
    history = [{"item": 25, "kind": "coupon"}, {"item": 3, "kind": "buy"}, {"item": 26, "kind": "coupon"}]
    request = RecommendRequest(history=history, k=30, exclude_seen=exclude_seen)
    (answer,) = retriever.recommend([request])
    expected = set(range(20)) - ({3} if exclude_seen else set())
    assert answer.events_used == 3
    assert {item.item_id for item in answer.items} == expected
    assert sum(item.probability for item in answer.items) == pytest.approx(1, abs=0.2 if exclude_seen else 1e-4)


def test_a_coupon_that_is_added_at_run_time_is_read_and_not_recommended(
    dataset: Dataset, run: Path, tmp_path: Path
) -> None:
    retriever = Retriever.open(run, data=dataset.path, device="cpu", items=tmp_path / "items")
    retriever.put_item(101, {"number": 1.0, "sort": "coupon"})
    retriever.put_item(102, {"number": 1.0, "sort": "thing"})
    retriever.put_item(25, {"number": 2.0, "sort": "coupon"})  # one that training had
    history = [{"item": 101, "kind": "coupon"}, {"item": 3, "kind": "buy"}, {"item": 25, "kind": "coupon"}]
    for events in (history, []):
        (answer,) = retriever.recommend([RecommendRequest(history=events, k=40)])
        assert answer.events_used == len(events)
        assert {item.item_id for item in answer.items} == {*range(20), 102}
        assert sum(item.probability for item in answer.items) == pytest.approx(1, abs=1e-4)
    assert [retriever.item(item).recommended for item in (101, 102, 25)] == [False, True, False]
    retriever.put_item(101, {"number": 1.0, "sort": "thing"})
    (answer,) = retriever.recommend([RecommendRequest(history=history, k=40)])
    assert {item.item_id for item in answer.items} == {*range(20), 101, 102}
    assert retriever.num_items == 22
    retriever.close()


def test_evaluation_ranks_the_same_candidates(dataset: Dataset) -> None:
    options = EvaluateOptions(queries=50, cutoffs=(1,), histories=())
    found = catalogue_subset(dataset, query_set(dataset, options), options)
    assert found is not None and found.tolist() == list(range(20))
