"""No number that looks fine where there is none: a status or a clear error."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from habitus.errors import FitError
from habitus.laws import (
    compare_valleys,
    correlation_by_budget,
    critical_batch,
    depth_optimum,
    frontier,
    isoflop_optimum,
    learning_rate_drift,
    leave_one_out,
    paired_regimes,
    power_law,
    predict_power_law,
    predict_saturating,
    rollout,
    saturating,
    spearman_matrix,
    steps_to_target,
    surface,
    surface_optimum,
    surrogacy,
    two_term,
    two_term_by_budget,
)
from habitus.store import Law, direction_of

X = np.geomspace(1e6, 1e8, 8)
VALLEY = 3 + 0.05 * np.log(X / 1e7) ** 2


def surface_of_budgets(x: Any, y: Any) -> Law:
    """A surface whose D are tied to x on two budgets, to test it with the laws of two columns."""
    x = np.asarray(x, dtype=float)
    D = np.where(np.arange(len(x)) % 2, 1e17, 1e16) / np.abs(x)
    return surface(x, D, y)


LAWS: dict[str, Callable[[Any, Any], Law]] = {
    "critical_batch": critical_batch,
    "isoflop_optimum": isoflop_optimum,
    "depth_optimum": depth_optimum,
    "power_law": power_law,
    "saturating": saturating,
    "two_term": two_term,
    "surface": surface_of_budgets,
}
each_law = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())


@each_law
def test_two_points_are_too_few(law: Callable[[Any, Any], Law]) -> None:
    result = law([1e6, 1e7], [3.0, 2.5])
    assert result.status == "too_few"
    assert not result.values
    assert result.warnings


@each_law
def test_nothing_is_too_few(law: Callable[[Any, Any], Law]) -> None:
    assert law([], []).status == "too_few"


@each_law
def test_equal_values_have_no_optimum_and_no_slope(law: Callable[[Any, Any], Law]) -> None:
    result = law(X, np.full(8, 3.0))
    assert result.status == "flat"
    assert "x_opt" not in result.values and "b_crit" not in result.values


@each_law
def test_nan_is_an_error_that_names_the_column_and_row(law: Callable[[Any, Any], Law]) -> None:
    y = VALLEY.copy()
    y[3] = np.nan
    with pytest.raises(FitError, match="row 3"):
        law(X, y)


@each_law
def test_negative_sizes_are_an_error(law: Callable[[Any, Any], Law]) -> None:
    x = X.copy()
    x[0] = -1e6
    with pytest.raises(FitError, match=r"positive|negative"):
        law(x, VALLEY)


@each_law
def test_a_cell_given_twice_is_an_error(law: Callable[[Any, Any], Law]) -> None:
    with pytest.raises(FitError, match="more than once"):
        # The ninth row has the parity of the first, so the surface's D repeats as well.
        law(np.append(X, X[0]), np.append(VALLEY, VALLEY[0]))


@each_law
def test_columns_of_different_length_are_an_error(law: Callable[[Any, Any], Law]) -> None:
    with pytest.raises((FitError, ValueError)):
        law(X, VALLEY[:-1])


def test_words_are_not_numbers() -> None:
    with pytest.raises(FitError, match="not a number"):
        power_law(["a", "b", "c"], [1, 2, 3])


@pytest.mark.parametrize("curvature", [0.0, -0.05])
def test_a_curve_without_upward_curvature_is_flat(curvature: float) -> None:
    rng = np.random.default_rng(0)
    y = 3 + curvature * np.log(X / 1e7) ** 2 + 1e-3 * rng.standard_normal(8)
    law = isoflop_optimum(X, y)
    assert law.status == "flat"
    assert not law.values


def test_a_minimum_at_the_edge_is_boundary_and_says_which_way() -> None:
    law = isoflop_optimum(X, 3 + 0.05 * np.log(X / 3e8) ** 2)
    assert law.status == "boundary"
    assert "outside the swept range" in law.warnings[-1]


def test_seven_points_that_rise_are_not_flat() -> None:
    K = [32, 64, 128, 256, 512, 1024, 2000]
    rises = two_term(K, [0.3588, 0.3623, 0.3655, 0.3738, 0.3832, 0.3890, 0.3928], "max")
    assert rises.details["flat_p_value"] > 0.05  # five values against two degrees of freedom
    assert rises.status == "monotone" and rises.details["better_edge"] == 2000
    assert "largest" in rises.warnings[0]


def test_the_warning_that_decides_stands_first() -> None:
    share = [0.0046, 0.0292, 0.0536, 0.0885, 0.1563, 0.3126, 0.4721, 0.6638]
    law = two_term(share, [0.264, 0.3717, 0.3775, 0.3822, 0.3797, 0.3778, 0.381, 0.3725], "max")
    assert law.status == "not_identified"
    assert "leaves the swept range" in law.warnings[0] and "sits at its bound" in law.warnings[1]


def test_a_noisy_valley_is_not_identified() -> None:
    rng = np.random.default_rng(1)
    verdicts = {two_term(X, 3 + 0.002 * np.log(X / 1e7) ** 2 + 0.01 * rng.standard_normal(8)).status for _ in range(10)}
    assert "ok" not in verdicts


def test_a_hill_is_no_valley() -> None:
    law = two_term(X, -VALLEY)
    assert law.status in ("flat", "monotone", "boundary", "not_identified")
    assert law.status != "ok"


def test_one_budget_has_no_scaling_law() -> None:
    found = frontier(np.full(8, 1e17), X, VALLEY)
    assert found.size.status == "too_few"
    assert found.height.status == "too_few"
    law = surface(X, 1e17 / (6 * X), VALLEY)
    assert law.status == "not_identified"
    assert "one line" in law.warnings[0]


def test_a_loss_that_rises_with_compute_does_not_saturate() -> None:
    assert saturating([1e15, 1e16, 1e17, 1e18], [2.0, 2.1, 2.3, 2.6]).status == "monotone"


def test_three_points_determine_a_saturating_law_and_nothing_judges_it() -> None:
    law = saturating([1e15, 1e16, 1e17], [4.0, 3.5, 3.2])
    assert law.status == "not_identified"
    assert law.interval("floor") == (-np.inf, np.inf)


def test_a_budget_with_too_few_cells_is_named_and_left_out(planted: Any) -> None:
    C = np.concatenate([np.repeat(planted.budgets[:4], 8), [1e19, 1e19]])
    N = np.concatenate([planted.size(c) * np.geomspace(1 / 6, 6, 8) for c in planted.budgets[:4]] + [[1e8, 2e8]])
    found = frontier(C, N, planted.loss(N, C / (6 * N)) + 1e-4 * np.random.default_rng(0).standard_normal(len(N)))
    assert found.optima[1e19].status == "too_few"
    assert any("1e+19 (too few)" in warning for warning in found.size.warnings)


def test_noise_has_no_frontier(planted: Any) -> None:
    rng = np.random.default_rng(3)
    C = np.repeat(planted.budgets, 8)
    N = np.concatenate([planted.size(c) * np.geomspace(1 / 6, 6, 8) for c in planted.budgets])
    laws_of_noise = [frontier(C, N, 3 * (1 + 0.003 * rng.standard_normal(len(N)))) for _ in range(5)]
    verdicts = [law.status for found in laws_of_noise for law in found.optima.values()]
    assert verdicts.count("ok") <= 2
    assert all(found.size.status == "too_few" for found in laws_of_noise)


def test_unknown_words_are_explained() -> None:
    with pytest.raises(FitError, match='"min" or "max"'):
        two_term(X, VALLEY, "up")  # type: ignore[arg-type]
    with pytest.raises(FitError, match="interior"):
        two_term(X, VALLEY, bounds=(1e6, 1e8))
    with pytest.raises(FitError, match="none"):
        two_term_by_budget(np.ones(8), X, VALLEY, share="beta")  # type: ignore[arg-type]
    with pytest.raises(FitError, match="power_law, saturating"):
        rollout([(1, 2), (2, 3)], "linear")
    with pytest.raises(FitError, match="stands twice"):
        rollout([(1e15, 2), (1e15, 3), (1e16, 4)], "power_law")
    with pytest.raises(FitError, match="fitted surface"):
        surface_optimum(power_law([1, 2, 4], [1, 2, 3]), 1e20)
    with pytest.raises(FitError, match="do not increase"):
        steps_to_target([(2, 1.0), (1, 1.0)], 0.5)
    with pytest.raises(FitError, match="two or more"):
        spearman_matrix({"loss": [1, 2, 3]})
    with pytest.raises(FitError, match="both regimes"):
        paired_regimes({"loss": [1, 2, 3]}, {"recall@10": [1, 2, 3]})
    with pytest.raises(FitError, match="one model size"):
        learning_rate_drift([1, 1], [0.1, 0.2], [3, 4])


def test_a_surface_without_one_of_its_terms_has_no_best_size() -> None:
    sizes, budgets = np.geomspace(1e4, 1e6, 5).repeat(4), np.tile([1e12, 1e13, 1e14, 1e15], 5)
    data = budgets / 6 / sizes
    law = surface(sizes, data, 2 + 300 * data**-0.4 + 30 * sizes**-0.3)
    assert surface_optimum(law, 1e16).values["size"] > 0
    for term, size in (("size_coef", "0"), ("data_coef", "endless")):
        one_term = law.model_copy(update={"values": {**law.values, term: 0.0}})
        best = surface_optimum(one_term, 1e16)
        assert (best.status, best.values) == ("monotone", {})
        assert f"it is {size} at every budget" in best.warnings[0]


def test_a_rate_at_the_edge_of_its_grid_is_named() -> None:
    drift = learning_rate_drift([1, 1, 1, 2, 2, 2], [1, 2, 4, 1, 2, 4], [3, 2, 3, 4, 3, 2])
    assert [best.bracketed for best in drift.best] == [True, False]
    assert "lower bound" in drift.warnings[0]


def test_a_curve_that_only_rises_or_falls_names_its_better_edge() -> None:
    K = 2.0 ** np.arange(14, 22)
    rising = two_term(K, 3 + 1e-3 * K**0.4)
    assert rising.status == "monotone"
    assert rising.details["better_edge"] == K.min()
    assert "smallest" in rising.warnings[0] and "x_opt" not in rising.values
    falling = two_term(K, 3 + 40 * K**-0.4)
    assert falling.status == "monotone"
    assert falling.details["better_edge"] == K.max()


def test_extreme_numbers_stay_finite() -> None:
    law = power_law([1e15, 1e16, 1e17], [1e150, 1e100, 1e30])
    assert np.isfinite(law["coefficient"])
    assert law["exponent"] == pytest.approx(-60, abs=1)


@each_law
def test_numbers_near_the_limits_of_floats_are_an_error(law: Callable[[Any, Any], Law]) -> None:
    with pytest.raises(FitError, match="another unit"):
        law(X, 1e300 * VALLEY)
    with pytest.raises(FitError, match="another unit"):
        law(1e-200 * X, VALLEY)


@each_law
def test_sizes_that_differ_by_rounding_are_one_size(law: Callable[[Any, Any], Law]) -> None:
    result = law(1 + 1e-15 * np.arange(8), VALLEY)
    assert result.status == "too_few"
    assert "1 distinct" in result.warnings[0] or "1 sizes" in result.warnings[0]


def test_a_law_without_values_predicts_nothing() -> None:
    with pytest.raises(FitError, match="fitted saturating law"):
        predict_saturating(saturating([1e15, 1e16], [3.0, 2.0]), 1e20)
    with pytest.raises(FitError, match="fitted power law"):
        predict_power_law(power_law([1e15, 1e16], [3.0, 2.0]), 1e20)
    with pytest.raises(FitError, match="fitted power law"):
        predict_power_law(saturating([1e15, 1e16, 1e17, 1e18], [3.0, 2.5, 2.2, 2.1]), 1e20)
    for budget in (0.0, -1.0, np.nan, np.inf, "much"):
        with pytest.raises(FitError, match="positive, finite"):
            predict_power_law(power_law([1, 2, 4, 8], [1, 2, 3, 5]), budget)  # type: ignore[arg-type]


def test_words_and_wrong_lengths_are_explained_everywhere() -> None:
    words = ["a", "b", "c"]
    for call in (
        lambda: spearman_matrix({"loss": words, "recall": [1, 2, 3]}),
        lambda: spearman_matrix({"loss": [[1], [2]], "recall": [1, 2]}),
        lambda: correlation_by_budget([1, 1, 2], {"loss": [1, 2], "recall": [1, 2]}),
        lambda: surrogacy([1, 1, 1], [1, 2], {"recall": [1, 2, 3]}),
        lambda: surrogacy([1, 1, 1], [1, 2, 3], {"recall": words}),
        lambda: paired_regimes({"loss": [1, 2, 3]}, {"loss": [1, 2]}),
        lambda: rollout(zip([1, 2, 3], words, strict=True), "power_law"),
        lambda: rollout([(1, 2), (2, 0), (3, 1), (4, 1)], "saturating"),
        lambda: leave_one_out([(1, 2), (2,)], "power_law"),
        lambda: steps_to_target([(1, "a")], 0.5),
        lambda: depth_optimum(X, VALLEY, at=0.0),
        lambda: compare_valleys(np.full(8, 1e6), VALLEY),
        lambda: surface(X, X[::-1], VALLEY, delta=-1.0),
        lambda: surface(X, X[::-1], VALLEY, bootstrap=1),
    ):
        with pytest.raises(FitError):
            call()


def test_a_metric_of_unknown_direction_is_refused() -> None:
    with pytest.raises(FitError, match="fall or rise"):
        direction_of("batch/nll")


def test_a_term_that_the_runs_do_not_show_is_no_value_of_the_surface() -> None:
    """A loss that depends on size alone, exactly: the data term is rounding."""
    D = np.array([1e15, 1e16, 1e17, 1e16, 1e17, 1e15, 1e17, 1e16]) / X
    only_size = surface(X, D, 40 * X**-0.2)
    assert only_size.status == "not_identified" and only_size.warnings
    rng = np.random.default_rng(0)
    for y in (3 - 0.05 * np.log(X / 1e7) ** 2, 3 - 0.1 * np.log(X / 1e7), 3 * (1 + 0.3 * rng.standard_normal(8))):
        law = surface(X, D, y)
        for name, value in law.values.items():
            low, high = law.interval(name)
            assert low <= value <= high, (name, law.status)
        if "size_exponent" in law.values:
            assert 0.02 <= law["size_exponent"] <= 2.5 and 0.02 <= law["data_exponent"] <= 2.5


def test_the_interval_of_b_crit_holds_b_crit_where_the_line_is_wrong() -> None:
    law = critical_batch(X, 1e16 * (X / 1e7) ** -0.6)
    for level in (0.8, 0.95):
        low, high = law.interval("b_crit", level)
        assert low <= law["b_crit"] <= high


def test_a_shared_alpha_is_not_tied_to_a_grid(planted: Any) -> None:
    K = 2.0 ** np.arange(14, 22)
    optima = {1e15: 1.0e5, 1e16: 1.5e5, 1e17: 2.0e5, 1e18: 3.0e5}
    rng = np.random.default_rng(1)
    covered = []
    for _ in range(8):
        y = [(9 + planted.valley(K, o, 0.5, 0.45, 0.3)) * (1 + 1e-5 * rng.standard_normal(8)) for o in optima.values()]
        laws = two_term_by_budget(np.repeat(list(optima), 8), np.tile(K, 4), np.concatenate(y), share="alpha")
        for c, law in laws.items():
            low, high = law.interval("x_opt")
            covered.append(low <= optima[c] <= high)
    assert np.mean(covered) > 0.85


def test_noise_has_no_exponent_and_intervals_are_nested() -> None:
    rng = np.random.default_rng(0)
    for _ in range(8):
        law = saturating(X, 3 + 0.1 * rng.standard_normal(8))
        assert law.status in ("not_identified", "monotone")
        for name in law.values:
            (low, high), (wider_low, wider_high) = law.interval(name, 0.8), law.interval(name, 0.95)
            assert wider_low <= low + 1e-3 * abs(low) and high <= wider_high + 1e-3 * abs(wider_high), name


@pytest.mark.parametrize("seed", [1, 2, 42])
def test_a_frontier_of_noise_has_nested_intervals_and_is_not_ok(seed: int) -> None:
    x, y = np.arange(1.0, 10.0), np.random.default_rng(seed).standard_normal(9)
    found = frontier(np.repeat([1e15, 1e16, 1e17], 9), np.tile(x, 3), np.concatenate([y, 0.9 * y, 0.85 * y]))
    for law in found.optima.values():
        assert law.status != "ok"
        if "x_opt" in law.values:
            (low, high), (wider_low, wider_high) = law.interval("x_opt", 0.8), law.interval("x_opt")
            assert wider_low <= low and high <= wider_high
