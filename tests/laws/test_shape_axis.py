"""Six knobs at once: the planted optimum comes back, held-out cells judge it; shares that dropout moves."""

import math

import numpy as np
import pytest
from scipy.stats import qmc

from habitus.laws.response_surface import compare_with_optimum, optimum_in_range, response_surface
from habitus.laws.runs import MeasuredRun
from habitus.laws.shape_axis import KNOBS, fit_regularisation, fit_shape
from habitus.store import Law

BEST = {"joint_dim": 48, "width": 160, "depth": 4, "text_depth": 2, "batch_sequences": 32, "rate_at_512": 0.1}
CENTRE = {"joint_dim": 40, "width": 128, "depth": 4, "text_depth": 2, "batch_sequences": 32, "rate_at_512": 0.1}


def loss_at(knobs: dict[str, float]) -> float:
    u = np.array([math.log(knobs[name] / BEST[name]) for name in KNOBS])
    return 7.0 + 0.2 * float(u @ u) + 0.1 * float(u[0] * u[1])


def make_run(label: str, knobs: dict[str, float], noise: float, seed: int = 0) -> MeasuredRun:
    rate = knobs["rate_at_512"] * math.sqrt(knobs["batch_sequences"] / 512)
    metrics = {"batch/loss": loss_at(knobs) + noise, "train/loss": 1.0}
    held = {name: float(value) for name, value in knobs.items() if name != "rate_at_512"}
    return MeasuredRun("shape", f"{label}-00", 3e14, rate, seed, knobs=held, metrics=metrics)


def make_runs(noise: float = 0.003, points: int = 60) -> list[MeasuredRun]:
    rng = np.random.default_rng(1)
    low = np.log([CENTRE[name] / 2 for name in KNOBS])
    runs = [make_run("centre", CENTRE, noise * rng.standard_normal(), seed) for seed in range(3)]
    for number, unit in enumerate(qmc.Sobol(6, rng=0).random(128)[: points + 10]):
        knobs = dict(zip(KNOBS, np.exp(low + unit * math.log(4)).tolist(), strict=True))
        label = f"point-{number}" if number < points else f"held-out-{number}"
        runs.append(make_run(label, knobs, noise * rng.standard_normal()))
    return runs


def laws_of(runs: list[MeasuredRun]) -> dict[str, Law]:
    return {entry.name: entry.law for entry in fit_shape(runs, "batch/loss").entries}


def test_the_planted_optimum_comes_back_within_its_region() -> None:
    laws = laws_of(make_runs())
    best, surface, centre = laws["shape_optimum"], laws["shape_surface"], laws["shape_centre"]
    assert best.ok and surface.ok
    assert surface.residuals.dof == 63 - 28
    for name, truth in BEST.items():
        assert best[name] == pytest.approx(truth, rel=0.15), name
    assert surface.details["held_out"] == 10
    assert surface["held_out_rmse"] < 0.01 < surface["held_out_spread"]
    low, high = centre.interval("lost")
    assert 0 < low <= loss_at(CENTRE) - 7.0 <= high
    assert not centre.details["inside_region"]  # the gap is several times the noise
    low, high = centre.interval("lost_one_at_a_time")
    assert low <= loss_at(centre.details["one_at_a_time"]) - 7.0 <= high  # the planted loss is 7 at its optimum
    assert centre["lost_one_at_a_time"] < centre["lost"]
    assert centre.details["inside_interval"]["depth"]


def test_a_centre_that_is_the_optimum_lies_inside_the_region() -> None:
    runs = make_runs(noise=0.01)
    moved = [make_run("centre", BEST, 0.0) if run.cell_id.startswith("centre") else run for run in runs][2:]
    centre = laws_of(moved)["shape_centre"]
    assert centre.details["inside_region"] and centre["p_value"] > 0.05
    low, high = centre.interval("lost")
    assert low == 0 < high < 0.01  # nothing may be lost: no drawn surface has its best point just there


@pytest.mark.parametrize("end", [5.0, 8.0, 10.0])  # of which some are not what the exponential of their logarithm is
def test_the_same_end_of_a_range_is_inside_the_joint_interval(end: float) -> None:
    runs = make_runs()
    least = min(run.knobs["width"] for run in runs)
    tilted = []
    for run in runs:
        loss = run.metrics["batch/loss"] + 2 * math.log(run.knobs["width"])  # the narrower the better
        knobs = {**run.knobs, "width": end * (run.knobs["width"] / least)}
        tilted.append(MeasuredRun(**{**run.__dict__, "knobs": knobs, "metrics": {"batch/loss": loss}}))
    laws = laws_of(tilted)
    assert "width" in laws["shape_optimum"].details["at_end"]
    centre = laws["shape_centre"].details
    assert centre["one_at_a_time"]["width"] == pytest.approx(end)
    assert centre["inside_interval"]["width"]


def test_noise_is_no_surface() -> None:
    rng = np.random.default_rng(2)
    runs = [
        MeasuredRun(**{**run.__dict__, "metrics": {"batch/loss": float(rng.standard_normal()), "train/loss": 1.0}})
        for run in make_runs()
    ]
    laws = laws_of(runs)
    assert set(laws) == {"shape_surface"} and laws["shape_surface"].status == "flat"
    assert "no better than a constant" in laws["shape_surface"].warnings[-1]


