"""A study keeps values per query of the cells that the test of sizes compares: the test pairs users by itself."""

import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from habitus.data import Dataset
from habitus.laws import MeasuredRun, fit, read_runs, select
from habitus.store import Law
from habitus.studies.paired_cells import cells_to_pair, keep_users, stated_seconds
from habitus.studies.progress import StudyMonitor
from habitus.studies.state import AxisCost, StatedSpeeds, StudyState
from habitus.sweeps import Preset, load_preset, preset_dataset, sweep

MICRO = Path(__file__).parent / "micro.toml"
RANKING = ("recall@10", "recall@100", "ndcg@10", "mrr@10")


def state_of(preset: Preset, dataset_checksum: str = "a" * 64) -> StudyState:
    speeds = StatedSpeeds(start=2.0, per_step=0.01, flops_per_second=1e10, again=0.1,
                          evaluate={"batch": 0.5, "catalogue": 3.0}, source="probes")  # fmt: skip
    cost = AxisCost(axis="allocation", budgets=(2e8,), runs=4, flops=8e8, seconds=10.0)
    return StudyState(dataset_checksum=dataset_checksum, request={}, preset=preset, axes=("allocation",), costs=(cost,),
                      probe_seconds=1.0, workers=1, speeds=speeds)  # fmt: skip


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset, StudyState]:
    """Four sizes at one budget, evaluated in both regimes."""
    folder, preset = tmp_path_factory.mktemp("paired"), load_preset(MICRO)
    dataset = preset_dataset(preset, folder / "dataset", seed=0, threads=1)
    sweep("allocation", dataset, folder / "store", budgets=[2e8], preset=preset, workers=1, device="cpu")
    return folder / "store", dataset, state_of(preset, dataset.checksum)


def size_test(store: Path, metric: str) -> Law:
    return fit(store, ["batch/loss", metric]).find("size_test", metric)


def test_users_are_paired_without_a_call_of_ones_own(swept: tuple[Path, Dataset, StudyState]) -> None:
    store, dataset, state = swept
    runs, notes = select(read_runs(store)).runs, list[str]()
    metric = next(m for m in (f"catalogue/{name}" for name in RANKING) if len(cells_to_pair(runs, m)) == 2)
    before = size_test(store, metric)
    assert not before.details["paired"]
    path = keep_users(store, state, metric, dataset, "cpu", notes.append)
    assert path is not None and len(notes) == 1
    after = size_test(store, metric)
    assert after.details["paired"]
    assert {n: after[n] for n in ("size_by_loss", "size_by_metric", "gain")} == {
        n: before[n] for n in ("size_by_loss", "size_by_metric", "gain")
    }
    # The queries are those of the Records: the kept values have their means.
    table = pq.read_table(path)
    for digest in cells_to_pair(runs, metric):
        ranks = [row["rank"] for row in table.to_pylist() if row["scorer"].endswith(digest)]
        recall = sum(rank <= 10 for rank in ranks) / len(ranks)
        (run,) = [run for run in runs if run.recipe_hash == digest]
        assert recall == pytest.approx(run.metrics["catalogue/recall@10"])
    # The same again evaluates nothing.
    changed = path.stat().st_mtime_ns
    assert keep_users(store, state, metric, dataset, "cpu", notes.append) == path
    assert path.stat().st_mtime_ns == changed and len(notes) == 1


def test_a_store_without_bundles_leaves_the_test_unpaired_and_says_so(
    swept: tuple[Path, Dataset, StudyState], tmp_path: Path
) -> None:
    store, dataset, state = swept
    copy, notes = tmp_path / "store", list[str]()
    shutil.copytree(store, copy, ignore=shutil.ignore_patterns("bundle", "evaluations"))
    runs = select(read_runs(copy)).runs
    metric = next(m for m in (f"catalogue/{name}" for name in RANKING) if len(cells_to_pair(runs, m)) == 2)
    assert keep_users(copy, state, metric, dataset, "cpu", notes.append) is None
    assert notes[-1].startswith("users are not paired in the test of sizes: ")


def cell(name: str, budget: float, loss: float, recall: float, seed: int = 0) -> MeasuredRun:
    metrics = {"batch/loss": loss, "catalogue/recall@10": recall}
    return MeasuredRun(
        "allocation", name, budget, 1e-3, seed, recipe_hash=f"{name}{seed}{budget:g}", metrics=metrics,
        knobs={"params": 1e5}, errors={"catalogue/recall@10": 0.01},
    )  # fmt: skip


def test_cells_are_compared_by_their_means_at_the_largest_budget() -> None:
    runs = [
        cell("a", 1e11, 1.0, 0.9),  # a smaller budget
        cell("b", 1e12, 3.0, 0.10), cell("b", 1e12, 4.0, 0.10, seed=1),  # mean loss 3.5
        cell("c", 1e12, 3.4, 0.11),
        cell("d", 1e12, 3.9, 0.12),
    ]  # fmt: skip
    assert cells_to_pair(runs, "catalogue/recall@10") == ["c01e+12", "d01e+12"]
    assert cells_to_pair(runs[:-1], "catalogue/recall@10") == ["c01e+12"]
    assert cells_to_pair([], "catalogue/recall@10") == []
    # The test asks only cells whose error over users is known, and so are the pairs.
    unknown = replace(cell("e", 1e12, 3.0, 0.99), errors={})
    assert cells_to_pair([*runs, unknown], "catalogue/recall@10") == ["c01e+12", "d01e+12"]


def test_the_plan_of_time_states_the_two_evaluations(tmp_path: Path) -> None:
    state = state_of(load_preset(MICRO))
    assert stated_seconds(state, "catalogue/recall@10") == 2 * (2.0 + 3.0)
    assert stated_seconds(state, "batch/ndcg@10") == 2 * (2.0 + 0.5)
    for metric in ("batch/loss", "catalogue/recall@10/history=5", "horizon7d/ndcg@10", "catalogue/coverage@10"):
        assert stated_seconds(state, metric) == 0
    notes: list[str] = []
    StudyMonitor(tmp_path, "catalogue/recall@10", None, notes.append).report_plan(state)
    assert "then 10 s to evaluate two cells again, user by user" in notes
