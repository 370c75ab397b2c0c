"""What size and data cost on some runs, as a power law: the cost under which a surface places its optimum."""

from typing import NamedTuple

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive

_ONE_BUDGET = 0.01  # budgets are met to 0.01%


class RealisedCost(NamedTuple):
    """C = k·N^p·D^q."""

    k: float
    p: float
    q: float

    def flops(self, N: float, D: float) -> float:
        return float(self.k * N**self.p * D**self.q)

    def data(self, C: float, N: float) -> float:
        """D that spends C at size N."""
        return float((C / self.k / N**self.p) ** (1 / self.q))


SIX_ND = RealisedCost(6.0, 1.0, 1.0)


def realised_cost(N: Numbers, D: Numbers, C: Numbers) -> RealisedCost:
    """k, p, q by least squares in logarithms: what a budget really bought."""
    N, D, C = as_columns(N=N, D=D, C=C)
    check_positive(N=N, D=D, C=C)
    if len(C) == 0 or np.ptp(np.log(C)) < _ONE_BUDGET:  # what rounding leaves of it would have exponents too
        raise FitError(
            f"{'no runs' if len(C) == 0 else 'all runs have one budget'}, which says nothing of what another buys",
            expected="runs of two or more budgets",
        )
    X = np.stack([np.ones(len(N)), np.log(N), np.log(D)], axis=1)
    (log_k, p, q), *_ = np.linalg.lstsq(X, np.log(C), rcond=None)
    if not (p > 0 and q > 0):
        raise FitError(
            f"FLOPs go as N^{p:.3g}·D^{q:.3g} over these runs", expected="runs whose cost rises with size and data"
        )
    return RealisedCost(float(np.exp(log_k)), float(p), float(q))
