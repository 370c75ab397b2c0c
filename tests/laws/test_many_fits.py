"""Many robust fits at once, against scipy's one at a time."""

import numpy as np
from scipy import optimize

from habitus.laws.many_fits import fit_many


def test_fits_are_scipys_to_draws_of_the_same_points() -> None:
    rng = np.random.default_rng(0)
    x = np.linspace(0, 4, 30)
    y = 2 + 3 * np.exp(-0.7 * x) + rng.normal(0, 0.05, 30)
    y[7] += 4  # a run that went wrong
    counts = rng.multinomial(30, np.full(30, 1 / 30), size=8).astype(float)

    def residuals(theta: np.ndarray, _at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a, b, c = (theta[:, k, None] for k in range(3))
        fall = np.exp(-np.exp(c) * x)
        gradient = np.stack([np.ones_like(fall), fall, -b * fall * np.exp(c) * x], axis=-1)
        return (a + b * fall - y) / 0.05, gradient / 0.05

    starts = np.tile([1.0, 1.0, 0.0], (8, 1))
    found = fit_many(residuals, starts, counts)
    for theta, drawn in zip(found, counts, strict=True):
        rows = np.repeat(np.arange(30), drawn.astype(int))

        def missed(values: np.ndarray, rows: np.ndarray = rows) -> np.ndarray:
            return np.asarray(residuals(values[None], np.zeros(1, int))[0][0][rows])

        one = optimize.least_squares(missed, starts[0], loss="soft_l1", xtol=1e-12, ftol=1e-12)
        np.testing.assert_allclose(theta, one.x, rtol=1e-3)
        assert abs(np.exp(theta[2]) - 0.7) < 0.2  # the point that went wrong does not pull


def test_a_number_that_the_points_do_not_tell_stays_where_it_was() -> None:
    def residuals(theta: np.ndarray, _at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        f = np.stack([theta[:, 0] - 3, theta[:, 0] - 5], axis=1)
        gradient = np.zeros((len(theta), 2, 2))
        gradient[..., 0] = 1
        return f, gradient

    ((mean, other),) = fit_many(residuals, np.array([[0.0, 7.0]]), np.ones((1, 2)))
    assert abs(mean - 4) < 1e-4 and other == 7
