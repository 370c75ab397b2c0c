"""Residuals that go with a knob are told from noise."""

import numpy as np

from habitus.laws.residual_structure import residual_structure

N = 60
ALL_LEFT = np.eye(N)  # a fit that takes nothing away


def test_a_step_along_a_knob_is_found_and_named() -> None:
    rng = np.random.default_rng(0)
    places = rng.random((N, 3))
    missed = rng.standard_normal(N) + np.where(places[:, 1] < 0.3, 1.5, -0.5)
    found = residual_structure(missed, ALL_LEFT, places, np.arange(N))
    assert found.knob == 1 and found.p_value < 0.01


def test_what_the_fit_takes_away_is_no_evidence() -> None:
    # A fit of a line along the only knob leaves residuals without one: their neighbours are alike less than by chance
    # alone, and that is what they are compared with.
    x = np.linspace(-1, 1, N)
    line = np.column_stack([np.ones(N), x])
    left = np.eye(N) - line @ np.linalg.pinv(line)
    refused = 0
    for seed in range(60):
        missed = left @ np.random.default_rng(seed).standard_normal(N)
        refused += residual_structure(missed, left, x[:, None], np.arange(N)).p_value < 0.05
    assert refused <= 8  # of 60 at 5%: more are seen once in 300 times


def test_errors_of_unequal_size_and_seeds_of_a_cell_are_not_structure() -> None:
    refused = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        x = np.sort(rng.random(N))
        cells = np.arange(N) // 2  # two seeds each, which share an error of their cell
        missed = (rng.standard_normal(N)[cells] + 0.5 * rng.standard_normal(N)) * np.where(x > 0.8, 5.0, 1.0)
        refused += residual_structure(missed, ALL_LEFT, x[cells * 2][:, None], cells).p_value < 0.05
    assert refused <= 8
