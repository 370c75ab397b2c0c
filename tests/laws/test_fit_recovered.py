"""Planted truths, found again."""

from typing import Any

import numpy as np
import pytest
from scipy import optimize

from habitus.errors import FitError
from habitus.laws import (
    compare_scaling,
    compare_valleys,
    critical_batch,
    frontier,
    iso_target,
    isoflop_optimum,
    leave_one_out,
    power_law,
    predict_power_law,
    predict_saturating,
    saturating,
    steps_to_target,
    surface,
    surface_optimum,
    trend,
    two_term,
    two_term_by_budget,
)

SHARES = np.array([0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.1, 0.15, 0.2, 0.27, 0.35, 0.5])
CHINCHILLA = {  # the public refit of Hoffmann et al.'s points
    "floor": 1.8172, "size_coef": 482.01, "size_exponent": 0.3478, "data_coef": 2085.43, "data_exponent": 0.3658,
}  # fmt: skip


def chinchilla_grid() -> tuple[np.ndarray, np.ndarray]:
    """N and D on the nine published iso-FLOP budgets, 73M to 16B parameters."""
    N, D = [], []
    for C in (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21):
        sizes = np.geomspace(73e6, 16.2e9, 27)
        ratio = C / (6 * sizes**2)
        sizes = sizes[(ratio > 1) & (ratio < 2000)]
        N += list(sizes)
        D += list(C / (6 * sizes))
    return np.array(N), np.array(D)


def test_a_two_term_valley_is_recovered_and_its_closed_form_is_the_numeric_minimum() -> None:
    a, alpha, b, beta, E = 0.9, 0.7, 0.004, 0.9, 2.5
    law = two_term(SHARES, a * SHARES**alpha + b * SHARES**-beta + E)
    for name, true in {"alpha": alpha, "beta": beta, "a": a, "b": b, "floor": E}.items():
        assert law[name] == pytest.approx(true, rel=1e-4), name
    numeric = optimize.minimize_scalar(
        lambda u: a * np.exp(alpha * u) + b * np.exp(-beta * u),
        bounds=(-6, 0),
        method="bounded",
        options={"xatol": 1e-10},
    )
    assert law["x_opt"] == pytest.approx(float(np.exp(numeric.x)), rel=1e-5)
    assert law.status == "ok"


def test_a_valley_of_a_ranking_metric_is_the_same_valley_upside_down() -> None:
    y = 0.3 * SHARES**0.5 + 0.01 * SHARES**-0.6 + 3
    low, high = two_term(SHARES, y), two_term(SHARES, -y, "max")
    assert high["x_opt"] == pytest.approx(low["x_opt"], rel=1e-6)
    assert high["y_opt"] == pytest.approx(-low["y_opt"], rel=1e-6)
    assert high["floor"] == pytest.approx(-low["floor"], rel=1e-4)


def test_no_extra_negatives_is_a_point_of_its_own(planted: Any) -> None:
    K = np.array([0.0, *2.0 ** np.arange(14, 22)])
    y = np.array([9.0, *(6 + planted.valley(K[1:], 2e5, 0.5, 0.45, 0.3))])
    law = two_term(K, y)
    assert law["x_opt"] == pytest.approx(2e5, rel=1e-3)
    assert law.details["y_at_zero"] == 9.0
    assert law.residuals.n == 8
    assert law.warnings == ()
    better_without = two_term(K, np.array([5.5, *y[1:]]))
    assert better_without["x_opt"] == law["x_opt"]
    assert "x = 0 reaches 5.5" in better_without.warnings[0]


def test_a_shared_alpha_steadies_valleys(planted: Any) -> None:
    K = 2.0 ** np.arange(14, 22)
    rng = np.random.default_rng(2)
    budget = np.repeat(planted.budgets[:4], len(K))
    y = np.concatenate([6 + planted.valley(K, 2e5, 0.5, 0.45, 0.4) for _ in range(4)])
    y = y + 0.004 * rng.standard_normal(len(y))
    free = two_term_by_budget(budget, np.tile(K, 4), y)
    shared = two_term_by_budget(budget, np.tile(K, 4), y, share="alpha")
    assert len({round(law["alpha"], 6) for law in shared.values()}) == 1
    assert len({round(law["alpha"], 6) for law in free.values()}) > 1
    for law in shared.values():
        low, high = law.interval("x_opt")
        assert low < 2e5 < high


def test_optima_beyond_the_sweep_are_boundary_and_one_sided_curves_are_monotone() -> None:
    K = 2.0 ** np.arange(14, 22)
    falling = 6 + 50 * K**-0.5
    rng = np.random.default_rng(0)
    assert two_term(K, falling + 1e-4 * rng.standard_normal(8)).status in ("monotone", "boundary")
    beyond = 1e-9 * K + 50 * K**-0.5 + 6
    law = two_term(K, beyond)
    assert law.status == "boundary"
    assert law["x_opt"] > K.max()
    assert "extrapolated" in law.warnings[-1]


