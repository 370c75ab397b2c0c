"""Queries only at targets, baselines that count them, by hand; and an oracle that knows of views."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset, PrepareOptions, prepare, prepare_world
from habitus.errors import ConfigError
from habitus.evaluation import EvaluateOptions, PerQuery, catalogue_subset, evaluate, query_set
from habitus.evaluation.baselines import OracleScorer, Popularity, RecentPopularity, Repeat, Transitions, baselines
from habitus.events import Schema, ViewQueries, World, WorldConfig, schema_of

OPTIONS = EvaluateOptions(regimes=("batch", "catalogue"), cutoffs=(1,), histories=(), batch_sequences=4)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The last event of each user validates: a buys item 1 after 0, 1, 2; b looks at 3; c buys 0 after 1, 3.

    Bought in training: 1 after 0 by a, 2 and then 0 by b, 3 after 1 by c. Item 4 is a coupon, which nobody buys.
    """
    folder = tmp_path_factory.mktemp("targets")
    rows = [
        ("a", 0, "view"), ("a", 1, "buy"), ("a", 2, "view"), ("a", 1, "buy"),
        ("b", 2, "buy"), ("b", 0, "buy"), ("b", 3, "view"),
        ("c", 1, "view"), ("c", 3, "buy"), ("c", 0, "buy"),
        ("d", 4, "view"), ("d", 4, "view"),
    ]  # fmt: skip
    users, items, kinds = zip(*rows, strict=True)
    pq.write_table(
        pa.table({"user": users, "item": items, "time": np.arange(len(rows)), "kind": kinds}), folder / "e.parquet"
    )
    pq.write_table(pa.table({"item": np.arange(5), "sort": ["thing"] * 4 + ["coupon"]}), folder / "i.parquet")
    values = {
        "events": {
            "user": "user", "item": "item", "timestamp": "time", "time_unit": "order", "fields": {"kind": "category"},
        },
        "items": {"item": "item", "fields": {"sort": "category"}},
        "targets": {"column": "kind", "weights": {"buy": 1.0}, "candidates": {"sort": ["thing"]}},
    }  # fmt: skip
    options = PrepareOptions(seq_len=8, split="last", test_share=0, memory="256MiB", threads=1)
    tables = str(folder / "e.parquet"), str(folder / "i.parquet")
    prepare(*tables, Schema.parse(values, "test"), folder / "dataset", options)
    return Dataset.open(folder / "dataset")


def losses(dataset: Dataset, scorer: Any, regime: str = "catalogue") -> dict[int, float]:
    """The loss of each target, which here are of different users."""
    found: dict[str, PerQuery] = {}
    evaluate(dataset, scorer, OPTIONS, keep=found.__setitem__)
    loss = found[regime].loss
    assert loss is not None
    return dict(zip(found[regime].target.tolist(), loss.tolist(), strict=True))


def test_queries_stand_before_targets_and_the_pool_holds_targets_only(dataset: Dataset) -> None:
    queries = query_set(dataset, OPTIONS)
    (batch,) = queries
    assert queries.num_queries == len(batch.targets) == dataset.counts("validation").queries == 2
    assert sorted(batch.targets.tolist()) == [0, 1] == batch.pool.tolist()
    by_target = {int(target): batch.visible(number).tolist() for number, target in enumerate(batch.targets)}
    assert by_target == {1: [0, 1, 2], 0: [1, 3]}
    found = catalogue_subset(dataset, queries, OPTIONS)
    assert found is not None and found.tolist() == [0, 1, 2, 3]


def test_baselines_count_targets_and_see_all_events(dataset: Dataset) -> None:
    assert dataset.item_target_counts.tolist() == [1, 1, 1, 1, 0]
    # Two of five for what was bought once, plus one: a quarter among the four candidates.
    for scorer in (Popularity(dataset), RecentPopularity(dataset)):
        assert set(losses(dataset, scorer)) == {0, 1}
    assert losses(dataset, Popularity(dataset)) == {n: pytest.approx(math.log(4)) for n in (0, 1)}
    # After 2, 0 was bought once; popularity, 2/9 each and 1/9 for the coupon, is worth five.
    shares = np.array([2, 2, 2, 2, 1]) / 9 * 5
    after_2, after_3 = shares + np.array([1, 0, 0, 0, 0]), shares
    expected = {1: after_2[1] / after_2[:4].sum(), 0: after_3[0] / after_3[:4].sum()}
    assert losses(dataset, Transitions(dataset)) == {n: pytest.approx(-math.log(p)) for n, p in expected.items()}
    # a has seen 0, 1 and 2, of which only 1 was bought: all of them count.
    repeat = 0.2 * np.array([2, 2, 2, 2, 1]) / 9
    weights = np.array([1 / 3, 1 / 2, 1.0, 0, 0]) * 0.8 / (1 / 3 + 1 / 2 + 1)
    chances = (repeat + weights)[:4] / (repeat + weights)[:4].sum()
    assert losses(dataset, Repeat(dataset))[1] == pytest.approx(-math.log(chances[1]))


def test_the_candidates_of_a_batch_are_its_targets(dataset: Dataset) -> None:
    assert losses(dataset, Popularity(dataset), "batch") == {n: pytest.approx(math.log(2)) for n in (0, 1)}


