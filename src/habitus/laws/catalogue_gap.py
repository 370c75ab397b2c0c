"""How much more the loss over the catalogue is than that among a batch's candidates, and what makes it less.

    catalogue/loss − batch/loss = G − log(1 + e^u),     u = c + Σ_x γ_x·log x,     x = p_e, p, D, B, r

p_e and p are the parameters of embedder and contextualizer, D the slots seen, B the windows per step, r the learning
rate at 512 windows per step. While models rank by popularity, candidates weigh the same for every user, and the
difference is what their numbers make it: G, whatever the recipe. It falls as models learn for whom the rest of the
catalogue is out of the question. So catalogue/loss may fall faster and faster where batch/loss does not, which no floor
with powers can follow; both laws together can. Intervals are those of refits to cells drawn with replacement.
"""

from collections.abc import Mapping

import numpy as np
from scipy import stats

from habitus.laws.checks import Numbers, as_columns, check_positive
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.laws.many_fits import fit_many
from habitus.laws.recipe_form import COLUMNS
from habitus.laws.recipe_surface import errors_from_form, robust_scale
from habitus.store import CATALOGUE_GAP, LEVELS, Law

FORM = "catalogue/loss - batch/loss = G - log(1 + exp(c + sum over p_e, p, D, B, r of g*log x))"
_NAMES = ("embedder", "contextualizer", "data", "batch", "rate")
_USED = [COLUMNS.index(name) for name in (
    "embedder_params", "contextualizer_params", "slots_seen", "batch_sequences", "rate_at_512")]  # fmt: skip
# What is expected of c and of each γ, and how far from it is no surprise: for knobs that hardly matter in the runs.
_EXPECTED = np.array([0.0, 0.3, 0.3, 0.3, 0.3, 0.0])
_SPREAD = np.array([4.0, 0.3, 0.3, 0.3, 0.3, 0.3])
_NUM_VALUES = 1 + len(_EXPECTED)
_SPARE = 5  # cells more than numbers, to judge them by
_STARTS = (-4.0, -2.0, 0.0, 2.0)  # of c


def catalogue_gap(
    table: Mapping[str, Numbers],
    catalogue_loss: Numbers,
    batch_loss: Numbers,
    cells: Numbers,
    *,
    draws: int = 100,
    seed: int = 0,
) -> Law:
    """The law of the difference. `cells` numbers the cells: runs with the same number differ in their seed alone."""
    *columns, compute, full, local = as_columns(
        **{name: table[name] for name in (*COLUMNS, "compute")}, catalogue_loss=catalogue_loss, batch_loss=batch_loss
    )
    named = {**dict(zip(COLUMNS, columns, strict=True)), "compute": compute}
    check_positive(**named)
    groups = np.asarray(cells)
    num_cells = len(np.unique(groups))
    if num_cells < _NUM_VALUES + _SPARE:
        why = f"{num_cells} cells; {_NUM_VALUES} numbers and {_SPARE} cells to judge them by are needed"
        return law_without_values(CATALOGUE_GAP, FORM, "too_few", len(full), why)
    gap, logs = full - local, np.log(np.stack(columns, axis=1))
    u = logs - logs.mean(axis=0)
    error = errors_from_form(compute, local)
    starts = np.array([[gap.max() + 0.1 * np.ptp(gap), c, *_EXPECTED[1:]] for c in _STARTS])
    first = _best(starts, u, gap, error)
    error = error * robust_scale(gap_of(first, u) - gap, error, _NUM_VALUES)
    best = _best(first[None], u, gap, error)
    drawn = _refits(best, u, gap, error, groups, draws, seed)
    values = dict(zip(("plateau", *_NAMES), map(float, np.delete(best, 1)), strict=True))
    rows = np.delete(drawn, 1, axis=1)
    by_level = {}
    for level in LEVELS:
        ends = np.quantile(rows, [0.5 - level / 2, 0.5 + level / 2], axis=0)
        by_level[level] = {name: (float(a), float(b)) for name, a, b in zip(values, *ends, strict=True)}
    near = error <= np.median(error)
    return Law(
        law=CATALOGUE_GAP,
        form=FORM,
        status="ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=residuals_of(gap, gap_of(best, u), _NUM_VALUES),
        points={**{name: tuple(column) for name, column in named.items()}, "metric": tuple(gap)},
        details={
            "theta": best.tolist(),
            "draws": [[float(f"{v:.8g}") for v in theta] for theta in drawn],
            "scatter": float(1.4826 * np.median(np.abs(gap_of(best, u) - gap)[near])),
            "cells": num_cells,
        },
    )


