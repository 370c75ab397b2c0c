"""What a plan forecasts where no axis by itself says what a run measures: one law over the runs of two axes."""

import importlib
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from habitus.laws import MeasuredRun, predict_recipe
from habitus.laws.law_builders import law_without_values
from habitus.laws.study_recipe import fit_study_recipe, study_cells
from habitus.planning.predict import PlannedRun, predict_metrics
from habitus.planning.sources import SourcedLaws
from habitus.store import STUDY_RECIPE, LawEntry, Laws, NamedRollout, Prediction, RunRow

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
    rows = tuple(RunRow(axis=r.axis, budget=r.budget, cell_id=r.cell_id, learning_rate=r.learning_rate, seed=r.seed,
                        init="", chosen=True, knobs=dict(r.knobs), metrics=dict(r.metrics)) for r in runs)  # fmt: skip
    return Laws(source="x", seed=0, metrics=(LOSS,), entries=fitted.entries, rollouts=fitted.rollouts, runs=rows)


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


def with_rollouts(laws: Laws, missed: float | None) -> Laws:
    """The laws with roll-outs that missed so much of each gain, by promising too little; without any for None."""
    (known,) = laws.rollouts
    forecasts = []
    for f in known.rollout.forecasts if missed is not None else ():
        assert f.last is not None and missed is not None
        forecasts.append(f.model_copy(update={"predicted": f.observed - missed * (f.observed - f.last)}))
    rollout = known.rollout.model_copy(update={"forecasts": tuple(forecasts)})
    return laws.model_copy(
        update={"rollouts": (NamedRollout(**{**dict(known), "rollout": rollout}),) if forecasts else ()}
    )


def typical(laws: Laws) -> dict[str, float]:
    points = laws.entries[0].law.points
    return {name: float(np.median(points[name])) for name in points}


@pytest.mark.parametrize("missed", [1.4, None])
def test_a_law_that_foresaw_nothing_forecasts_nothing(laws: Laws, missed: float | None) -> None:
    """Roll-outs that miss by more than the last budget itself would have done, or none at all."""
    prediction, why_not = predicted(with_rollouts(laws, missed), at_ten_times(typical(laws)))
    assert prediction is None
    assert why_not[0].startswith("batch/loss is not predicted: ")


@pytest.mark.parametrize(
    ("missed", "share"),
    [
        (0.0, 0.15),  # right by luck: there is one roll-out
        (0.7, 0.7 / 0.3),  # three tenths of the gain were promised, so that seven thirds of the promise came on top
        (-0.5, 0.5 / 1.5),  # one and a half times the gain was promised
    ],
)
def test_the_interval_holds_twice_what_roll_outs_missed_of_their_promise(
    laws: Laws, missed: float, share: float
) -> None:
    run = at_ten_times(typical(laws))
    told, _ = predicted(with_rollouts(laws, missed), run)
    own = predict_recipe(laws.entries[0].law, run.knobs(run.slots))
    best = min(r.metrics[LOSS] for r in laws.runs if r.axis == "allocation" and r.budget == 1e15)
    assert told is not None and told.low is not None and told.high is not None
    value, low, high = (float(column[0]) for column in own)
    miss = 2 * share * abs(value - best)
    assert told.value == pytest.approx(value)
    assert told.low == pytest.approx(value - math.hypot(value - low, miss))
    assert told.high == pytest.approx(value + math.hypot(high - value, miss))
    assert f"missed {abs(missed):.0%} of the gain, and the interval holds twice {share:.0%}" in told.how


def test_what_one_pass_would_give_is_as_uncertain_as_any_forecast(laws: Laws) -> None:
    """One pass and a half: the interval reaches to what two thirds of the slots would give, with roll-outs' misses."""
    missing = with_rollouts(laws, -0.5)
    run = at_ten_times(typical(laws))
    once, _ = predicted(missing, replace(run, slots=run.slots / 1.5))
    told, _ = predicted(missing, replace(run, one_pass=run.slots / 1.5))
    assert once is not None and told is not None and once.high is not None and told.high is not None
    assert told.high >= once.high > told.value and "1.5 passes" in told.how


def test_windows_of_another_length_are_counted_as_the_laws_count_them() -> None:
    """16 windows of 1,024 events in a plan are 64 of the study's 256, and so are their rate and steps."""
    long = SimpleNamespace(params=9e5, slots_seen=1e7, embedder_params=1e5, batch_sequences=16, seq_len=1024)
    usual = SimpleNamespace(**{**vars(long), "batch_sequences": 64, "seq_len": 256})
    of_long: Any = PlannedRun.of(1e14, cast(Any, long), 0.01, None, batch_scale=256 / 1024)
    assert of_long == PlannedRun.of(1e14, cast(Any, usual), 0.01, None)


