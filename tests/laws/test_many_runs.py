"""What makes ten thousand runs quick to fit changes nothing that a fit says."""

import numpy as np
import pytest

from habitus.laws.correlation import _pair
from habitus.laws.separable import Curve, _merge_replicates, fit_separable, project
from habitus.laws.two_term import EXPONENTS, valley_terms


def replicated(rng: np.random.Generator) -> Curve:
    """Six places, one to nine observations each, with weights of their own."""
    log_x = np.repeat(np.linspace(-1.5, 1.5, 6), [1, 3, 9, 2, 4, 5])
    y = 3 + 0.4 * np.exp(0.8 * log_x) + 0.3 * np.exp(-0.6 * log_x) + 0.02 * rng.standard_normal(len(log_x))
    return Curve(valley_terms(log_x), y, rng.uniform(0.5, 2.0, len(y)))


def test_merged_replicates_are_the_same_least_squares() -> None:
    curve = replicated(np.random.default_rng(0))
    merged = _merge_replicates(curve, 2)
    assert (len(merged.y), merged.replicates) == (6, 18)
    log_theta = np.random.default_rng(1).uniform(-2, 0.5, (50, 2))
    for name in ("rss", "linear", "inverse"):
        expected, found = (getattr(project(one, log_theta), name) for one in (curve, merged))
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-10)
    best = fit_separable([curve], (EXPONENTS, EXPONENTS))
    assert best.dof == 24 - 2 - 3
    assert best.rss == pytest.approx(float(project(curve, np.log(best.theta)[None]).rss[0]), rel=1e-9)


def test_observations_at_places_of_their_own_stay_as_they_are() -> None:
    curve = Curve(valley_terms(np.arange(5.0)), np.arange(5.0), np.ones(5))
    assert _merge_replicates(curve, 2) is curve


def test_chance_of_many_pairs_is_that_of_their_permutations() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal((2, 499)), rng.standard_normal((2, 501))
    drawn, normal = (_pair("a", "b", *columns, rng) for columns in (x, y))
    for end in ("chance_low", "chance_high"):
        assert getattr(normal, end) == pytest.approx(getattr(drawn, end), abs=0.012)
    assert normal.chance_low == -normal.chance_high