def test_the_chinchilla_refit_is_recovered_exactly_and_from_noise() -> None:
    N, D = chinchilla_grid()
    values = CHINCHILLA
    L = values["floor"] + values["size_coef"] * N ** -values["size_exponent"]
    L = L + values["data_coef"] * D ** -values["data_exponent"]
    exact = surface(N, D, L)
    for name, true in values.items():
        assert exact[name] == pytest.approx(true, rel=1e-6), name
    noisy = surface(N, D, L * np.exp(0.003 * np.random.default_rng(1).standard_normal(len(L))))
    for name, true in values.items():
        low, high = noisy.interval(name)
        assert low < true < high, name
    assert noisy["size_exponent"] == pytest.approx(0.3478, rel=0.03)
    assert noisy["floor"] == pytest.approx(1.8172, abs=0.02)


def test_outliers_do_not_move_the_surface() -> None:
    N, D = chinchilla_grid()
    L = 1.8172 + 482.01 * N**-0.3478 + 2085.43 * D**-0.3658
    L = L * np.exp(0.002 * np.random.default_rng(4).standard_normal(len(L)))
    L[[3, 50]] *= 1.3
    assert surface(N, D, L)["data_exponent"] == pytest.approx(0.3658, rel=0.04)


def test_bootstrap_intervals_hold_the_truth_and_are_the_same_twice() -> None:
    N, D = chinchilla_grid()
    L = 1.8172 + 482.01 * N**-0.3478 + 2085.43 * D**-0.3658
    L = L * np.exp(0.003 * np.random.default_rng(5).standard_normal(len(L)))
    first, second = (surface(N, D, L, bootstrap=25, seed=3) for _ in range(2))
    assert first.intervals == second.intervals
    low, high = first.interval("data_exponent")
    assert low < 0.3658 < high


def test_the_surface_optimum_is_the_closed_form_for_6nd_and_right_for_any_cost() -> None:
    N, D = chinchilla_grid()
    law = surface(N, D, 1.8172 + 482.01 * N**-0.3478 + 2085.43 * D**-0.3658)
    best = surface_optimum(law, 1e22)
    G = (0.3478 * 482.01 / (0.3658 * 2085.43)) ** (1 / (0.3478 + 0.3658))
    assert best["size"] == pytest.approx(G * (1e22 / 6) ** (0.3658 / 0.7136), rel=1e-4)
    assert best["exponent"] == pytest.approx(0.3658 / 0.7136, rel=1e-5)
    assert any("extrapolates" in warning for warning in best.warnings)

    def dear_data(n: np.ndarray, d: np.ndarray) -> np.ndarray:
        return 6 * n * d + 1e9 * d  # a cost per slot that no parameter pays for

    other = surface_optimum(law, 1e22, dear_data)
    sizes = np.geomspace(other["size"] / 3, other["size"] * 3, 20001)
    data = 1e22 / (6 * sizes + 1e9)
    losses = 1.8172 + 482.01 * sizes**-0.3478 + 2085.43 * data**-0.3658
    assert other["size"] == pytest.approx(sizes[losses.argmin()], rel=0.01)
    assert other["size"] > best["size"]


def test_a_saturating_law_is_recovered_with_its_forecast() -> None:
    C = np.array([1e15, 1e16, 1e17, 1e18, 1e19])
    y = 2.0 + 900 * C**-0.2
    law = saturating(C, y)
    assert law["floor"] == pytest.approx(2.0, rel=1e-6)
    assert law["exponent"] == pytest.approx(0.2, rel=1e-6)
    assert predict_saturating(law, 1e20)[0] == pytest.approx(2.0 + 900 * 1e20**-0.2, rel=1e-9)
    pinned = saturating(C, y + 0.001 * np.array([1, -1, 1, -1, 1]), fixed_floor=2.0)
    assert pinned["floor"] == 2.0
    assert pinned["exponent"] == pytest.approx(0.2, abs=0.01)


def test_lopsided_valleys_mislead_parabolas_but_not_the_shared_shape(planted: Any) -> None:
    rng = np.random.default_rng(0)
    C, N = [], []
    for c in planted.budgets:
        best = planted.size(c)
        C += [c] * 8
        N += list(best * np.geomspace(1 / 6, 6, 8))
    C, N = np.array(C), np.array(N)
    found = frontier(C, N, planted.loss(N, C / (6 * N)) * (1 + 1e-4 * rng.standard_normal(len(N))))
    for c, law in found.optima.items():
        assert law["x_opt"] == pytest.approx(planted.size(c), rel=0.01)
        low, high = law["flat_range"]
        assert low < law["x_opt"] < high
    assert any(found.parabolas[c]["x_opt"] > 1.02 * planted.size(c) for c in planted.budgets)
    assert found.size["exponent"] == pytest.approx(0.37 / 0.82, abs=0.002)
    assert predict_power_law(found.size, 1e20)[0] == pytest.approx(planted.size(1e20), rel=0.02)


