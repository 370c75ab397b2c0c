"""Items that training never saw: added at run time, they are recommended where their features fit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs
from habitus.evaluation.per_query import PerQuery
from habitus.events.schema import Schema
from habitus.events.world import World, WorldConfig
from habitus.events.world.writing import WORLD_SCHEMA, write_world
from habitus.model.bundle import save_bundle
from habitus.serving import RecommendRequest, Retriever

AMAZON = Path(__file__).parents[3] / "shared" / "data" / "amazon_purchases"
SCHEMAS = Path(__file__).parents[2] / "examples" / "schemas"


@pytest.mark.slow
def test_unseen_items_of_a_world_are_found_as_the_oracle_finds_them(
    tmp_path: Path, train: Callable[..., Any], recipe_of: Callable[..., Any]
) -> None:
    """A tenth of the items is kept from training, events and all; then it is added, by fields alone."""
    world = World(WorldConfig(num_users=2500, num_items=2000, events_per_user=30, num_groups=12, num_brands=40, seed=4))
    write_world(world, tmp_path / "world", threads=1, progress=lambda *_: None)
    events = pq.read_table(tmp_path / "world" / "events.parquet")
    items = pq.read_table(tmp_path / "world" / "items.parquet")
    held_out = set(range(0, 2000, 10))
    for name, table in (("events", events), ("items", items)):
        known = pc.invert(pc.is_in(table["item_id"], value_set=pa.array(sorted(held_out))))
        pq.write_table(table.filter(known), tmp_path / f"{name}.parquet")
    options = PrepareOptions(seq_len=64, text_len=6, vocabulary_size=800, validation_share=0.3, test_share=0, threads=1)
    prepare(
        str(tmp_path / "events.parquet"), str(tmp_path / "items.parquet"), WORLD_SCHEMA, tmp_path / "dataset", options
    )
    dataset = Dataset.open(tmp_path / "dataset")
    recipe = recipe_of(300)
    save_bundle(train(dataset, recipe), recipe, dataset, tmp_path / "run" / "bundle")
    retriever = Retriever.open(tmp_path / "run", data=dataset.path, device="cpu")
    assert retriever.num_items == 1800
    for item in items.to_pylist():
        if item["item_id"] in held_out:
            retriever.put_item(item["item_id"], item)
    assert retriever.num_items == 2000

    segments = dataset.windows("validation").segments
    users = set(dataset.user_ids().take(np.unique(segments["user"])).to_pylist())
    histories: dict[int, list[dict[str, Any]]] = {}
    for event in events.to_pylist():
        if event["user_id"] in users:
            histories.setdefault(event["user_id"], []).append(event)
    asked = [
        (user, place)
        for user, log in histories.items()
        for place in range(3, min(len(log), 60))
        # First-time targets: with copying alone an item's features would not matter.
        if log[place]["item_id"] in held_out and log[place]["item_id"] not in {e["item_id"] for e in log[:place]}
    ][:400]
    requests = [RecommendRequest(history=histories[user][:place], k=100) for user, place in asked]
    targets = [histories[user][place]["item_id"] for user, place in asked]
    ours = recall(retriever, requests, targets)
    best = []
    for (user, place), target in zip(asked, targets, strict=True):
        chances = world.oracle.conditional(np.array([event["item_id"] for event in histories[user][:place]]))
        best.append(int((chances >= chances[target]).sum()) <= 100)
    # The control: each of these items gets the fields of another of them.
    fields = {item["item_id"]: item for item in items.to_pylist()}
    for one, other in zip(sorted(held_out), np.roll(sorted(held_out), 7).tolist(), strict=True):
        retriever.put_item(one, {**fields[other], "item_id": one})
    control = recall(retriever, requests, targets)
    print(f"recall@100 of 2,000: unseen {ours:.3f}, with others' fields {control:.3f}, oracle {np.mean(best):.3f}")
    assert len(asked) == 400
    assert ours > 2 * 100 / 2000
    assert ours > 1.5 * control
    # The oracle knows how popular each unseen item is and what it succeeds, which no field tells.
    assert ours > 0.3 * np.mean(best)


def recall(retriever: Retriever, requests: list[RecommendRequest], targets: list[int]) -> float:
    """The share of requests whose target is among the first 100."""
    answers = retriever.recommend(requests)
    firsts = [[one.item_id for one in answer.items] for answer in answers]
    return float(np.mean([target in first for first, target in zip(firsts, targets, strict=True)]))


@pytest.mark.slow
@pytest.mark.skipif(not AMAZON.exists(), reason="the data set is not here")
def test_amazon_items_added_at_run_time_rank_as_the_cold_rows_of_the_evaluation(
    tmp_path: Path, train: Callable[..., Any], recipe_of: Callable[..., Any]
) -> None:
    events, items = pq.read_table(AMAZON / "events.parquet"), pq.read_table(AMAZON / "items.parquet")
    some = sorted(set(events["user_id"].to_pylist()))[::8]
    events = events.filter(pc.is_in(events["user_id"], value_set=pa.array(some, events["user_id"].type)))
    items = items.filter(pc.is_in(items["item_id"], value_set=events["item_id"].combine_chunks().unique()))
    pq.write_table(events, tmp_path / "events.parquet")
    pq.write_table(items, tmp_path / "items.parquet")
    schema = Schema.read(SCHEMAS / "amazon_purchases.toml")
    options = PrepareOptions(
        seq_len=64, text_len=8, vocabulary_size=2000, validation_share=0.3, test_share=0, threads=1
    )
    prepare(str(tmp_path / "events.parquet"), str(tmp_path / "items.parquet"), schema, tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    recipe = recipe_of(60)
    model = recipe.model.model_copy(update={"text_len": 8})
    recipe = recipe.model_copy(update={"model": model})
    run = tmp_path / "run"
    save_bundle(train(dataset, recipe), recipe, dataset, run / "bundle")
    kept: list[PerQuery] = []
    evaluated = EvaluateOptions(regimes=("catalogue",), queries=4000, cutoffs=(10, 100))
    found = evaluate_runs([run], dataset, evaluated, ComputeOptions(), keep=lambda _, __, values: kept.append(values))[
        0
    ]
    values = kept[0]
    users: list[str] = dataset.user_ids().to_pylist()
    logs: dict[str, list[dict[str, Any]]] = {}
    for event in events.drop_columns("event_type").sort_by([("timestamp", "ascending")]).to_pylist():
        logs.setdefault(event["user_id"], []).append(event)
    chosen, requests = [], []
    for query in np.flatnonzero(values.cold).tolist():
        user = int(np.searchsorted(dataset.user_offsets, values.event[query], "right")) - 1
        seen = int(values.event[query] - dataset.user_offsets[user]) + 1
        if seen == values.history[query]:
            chosen.append(query)
            requests.append(RecommendRequest(history=logs[users[user]][:seen], k=1000))
    chosen, requests = chosen[:300], requests[:300]
    ids = dataset.item_ids()["item_id"]
    raw = {item["item_id"]: item for item in items.to_pylist()}
    retriever = Retriever.open(run, data=dataset.path, device="cpu")
    # Withdrawn and added again from their raw fields, the cold targets have no part of the catalogue left.
    cold = sorted({ids[int(values.target[query])].as_py() for query in chosen})
    for item in cold:
        retriever.delete_item(item)
    without = retriever.recommend(requests[:5])
    assert all(one.item_id not in cold for answer in without for one in answer.items)
    for item in cold:
        retriever.put_item(item, raw[item])
    ours = []
    for query, answer in zip(chosen, retriever.recommend(requests), strict=True):
        ranked = [one.item_id for one in answer.items]
        target = ids[int(values.target[query])].as_py()
        ours.append(ranked.index(target) + 1 if target in ranked else 1001)
    theirs = np.minimum(values.rank[chosen], 1001)
    recalls = {k: (float((np.array(ours) <= k).mean()), float((theirs <= k).mean())) for k in (10, 100, 1000)}
    print(f"{len(chosen)} cold queries of {dataset.num_items:,} items: (run time, evaluation) {recalls}")
    print({name: metric.value for name, metric in found.metrics.items() if name.endswith("/cold")})
    assert len(chosen) >= 100
    # Ties aside (twins share a vector; evaluation counts them against the target), the ranks are the evaluation's.
    assert np.mean(np.array(ours) == theirs) > 0.9
    for run_time, evaluation in recalls.values():
        assert run_time == pytest.approx(evaluation, abs=0.02)
    assert recalls[1000][1] > 2 * 1000 / dataset.num_items
