"""What makes ten thousand runs quick to fit changes nothing that a fit says."""

import numpy as np
import pytest
from scipy import optimize

from habitus.laws.correlation import _chance_interval, spearman_matrix
from habitus.laws.frontier import frontier, shared_shape
from habitus.laws.saturating import decay_terms
from habitus.laws.separable import Curve, Curves, Terms, _merge_replicates, _total_rss, fit_separable, project, region
from habitus.laws.surface import _surface_terms
from habitus.laws.two_term import EXPONENTS, valley_terms


def valley(rng: np.random.Generator, counts: list[int]) -> Curve:
    """A place for each count, with so many observations, which have weights of their own."""
    log_x = np.repeat(np.linspace(-1.5, 1.5, len(counts)), counts)
    y = 3 + 0.4 * np.exp(0.8 * log_x) + 0.3 * np.exp(-0.6 * log_x) + 0.02 * rng.standard_normal(len(log_x))
    return Curve(valley_terms, log_x, y, rng.uniform(0.5, 2.0, len(y)))


def solve_slowly(curve: Curve, log_theta: np.ndarray, floor: float | None = None) -> tuple[float, np.ndarray]:
    """RSS and E, c of one curve at one θ: every observation a row of a least-squares problem with c ≥ 0."""
    terms = curve.terms(log_theta[None], np.atleast_2d(curve.x)[..., None, None])[..., 0, 0].T
    columns = terms if floor is not None else np.column_stack([np.ones(len(curve.y)), terms])
    low = [0.0] * terms.shape[1] if floor is not None else [-np.inf] + [0.0] * terms.shape[1]
    wanted = (curve.y - (floor or 0.0)) * curve.weight
    solution = optimize.lsq_linear(columns * curve.weight[:, None], wanted, (low, np.inf), method="bvls", tol=1e-14)
    linear = solution.x if floor is None else np.concatenate([[floor], solution.x])
    return 2 * float(solution.cost), linear