def test_a_surface_that_misses_what_it_has_not_seen_is_a_misfit() -> None:
    runs = make_runs()
    shifted = [
        MeasuredRun(**{**run.__dict__, "metrics": {"batch/loss": 20.0 - run.metrics["batch/loss"], "train/loss": 1.0}})
        if run.cell_id.startswith("held-out")
        else run
        for run in runs
    ]
    laws = laws_of(shifted)
    assert laws["shape_surface"].status == laws["shape_optimum"].status == laws["shape_centre"].status == "misfit"
    assert "no better than by their mean" in laws["shape_optimum"].warnings[-1]


def test_too_few_runs_are_refused() -> None:
    laws = laws_of(make_runs(points=25))
    assert laws["shape_surface"].status == "too_few" and set(laws) == {"shape_surface"}


def test_an_optimum_beyond_the_range_is_its_end() -> None:
    x = np.exp(np.linspace(0, 2, 9))
    surface = response_surface({"width": x}, [1e14] * 9, (np.log(x) - 3) ** 2)
    best = optimum_in_range(surface, 1e14)
    assert best.status == "boundary" and best["width"] == pytest.approx(math.exp(2))
    # At the left end (0 - 3)² against (2 - 3)² at the right one.
    assert compare_with_optimum(surface, {"width": 1.0}, 1e14)["lost"] == pytest.approx(8.0)


def test_an_optimum_at_an_end_lies_inside_its_own_region() -> None:
    rng = np.random.default_rng(0)
    a, b = np.exp(rng.uniform(0, 2, (2, 40)))
    a[0], b[0] = 1.0, math.e  # the best of both: a falls towards its lower end
    loss = 0.5 * np.log(a) + (np.log(b) - 1) ** 2 + 0.001 * rng.standard_normal(40)
    surface = response_surface({"a": a, "b": b}, [1e14] * 40, loss)
    assert compare_with_optimum(surface, {"a": 1.0, "b": math.e}, 1e14)["p_value"] > 0.05
    assert compare_with_optimum(surface, {"a": 2.0, "b": math.e}, 1e14)["p_value"] < 1e-6
    assert compare_with_optimum(surface, {"a": 1.0, "b": 2 * math.e}, 1e14)["p_value"] < 1e-6


def test_a_saddle_is_left_along_its_falling_knob() -> None:
    grid = np.exp(np.stack(np.meshgrid(np.linspace(-1, 1, 5), np.linspace(-1, 2, 5)), axis=-1).reshape(-1, 2))
    u = np.log(grid)
    surface = response_surface({"a": grid[:, 0], "b": grid[:, 1]}, [1.0] * 25, u[:, 0] ** 2 - u[:, 1] ** 2)
    best = optimum_in_range(surface, 1.0)
    assert best["a"] == pytest.approx(1.0, abs=1e-6) and best["b"] == pytest.approx(math.exp(2))
    assert best.details["at_end"] == ["b"]


def share_runs(best: dict[float, float]) -> list[MeasuredRun]:
    runs = []
    for dropout, optimum in best.items():
        for share in (0.02, 0.04, 0.08, 0.15, 0.27, 0.5):
            u = share / optimum
            metrics = {"batch/loss": 6 + 0.1 * (u**0.7 + u**-0.6), "train/loss": 1.0}
            knobs = {"embedder_share": share, "item_dropout": dropout}
            runs.append(
                MeasuredRun("regularisation", f"s={share}-{dropout}", 3e14, 1e-3, 0, knobs=knobs, metrics=metrics)
            )
    return runs


def test_dropout_that_doubles_the_best_share_is_seen_to() -> None:
    (entry,) = fit_regularisation(share_runs({0.0: 0.08, 0.2: 0.16}), "batch/loss").entries
    law = entry.law
    assert law.ok and law["ratio"] == pytest.approx(2.0, rel=0.02)
    low, high = law.interval("ratio")
    assert low < 2 < high
    assert law["share_plain"] < law["share_regularised"]


def test_six_shares_of_one_seed_each_have_a_bottom() -> None:
    shares = (0.0271, 0.0616, 0.1165, 0.2383, 0.3647, 0.6091)  # of the quick world at 1e11 FLOPs
    losses = {
        0.0: (5.7728, 5.7126, 5.7033, 5.7379, 5.7359, 5.8203),
        0.2: (5.9286, 5.9012, 5.8707, 5.8715, 5.8830, 5.9390),
    }
    runs = [
        MeasuredRun(
            "regularisation", f"s={share}-{dropout}", 1e11, 1e-2, 0,
            knobs={"embedder_share": share, "item_dropout": dropout}, metrics={"batch/loss": loss},
        )
        for dropout, row in losses.items()
        for share, loss in zip(shares, row, strict=True)
    ]  # fmt: skip
    (entry,) = fit_regularisation(runs, "batch/loss").entries
    law = entry.law
    assert law.ok and 1.1 < law["ratio"] < 1.4
    low, high = law.interval("ratio")
    assert low < 1 < high  # six runs each do not tell whether the share moves
    low, high = law.interval("share_plain")
    assert 0.05 < low < law["share_plain"] < high < 0.25


def test_without_an_interior_share_nothing_is_said_to_move() -> None:
    (entry,) = fit_regularisation(share_runs({0.0: 50.0, 0.2: 0.16}), "batch/loss").entries
    assert entry.law.status == "not_identified" and "without dropout" in entry.law.warnings[0]
