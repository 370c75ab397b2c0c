"""The form of the law of a recipe, for one fit or many at once.

    L = E + (Σ_x (A_x·x^−α_x)^q)^(1/q) + 2k·w²·(e^(δ/w) − 1 − δ/w),       x = p_e, p, D, S, B
    δ = log r − log r*,   log r* = r0 + r_p·log p + r_e·log p_e,   w = 1.5

What the letters stand for: `recipe_surface`, which fits it.
"""

from typing import NamedTuple

import numpy as np

FORM = "L = E + (sum over p_e, p, D, S, B of (A*x^-alpha)^q)^(1/q) + 2k*w^2*(exp(d/w) - 1 - d/w), d = log(r/r*)"
COLUMNS = ("embedder_params", "contextualizer_params", "slots_seen", "steps", "batch_sequences", "rate_at_512")
PARTS = ("embedder", "contextualizer", "data", "steps", "batch")  # of the first five columns
RATE_WIDTH = 1.5  # w, the best of those tried by cells left out; a free one is no better


class Surface(NamedTuple):
    """The numbers of one fit, about the centre of the logarithms of the columns."""

    floor: np.ndarray  # [...]
    log_power: np.ndarray  # log q [...]
    heights: np.ndarray  # log A_x at the centre [..., 5]
    log_exponents: np.ndarray  # log α_x [..., 5]
    log_curvature: np.ndarray  # log k [...]
    rate: np.ndarray  # r0, r_p, r_e [..., 3]

    @classmethod
    def of(cls, theta: np.ndarray) -> "Surface":
        """From the numbers of a fit [16], or of several [..., 16]."""
        theta = np.asarray(theta)
        parts = theta[..., 2 : 2 + 2 * len(PARTS)].reshape(*theta.shape[:-1], -1, 2)
        return cls(theta[..., 0], theta[..., 1], parts[..., 0], parts[..., 1], theta[..., 12], theta[..., 13:])

    def best_rate(self, u: np.ndarray) -> np.ndarray:
        """Centred log r* at centred log columns [..., 5 or 6]."""
        return np.asarray(self.rate[..., 0] + self.rate[..., 1] * u[..., 1] + self.rate[..., 2] * u[..., 0])

    def metric(self, u: np.ndarray) -> np.ndarray:
        """The loss at centred log columns [..., 6]."""
        total, _, _ = self._parts(u)
        cost, _ = rate_cost(u[..., 5] - self.best_rate(u))
        return np.asarray(self.floor + total + np.exp(self.log_curvature) * cost)

    def _parts(self, u: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What the parts cost together [...], the share of each in it [..., 5], and their logarithms [..., 5]."""
        q = np.exp(self.log_power)[..., None]
        parts = self.heights - np.exp(self.log_exponents) * u[..., :5]
        most = parts.max(axis=-1, keepdims=True)
        powers = np.exp(q * (parts - most))
        sums = powers.sum(axis=-1, keepdims=True)
        total = np.exp(most + np.log(sums) / q)
        return total[..., 0], powers / sums, parts

    def gradient(self, u: np.ndarray) -> np.ndarray:
        """Of the loss at [..., n, 6] by the numbers of the fit [..., n, 16]."""
        total, share, parts = self._parts(u)
        of_heights = total[..., None] * share
        of_exponents = -of_heights * np.exp(self.log_exponents) * u[..., :5]
        of_power = total * ((share * parts).sum(axis=-1) - np.log(total))
        k, (cost, slope) = np.exp(self.log_curvature), rate_cost(u[..., 5] - self.best_rate(u))
        of_parts = np.stack([of_heights, of_exponents], axis=-1).reshape(*total.shape, -1)
        one, of_best = np.ones_like(total), -k * slope
        of_rate = (of_best, of_best * u[..., 1], of_best * u[..., 0])
        columns = (one, of_power, *np.moveaxis(of_parts, -1, 0), k * cost, *of_rate)
        return np.stack(columns, axis=-1)


def rate_cost(off: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What a rate costs whose logarithm is so far off the best, δ² nearby, and its slope."""
    x = off / RATE_WIDTH
    return 2 * RATE_WIDTH**2 * (np.expm1(x) - x), 2 * RATE_WIDTH * np.expm1(x)
