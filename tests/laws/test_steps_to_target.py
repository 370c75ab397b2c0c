"""Steps to a target: smoothing delays no crossing, and B_crit is read at equal steps of one reference."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from habitus.laws.axes import fit_batch
from habitus.laws.runs import MeasuredRun
from habitus.laws.steps import steps_to_target

BATCHES = 64.0 * 2 ** np.arange(6)


def trajectories(b_crit: float, growth: float = 0.0) -> list[MeasuredRun]:
    """Losses 3 + 4·exp(−step/τ) with τ = 1000·(1 + B_crit/B); with `growth`, B_crit rises as the loss falls."""
    runs = []
    for batch in BATCHES:
        points = []
        for depth in np.linspace(0.02, 3, 150):  # log of how far the loss has fallen
            step = 1000 * depth * (1 + b_crit * (1 + growth * depth) / batch)
            points.append((float(step), "batch/loss", float(3 + 4 * np.exp(-depth))))
        runs.append(
            MeasuredRun(
                "batch", f"b{batch:g}", 1e17, 2e-3, 0, trajectory=tuple(points), knobs={"batch_sequences": batch}
            )
        )
    return runs


def test_a_straight_fall_is_crossed_without_delay() -> None:
    path = [(float(step), 10 - step / 100) for step in range(50, 1000, 50)]
    assert steps_to_target(path, 5.17) == pytest.approx(483, abs=0.5)
    assert steps_to_target(path, 5.17, ewma=0) == 500.0  # as evaluated
    assert steps_to_target(path, -5.0) is None


def test_a_planted_critical_batch_reads_within_a_few_percent() -> None:
    """With evaluations every 50 steps a delay of a few evaluations made 314 out of 400."""
    runs = []
    for batch in BATCHES:
        end = 1000 * (1 + 400 / batch)
        points = tuple((float(s), "batch/loss", 3 + 4 * float(np.exp(-s / end))) for s in np.arange(50, 2 * end, 50))
        runs.append(
            MeasuredRun("batch", f"{batch}", 1e17, 2e-3, 0, trajectory=points, knobs={"batch_sequences": batch})
        )
    (entry,) = fit_batch(runs, "batch/loss").entries
    assert entry.law["b_crit"] == pytest.approx(400, rel=0.05)


def test_the_critical_batch_is_a_function_of_the_target() -> None:
    (steady,) = fit_batch(trajectories(400), "batch/loss").entries
    (grown,) = fit_batch(trajectories(200, growth=2.0), "batch/loss").entries
    flat = [row["b_crit"] for row in steady.law.details["by_target"]]
    assert flat == pytest.approx([400] * len(flat), rel=0.03) and len(flat) >= 4
    rising = [row["b_crit"] for row in grown.law.details["by_target"]]
    assert all(a < b for a, b in pairwise(rising)) and rising[-1] > 1.5 * rising[0]
    assert any("b_crit depends on the target" in warning for warning in grown.law.warnings)
    assert not any("depends on the target" in warning for warning in steady.law.warnings)


def test_both_arms_have_a_critical_batch_of_their_own_and_the_longest_run_of_a_size_counts() -> None:
    """Candidates that grow with the batch hide a part of the noise: planted 400 with a fixed pool, 150 without."""
    plain, pooled = trajectories(150), trajectories(400)
    fixed = [
        replace(run, cell_id=f"{run.cell_id}-pool", knobs={**run.knobs, "pool_sequences": 64.0}) for run in pooled[1:]
    ]
    short = replace(plain[3], cell_id="short", trajectory=plain[3].trajectory[:20])
    own, pool = fit_batch([*plain, *fixed, short], "batch/loss").entries
    assert (own.name, pool.name) == ("critical_batch", "critical_batch_fixed_pool")
    assert own.law["b_crit"] == pytest.approx(150, rel=0.03)  # the short run would have lowered the target
    assert own.law.details["target"] < 3.3
    # B = 64 is a cell of both arms: it is the plain one, so the fixed arm is off there and right elsewhere.
    assert pool.law.points["batch"] == tuple(BATCHES) and pool.law.details["pool_sequences"] == 64
    (alone,) = fit_batch(
        [replace(pooled[0], knobs={"batch_sequences": 64.0, "pool_sequences": 64.0}), *fixed], "batch/loss"
    ).entries
    assert alone.name == "critical_batch_fixed_pool" and alone.law["b_crit"] == pytest.approx(400, rel=0.03)
