"""Times stated before a study are corrected by what its finished axes took."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from habitus.planning.several_gpus import MEASURED_STEPS
from habitus.record import Seconds
from habitus.sizing import H200_RATES, TYPICAL_INPUTS, fit_speed, pace, part_factors
from habitus.studies.progress import StudyMonitor, StudyProgress
from tests.planning.planted import example_recipe, record_of


def test_assumed_rates_are_the_newest_measured_ones() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "train-h200.json"
    rows = {float(row["cell"]): row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}
    assert {budget: row["nominal_tflops"] * 1e12 for budget, row in rows.items()} == pytest.approx(H200_RATES)
    for step_flops, row in zip(MEASURED_STEPS, rows.values(), strict=True):
        assert step_flops == pytest.approx(row["nominal_tflops"] * 1e9 * row["step_ms"], rel=0.05)


def test_the_pace_is_what_was_taken_over_what_was_stated() -> None:
    assert pace([], []) == 1.0
    # An hour stated and 27 minutes taken: (27 + 1) / (60 + 1) minutes.
    assert pace([3600.0], [27 * 60.0]) == pytest.approx(28 / 61)
    assert pace([5.0], [20.0]) == pytest.approx(80 / 65)  # seconds decide little


def test_the_time_left_follows_the_pace_of_finished_axes() -> None:
    """−55% seen on the first axis makes the second one shorter too."""
    seen: list[StudyProgress] = []
    notes: list[str] = []
    monitor = StudyMonitor(Path("nowhere"), "batch/loss", seen.append, notes.append)
    costs = tuple(
        SimpleNamespace(axis=axis, runs=3, seconds=3600.0, parts=None) for axis in ("share", "batch", "allocation")
    )
    state: Any = SimpleNamespace(costs=costs, baseline=None, speeds=None)
    monitor.begin(state)
    sweep: Any = SimpleNamespace(axis="batch", done=1, total=4, failed=0, seconds_left=100.0, finished=(0.0, 0.0))
    monitor.sweep_progress(2, 3)(sweep)
    result: Any = SimpleNamespace(
        axis="share", seconds=27 * 60.0, runs=[1, 2], counts={"published": 2}, number=lambda _: 0,
        design=SimpleNamespace(left_out=(), decided=()),
    )  # fmt: skip
    monitor.finish_axis(result)
    monitor.sweep_progress(2, 3)(sweep)
    assert [one.seconds_left for one in (seen[0], seen[-1])] == pytest.approx([100 + 3600, 100 + 3600 * 28 / 61])
    assert any("the rest should take" in note for note in notes)


def test_the_time_left_follows_the_pace_of_the_axis_that_runs() -> None:
    """Ten minutes stated for what has finished and five taken: the axes after it are corrected before it ends."""
    seen: list[StudyProgress] = []
    monitor = StudyMonitor(Path("nowhere"), "batch/loss", seen.append, lambda _text: None)
    costs = tuple(SimpleNamespace(axis=axis, runs=3, seconds=3600.0, parts=None) for axis in ("share", "batch"))
    state: Any = SimpleNamespace(costs=costs, baseline=None, speeds=None)
    monitor.begin(state)
    sweep: Any = SimpleNamespace(axis="share", done=1, total=4, failed=0, seconds_left=100.0, finished=(600.0, 300.0))
    monitor.sweep_progress(1, 2)(sweep)
    assert seen[-1].seconds_left == pytest.approx(100 + 3600 * 360 / 660)


def test_runs_with_several_pools_of_candidates_do_not_slow_the_others_down_on_a_gpu() -> None:
    plain = example_recipe()
    pooled = plain.model_copy(update={"train": plain.train.model_copy(update={"pool_sequences": 4})})
    gpu, slow = {"device": "cuda"}, Seconds(warmup=0.0, train=1000.0, evaluate=1.0)
    records = [record_of(plain, "c" * 64, steps=300, hardware=gpu) for _ in range(3)]
    more = [record_of(pooled, "c" * 64, steps=300, hardware=gpu, seconds=slow) for _ in range(3)]
    assert fit_speed([*records, *more], "cuda", TYPICAL_INPUTS) == fit_speed(records, "cuda", TYPICAL_INPUTS)
    assert "3 Records" in fit_speed(records, "cuda", TYPICAL_INPUTS).source


def test_a_run_that_took_no_time_corrects_nothing() -> None:
    parts = (1.0, 2.0, 3.0)
    assert part_factors([parts, parts], [3.0, 0.0]) == part_factors([parts], [3.0])
    assert part_factors([parts], [0.0]) == (1.0, 1.0, 1.0)
