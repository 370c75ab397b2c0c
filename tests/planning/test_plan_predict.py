"""What a plan expects after stage 2: stage 1's law and the measured gains over the parents, worked by hand."""

import math
from pathlib import Path

import pytest

from habitus.laws import power_law, saturating
from habitus.planning import PlanOptions, plan
from habitus.planning.facts import ParentMetrics
from habitus.planning.predict import PlannedRun, predict_metrics
from habitus.planning.sources import SourcedLaws
from habitus.store import LawEntry, Laws, Prediction, RunRow

METRIC = "catalogue/recall@10"
BUDGETS = [1e11, 3e11, 1e12, 3e12, 1e13]


def run(budget: float, K: float, value: float, chosen: bool = True, seed: int = 0) -> RunRow:
    return RunRow(
        axis="negatives", budget=budget, cell_id=f"k{K}", learning_rate=0.01, seed=seed, init="", chosen=chosen,
        knobs={"num_negatives": K}, metrics={METRIC: value},
    )  # fmt: skip


def predicted(
    runs: list[RunRow], parents: dict[float, float], share: float, batches: tuple[int, int] = (0, 0)
) -> tuple[list[Prediction], list[str]]:
    """For 1e13 FLOPs of stage 1; parents had the budget of the stage-2 runs that continue them.

    `batches` are windows per step, of the parents and of the plan.
    """
    law = saturating(BUDGETS, [0.5 - 40 * C**-0.2 for C in BUDGETS], direction="max")
    sizes = power_law(BUDGETS, [C**0.5 for C in BUDGETS])
    entries = tuple(
        LawEntry(name=name, metric=METRIC, axis="allocation", law=one)
        for name, one in (("loss_law", law), ("size_law", sizes))
    )
    laws = SourcedLaws(Laws(source="x", seed=0, metrics=(METRIC,), entries=entries, runs=tuple(runs)), "this study")
    known = {
        (r.budget, r.knobs["num_negatives"], 0.01, r.seed): ParentMetrics(
            r.budget, {METRIC: parents[r.budget]}, batches[0]
        )
        for r in runs
    }
    planned = PlannedRun(1e13, 10**6.5, 10**6.5, batch_sequences=batches[1])
    found, why_not = predict_metrics(planned, share * 1e13, METRIC, [laws], known)
    return [p for p in found if p.metric == METRIC], [line for line in why_not if line.startswith(METRIC)]


RUNS = [
    run(1e11, 0, 0.20), run(1e11, 100, 0.26), run(1e11, 200, 0.4, chosen=False),
    run(1e12, 0, 0.34), run(1e12, 100, 0.33),
]  # fmt: skip
PARENTS = {1e11: 0.25, 1e12: 0.31}


def test_stage_two_is_stage_ones_law_and_the_gain_over_the_parent() -> None:
    (first, second), why_not = predicted(RUNS, PARENTS, share=1.0)
    assert why_not == []
    # Gains of the best chosen K: 0.26 − 0.25 and 0.34 − 0.31, mean 0.02, deviation √2/100.
    assert second.value == pytest.approx(first.value + 0.02)
    # One more gain: t(1) = 12.706 times √2/100 times √(1 + 1/2), beside stage 1's own error.
    half = 12.7062 * math.sqrt(2) / 100 * math.sqrt(1.5)
    assert first.low is not None and second.low is not None
    assert second.low == pytest.approx(second.value - math.hypot(first.value - first.low, half), rel=1e-4)
    assert "+0.01 to +0.03; stage 2 had 1 times its parent's compute there, 1 times here" in second.how


def test_a_lucky_seed_of_another_number_of_negatives_is_no_gain() -> None:
    lucky = [run(1e11, 400, 0.32), run(1e11, 400, 0.19, seed=1), run(1e11, 100, 0.26, seed=1)]
    (first, second), _ = predicted([*RUNS, *lucky], PARENTS, share=1.0)
    assert second.value == pytest.approx(first.value + 0.02)  # K = 100 gains 0.01 by both seeds; 0.07 by one of 400


def test_a_stage_two_with_less_compute_may_gain_nothing() -> None:
    steady = [run(budget, 0, value) for budget, value in ((1e11, 0.27), (1e12, 0.33))]  # two gains of 0.02
    (first, same), _ = predicted(steady, PARENTS, share=1.0)
    (_, less), _ = predicted(steady, PARENTS, share=0.25)
    assert first.low is not None and same.low is not None and less.low is not None
    assert same.low == pytest.approx(first.low + 0.02)
    assert less.low == pytest.approx(less.value - math.hypot(first.value - first.low, 0.02))
    assert less.value == pytest.approx(same.value)


@pytest.mark.parametrize(("batch", "is_predicted"), [(8, True), (11, True), (16, False), (4, False)])
def test_gains_over_parents_of_another_batch_say_nothing(batch: int, is_predicted: bool) -> None:
    found, why_not = predicted(RUNS, PARENTS, share=0.25, batches=(8, batch))
    assert [p.stage for p in found] == [1, 2][: 1 + is_predicted]
    why = f"on parents of 8 windows per step, and the plan's has {batch}"
    told = f"{METRIC} after stage 2 is not predicted: what stage 2 adds to its parent is measured {why}"
    assert why_not == ([] if is_predicted else [told])


def test_one_gain_has_no_interval_and_is_not_printed(laws_path: Path) -> None:
    found, why_not = predicted(RUNS[:2], PARENTS, share=0.25)
    assert [p.stage for p in found] == [1]
    told = "after stage 2 is not predicted: what stage 2 adds to its parent is measured at"
    assert why_not == [f"{METRIC} {told} one budget, which gives it no interval"]
    # A laws.json without its store knows no parents.
    made = plan(1e13, METRIC, PlanOptions(laws=laws_path))
    assert f"{METRIC} {told} no budget" in made.warnings
    assert {p.stage for p in made.predictions} == {1}
