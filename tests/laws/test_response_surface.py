"""One surface over size, share, batch and rate: the planted optima come back together, and flat ones are refused."""

import numpy as np
import pytest
from scipy.stats import qmc

from habitus.errors import FitError
from habitus.laws import response_optimum, response_surface

BUDGETS = (1e14, 3e14, 1e15, 3e15)


def planted_knobs(C: float) -> dict[str, float]:
    """N* as the root of compute, a share that falls slowly, and a rate that falls with compute."""
    return {"params": 3e5 * (C / 1e14) ** 0.5, "share": 0.1 * (C / 1e14) ** -0.1, "rate": 0.03 * (C / 1e14) ** -0.25}


def cells(noise: float, curvature: float = 0.05) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """24 cells per budget by a Latin hypercube; a small model wants a higher rate."""
    rng = np.random.default_rng(0)
    table, compute, loss = [], [], []
    for C in BUDGETS:
        best = planted_knobs(C)
        for point in qmc.LatinHypercube(3, seed=int(C / 1e14)).random(24):
            u = (2 * point - 1) * np.log([5.0, 6.0, 3.0])
            table.append([np.log(b) + v for b, v in zip(best.values(), u, strict=True)])
            compute.append(C)
            quadratic = curvature * (u @ u) + 0.3 * curvature * u[0] * u[2]
            loss.append(7 + 0.3 * np.log(1e15 / C) / 3 + quadratic + noise * rng.standard_normal())
    columns = np.exp(np.array(table)).T
    return dict(zip(("params", "share", "rate"), columns, strict=True)), np.array(compute), np.array(loss)


def test_planted_optima_come_back_together_and_inside_their_intervals() -> None:
    surface = response_surface(*cells(noise=0.005))
    inside = 0
    for C in (3e14, 3e15, 1e16):
        best = response_optimum(surface, C)
        assert best.ok
        for name, truth in planted_knobs(C).items():
            low, high = best.interval(name)
            inside += low < truth < high
            assert best[name] == pytest.approx(truth, rel=0.25)
        assert best["metric"] == pytest.approx(7 + 0.3 * np.log(1e15 / C) / 3, abs=0.02)
    assert inside >= 8  # of nine at 95%


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    knobs, compute, exact = cells(noise=0.0)
    rng, inside = np.random.default_rng(3), 0
    for _ in range(60):
        best = response_optimum(response_surface(knobs, compute, exact + 0.01 * rng.standard_normal(len(exact))), 1e15)
        low, high = best.interval("params")
        inside += low < planted_knobs(1e15)["params"] < high
    assert 53 <= inside <= 60


def test_a_flat_knob_has_no_joint_optimum() -> None:
    best = response_optimum(response_surface(*cells(noise=0.05, curvature=0.0)), 1e15)
    assert best.status == "not_identified" and not best.values
    few = response_surface({"params": [1e5, 2e5, 4e5]}, [1e14] * 3, [7.0, 6.9, 7.1])
    assert few.status == "too_few"
    with pytest.raises(FitError, match="a fitted response surface"):
        response_optimum(few, 1e15)
