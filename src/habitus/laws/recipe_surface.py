"""What the parts of a recipe buy: one law of the loss over embedder, contextualizer, data, steps, batch and rate.

    L = E + (Σ_x (A_x·x^−α_x)^q)^(1/q) + k·(log r − log r*)²,       x = p_e, p, D, S, B
    log r* = r0 + r_p·log p + r_e·log p_e

p_e and p are the parameters of embedder and contextualizer, D the slots seen, S the steps, B the windows per step
(whose items are each other's candidates), r the learning rate at 512 windows per step. q = 1 adds what the parts cost;
the larger q is, the more the scarcest part decides alone. It is fitted to cells that are spread over all knobs, with
errors that grow with the distance from the budget's best run, since no form holds far from it. What a budget pays is
Equation 1, C = 6·D·(t·p_e + p + 3·B·L·h), so that N*, s*, B*, r* and L* come from one law. Intervals are those of
refits to cells drawn with replacement, seeds of one cell together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, check_positive_number
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Law, Residuals

FORM = "L = E + (sum over p_e, p, D, S, B of (A*x^-alpha)^q)^(1/q) + k*(log r - log r*)^2"
COLUMNS = ("embedder_params", "contextualizer_params", "slots_seen", "steps", "batch_sequences", "rate_at_512")
PARTS = ("embedder", "contextualizer", "data", "steps", "batch")  # of the first five columns
OPTIMUM = ("params", "share", "batch", "rate", "slots", "metric")
# Typical values and how far from them, in logarithms, is no surprise: for parts that hardly matter in the runs.
_EXPONENT, _POWER, _RATE_SLOPE = (0.35, 0.8), (2.0, 1.0), 0.7
_FORM_ERROR = 0.1  # of the distance to the budget's best run
_STARTS = 6
_AT_END = 0.01  # of a logarithm
_SPARE = 5  # cells more than numbers, to judge them by
_NUM_VALUES = 2 + 2 * len(PARTS) + 4


@dataclass(frozen=True)
class SlotCost:
    """FLOPs of a slot by Equation 1: 6·(t·p_e + p + 3·B·L·h), with p_e a quadratic in h."""

    tokens: float  # t
    seq_len: float  # L
    quadratic: float  # p_e = quadratic·h² + linear·h + constant
    linear: float
    constant: float

    def joint_dim(self, embedder_params: np.ndarray) -> np.ndarray:
        a, b, c = self.quadratic, self.linear, self.constant
        root = np.sqrt(np.maximum(b * b + 4 * a * (embedder_params - c), 0.0))
        return np.asarray(np.maximum(4.0, (root - b) / (2 * a)))

    def slots(self, compute: float, p_e: np.ndarray, p: np.ndarray, B: np.ndarray) -> np.ndarray:
        """D that a budget pays."""
        return np.asarray(compute / (6 * (self.tokens * p_e + p + 3 * B * self.seq_len * self.joint_dim(p_e))))


def slot_cost(table: Mapping[str, Numbers]) -> SlotCost:
    """The cost of runs of one text depth, from their own columns and `compute`, `joint_dim` and `seq_len`."""
    p_e, p, D, _, B, C, h, L = (
        np.asarray(table[name], float) for name in (*COLUMNS[:5], "compute", "joint_dim", "seq_len")
    )
    if len(set(h)) < 3:
        raise FitError(f"{len(set(h))} joint dimensions", expected="runs of three or more")
    quadratic, linear, constant = np.polyfit(h, p_e, 2)
    tokens = float(np.median((C / (6 * D) - p - 3 * B * L * h) / p_e))
    return SlotCost(tokens, float(np.median(L)), float(quadratic), float(linear), float(constant))


class _Surface(NamedTuple):
    """The numbers of one fit, about the centre of the logarithms of the columns."""

    floor: float
    log_power: float  # log q
    heights: np.ndarray  # log A_x at the centre [5]
    log_exponents: np.ndarray  # log α_x [5]
    log_curvature: float  # log k
    rate: np.ndarray  # r0, r_p, r_e [3]

    @classmethod
    def of(cls, theta: np.ndarray) -> "_Surface":
        parts = np.asarray(theta[2 : 2 + 2 * len(PARTS)]).reshape(-1, 2)
        return cls(float(theta[0]), float(theta[1]), parts[:, 0], parts[:, 1], float(theta[12]), np.asarray(theta[13:]))

    def best_rate(self, u: np.ndarray) -> np.ndarray:
        """Centred log r* at centred log columns [..., 5 or 6]."""
        return np.asarray(self.rate[0] + self.rate[1] * u[..., 1] + self.rate[2] * u[..., 0])

    def metric(self, u: np.ndarray) -> np.ndarray:
        """The loss at centred log columns [..., 6]."""
        q = np.exp(self.log_power)
        parts = self.heights - np.exp(self.log_exponents) * u[..., :5]
        total = np.exp(np.logaddexp.reduce(q * parts, axis=-1) / q)
        return np.asarray(self.floor + total + np.exp(self.log_curvature) * (u[..., 5] - self.best_rate(u)) ** 2)


def recipe_surface(
    table: Mapping[str, Numbers], metric: Numbers, cells: Numbers, *, draws: int = 100, seed: int = 0
) -> Law:
    """The fitted law of a loss. `cells` numbers the cells: runs with the same number differ in their seed alone.

    Intervals are of so many refits.
    """
    *columns, compute, y = as_columns(**{name: table[name] for name in (*COLUMNS, "compute")}, metric=metric)
    named = {**dict(zip(COLUMNS, columns, strict=True)), "compute": compute}
    check_positive(**named)
    groups = np.asarray(cells)
    num_cells = len(np.unique(groups))
    if num_cells < _NUM_VALUES + _SPARE:
        why = f"{num_cells} cells; {_NUM_VALUES} numbers and {_SPARE} cells to judge them by are needed"
        return law_without_values("recipe_surface", FORM, "too_few", len(y), why)
    logs = np.log(np.stack(columns, axis=1))
    u = logs - logs.mean(axis=0)
    error = _errors(compute, y)
    first = _fit(u, y, error, _starts(y, seed))
    error = error * _scale(_Surface.of(first).metric(u) - y, error)
    best = _fit(u, y, error, [first])
    surface = _Surface.of(best)
    refits = _refits(u, y, error, groups, best, draws, seed)
    names = ("floor", "power", *PARTS, "rate_by_contextualizer", "rate_by_embedder")

    def told(theta: np.ndarray) -> list[float]:
        s = _Surface.of(theta)
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
        status="ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=residuals_of(y, surface.metric(u), _NUM_VALUES),
        points={**{name: tuple(column) for name, column in named.items()}, "metric": tuple(y)},
        details={
            "theta": best.tolist(),
            "draws": [[float(f"{v:.8g}") for v in theta] for theta in refits],
            "scatter": _scale(surface.metric(u) - y, error) * float(error.min()),  # of a run near its budget's best
            "cells": num_cells,
        },
    )


def predict_recipe(law: Law, table: Mapping[str, Numbers], level: float = 0.95) -> tuple[np.ndarray, ...]:
    """The loss of one more run of each recipe, near the best of its budget: value, low and high."""
    u = _centred(law, np.stack([np.log(np.atleast_1d(np.asarray(table[name], float))) for name in COLUMNS], axis=1))
    value = _Surface.of(np.asarray(law.details["theta"])).metric(u)
    drawn = np.stack([_Surface.of(np.asarray(draw)).metric(u) for draw in law.details["draws"]])
    low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    noise = float(stats.t.ppf(0.5 + level / 2, max(1, law.residuals.dof))) * law.details["scatter"]
    below, above = value - np.minimum(low, value), np.maximum(high, value) - value
    return value, value - np.hypot(below, noise), value + np.hypot(above, noise)


def recipe_rate(law: Law, embedder_params: float, contextualizer_params: float) -> float:
    """The best learning rate of a size, at 512 windows per step."""
    logs = np.log([embedder_params, contextualizer_params, 1.0, 1.0, 1.0, 1.0])
    u = _centred(law, logs)
    return float(np.exp(_Surface.of(np.asarray(law.details["theta"])).best_rate(u) - u[5]))


def recipe_losses(law: Law, table: Mapping[str, Numbers]) -> np.ndarray:
    """The loss of recipes by the fit and by each refit, [1 + refits, n], every one at its own best rate."""
    logs = np.log(np.stack([np.atleast_1d(np.asarray(table[name], float)) for name in COLUMNS[:5]], axis=1))
    u = _centred(law, np.column_stack([logs, np.zeros(len(logs))]))
    rows = []
    for surface in _surfaces(law):
        u[:, 5] = surface.best_rate(u)
        rows.append(surface.metric(u))
    return np.array(rows)


def recipe_optima(law: Law, compute: float, cost: SlotCost, most_slots: float = np.inf) -> np.ndarray:
    """OPTIMUM of a budget by the fit and by each refit, [1 + refits, 6].

    `most_slots` are those of one pass: larger models are taken where a budget pays for more.
    """
    if law.law != "recipe_surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted recipe surface")
    check_positive_number(compute=compute)
    budget = _Budget(law, compute, cost, most_slots)
    best, *refits = _surfaces(law)
    first = budget.lowest(best)
    rows = [budget.describe(best, first)]
    return np.array(rows + [budget.describe(surface, budget.lowest(surface, first)) for surface in refits])


def recipe_optimum(law: Law, compute: float, cost: SlotCost, most_slots: float = np.inf) -> Law:
    """The best size, share, batch and rate of a budget and the loss there, with intervals that move together."""
    rows = recipe_optima(law, compute, cost, most_slots)
    values = dict(zip(OPTIMUM, map(float, rows[0]), strict=True))
    by_level = {}
    for level in LEVELS:
        low, high = np.quantile(rows[1:], [0.5 - level / 2, 0.5 + level / 2], axis=0)
        by_level[level] = {n: (float(a), float(b)) for n, a, b in zip(OPTIMUM, low, high, strict=True)}
    ends = _Budget(law, compute, cost, most_slots).ends
    at_end = [name for name, value, (low, high) in zip(OPTIMUM, rows[0], ends, strict=False)
              if min(np.log(value) - low, high - np.log(value)) < _AT_END]  # fmt: skip
    return Law(
        law="recipe_optimum",
        form=FORM + ", at the least metric for the cost",
        status="boundary" if {"params", "share"} & set(at_end) else "ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=Residuals(n=law.residuals.n, dof=law.residuals.dof),
        warnings=(f"the best {', '.join(at_end)} is an end of what was tried",) if at_end else (),
        details={"compute": compute, "at_end": at_end},
    )


def _surfaces(law: Law) -> list[_Surface]:
    """The fit and its refits."""
    return [_Surface.of(np.asarray(theta)) for theta in (law.details["theta"], *law.details["draws"])]


class _Budget:
    """What a budget may choose from: what was tried of size, share and batch, carried on as it moved with compute."""

    def __init__(self, law: Law, compute: float, cost: SlotCost, most_slots: float) -> None:
        self.law, self.compute, self.cost, self.most_slots = law, compute, cost, most_slots
        points = {name: np.asarray(column) for name, column in law.points.items()}
        total = points["embedder_params"] + points["contextualizer_params"]
        log_c = np.log(points["compute"])
        self.ends = []
        for name, column in (("params", total), ("share", points["embedder_params"] / total),
                             ("batch", points["batch_sequences"])):  # fmt: skip
            moves = name != "share" and np.ptp(log_c) > 0.1
            slope = float(np.polyfit(log_c, np.log(column), 1)[0]) if moves else 0.0
            rest = np.log(column) - slope * (log_c - np.log(compute))
            self.ends.append((float(rest.min()), float(rest.max())))

    def lowest(self, surface: _Surface, start: np.ndarray | None = None) -> np.ndarray:
        """Logarithms of size, share and batch where the metric is least."""
        places = [start] if start is not None else [
            np.array([low + f * (high - low) for f, (low, high) in zip(fs, self.ends, strict=True)])
            for fs in product((0.3, 0.7), repeat=3)
        ]  # fmt: skip
        found = [optimize.minimize(lambda x: self.recipe(surface, x)[1], place, method="Nelder-Mead", bounds=self.ends,
                                   options={"xatol": 1e-3, "fatol": 1e-7}) for place in places]  # fmt: skip
        return np.asarray(min(found, key=lambda result: result.fun).x)

    def recipe(self, surface: _Surface, x: np.ndarray) -> tuple[dict[str, float], float]:
        """A recipe of some size, share and batch at its best rate, and the loss there."""
        N, s, B = np.exp(x)
        p_e, p = s * N, (1 - s) * N
        D = float(self.cost.slots(self.compute, np.asarray(p_e), np.asarray(p), np.asarray(B)))
        named = {"embedder_params": p_e, "contextualizer_params": p, "slots_seen": D,
                 "steps": D / (B * self.cost.seq_len), "batch_sequences": B, "rate_at_512": 1.0}  # fmt: skip
        u = _centred(self.law, np.log(list(named.values())))
        rate = float(surface.best_rate(u))
        named["rate_at_512"] = float(np.exp(rate - u[5]))
        u[5] = rate
        # A second pass is worth less; by how much these runs do not say.
        beyond = float(np.log(D / self.most_slots)) if self.most_slots < D else 0.0
        return named, float(surface.metric(u)) + beyond

    def describe(self, surface: _Surface, x: np.ndarray) -> tuple[float, ...]:
        named, y = self.recipe(surface, x)
        N, s, B = np.exp(x)
        return float(N), float(s), float(B), named["rate_at_512"], named["slots_seen"], y


def _centred(law: Law, logs: np.ndarray) -> np.ndarray:
    return np.asarray(logs - [np.mean(np.log(law.points[name])) for name in COLUMNS])


def _errors(compute: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far each run may be from the form, up to a factor: more, the worse it is than the best of its budget."""
    budget = np.round(np.log(compute), 1)
    above = np.array([value - y[budget == b].min() for value, b in zip(y, budget, strict=True)])
    return np.asarray(_FORM_ERROR * np.hypot(above, float(np.median(above)) or 1.0))


