"""Many fits of one form at once: Levenberg-Marquardt on a robust sum of squares, all draws of a bootstrap side by side.

    cost = Σ_i c_i·(√(1 + f_i²) − 1)

with residuals f in standard errors and c how often each was drawn, as scipy's least_squares has it with
loss="soft_l1": quadratic for small residuals, linear for those of a run that went wrong. Two hundred refits of sixteen
numbers take as long as one call of scipy's.
"""

from collections.abc import Callable

import numpy as np

Residuals = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]

_LEAST_GAIN, _PATIENCE = 1e-6, 4  # of the cost: a fit that gains less has ended, after as many such steps
_EASIER, _HARDER = 1 / 3, 4.0
_DAMPING = (1e-2, 1e-9, 1e12)  # at first, least and most


def fit_many(residuals: Residuals, starts: np.ndarray, counts: np.ndarray, max_steps: int = 400) -> np.ndarray:
    """The numbers of each fit [R, p], from its start [R, p]; `counts` weigh its residuals [R, m].

    `residuals` gives f [r, m] and its gradient [r, m, p] at numbers [r, p] of the fits at positions [r].
    """
    theta, num = np.array(starts, float), starts.shape[1]
    damping = np.full(len(theta), _DAMPING[0])
    f, J = residuals(theta, np.arange(len(theta)))
    cost = _cost(f, counts)
    going, idle = np.arange(len(theta)), np.zeros(len(theta), int)
    for _ in range(max_steps):
        tried = theta[going] + _steps(f[going], J[going], counts[going], damping[going], num)
        new_f, new_J = residuals(tried, going)
        new_cost = _cost(new_f, counts[going])
        better = new_cost < cost[going]
        gained = cost[going] - new_cost > _LEAST_GAIN * cost[going]
        idle[going] = np.where(gained, 0, idle[going] + better)
        ended = (idle[going] >= _PATIENCE) | (~better & (damping[going] >= _DAMPING[2]))
        taken = going[better]
        theta[taken], f[taken], J[taken], cost[taken] = tried[better], new_f[better], new_J[better], new_cost[better]
        damping[going] = np.clip(damping[going] * np.where(better, _EASIER, _HARDER), *_DAMPING[1:])
        going = going[~ended]
        if not len(going):
            break
    return theta


def _cost(f: np.ndarray, counts: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        cost = (counts * (np.sqrt(1 + f * f) - 1)).sum(axis=1)
    return np.asarray(np.where(np.isfinite(cost), cost, np.inf))


def _steps(f: np.ndarray, J: np.ndarray, counts: np.ndarray, damping: np.ndarray, num: int) -> np.ndarray:
    """Damped steps [r, p] for squares that touch the cost from above: large residuals weigh less, none turns round."""
    weights = counts / np.sqrt(1 + f * f)
    weighted = J * weights[..., None]
    gradient = np.einsum("rmp,rm->rp", weighted, f)
    hessian = np.matmul(weighted.transpose(0, 2, 1), J)
    diagonal = np.einsum("rpp->rp", hessian)
    ridge = damping[:, None] * diagonal + 1e-12 * diagonal.max(axis=1, keepdims=True) + 1e-300
    hessian[:, np.arange(num), np.arange(num)] += ridge
    steps = -np.linalg.solve(hessian, gradient[..., None])[..., 0]
    # What the runs say nothing of would be thrown far away: no number moves by more than one at a time.
    return np.asarray(steps / np.maximum(np.abs(steps).max(axis=1, keepdims=True), 1.0))