def test_curves_side_by_side_are_solved_as_each_is_alone() -> None:
    rng = np.random.default_rng(0)
    curves = [valley(rng, [1, 3, 9, 2, 4, 5]), valley(rng, [1] * 9), valley(rng, [2, 1, 1, 1])]
    log_theta = rng.uniform(-3, 0.7, (25, 2))
    solved = project(Curves.stack(curves), log_theta)
    for b, curve in enumerate(curves):
        for g, one in enumerate(log_theta):
            rss, linear = solve_slowly(curve, one)
            assert solved.rss[b, g] == pytest.approx(rss, rel=1e-7)
            if (linear[1:] > 0).all():
                np.testing.assert_allclose(solved.linear[b, g], linear, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(_total_rss(Curves.stack(curves), log_theta), solved.rss.sum(0), rtol=1e-9)


def test_inverse_is_that_of_the_gram_matrix_of_all_observations() -> None:
    curve = valley(np.random.default_rng(1), [1, 3, 9, 2, 4, 5])
    log_theta = np.log([[0.7, 0.5]])
    terms = curve.terms(log_theta, curve.x[None, :, None, None])[:, :, 0, 0]
    X = np.column_stack([np.ones(len(curve.y)), *terms]) * curve.weight[:, None]
    inverse = project(Curves.stack([curve]), log_theta).inverse[0, 0]
    np.testing.assert_allclose(inverse, np.linalg.inv(X.T @ X), rtol=1e-8)


def test_known_floor_is_not_fitted() -> None:
    rng = np.random.default_rng(2)
    log_x = np.linspace(-2, 2, 7)
    curve = Curve(decay_terms, log_x, 2.5 + 0.7 * np.exp(-0.3 * log_x) + 0.01 * rng.standard_normal(7), np.ones(7))
    solved = project(Curves.stack([curve], floor=2.5), np.log([[0.4]]))
    rss, linear = solve_slowly(curve, np.log([0.4]), floor=2.5)
    np.testing.assert_allclose(solved.linear[0, 0], linear, rtol=1e-10)
    assert solved.rss[0, 0] == pytest.approx(rss, rel=1e-9)
    assert fit_separable([curve], [(0.005, 2.0)], floor=2.5).dof == 7 - 2


@pytest.mark.parametrize("noise", [0.0, 0.02, 0.3])
def test_descent_ends_where_a_general_solver_does(noise: float) -> None:
    rng = np.random.default_rng(3)
    log_x = np.linspace(-1.5, 1.5, 8)
    for _ in range(20):
        alpha, beta = rng.uniform(0.2, 1.5, 2)
        y = 3 + 0.4 * np.exp(alpha * log_x) + 0.3 * np.exp(-beta * log_x) + noise * rng.standard_normal(8)
        curves = [Curve(valley_terms, log_x, y, np.ones(8)), Curve(valley_terms, log_x, 2 * y + 1, np.ones(8))]
        best = fit_separable(curves, (EXPONENTS, EXPONENTS))

        def missed(log_theta: np.ndarray, curves: list[Curve] = curves) -> np.ndarray:
            return np.concatenate([_residuals(curve, log_theta) for curve in curves])

        box = np.log([EXPONENTS, EXPONENTS]).T + np.array([[-1e-9], [1e-9]])
        slow = optimize.least_squares(missed, np.log(best.theta), bounds=box, xtol=1e-14, ftol=1e-14, gtol=1e-14)
        assert best.rss <= 2 * float(slow.cost) * (1 + 1e-9) + 1e-24


def _residuals(curve: Curve, log_theta: np.ndarray) -> np.ndarray:
    terms: Terms = curve.terms
    phi = terms(log_theta[None], curve.x[None, :, None, None])[..., 0, 0].T
    floor, *c = solve_slowly(curve, log_theta)[1]
    return (curve.y - floor - phi @ np.array(c)) * curve.weight


def test_observations_at_places_of_their_own_stay_as_they_are() -> None:
    x, y, weight = np.array([[3.0, 1.0, 2.0]]), np.arange(3.0), np.ones(3)
    merged = _merge_replicates(x, y, weight)
    assert [a is b for a, b in zip(merged, (x, y, weight), strict=False)] == [True] * 3
    assert merged[3] == 0.0


def test_replicates_stand_in_their_weighted_mean() -> None:
    x, y, weight = np.array([[2.0, 1.0, 2.0]]), np.array([1.0, 7.0, 4.0]), np.array([1.0, 1.0, np.sqrt(2.0)])
    places, mean, merged_weight, pure_error = _merge_replicates(x, y, weight)
    assert (places.tolist(), mean.tolist()) == ([[1.0, 2.0]], [7.0, 3.0])
    assert merged_weight == pytest.approx([1.0, np.sqrt(3.0)])
    assert pure_error == pytest.approx(1 * 4 + 2 * 1)


def test_forecast_sees_the_frontier_without_its_parabolas() -> None:
    rng = np.random.default_rng(4)
    budget = np.repeat([1e15, 1e16, 1e17, 1e18], 7)
    best = 1e5 * (budget / 1e15) ** 0.5
    size = best * np.tile(np.geomspace(0.2, 5, 7), 4)
    loss = 2 + 3 * (budget / 1e15) ** -0.1 * (1 + 0.02 * np.log(size / best) ** 2) + 1e-3 * rng.standard_normal(28)
    whole, forecast = frontier(budget, size, loss), shared_shape(budget, size, loss)
    assert forecast.size == whole.size
    assert forecast.height == whole.height
    for c, law in whole.optima.items():
        assert forecast.optima[c].values == law.values
        assert forecast.optima[c].status == law.status
        assert forecast.optima[c].interval("x_opt") == pytest.approx(law.interval("x_opt"), rel=1e-9)


def test_chance_of_many_pairs_is_that_of_their_permutations() -> None:
    few, many = (np.arange(n) - (n - 1) / 2 for n in (499, 501))
    (low, high), normal = (_chance_interval(v / np.linalg.norm(v), v / np.linalg.norm(v), 0) for v in (few, many))
    assert normal == pytest.approx((low, high), abs=0.008)
    assert normal[0] == -normal[1]


def test_chance_of_a_pair_depends_on_its_ties_and_not_on_the_other_pairs() -> None:
    rng = np.random.default_rng(5)
    table = {"a": rng.standard_normal(9), "b": rng.standard_normal(9), "tied": np.array([0.0] * 8 + [1.0])}
    by_name = {(p.first, p.second): p for p in spearman_matrix(table).pairs}
    alone = spearman_matrix({"a": table["a"], "b": table["b"]}).pairs[0]
    assert by_name["a", "b"] == alone
    # Ranks of 8 ties and one above them: ρ with nine others is 4.5·r/√(60·18), r from −4 to 4, each as likely.
    assert by_name["a", "tied"].chance_high == pytest.approx(np.sqrt(0.3))
    assert by_name["a", "tied"].chance_high != by_name["a", "b"].chance_high


def test_region_of_exact_data_holds_the_best_point() -> None:
    """Whose RSS, mere rounding, may come out larger when many points are evaluated at once."""
    rng = np.random.default_rng(6)
    for _ in range(40):
        size = int(rng.integers(6, 12))
        u, v = rng.uniform(-2, 2, (2, size * 3))
        y = 1.5 + np.exp(-rng.uniform(0.2, 0.6) * u) + 0.5 * np.exp(-rng.uniform(0.2, 0.6) * v)
        best = fit_separable([Curve(_surface_terms, np.stack([u, v]), y, 1 / y)], ((0.02, 2.5), (0.02, 2.5)))
        assert np.isclose(region(best, 0.95).theta, best.theta).all(1).any()
