"""Whether what a law misses goes with one of its knobs, as where its form is wrong.

Along a knob the residuals of a right form change sign at random; those of a wrong one, with a step or a bend that the
form does not have, are alike among neighbours. With z the residuals over their errors and K_x the closeness of two
cells by rank along knob x,

    Q_x = Σ K_x(i, j)·z_i·z_j / Σ z_i²,     i and j of different cells,

is compared with its values where the same residuals have random signs, one for all seeds of a cell, and what the fit
would have taken of them is taken away (a wild bootstrap): errors need not be of one size, and the largest Q of several
knobs has its own p value.
"""

from typing import NamedTuple

import numpy as np
from scipy import stats

_NEAR = 0.05  # of all runs: the standard deviation of closeness, in ranks
_SIGNS = 400
_MOST_LEVERAGE = 0.95


class Structure(NamedTuple):
    """The knob along which residuals are most alike, and how often chance alone would make some knob look so."""

    knob: int
    p_value: float


def residual_structure(
    missed: np.ndarray, left: np.ndarray, places: np.ndarray, cells: np.ndarray, seed: int = 0
) -> Structure:
    """Of residuals over their errors [n], at places [n, knobs]; `left` [n, n] is what a fit leaves of errors."""
    n = len(missed)
    leverage = np.minimum(1 - np.diag(left), _MOST_LEVERAGE)
    numbers = np.unique(cells, return_inverse=True)[1]
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (_SIGNS, numbers.max() + 1))
    by_chance = signs[:, numbers] * (missed / np.sqrt(1 - leverage)) @ left.T
    ranks = stats.rankdata(places, axis=0) / n
    kernels = np.exp(-0.5 * ((ranks[:, None] - ranks[None]) / _NEAR) ** 2)  # [n, n, knobs]
    kernels *= (cells[:, None] != cells[None])[:, :, None]

    def alike(rows: np.ndarray) -> np.ndarray:
        shares = np.einsum("ri,ijk,rj->rk", rows, kernels, rows, optimize=True)
        return np.asarray(shares / (rows**2).sum(axis=1, keepdims=True))

    chance = alike(by_chance)
    centre, spread = chance.mean(axis=0), chance.std(axis=0)
    seen = ((alike(missed[None]) - centre) / spread)[0]
    most = ((chance - centre) / spread).max(axis=1)
    return Structure(int(seen.argmax()), float((1 + (most >= seen.max()).sum()) / (1 + _SIGNS)))