def test_a_parabola_and_its_flat_range_are_exact() -> None:
    x = np.geomspace(1e6, 1e8, 7)
    law = isoflop_optimum(x, 3 + 0.05 * np.log(x / 1e7) ** 2)
    assert law["x_opt"] == pytest.approx(1e7, rel=1e-9)
    assert law["y_opt"] == pytest.approx(3)
    half = np.sqrt(0.003 / 0.05)
    assert law["flat_range"] == pytest.approx((1e7 * np.exp(-half), 1e7 * np.exp(half)))
    assert law.details["spline_x_opt"] == pytest.approx(1e7, rel=0.05)


def test_steps_to_target_is_the_first_smoothed_crossing() -> None:
    path = [(50, 5.0), (100, 4.0), (150, 2.0), (200, 2.0), (250, 2.0)]
    assert steps_to_target(path, 3.0, ewma=0) == 150
    # Half-life 1, normalised weights: 5, 4.333, 3.0, 2.467, 2.226 by hand.
    # Weights 1, 1/2, 1/4: the mean value 3 stands for the mean step, (150 + 50 + 12.5) / 1.75.
    assert steps_to_target(path, 3.0, ewma=1) == pytest.approx(212.5 / 1.75)
    # 3/16 of the way from there to (200 + 106.25) / 1.875, where the mean is 2.467.
    assert steps_to_target(path, 2.9, ewma=1) == pytest.approx(129.286, abs=1e-3)
    assert steps_to_target(path, 1.0, ewma=1) is None
    assert steps_to_target([(1, 0.1), (2, 0.3)], 0.2, "max", ewma=0) == 2


def test_the_iso_target_is_what_the_worst_batch_size_reaches_less_a_margin() -> None:
    paths = {64: [(1, 5.0), (2, 3.0)], 128: [(1, 5.0), (2, 4.0)]}
    chosen = iso_target(paths, ewma=0, margin=0.01)
    assert chosen.strictest == 4.0
    assert chosen.limiting_batch == 128
    assert chosen.target == pytest.approx(4.01)
    rising = {64: [(1, 0.1), (2, 0.4)], 128: [(1, 0.1), (2, 0.3)]}
    assert iso_target(rising, "max", ewma=0, margin=0.1).target == pytest.approx(0.28)


def test_a_critical_batch_is_recovered() -> None:
    B = 64.0 * 2 ** np.arange(6)
    law = critical_batch(B, 800 * (1 + 350 / B))
    assert law["b_crit"] == pytest.approx(350, rel=1e-9)
    assert law["s_min"] == pytest.approx(800, rel=1e-9)


def test_forms_are_told_apart_by_aicc() -> None:
    rng = np.random.default_rng(0)
    x = np.geomspace(1, 100, 12)
    u = np.log(x / 10)
    assert compare_valleys(x, 3 + 0.05 * u**2 + 0.002 * rng.standard_normal(12))[0].name == "parabola"
    chosen = [compare_valleys(x, 3 + 0.01 * rng.standard_normal(12))[0].name for _ in range(20)]
    assert chosen.count("constant") >= 14
    C = 10.0 ** np.arange(12, 20)
    best = compare_scaling(C, 2 + 900 * C**-0.2 + 1e-4 * rng.standard_normal(8))
    assert best[0].name == "saturating"
    assert sum(form.weight or 0 for form in best) == pytest.approx(1)
    assert compare_scaling(C[:4], 2 + 900 * C[:4] ** -0.2)[-1].aicc is None  # four points cannot judge four numbers


def test_leave_one_out_finds_the_odd_budget() -> None:
    C = [1e15, 1e16, 1e17, 1e18, 1e19]
    y = [1e6 * (c / 1e15) ** 0.5 for c in C]
    y[2] *= 2
    misses = {
        f.budget: abs(np.log(f.ratio)) for f in leave_one_out(list(zip(C, y, strict=True)), "power_law").forecasts
    }
    assert max(misses, key=lambda c: misses[c]) == 1e17


def test_values_answer_by_name_and_unknown_names_are_explained() -> None:
    law = saturating([1e15, 1e16, 1e17, 1e18], [4.0, 3.5, 3.2, 3.05])
    assert law.floor == law["floor"] == law.values["floor"]
    with pytest.raises(FitError, match="did you mean 'exponent'"):
        law["exponnt"]
    with pytest.raises(FitError, match=r"0\.8, 0\.95"):
        law.interval("floor", 0.5)
    with pytest.raises(AttributeError):
        _ = law.nonsense


def test_a_law_has_a_trend_only_where_its_interval_leaves_zero_out() -> None:
    x = np.exp([-1.0, 0.0, 1.0])
    # log y = 0, 1, 2.1: slope 1.05, residuals ±1/60 and 1/30, so SE = √(1/600/2) = 0.0289 and t(1) = 12.71 make ±0.367.
    rising = power_law(x, np.exp([0.0, 1.0, 2.1]))
    assert rising.interval("exponent") == pytest.approx((1.05 - 0.3669, 1.05 + 0.3669), abs=1e-3)
    assert trend(rising) == "rises"
    assert trend(power_law(x, np.exp([2.1, 1.0, 0.0]))) == "falls"
    assert trend(power_law(x, np.exp([0.0, 1.0, 0.5]))) == "none"
    assert trend(power_law(x[:2], [1.0, 2.0])) == "unknown"  # no law, no interval
