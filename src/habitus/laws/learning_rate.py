"""The best learning rate per model size, and how far it drifts, in decades."""

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, check_rows_differ
from habitus.store import BestRate, RateDrift


def learning_rate_drift(size: Numbers, learning_rate: Numbers, loss: Numbers) -> RateDrift:
    """Best rate per size and the span of those rates in decades; rates at an edge of their grid are named."""
    size, rate, loss = as_columns(size=size, learning_rate=learning_rate, loss=loss)
    check_positive(size=size, learning_rate=rate)
    check_rows_differ(size=size, learning_rate=rate, loss=loss)
    if len(np.unique(size)) < 2:
        raise FitError("one model size", expected="two or more, or nothing can drift")
    best = [_best(float(s), rate[size == s], loss[size == s]) for s in np.unique(size)]
    rates = [b.learning_rate for b in best]
    vertices = [b.vertex for b in best if b.vertex is not None]
    open_sizes = [f"{b.size:.3g}" for b in best if not b.bracketed]
    warnings = []
    if open_sizes:
        warnings.append(
            f"the best rate is at the edge of its grid at size {', '.join(open_sizes)}: the span is a lower bound; "
            "extend the grid there"
        )
    return RateDrift(
        best=tuple(best),
        span_decades=float(np.log10(max(rates) / min(rates))),
        vertex_span_decades=float(np.log10(max(vertices) / min(vertices))) if len(vertices) > 1 else None,
        warnings=tuple(warnings),
    )


def _best(size: float, rate: np.ndarray, loss: np.ndarray) -> BestRate:
    rates = np.unique(rate)
    means = np.array([loss[rate == r].mean() for r in rates])  # over seeds
    at = int(means.argmin())
    inside = 0 < at < len(rates) - 1
    bracketed = inside and bool(means[at - 1] > means[at] < means[at + 1])
    vertex = None
    if bracketed:
        u = np.log(rates[at - 1 : at + 2])
        c2, c1, _ = np.polyfit(u - u[1], means[at - 1 : at + 2], 2)
        vertex = float(np.exp(u[1] - c1 / (2 * c2)))
    return BestRate(
        size=size, learning_rate=float(rates[at]), loss=float(means[at]), bracketed=bracketed, vertex=vertex
    )
