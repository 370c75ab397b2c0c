"""What the parts of a recipe buy: one law of the loss over embedder, contextualizer, data, steps, batch and rate.

    L = E + (Σ_x (A_x·x^−α_x)^q)^(1/q) + 2k·w²·(e^(δ/w) − 1 − δ/w),       x = p_e, p, D, S, B
    δ = log r − log r*,   log r* = r0 + r_p·log p + r_e·log p_e,   w = 1.5

p_e and p are the parameters of embedder and contextualizer, D the slots seen, S the steps, B the windows per step
(whose items are each other's candidates), r the learning rate at 512 windows per step. q = 1 adds what the parts cost;
the larger q is, the more the scarcest part decides alone. A rate costs k·δ² near the best one, more than that where it
is too high and less where it is too low. It is fitted to cells that are spread over all knobs, with
errors that grow with the distance from the budget's best run, since no form holds far from it. What a budget pays is
Equation 1, C = 6·D·(t·p_e + p + 3·B·L·h), so that N*, s*, B*, r* and L* come from one law. Intervals are those of
refits to cells drawn with replacement, seeds of one cell together, half of them without a third of some knob's range.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from habitus.laws.checks import Numbers, all_equal, as_columns, check_positive
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.laws.many_fits import fit_many
from habitus.laws.pure_error import SIGNIFICANT
from habitus.laws.recipe_form import COLUMNS, FORM, PARTS, Surface
from habitus.laws.residual_structure import residual_structure
from habitus.laws.told_knobs import as_told
from habitus.store import LEVELS, Direction, Law

# Typical values and how far from them, in logarithms, is no surprise: for parts that hardly matter in the runs.
_EXPONENT, _POWER, _RATE, _RATE_SLOPE = (0.35, 0.8), (2.0, 1.0), 1.0, 0.7
_FORM_ERROR = 0.1  # of the distance to the budget's best run
_STARTS = 24
_REFIT_STEPS = 80  # from the fit to all runs, which is near
_AT_ONE_VALUE = 1e-9  # of a logarithm: nothing goes with what is the same in all runs
_WRONG = 0.02  # p value of a wrong form: planted steps and kinks have 0.0025, the least there is
_ROUNDING = 1e-3  # of the range of the metric: no form is wrong that misses by less
_SPARE = 5  # cells more than numbers, to judge them by
_NUM_VALUES = 2 + 2 * len(PARTS) + 4


def recipe_surface(
    table: Mapping[str, Numbers],
    metric: Numbers,
    cells: Numbers,
    direction: Direction = "min",
    *,
    draws: int = 200,
    seed: int = 0,
) -> Law:
    """The fitted law of a loss, or of −log of a metric that should rise.

    `cells` numbers the cells: runs with the same number differ in their seed alone. Intervals are of so many refits;
    with one seed, laws of several metrics have refits to the same draws of cells.
    """
    *columns, compute, y = as_columns(**{name: table[name] for name in (*COLUMNS, "compute")}, metric=metric)
    named = {**dict(zip(COLUMNS, columns, strict=True)), "compute": compute}
    check_positive(**named)
    if direction == "max":
        check_positive(metric=y)
    values_measured, y = y, y if direction == "min" else -np.log(y)
    groups = np.asarray(cells)
    num_cells = len(np.unique(groups))
    if num_cells < _NUM_VALUES + _SPARE:
        why = f"{num_cells} cells; {_NUM_VALUES} numbers and {_SPARE} cells to judge them by are needed"
        return law_without_values("recipe_surface", FORM, "too_few", len(y), why)
    if all_equal(y):
        return law_without_values("recipe_surface", FORM, "flat", len(y), "the metric is the same in all runs")
    logs = np.log(np.stack(columns, axis=1))
    u = logs - logs.mean(axis=0)
    error = _errors(compute, y)
    first = _fit(u, y, error, _starts(y, seed))
    error = error * _scale(Surface.of(first).metric(u) - y, error)
    best = _fit(u, y, error, [first])
    surface = Surface.of(best)
    scatter = _scatter(surface.metric(u) - y, error)
    along = _along_parts(surface, u, y, error, groups)
    refits = _refits(u, y, error, groups, best, draws, seed)
    names = ("floor", "power", *PARTS, "rate_by_contextualizer", "rate_by_embedder")

    def told(theta: np.ndarray) -> list[float]:
        s = Surface.of(theta)
        return [s.floor, np.exp(s.log_power), *np.exp(s.log_exponents), *s.rate[1:]]

    values = dict(zip(names, map(float, told(best)), strict=True))
    rows = np.array([told(theta) for theta in refits])
    by_level = {}
    for level in LEVELS:
        ends = np.quantile(rows, [0.5 - level / 2, 0.5 + level / 2], axis=0)
        by_level[level] = {name: (float(a), float(b)) for name, a, b in zip(names, *ends, strict=True)}
    return Law(
        law="recipe_surface",
        form=FORM,
        status="misfit" if along["structure_p_value"] < _WRONG else "ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=residuals_of(y, surface.metric(u), _NUM_VALUES),
        points={**{name: tuple(column) for name, column in named.items()}, "metric": tuple(values_measured)},
        details={
            "direction": direction,
            "theta": best.tolist(),
            "draws": [[float(f"{v:.8g}") for v in theta] for theta in refits],
            "scatter": scatter,
            **_against_seeds(scatter, y, groups),
            **along,
            "cells": num_cells,
        },
    )


def from_target(law: Law, target: np.ndarray) -> np.ndarray:
    """The metric, from what was fitted: the loss itself, or −log of a metric that should rise."""
    return target if law.details.get("direction", "min") == "min" else np.exp(-target)


def predict_recipe(law: Law, table: Mapping[str, Numbers], level: float = 0.95) -> tuple[np.ndarray, ...]:
    """The metric of one more run of each recipe, near the best of its budget: value, low and high."""
    logs = np.stack([np.log(np.atleast_1d(np.asarray(table[name], float))) for name in COLUMNS], axis=1)
    u = as_told(law, centred_logs(law, logs))
    value = Surface.of(np.asarray(law.details["theta"])).metric(u)
    drawn = np.stack([Surface.of(np.asarray(draw)).metric(u) for draw in law.details["draws"]])
    low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    noise = float(stats.t.ppf(0.5 + level / 2, max(1, law.residuals.dof))) * law.details["scatter"]
    below, above = value - np.minimum(low, value), np.maximum(high, value) - value
    ends = (value - np.hypot(below, noise), value + np.hypot(above, noise))
    low, high = sorted((from_target(law, end) for end in ends), key=lambda end: float(end[0]))
    return from_target(law, value), low, high


def recipe_rate(law: Law, embedder_params: float, contextualizer_params: float) -> float:
    """The best learning rate of a size, at 512 windows per step."""
    logs = np.log([embedder_params, contextualizer_params, 1.0, 1.0, 1.0, 1.0])
    u = centred_logs(law, logs)
    return float(np.exp(Surface.of(np.asarray(law.details["theta"])).best_rate(u) - u[5]))


def recipe_losses(law: Law, table: Mapping[str, Numbers]) -> np.ndarray:
    """The loss of recipes by the fit and by each refit, [1 + refits, n], every one at its own best rate."""
    logs = np.log(np.stack([np.atleast_1d(np.asarray(table[name], float)) for name in COLUMNS[:5]], axis=1))
    u = centred_logs(law, np.column_stack([logs, np.zeros(len(logs))]))
    surfaces = fitted_surfaces(law)
    rates = surfaces.best_rate(u)
    places = np.broadcast_to(u, (*rates.shape, len(COLUMNS))).copy()
    places[..., 5] = rates
    return from_target(law, surfaces.metric(places))


def misfit(law: Law) -> str:
    """Why what moves with compute is not to be trusted: the form is wrong, or cells scatter by more than seeds do."""
    if why := wrong_form(law):
        return why
    p_value = law.details.get("lack_of_fit_p_value", 1.0)
    if p_value >= SIGNIFICANT:
        return ""
    seeds, scatter = law.details["seed_error"], law.details["scatter"]
    return (
        f"cells near the best scatter about the law by {scatter:.2g}, where seeds differ by {seeds:.2g} "
        f"(p = {p_value:.2g}): optima count that as noise of cells, exponents are not to be trusted"
    )


def wrong_form(law: Law) -> str:
    """Why nothing of the law is to be trusted: what it misses goes with one of its parts."""
    p_value = law.details.get("structure_p_value", 1.0)
    if p_value >= _WRONG:
        return ""
    return (
        f"cells with much the same {law.details['structure_of']} are missed alike (p = {p_value:.2g}): the form of the "
        "law is wrong, and neither optima nor forecasts nor exponents are to be trusted"
    )


def fitted_surfaces(law: Law) -> Surface:
    """The fit and its refits as one, [1 + refits, 1]: to be asked at places [..., n, 6]."""
    return Surface.of(np.array([law.details["theta"], *law.details["draws"]])[:, None])


def centred_logs(law: Law, logs: np.ndarray) -> np.ndarray:
    return np.asarray(logs - centre_of(law))


def centre_of(law: Law) -> np.ndarray:
    """Mean logarithms of the columns."""
    return np.array([np.mean(np.log(law.points[name])) for name in COLUMNS])


def budget_numbers(compute: Numbers) -> np.ndarray:
    """A number for each run's budget: cells of one budget differ by a step, budgets by a quarter or more."""
    logs = np.log(np.asarray(compute, float))
    order = np.argsort(logs, kind="stable")
    numbers = np.empty(len(logs), int)
    numbers[order] = np.cumsum(np.diff(logs[order], prepend=logs[order][:1]) > 0.1)
    return numbers