def predict_gap(law: Law, table: Mapping[str, Numbers], level: float = 0.95) -> tuple[np.ndarray, ...]:
    """The difference for one more run of each recipe: value, low and high."""
    logs = np.stack([np.log(np.atleast_1d(np.asarray(table[name], float))) for name in COLUMNS], axis=1)
    u = logs - np.array([np.mean(np.log(law.points[name])) for name in COLUMNS])
    value = gap_of(np.asarray(law.details["theta"]), u)
    drawn = gap_of(np.asarray(law.details["draws"]), u)
    low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    noise = float(stats.t.ppf(0.5 + level / 2, max(1, law.residuals.dof))) * law.details["scatter"]
    below, above = value - np.minimum(low, value), np.maximum(high, value) - value
    return value, value - np.hypot(below, noise), value + np.hypot(above, noise)


def gap_of(theta: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The difference by one fit [7] or by several [R, 7] at centred logarithms of all columns [n, 6]."""
    return np.asarray(theta[..., :1] - np.logaddexp(0.0, _inner(theta, u)))


def _inner(theta: np.ndarray, u: np.ndarray) -> np.ndarray:
    return np.asarray(theta[..., 1:2] + theta[..., 2:] @ u[:, _USED].T)


def _best(starts: np.ndarray, u: np.ndarray, gap: np.ndarray, error: np.ndarray) -> np.ndarray:
    """The fit to all runs that misses least, of those from several starts."""
    found = _fits(starts, u, gap, error, np.ones((len(starts), len(gap))), np.zeros((len(starts), len(_EXPECTED))))
    missed = np.column_stack([(gap_of(found, u) - gap) / error, (found[:, 1:] - _EXPECTED) / _SPREAD])
    return np.asarray(found[np.argmin((np.sqrt(1 + missed**2) - 1).sum(axis=1))])


def _refits(
    best: np.ndarray, u: np.ndarray, gap: np.ndarray, error: np.ndarray, groups: np.ndarray, num: int, seed: int
) -> np.ndarray:
    """Fits to cells drawn with replacement, with expectations drawn from their own spread."""
    rng = np.random.default_rng(seed)
    rows = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    counts = np.zeros((num, len(gap)))
    for k in range(num):
        for cell in rng.integers(len(rows), size=len(rows)):
            counts[k, rows[cell]] += 1
    return _fits(np.tile(best, (num, 1)), u, gap, error, counts, rng.standard_normal((num, len(_EXPECTED))))


def _fits(
    starts: np.ndarray, u: np.ndarray, gap: np.ndarray, error: np.ndarray, counts: np.ndarray, surprise: np.ndarray
) -> np.ndarray:
    """The numbers of fits [R, 7] to runs that count so often each [R, n]; `surprise` moves what is expected [R, 6]."""
    centre = _EXPECTED + _SPREAD * surprise
    slope = np.column_stack([np.zeros(len(_EXPECTED)), np.diag(1 / _SPREAD)])

    def residuals(theta: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        inner = _inner(theta, u)
        missed = (theta[:, :1] - np.logaddexp(0.0, inner) - gap) / error
        of_inner = -1 / (1 + np.exp(-np.clip(inner, -700, 700)))
        gradient = np.concatenate(
            [np.ones((*inner.shape, 1)), of_inner[..., None], of_inner[..., None] * u[None, :, _USED]], axis=-1
        )
        surprised = (theta[:, 1:] - centre[at]) / _SPREAD
        slopes = np.broadcast_to(slope, (len(theta), *slope.shape))
        return (
            np.concatenate([missed, surprised], axis=1),
            np.concatenate([gradient / error[:, None], slopes], axis=1),
        )

    return fit_many(residuals, starts, np.column_stack([counts, np.ones((len(starts), len(_EXPECTED)))]))
