"""How a ranking metric follows the loss, for forecasts of it: its own law over the recipe foresees it badly."""

from typing import NamedTuple

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive


class LossLink(NamedTuple):
    """log metric = c0 + c1·loss + c2·log B + c3·log r about their means, with its covariance."""

    means: np.ndarray  # of loss, log B and log r
    coefficients: np.ndarray
    covariance: np.ndarray
    scatter: float
    n: int

    def at(self, loss: float, batch: float, rate: float) -> tuple[float, float]:
        """log metric of one more run and its standard error."""
        x = np.array([1.0, *(np.array([loss, np.log(batch), np.log(rate)]) - self.means)])
        return float(x @ self.coefficients), float(np.sqrt(x @ self.covariance @ x + self.scatter**2))


def loss_link(loss: Numbers, batch: Numbers, rate: Numbers, metric: Numbers) -> LossLink:
    """How a ranking metric follows the loss, whatever made the loss fall, and what batch and rate add to it.

    By the half of the runs with the lowest loss: metrics rise faster, the better runs are.
    """
    x, B, r, y = as_columns(loss=loss, batch=batch, rate=rate, metric=metric)
    check_positive(metric=y, batch=B, rate=r)
    half = x <= np.median(x)
    if half.sum() < 8:
        raise FitError(f"{len(x)} runs for a link to the loss", expected="16 or more")
    columns = np.stack([x, np.log(B), np.log(r)], axis=1)[half]
    means = columns.mean(axis=0)
    X = np.column_stack([np.ones(len(columns)), columns - means])
    coefficients, *_ = np.linalg.lstsq(X, np.log(y[half]), rcond=None)
    missed = np.log(y[half]) - X @ coefficients
    variance = float(missed @ missed) / (len(X) - X.shape[1])
    return LossLink(means, coefficients, variance * np.linalg.pinv(X.T @ X), float(np.sqrt(variance)), len(X))
