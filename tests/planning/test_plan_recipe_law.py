"""What a plan forecasts where no axis by itself says what a run measures: one law over the runs of two axes."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from habitus.laws import MeasuredRun
from habitus.laws.study_recipe import fit_study_recipe
from habitus.planning.knobs import SourcedLaws
from habitus.planning.predict import PlannedRun, predict_metrics
from habitus.store import STUDY_RECIPE, Laws, NamedRollout, Prediction

LOSS = "batch/loss"


@pytest.fixture(scope="module")
def planted() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        return importlib.import_module("planted_recipes")


@pytest.fixture(scope="module")
def runs(planted: Any) -> list[MeasuredRun]:
    """Cells of a planted law, as if two axes had asked for them in turn."""
    rows, numbers = planted.planted_rows(0)
    losses = planted.planted_losses(planted.TRUTHS["scarcest decides"], rows, 0.004, 0)
    made = []
    for k, (row, number, loss) in enumerate(zip(rows, numbers, losses, strict=True)):
        rate = row["rate_at_512"] * math.sqrt(row["batch_sequences"] / 512)
        knobs = {**row, "flops_nominal": row["compute"], "text_depth": 4.0}
        axis = ("share", "allocation")[number % 2]
        made.append(MeasuredRun(axis, f"c{number}", row["compute"], rate, k, knobs=knobs, metrics={LOSS: loss}))
    return made


@pytest.fixture(scope="module")
def laws(runs: list[MeasuredRun]) -> Laws:
    fitted = fit_study_recipe(runs, LOSS)
    return Laws(source="x", seed=0, metrics=(LOSS,), entries=fitted.entries, rollouts=fitted.rollouts)


def predicted(laws: Laws, run: PlannedRun) -> tuple[Prediction | None, list[str]]:
    found, why_not = predict_metrics(run, 0.0, LOSS, [SourcedLaws(laws, "this study")], {})
    return next((p for p in found if p.metric == LOSS), None), why_not


def at_ten_times(row: dict[str, float]) -> PlannedRun:
    """A recipe of three times the size of some cell, on three times its data."""
    return PlannedRun(
        10 * row["compute"],
        3 * (row["embedder_params"] + row["contextualizer_params"]),
        3 * row["slots_seen"],
        None,
        3 * row["embedder_params"],
        row["batch_sequences"],
        256,
        row["rate_at_512"],
    )


def test_a_recipe_that_no_axis_ran_is_foreseen(planted: Any, runs: list[MeasuredRun], laws: Laws) -> None:
    best = min((run for run in runs if run.budget == 1e15), key=lambda run: run.metrics[LOSS])
    row = {name: best.knobs[name] for name in planted.planted_rows(0)[0][0]}
    run = at_ten_times(row)
    columns = {name: values[0] for name, values in run.knobs(run.slots).items()}
    assert columns["steps"] == pytest.approx(3 * row["steps"], rel=1e-3)
    truth = planted.TRUTHS["scarcest decides"].loss({**row, **columns})
    prediction, _ = predicted(laws, run)
    assert prediction is not None and prediction.low is not None and prediction.high is not None
    assert prediction.low < truth < prediction.high
    assert prediction.low < best.metrics[LOSS] and abs(prediction.value - truth) < 0.5 * (best.metrics[LOSS] - truth)
    assert prediction.how.startswith("one law of batch/loss over size, share, data, batch and rate")


def test_runs_with_another_schedule_or_text_depth_do_not_enter(runs: list[MeasuredRun], laws: Laws) -> None:
    def spoiled(run: MeasuredRun, axis: str, text_depth: float) -> MeasuredRun:
        knobs = {**run.knobs, "text_depth": text_depth}
        return MeasuredRun(axis, "x", run.budget, run.learning_rate, 0, knobs=knobs, metrics={LOSS: 99.0})

    others = [*(spoiled(run, "batch", 4.0) for run in runs[:9]), *(spoiled(run, "share", 1.0) for run in runs[:9])]
    (entry,) = fit_study_recipe([*runs, *others], LOSS).entries
    assert entry.name == STUDY_RECIPE and entry.law == laws.entries[0].law
    # Shares alone say nothing of how a metric moves with compute.
    assert not fit_study_recipe([run for run in runs if run.axis == "share"], LOSS).entries


def test_residuals_go_with_nothing_that_is_the_same_in_all_runs(planted: Any) -> None:
    """One batch at all budgets, as preset quick has it: the batch is not what a wrong form is blamed on."""
    rng, runs = np.random.default_rng(0), []
    for budget in (1e14, 2e14, 4e14):
        for size, share in rng.uniform((3e5, 0.03), (3e6, 0.5), (12, 2)):
            row = planted.cell(budget, size, share, 64.0)
            loss = planted.TRUTHS["small models starve"].loss(row) + 0.004 * rng.standard_normal()
            knobs = {**row, "flops_nominal": budget}
            name = f"{len(runs)}"
            runs.append(MeasuredRun("allocation", name, budget, 0.01, 0, knobs=knobs, metrics={LOSS: loss}))
    (entry,) = fit_study_recipe(runs, LOSS).entries
    assert entry.law.details["structure_of"] in ("embedder", "contextualizer", "data", "steps")
    spoiled = [replace(run, metrics={LOSS: run.metrics[LOSS] + (0.2 if k < 6 else 0.0)}) for k, run in enumerate(runs)]
    (entry,) = fit_study_recipe(spoiled, LOSS).entries
    assert entry.law.details["structure_of"] != "batch"


@pytest.mark.parametrize("missed", [1.4, None])
def test_a_law_that_foresaw_nothing_forecasts_nothing(laws: Laws, missed: float | None) -> None:
    """Roll-outs that miss by more than the last budget itself would have done, or none at all."""
    (known,) = laws.rollouts
    forecasts = []
    for f in known.rollout.forecasts if missed is not None else ():
        assert f.last is not None and missed is not None
        forecasts.append(f.model_copy(update={"predicted": f.observed - missed * (f.observed - f.last)}))
    rollout = known.rollout.model_copy(update={"forecasts": tuple(forecasts)})
    changed = laws.model_copy(
        update={"rollouts": (NamedRollout(**{**dict(known), "rollout": rollout}),) if forecasts else ()}
    )
    points = laws.entries[0].law.points
    row = {name: float(np.median(points[name])) for name in points}
    prediction, why_not = predicted(changed, at_ten_times(row))
    assert prediction is None
    assert why_not[0].startswith("batch/loss is not predicted: ")