def _errors(compute: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far each run may be from the form, up to a factor: more, the worse it is than the best of its budget."""
    budget = budget_numbers(compute)
    above = np.array([value - y[budget == b].min() for value, b in zip(y, budget, strict=True)])
    return np.asarray(_FORM_ERROR * np.hypot(above, float(np.median(above)) or 1.0))


def _scale(missed: np.ndarray, error: np.ndarray) -> float:
    """What errors are too large by: of the median, which a run that diverged does not move."""
    dof = max(1, len(missed) - _NUM_VALUES)
    return float(max(1e-3, 1.4826 * np.median(np.abs(missed) / error) * np.sqrt(len(missed) / dof)))


def _scatter(missed: np.ndarray, error: np.ndarray) -> float:
    """Of a run near its budget's best: by the model of errors, or by the better half itself where that is more.

    Errors that do not grow with the distance from the best would make the model's least one too small.
    """
    near = error <= np.median(error)
    dof = max(1, len(missed) - _NUM_VALUES)
    by_half = 1.4826 * float(np.median(np.abs(missed[near]))) * np.sqrt(len(missed) / dof)
    return float(max(_scale(missed, error) * error.min(), by_half))


def _against_seeds(scatter: float, y: np.ndarray, groups: np.ndarray) -> dict[str, float]:
    """What seeds of a cell differ by, and the p value of cells near the best scattering about the law no more."""
    within = [y[groups == group] - y[groups == group].mean() for group in np.unique(groups)]
    dof = sum(len(missed) - 1 for missed in within)
    squares = sum(float(missed @ missed) for missed in within)
    if not dof or not squares:
        return {}
    # The scatter is that of the better half of the runs.
    p_value = float(stats.f.sf(scatter**2 * dof / squares, max(1, (len(y) - _NUM_VALUES) // 2), dof))
    return {"seed_error": float(np.sqrt(squares / dof)), "seed_dof": dof, "lack_of_fit_p_value": p_value}


def _along_parts(
    surface: Surface, u: np.ndarray, y: np.ndarray, error: np.ndarray, groups: np.ndarray
) -> dict[str, Any]:
    """The part along which residuals are most alike among neighbours, and how often chance would make some part so."""
    missed = surface.metric(u) - y
    if float(np.sqrt(np.mean(missed**2))) < _ROUNDING * float(np.ptp(y)):
        return {"structure_of": PARTS[0], "structure_p_value": 1.0}
    missed = missed / error
    slopes = surface.gradient(u) / error[:, None]
    weighted = slopes / np.sqrt(1 + missed**2)[:, None]  # as the robust loss weighs runs
    held = np.diag(_expectations()[1] ** -2.0)
    left = np.eye(len(y)) - slopes @ np.linalg.lstsq(slopes.T @ weighted + held, weighted.T, rcond=None)[0]
    varied = np.flatnonzero(np.ptp(u[:, : len(PARTS)], axis=0) > _AT_ONE_VALUE)
    found = residual_structure(missed, left, u[:, varied], groups)
    return {"structure_of": PARTS[varied[found.knob]], "structure_p_value": found.p_value}


def _starts(y: np.ndarray, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    spread = float(np.ptp(y))
    starts = []
    for _ in range(_STARTS):
        parts = [[np.log(spread / 2) + rng.normal(0, 0.3), np.log(0.3) + rng.normal(0, 0.4)] for _ in PARTS]
        floor = float(y.min()) - spread * rng.uniform(0.2, 1.0)
        starts.append(np.array([floor, np.log(1.5), *np.ravel(parts), np.log(spread / 50), 0.0, 0.0, 0.0]))
    return starts


def _fit(u: np.ndarray, y: np.ndarray, error: np.ndarray, starts: Sequence[np.ndarray]) -> np.ndarray:
    """The numbers of the best fit to all runs."""
    found = _fits(u, y, error, np.array(starts), np.ones((len(starts), len(y))))
    expected, spread = _expectations()
    known = np.isfinite(spread)
    missed = np.column_stack(
        [(Surface.of(found[:, None]).metric(u) - y) / error, (found - expected)[:, known] / spread[known]]
    )
    return np.asarray(found[np.argmin((np.sqrt(1 + missed**2) - 1).sum(axis=1))])


def _fits(
    u: np.ndarray,
    y: np.ndarray,
    error: np.ndarray,
    starts: np.ndarray,
    counts: np.ndarray,
    surprise: np.ndarray | float = 0.0,
    max_steps: int = 400,
) -> np.ndarray:
    """The numbers of fits [R, 16] to runs that count so often each [R, n].

    `surprise` moves what is expected of a fit's numbers by so many standard deviations [R, those with expectations].
    """
    unit = float(np.ptp(y)) or 1.0  # a perplexity's floor would take thousands of steps
    y, error, starts = y / unit, error / unit, _times(starts, 1 / unit)
    expected, spread = _expectations()
    known = np.isfinite(spread)
    centre = np.broadcast_to(expected[known] + spread[known] * surprise, (len(starts), known.sum()))
    slope = np.diag(1 / np.where(known, spread, 1.0))[known]

    def residuals(theta: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        surfaces = Surface.of(theta[:, None])
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            missed = (surfaces.metric(u) - y) / error
            gradient = surfaces.gradient(np.broadcast_to(u, (len(theta), *u.shape))) / error[:, None]
        missed = np.clip(np.nan_to_num(missed, nan=1e6), -1e6, 1e6)
        gradient = np.clip(np.nan_to_num(gradient), -1e6, 1e6)
        surprised = (theta[:, known] - centre[at]) / spread[known]
        slopes = np.broadcast_to(slope, (len(theta), *slope.shape))
        return np.concatenate([missed, surprised], axis=1), np.concatenate([gradient, slopes], axis=1)

    counts = np.column_stack([counts, np.ones((len(starts), known.sum()))])
    return _times(fit_many(residuals, starts, counts, max_steps), unit)


def _times(theta: np.ndarray, unit: float) -> np.ndarray:
    """The numbers of fits [R, 16] to a metric that is larger by this factor."""
    heights = [*range(2, 2 + 2 * len(PARTS), 2), 2 + 2 * len(PARTS)]
    theta = theta.copy()
    theta[:, 0] *= unit
    theta[:, heights] += np.log(unit)
    return theta


def _expectations() -> tuple[np.ndarray, np.ndarray]:
    """What is expected of every number of a fit, and how far from it is no surprise: infinite where nothing is."""
    expected, spread = np.zeros(_NUM_VALUES), np.full(_NUM_VALUES, np.inf)
    expected[1], spread[1] = np.log(_POWER[0]), _POWER[1]
    exponents = 3 + 2 * np.arange(len(PARTS))
    expected[exponents], spread[exponents] = np.log(_EXPONENT[0]), _EXPONENT[1]
    spread[-3:] = _RATE, _RATE_SLOPE, _RATE_SLOPE  # the best rate of the mean size is near the mean of those tried
    return expected, spread


def _refits(
    u: np.ndarray, y: np.ndarray, error: np.ndarray, groups: np.ndarray, best: np.ndarray, num: int, seed: int
) -> list[np.ndarray]:
    """Fits to cells drawn with replacement, every other one without the least or most third of size, share, batch or
    rate, and with expectations drawn from their own spread.

    A form that is wrong in some corner gives other answers without it: seeds do not show that, and neither do refits to
    all cells. With fixed expectations all refits would lean to one and the same value where the cells say little.
    """
    rng = np.random.default_rng(seed)
    cells = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    place = np.array([u[rows[0]] for rows in cells])
    num_expected = int(np.isfinite(_expectations()[1]).sum())
    counts, surprise = np.zeros((num, len(y))), np.empty((num, num_expected))
    for k in range(num):
        kept = np.arange(len(cells)) if k % 2 else _without_a_third(place, rng)
        for cell in kept[rng.integers(len(kept), size=len(kept))]:
            counts[k, cells[cell]] += 1
        surprise[k] = rng.standard_normal(num_expected)
    return list(_fits(u, y, error, np.tile(best, (num, 1)), counts, surprise, _REFIT_STEPS))


def _without_a_third(place: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Positions of cells at [n, 6] but for the least or most third of size, share, batch or rate."""
    knobs = (np.logaddexp(place[:, 0], place[:, 1]), place[:, 0] - place[:, 1], place[:, 4], place[:, 5])
    order = np.argsort(knobs[rng.integers(len(knobs))], kind="stable")
    third = len(order) // 3
    return np.sort(order[third:] if rng.integers(2) else order[: len(order) - third])


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Rows as columns."""
    return {name: np.array([row[name] for row in rows], float) for name in rows[0]}