def test_the_days_after_a_cut_hold_targets_and_lists_hold_candidates(tmp_path: Path) -> None:
    """Each of 20 users gets a coupon and buys things 0 and 1 before the cut, then coupons and thing 2."""
    hours = [0, 1, 2, 100, 101, 103]
    items = [3, 0, 1, 3, 2, 3]
    events = {
        "user": np.repeat(np.arange(20), 6),
        "item": items * 20,
        "time": np.array([(hour * 3600 + user) * 1_000_000 for user in range(20) for hour in hours]).view(
            "datetime64[us]"
        ),
        "kind": ["view" if item == 3 else "buy" for item in items] * 20,
    }
    pq.write_table(pa.table(events), tmp_path / "e.parquet")
    pq.write_table(pa.table({"item": np.arange(4), "sort": ["thing"] * 3 + ["coupon"]}), tmp_path / "i.parquet")
    values = {
        "events": {"user": "user", "item": "item", "timestamp": "time", "fields": {"kind": "category"}},
        "items": {"item": "item", "fields": {"sort": "category"}},
        "targets": {"column": "kind", "weights": {"buy": 1.0}, "candidates": {"sort": ["thing"]}},
    }
    options = PrepareOptions(seq_len=8, split="time", validation_share=0.499, test_share=0, memory="256MiB", threads=1)
    tables = str(tmp_path / "e.parquet"), str(tmp_path / "i.parquet")
    prepare(*tables, Schema.parse(values, "test"), tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    asked = EvaluateOptions(regimes=(), horizons=("2h",), cutoffs=(2, 3), histories=())
    found: dict[str, Any] = {}
    result = evaluate(dataset, Popularity(dataset), asked, keep_users=found.__setitem__)
    (one,) = found.values()
    assert set(one.top.ravel().tolist()) == {0, 1, 2} and one.relevant.tolist() == [1] * 20
    regime = next(iter(found))
    assert result.metrics[f"{regime}/recall@2"].value == 0 and result.metrics[f"{regime}/recall@3"].value == 1
    assert result.specification[regime].candidates == 3


def test_the_oracle_of_a_world_with_views_answers_the_question_of_the_dataset(tmp_path: Path) -> None:
    world = World(
        WorldConfig(num_users=60, num_items=30, num_groups=3, num_brands=3, events_per_user=8, views_per_purchase=2.0)
    )
    options = PrepareOptions(seq_len=64, text_len=4, vocabulary_size=300, validation_share=0.4, test_share=0, threads=1)
    schema = schema_of(world)
    prepare_world(world, schema, tmp_path / "targets", options, lambda *_: None)
    prepare_world(world, schema.model_copy(update={"targets": None}), tmp_path / "all", options, lambda *_: None)
    assert world.view_oracle is not None
    means = {}
    for name, law in (("targets", world.view_oracle.next_purchase), ("all", world.view_oracle.next_event)):
        dataset = Dataset.open(tmp_path / name)
        found: dict[str, PerQuery] = {}
        evaluate(dataset, OracleScorer(dataset), OPTIONS, keep=found.__setitem__)
        values = found["catalogue"]
        bought = dataset.event_fields["event_type"] == dataset.encoders.event_values["event_type"].index("purchase") + 1
        asked = ViewQueries.of_events(dataset.items, bought, dataset.user_offsets[:-1], values.event + 1)
        chances = law(asked)[np.arange(len(values.target)), values.target]
        assert values.loss is not None
        np.testing.assert_allclose(values.loss, -np.log(chances), rtol=1e-9, atol=1e-12)
        means[name] = {scorer.name: _mean(dataset, scorer) for scorer in baselines(dataset)}
    for by_scorer in means.values():
        assert by_scorer["oracle"] == min(by_scorer.values())


def test_a_world_with_views_has_an_oracle_of_purchases_and_of_all_events_alone(tmp_path: Path) -> None:
    world = World(WorldConfig(num_users=40, num_items=30, events_per_user=8, views_per_purchase=2.0))
    options = PrepareOptions(seq_len=64, text_len=4, vocabulary_size=300, validation_share=0.4, test_share=0, threads=1)

    def prepared_with(name: str, targets: dict[str, Any] | None, *fields: str) -> Dataset:
        values = schema_of(world).to_values() | {"targets": targets}
        values["events"]["fields"] = dict.fromkeys(fields, "category")
        prepare_world(world, Schema.parse(values, "test"), tmp_path / name, options, lambda *_: None)
        return Dataset.open(tmp_path / name)

    bought = {"column": "event_type", "weights": {"purchase": 2.0}}
    with_type = prepared_with("with type", bought, "event_type")
    without = prepared_with("without", bought)  # the column of the targets need not be a field
    assert baselines(without)[-1].name == "oracle"
    assert _mean(without, OracleScorer(without)) == _mean(with_type, OracleScorer(with_type))
    for name, dataset in (
        ("viewed", prepared_with("viewed", {"column": "event_type", "weights": {"view": 1.0}}, "event_type")),
        ("untold", prepared_with("untold", None)),
    ):
        assert "oracle" not in [scorer.name for scorer in baselines(dataset)], name
        with pytest.raises(ConfigError, match="predicts neither purchases nor all events"):
            OracleScorer(dataset)


def _mean(dataset: Dataset, scorer: Any) -> float:
    return evaluate(dataset, scorer, OPTIONS).metrics["catalogue/loss"].value
