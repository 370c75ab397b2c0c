"""What was measured of a store's cells after they had ended reaches its laws, and pairs their users."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from habitus.laws.paired_users import PairedUsers, clustered_error
from habitus.laws.runs import MeasuredRun
from habitus.laws.size_test import size_test
from habitus.record import EvaluationSpec, Metric
from habitus.store import StoreEvaluation, evaluation_path, read_evaluations
from tests.planning.planted import example_recipe, record_of

SPEC = EvaluationSpec(queries=10, query_set_checksum="q" * 64, batch_sequences=32, candidates=100)


def kept(name: str, spec: EvaluationSpec, recipe_hash: str) -> StoreEvaluation:
    metrics = {"batch/loss": Metric(value=1.0, n=10), "catalogue/recall@10": Metric(value=0.5, n=10)}
    return StoreEvaluation(
        name=name, dataset_checksum="a" * 64, specification={"batch": spec, "catalogue": spec},
        runs={recipe_hash: metrics},
    )  # fmt: skip


def test_metrics_keep_their_names_only_where_they_were_measured_alike(tmp_path: Path) -> None:
    record = record_of(example_recipe(), "a" * 64, evaluation=SPEC, metrics={"batch/loss": Metric(value=2.0, n=10)})
    alike = kept("late", SPEC, record.recipe_hash)
    assert set(alike.metrics_of(record)) == {"catalogue/recall@10"}  # the Record's own loss stays
    wide = kept("wide", SPEC.model_copy(update={"batch_sequences": 64, "candidates": 100}), record.recipe_hash)
    assert set(wide.metrics_of(record)) == {"batch/loss/eval=wide", "catalogue/recall@10"}
    few = kept("few", SPEC.model_copy(update={"candidates": 50}), record.recipe_hash)
    assert set(few.metrics_of(record)) == {"catalogue/recall@10/eval=few"}
    measured = {record.recipe_hash: {"horizon7d/ndcg@10": Metric(value=0.3, n=5)}}
    week = kept("week", SPEC, record.recipe_hash).model_copy(
        update={"specification": {"horizon7d": SPEC}, "runs": measured}
    )
    assert set(week.metrics_of(record)) == {"horizon7d/ndcg@10"}  # users and cut follow from the dataset
    later = week.model_copy(update={"specification": {"horizon7d": SPEC.model_copy(update={"side": "test"})}})
    assert set(later.metrics_of(record)) == {"horizon7d/ndcg@10/eval=week"}
    assert kept("late", SPEC, "b" * 64).metrics_of(record) == {}
    (tmp_path / "evaluations").mkdir()
    wide.write(evaluation_path(tmp_path, "wide"))
    assert read_evaluations(tmp_path) == [wide]


def test_an_error_over_users_counts_a_user_once() -> None:
    # Users 1 and 2 differ by 0.2 and 0.4 with two and one queries: mean 0.8/3, off by −0.1333 and +0.1333.
    difference, users = np.array([0.1, 0.3, 0.4]), np.array([1, 1, 2])
    off = 0.4 - 0.8 / 3
    assert clustered_error(difference, users) == pytest.approx(np.sqrt(2 * (2 * off**2)) / 3)
    assert clustered_error(difference, np.array([1, 1, 1])) is None


def test_paired_users_show_what_independent_errors_hide(tmp_path: Path) -> None:
    """Recall 0.50 and 0.54 on the same 200 users: apart within their errors, and never the other way round."""
    (tmp_path / "evaluations").mkdir()
    rank = {"a" * 64: np.where(np.arange(200) < 100, 1, 50), "b" * 64: np.where(np.arange(200) < 108, 1, 50)}
    tables = [
        pa.table({"scorer": [f"store/cells/{h}"] * 200, "regime": ["catalogue"] * 200, "user": np.arange(200),
                  "event": np.arange(200), "rank": ranks, "loss": np.ones(200)})
        for h, ranks in rank.items()
    ]  # fmt: skip
    pq.write_table(pa.concat_tables(tables), tmp_path / "evaluations" / "late.parquet")
    metric = "catalogue/recall@10"
    runs = [
        MeasuredRun("allocation", h[0], 1e13, 0.01, 0, recipe_hash=h, knobs={"params": size}, errors={metric: 0.035},
                    metrics={"batch/loss": loss, metric: float((rank[h] <= 10).mean())})
        for h, size, loss in (("a" * 64, 1e5, 3.9), ("b" * 64, 4e5, 4.0))
    ]  # fmt: skip
    apart, paired = size_test(runs, metric), size_test(runs, metric, paired=PairedUsers(tmp_path))
    assert apart is not None and apart.status == "flat"
    assert paired is not None and paired.ok and paired.details["paired"]
    # Eight users of 200 differ: mean 0.04, error √(0.04·0.96/199).
    assert PairedUsers(tmp_path).error("a" * 64, "b" * 64, metric) == pytest.approx(np.sqrt(0.04 * 0.96 / 199))
