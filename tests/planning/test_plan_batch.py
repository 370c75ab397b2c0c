"""Which batch: the best one at equal compute, for the metric that is served."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest

from habitus.laws import fit
from habitus.planning import PlanOptions, plan
from habitus.planning.fast_batch import choose_fastest
from habitus.sizing import StepSpeed
from habitus.store import Laws, Quantity, RunRow

from .planted import RATE, rows, valley

BUDGETS = (1e11, 1e12, 1e13)
METRICS = ("batch/loss", "catalogue/loss", "catalogue/recall@10")


def best_batch(budget: float, metric: str) -> float:
    """Planted: twice per decade, and for what is served twice that of the loss."""
    return (8 if metric == "batch/loss" else 16) * 2 ** math.log10(budget / 1e12)


def batch_rows(budgets: tuple[float, ...], spread: float = 1.0) -> list[dict[str, Any]]:
    found = []
    for budget in budgets:
        for k, batch in enumerate((2, 4, 8, 16, 32, 64, 128, 256)):
            noise = spread * 2e-4 * (-1) ** k
            loss = 4 + 2 * valley(batch, best_batch(budget, "batch/loss")) + noise
            served = 6 + 2 * valley(batch, best_batch(budget, "catalogue/loss")) + noise
            found.append(
                {
                    "axis": "batch_size", "cell_id": f"B={batch}", "flops_budget": budget, "seed": 0,
                    "train/loss": loss, "learning_rate": RATE * math.sqrt(batch / 512), "optimizer": "muon",
                    "batch_sequences": batch, "batch/loss": loss, "catalogue/loss": served,
                    "catalogue/recall@10": math.exp(-served / 2),
                }
            )  # fmt: skip
    return found


def fitted(folder: Path, more: list[dict[str, Any]]) -> Path:
    table = [{"catalogue/loss": 2 + row["batch/loss"], **row} for row in rows()] + more
    names = list(dict.fromkeys(key for row in table for key in row))
    with (folder / "runs.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="")
        writer.writeheader()
        writer.writerows(table)
    fit(folder / "runs.csv", METRICS).write(folder / "laws.json")
    return folder / "laws.json"


@pytest.fixture(scope="module")
def laws_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fitted(tmp_path_factory.mktemp("laws"), batch_rows(BUDGETS))


def test_optima_and_the_law_through_them_are_recovered(laws_path: Path) -> None:
    laws = Laws.read(laws_path)
    for metric in METRICS:
        for budget in BUDGETS:
            law = laws.find("batch_size_optimum", metric, budget)
            low, high = law.interval("x_opt")
            assert law.ok and low <= best_batch(budget, metric) <= high
        law = laws.find("batch_size_law", metric)
        assert law.ok and law["exponent"] == pytest.approx(math.log10(2), abs=0.03)
    # Steps against larger batches choose among more candidates: training losses rank nothing.
    assert not [e for e in laws.entries if e.axis == "batch_size" and e.metric.startswith("train/")]


@pytest.mark.parametrize(("metric", "expected"), [("batch/loss", 16), ("catalogue/recall@10", 32)])
def test_the_plan_takes_the_batch_of_the_metric_that_is_served(laws_path: Path, metric: str, expected: int) -> None:
    made = plan(1.25e13, metric, PlanOptions(laws=laws_path))  # 1e13 in stage 1
    B = made.quantities["batch_sequences"]
    assert B.value == expected == made.stage1.train.batch_sequences
    assert f"B* law at equal compute of {metric}" in B.how and B.source == "this study"
    assert B.low is not None and B.high is not None and B.low <= expected <= B.high


def test_one_optimum_goes_on_as_the_ladder(tmp_path: Path) -> None:
    made = plan(1.25e13, "catalogue/recall@10", PlanOptions(laws=fitted(tmp_path, batch_rows((1e12,)))))
    B = made.quantities["batch_sequences"]
    assert B.value == 32 and "carried on as C^0.30" in B.how  # 16 at 1e12, a tenth of the compute


def test_a_metric_that_only_wants_more_is_said_where_the_loss_decides(tmp_path: Path) -> None:
    more = [{**row, "catalogue/recall@10": 0.1 + 1e-3 * k} for k, row in enumerate(batch_rows((1e12,)))]
    B = plan(1.25e13, "catalogue/recall@10", PlanOptions(laws=fitted(tmp_path, more))).quantities["batch_sequences"]
    assert B.value == 32 and "of catalogue/loss" in B.how
    assert "catalogue/recall@10 by itself wants 256 or more at 1e+12, an end of what was tried" in B.how


def test_laws_of_runs_with_another_batch_forecast_nothing(laws_path: Path) -> None:
    """The sizes' runs have 16 windows: L*(C) holds for them alone."""
    same = plan(1.25e13, "batch/loss", PlanOptions(laws=laws_path))
    assert {p.metric for p in same.predictions} >= {"batch/loss"}
    other = plan(1.25e13, "catalogue/recall@10", PlanOptions(laws=laws_path))
    assert not [p for p in other.predictions if "L*(C)" in p.how or "L(N, D)" in p.how]
    assert any("of runs with another batch than the plan's 32" in warning for warning in other.warnings)


def test_the_fastest_of_batches_as_good_for_the_metric_is_carried_on_whatever_the_plan_had() -> None:
    recall = {8.0: 0.190, 16.0: 0.200, 32.0: 0.1995, 64.0: 0.195}

    def run(axis: str, batch: float, value: float) -> RunRow:
        knobs = {"batch_sequences": batch, "steps": 640 / batch, "flops_nominal": 6.4e8, "slots_seen": 640.0}
        return RunRow(
            axis=axis, budget=1e12, cell_id=f"B={batch}", learning_rate=1e-3, seed=0, init="default", chosen=True,
            knobs=knobs, metrics={"catalogue/recall@10": value, "batch/loss": 4.0},
        )  # fmt: skip

    runs = (run("allocation", 8, 0.19), *(run("batch_size", b, v) for b, v in recall.items()))
    laws = Laws(source="", seed=0, metrics=("catalogue/recall@10",), runs=runs)
    speeds = [StepSpeed(1, batch * 1e6, 1e9 * batch) for batch in recall]
    # 16 and 32 are as good, 32 is twice as fast: 64 at ten times the compute, also where the plan had the runs' own 8.
    for value in (64, 8):
        had = Quantity(value=value, source="default", how="B*", doubts=("the interval rests on 1 degree of freedom",))
        chosen = choose_fastest(had, laws, speeds, "catalogue/recall@10", 1e13)
        assert (chosen.source, chosen.doubts) == ("this study", ())  # nothing of what the plan had is left
        assert chosen.value == 64 and "of 16, 32, all within 0.5% of the best catalogue/recall@10" in chosen.how
        assert choose_fastest(had, laws, speeds, "catalogue/recall@10", 1e12).value == 32
