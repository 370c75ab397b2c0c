"""Units, order and direction change nothing that they should not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from habitus.laws import (
    critical_batch,
    isoflop_optimum,
    power_law,
    saturating,
    spearman_matrix,
    surface,
    two_term,
)

X = np.geomspace(1e-2, 1, 9)
seeds = st.integers(0, 1000)
scales = st.floats(1e-3, 1e6)
few = settings(max_examples=15, deadline=None)


def noisy_valley(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return 0.8 * X**0.7 + 0.02 * X**-0.8 + 2.5 + 0.002 * rng.standard_normal(len(X))


@few
@given(seed=seeds, scale=scales)
def test_the_optimum_moves_with_the_unit_of_x(seed: int, scale: float) -> None:
    y = noisy_valley(seed)
    one, other = two_term(X, y), two_term(scale * X, y)
    assert other.status == one.status
    assert other["x_opt"] == pytest.approx(scale * one["x_opt"], rel=1e-4)
    assert other["y_opt"] == pytest.approx(one["y_opt"], rel=1e-6)
    assert np.allclose(np.log(np.array(other.interval("x_opt")) / scale), np.log(one.interval("x_opt")), atol=1e-2)


@few
@given(seed=seeds)
def test_the_order_of_rows_does_not_matter(seed: int) -> None:
    y = noisy_valley(seed)
    order = np.random.default_rng(seed).permutation(len(X))
    for law in (two_term, isoflop_optimum):
        one, other = law(X, y), law(X[order], y[order])
        assert other.status == one.status
        assert other["x_opt"] == pytest.approx(one["x_opt"], rel=1e-4)
        assert np.allclose(np.log(other.interval("x_opt")), np.log(one.interval("x_opt")), atol=1e-3)


@few
@given(seed=seeds)
def test_flipping_the_metric_and_its_direction_flips_only_the_height(seed: int) -> None:
    y = noisy_valley(seed)
    for law in (two_term, isoflop_optimum):
        one, other = law(X, y, "min"), law(X, -y, "max")
        assert other.status == one.status
        assert other["x_opt"] == pytest.approx(one["x_opt"], rel=1e-9)
        assert other.interval("x_opt") == pytest.approx(one.interval("x_opt"), rel=1e-9)
        low, high = one.interval("y_opt")
        assert other.interval("y_opt") == pytest.approx((-high, -low), rel=1e-9)


@few
@given(seed=seeds, cx=scales, cy=scales)
def test_power_law_exponents_have_no_unit(seed: int, cx: float, cy: float) -> None:
    rng = np.random.default_rng(seed)
    x = 10.0 ** np.arange(5)
    y = x**0.6 * np.exp(0.1 * rng.standard_normal(5))
    one, other = power_law(x, y), power_law(cx * x, cy * y)
    assert other["exponent"] == pytest.approx(one["exponent"], rel=1e-8)
    assert other.interval("exponent") == pytest.approx(one.interval("exponent"), rel=1e-6)
    assert other["coefficient"] == pytest.approx(cy * one["coefficient"] * cx ** -one["exponent"], rel=1e-6)


@few
@given(seed=seeds, scale=scales)
def test_the_critical_batch_does_not_depend_on_the_unit_of_steps(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    B = 64.0 * 2 ** np.arange(6)
    S = 1000 * (1 + 400 / B) * (1 + 0.03 * rng.standard_normal(6))
    one, other = critical_batch(B, S), critical_batch(B, scale * S)
    assert other["b_crit"] == pytest.approx(one["b_crit"], rel=1e-8)
    assert other.interval("b_crit") == pytest.approx(one.interval("b_crit"), rel=1e-6)
    assert other["s_min"] == pytest.approx(scale * one["s_min"], rel=1e-8)


@few
@given(seed=seeds, scale=st.floats(1e-2, 1e2))
def test_a_loss_in_other_units_scales_floor_and_coefficient(seed: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    C = 10.0 ** np.arange(14, 20)
    y = 2 + 900 * C**-0.2 + 0.005 * rng.standard_normal(6)
    one, other = saturating(C, y), saturating(C, scale * y)
    assert other["exponent"] == pytest.approx(one["exponent"], rel=1e-4)
    assert other["floor"] == pytest.approx(scale * one["floor"], rel=1e-4, abs=1e-6)


@settings(max_examples=5, deadline=None)
@given(seed=seeds)
def test_the_surface_does_not_depend_on_the_order_of_runs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    N = np.tile(np.geomspace(1e6, 1e9, 7), 5)
    D = np.repeat(np.geomspace(1e8, 1e11, 5), 7)
    L = (1.8 + 400 * N**-0.35 + 900 * D**-0.36) * np.exp(0.003 * rng.standard_normal(35))
    order = rng.permutation(35)
    one, other = surface(N, D, L), surface(N[order], D[order], L[order])
    for name in one.values:
        assert other[name] == pytest.approx(one[name], rel=1e-3)


@few
@given(seed=seeds)
def test_ranks_see_no_monotone_change_of_a_metric(seed: int) -> None:
    rng = np.random.default_rng(seed)
    loss, recall = rng.random(12), rng.random(12)
    plain = spearman_matrix({"loss": loss, "recall": recall})
    bent = spearman_matrix({"loss": np.exp(3 * loss), "recall": recall**3})
    flipped = spearman_matrix({"loss": -loss, "recall": recall})
    assert bent.rho("loss", "recall") == pytest.approx(plain.rho("loss", "recall"))
    assert flipped.rho("loss", "recall") == pytest.approx(-plain.rho("loss", "recall"))