def _scale(missed: np.ndarray, error: np.ndarray) -> float:
    """What errors are too large by: of the median, which a run that diverged does not move."""
    dof = max(1, len(missed) - _NUM_VALUES)
    return float(max(1e-3, 1.4826 * np.median(np.abs(missed) / error) * np.sqrt(len(missed) / dof)))


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
    def missed(theta: np.ndarray) -> np.ndarray:
        surface = _Surface.of(theta)
        with np.errstate(over="ignore"):
            values = np.nan_to_num((surface.metric(u) - y) / error, nan=1e6, posinf=1e6, neginf=-1e6)
        surprise = [
            *((surface.log_exponents - np.log(_EXPONENT[0])) / _EXPONENT[1]),
            (surface.log_power - np.log(_POWER[0])) / _POWER[1],
            *(surface.rate[1:] / _RATE_SLOPE),
        ]
        return np.concatenate([np.clip(values, -1e6, 1e6), surprise])

    found = [optimize.least_squares(missed, start, loss="soft_l1", max_nfev=400) for start in starts]
    return np.asarray(min(found, key=lambda result: result.cost).x)


def _refits(
    u: np.ndarray, y: np.ndarray, error: np.ndarray, groups: np.ndarray, best: np.ndarray, num: int, seed: int
) -> list[np.ndarray]:
    """Fits to cells drawn with replacement."""
    rng = np.random.default_rng(seed)
    cells = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    draws = []
    for _ in range(num):
        rows = np.concatenate([cells[i] for i in rng.integers(len(cells), size=len(cells))])
        draws.append(_fit(u[rows], y[rows], error[rows], [best]))
    return draws


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


def columns_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Rows as columns."""
    return {name: np.array([row[name] for row in rows], float) for name in rows[0]}