def test_runs_of_one_batch_do_not_tell_another(planted: Any) -> None:
    """As preset quick has it: what a batch costs cannot be told from the floor, nor data from steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        forecasts = importlib.import_module("study_forecasts")
    runs = forecasts.study(planted.TRUTHS["parts add"], np.random.default_rng(1))
    fitted = fit_study_recipe(runs, LOSS)
    height = LawEntry(
        name="loss_law", axis="allocation", metric=LOSS, law=law_without_values("saturating", "", "too_few", 0, "")
    )
    laws = Laws(source="x", seed=0, metrics=(LOSS,), entries=(*fitted.entries, height), rollouts=fitted.rollouts)

    def told(batch: float) -> tuple[Prediction | None, list[str]]:
        row = planted.cell(3e15, 3e6, 0.15, batch)
        p_e, p = row["embedder_params"], row["contextualizer_params"]
        run = PlannedRun(3e15, p_e + p, row["slots_seen"], None, p_e, batch, 256, row["rate_at_512"])
        return predicted(laws, run)

    assert told(64.0)[0] is not None
    prediction, why_not = told(128.0)
    assert prediction is None
    assert why_not[0].endswith("is of runs with one batch_sequences, which the plan does not have")
    # Nor is a budget of another batch what the law is judged by.
    larger = [
        replace(run, knobs={**run.knobs, "batch_sequences": 128.0, "steps": run.knobs["steps"] / 2},
                learning_rate=run.learning_rate * math.sqrt(2)) if run.budget == 4.3e14 else run
        for run in runs
    ]  # fmt: skip
    (rollout,) = fit_study_recipe(larger, LOSS).rollouts
    assert [f.budget for f in rollout.rollout.forecasts] == [2.57e14]


def test_a_law_that_is_refused_is_not_said_to_have_foreseen_nothing(laws: Laws) -> None:
    (entry,) = laws.entries
    refused = entry.model_copy(update={"law": entry.law.model_copy(update={"status": "misfit"})})
    height = entry.model_copy(
        update={"name": "loss_law", "law": law_without_values("saturating", "", "too_few", 0, "")}
    )
    prediction, why_not = predicted(laws.model_copy(update={"entries": (refused, height)}), at_ten_times(typical(laws)))
    assert prediction is None and why_not[0].endswith("and the law over the whole recipe is refused (misfit)")


def changed(runs: list[MeasuredRun], metric: str, values: list[float]) -> list[MeasuredRun]:
    return [replace(run, metrics={metric: value}) for run, value in zip(runs, values, strict=True)]


def test_a_metric_without_a_law_does_not_end_the_fit(runs: list[MeasuredRun]) -> None:
    """A ranking metric that is zero in one run, or the same in all, as recall@100 among 90 items is."""
    recall = "catalogue/recall@10"
    losses = [run.metrics[LOSS] for run in runs]
    (entry,) = fit_study_recipe(changed(runs, recall, [0.0, *(math.exp(-y) for y in losses[1:])]), recall).entries
    assert entry.law.status == "not_identified" and "must be positive" in entry.law.warnings[0]
    for metric in (LOSS, recall):
        fitted = fit_study_recipe(changed(runs, metric, [1.0] * len(runs)), metric)
        assert fitted.entries[0].law.status == "flat" and not fitted.rollouts


def test_a_run_that_both_axes_asked_for_counts_once(runs: list[MeasuredRun], laws: Laws) -> None:
    others = [replace(run, axis="share", cell_id="x") for run in runs if run.axis == "allocation"]
    (entry,) = fit_study_recipe([*runs, *others], LOSS).entries
    assert entry.law == laws.entries[0].law
    # Another seed of such a recipe is a seed of the same cell.
    others = [replace(run, seed=999, metrics={LOSS: run.metrics[LOSS] + 0.004}) for run in others]
    (entry,) = fit_study_recipe([*runs, *others], LOSS).entries
    assert entry.law.residuals.n == len(runs) + len(others)
    assert entry.law.details["cells"] == laws.entries[0].law.details["cells"]


def test_the_text_depth_is_that_of_the_sizes(runs: list[MeasuredRun]) -> None:
    """Shares of another text depth do not push the sizes out, however many there are."""
    sizes = [run for run in runs if run.axis == "allocation"]
    shares = [replace(run, axis="share", knobs={**run.knobs, "text_depth": 1.0}) for run in runs]
    assert len(shares) > len(sizes)
    assert {run.axis for run in study_cells([*sizes, *shares], LOSS)} == {"allocation"}


def test_budgets_too_close_to_tell_apart_have_no_roll_out(runs: list[MeasuredRun]) -> None:
    near = {1e14: 1e14, 3e14: 1.04e14, 1e15: 1.08e14}
    fitted = fit_study_recipe([replace(run, budget=near[run.budget]) for run in runs], LOSS)
    assert fitted.entries[0].law.values and not fitted.rollouts


def test_planted_studies_have_the_errors_that_their_names_say() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        forecasts = importlib.import_module("study_forecasts")
    plain, far, differ = (
        np.array([run.metrics[LOSS] for run in forecasts.study(forecasts.TRUTHS[name], np.random.default_rng(0))])
        for name in ("scarcest decides", "worse far from the best", "cells differ")
    )
    assert np.std(far - plain) > 0.005 and 0.004 < np.std(differ - plain) < 0.010


@pytest.mark.slow
def test_a_kink_that_no_roll_out_saw_is_mostly_held() -> None:
    """Data count for less beyond what the best runs of the largest budget saw, and roll-outs were right by luck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        forecasts = importlib.import_module("study_forecasts")
    found = [forecasts.forecast(forecasts.TRUTHS["data kinks"], seed) for seed in range(12)]
    held = [one["held"] for one in found if one is not None]
    assert len(held) >= 5 and sum(held) >= len(held) - 1
