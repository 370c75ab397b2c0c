"""A budget that outlasts its log: the plan stops where the log ends, and says so."""

from pathlib import Path

import pytest

from habitus.data import Dataset
from habitus.planning import PlanOptions, plan
from habitus.planning.facts import DatasetProfile, StoreFacts
from habitus.planning.repeats import dropout_quantity, flops_to_log_end, log_end_warning, most_passes, passes_quantity
from habitus.sizing import CellRequest, solve

METRIC = "catalogue/recall@10"


def test_ten_times_the_budget_beyond_the_log_gives_the_same_plan(laws_path: Path, small: Dataset) -> None:
    options = PlanOptions(laws=laws_path, dataset=small)
    rich, richer = plan(1e13, METRIC, options), plan(1e14, METRIC, options)
    assert rich.flops < 1e13
    assert richer.flops == pytest.approx(rich.flops, rel=0.3)  # to the nearest buildable model
    for made, asked in ((rich, "1e+13"), (richer, "1e+14")):
        assert any(w.startswith("the log ends at ") and f"the rest of {asked} FLOPs" in w for w in made.warnings)
        assert 8 / 1.6 < made["passes"].value < 8 * 1.6  # eight for so small a log, as near as a model can be built
        assert (made["dropout"].value, made["dropout"].source) == (0.3, "default")
        assert made.stage1.train.dropout == 0.3


def test_a_budget_that_the_log_outlasts_is_used_whole(laws_path: Path) -> None:
    cell = solve(CellRequest(flops=1e13, share=0.02, data_ratio=15, batch_sequences=8))
    long = DatasetProfile(train_slots=cell.slots_seen // 7)  # seven passes, and eight are the least that are allowed
    assert flops_to_log_end(1e13, long, lambda _total: cell) == 1e13
    passes = passes_quantity(cell, long, stopped=False)
    assert passes is not None and passes.value == pytest.approx(7)
    assert log_end_warning(1e13, 1e13, passes) == []
    once = passes_quantity(cell, DatasetProfile(train_slots=cell.slots_seen), stopped=False)
    assert dropout_quantity(once, StoreFacts()).value == 0
    assert "passes" not in plan(1e13, METRIC, PlanOptions(laws=laws_path)).quantities  # of no dataset in particular


def test_the_most_passes_follow_the_size_of_the_log() -> None:
    # Twice 20·(events / 800,000)^0.75: 40 at 800,000; at 100,000 2·20·(1/8)^0.75 = 8.41; 8 below.
    for events, most in ((800_000, 40.0), (100_000, 8.409), (1_000, 8.0), (10**9, 48.0)):
        assert most_passes(DatasetProfile(train_slots=events)) == pytest.approx(most, rel=1e-3)
