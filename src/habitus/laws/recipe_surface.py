"""What the parts of a recipe buy: one law over embedder, contextualizer, data, batch and learning rate at once.

    y = E + a·p_e^−α + b·p^−γ + d·D^−β + q(log r, log B, log C)

p_e and p are the parameters of embedder and contextualizer, D the slots seen, r the learning rate at 512 windows per
step, q a quadratic whose optimum moves with log C. Fitted to cells that are spread over all knobs, with errors that
grow with the distance from the budget's best run, since no form holds far from it. What a budget pays is Equation 1,
C = 6·D·(t·p_e + p + 3·B·L·h), so that N*, s*, B*, r* and L* come from one law. Intervals are those of refits to cells
drawn with replacement, seeds of one cell together.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from scipy import optimize, stats

from habitus.errors import FitError
from habitus.laws.checks import Numbers, as_columns, check_positive, check_positive_number
from habitus.laws.law_builders import law_without_values, make_intervals, residuals_of, widen_to_values
from habitus.store import LEVELS, Law, Residuals

FORM = "y = E + a*p_e^-alpha + b*p^-gamma + d*D^-beta + quadratic of log rate and log batch, moving with log C"
COLUMNS = ("embedder_params", "contextualizer_params", "slots_seen", "batch_sequences", "rate_at_512", "compute")
_POWERS = (("alpha", "embedder_params"), ("gamma", "contextualizer_params"), ("beta", "slots_seen"))
_EXPONENTS = (0.05, 2.0)
_TYPICAL, _SPREAD = (
    0.35,
    0.8,
)  # exponents of published laws, and how far from it in logarithms without being implausible
_FORM_ERROR = 0.1  # of the distance to the budget's best run
_DRAWS = 200
_NUM_COEFFICIENTS = 12
_AT_END = 0.01  # of a logarithm
OPTIMUM = ("params", "share", "batch", "rate", "slots", "metric")


class Surface(NamedTuple):
    """Exponents [3] and coefficients [12] of one fit."""

    exponents: np.ndarray
    coefficients: np.ndarray


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
        return np.maximum(4.0, (-b + np.sqrt(np.maximum(b * b + 4 * a * (embedder_params - c), 0.0))) / (2 * a))

    def slots(self, compute: float, p_e: np.ndarray, p: np.ndarray, B: np.ndarray) -> np.ndarray:
        """D that a budget pays."""
        return compute / (6 * (self.tokens * p_e + p + 3 * B * self.seq_len * self.joint_dim(p_e)))


def slot_cost(table: Mapping[str, Numbers]) -> SlotCost:
    """The cost of runs of one text depth, from their own columns, `joint_dim` and `seq_len` among them."""
    p_e, p, D, B, C, h, L = (
        np.asarray(table[n], float)
        for n in ("embedder_params", "contextualizer_params", "slots_seen", "batch_sequences", "compute", "joint_dim",
                  "seq_len")
    )  # fmt: skip
    if len(set(h)) < 3:
        raise FitError(f"{len(set(h))} joint dimensions", expected="runs of three or more")
    quadratic, linear, constant = np.polyfit(h, p_e, 2)
    tokens = float(np.median((C / (6 * D) - p - 3 * B * L * h) / p_e))
    return SlotCost(tokens, float(np.median(L)), float(quadratic), float(linear), float(constant))


def recipe_surface(table: Mapping[str, Numbers], metric: Numbers, cells: Numbers, seed: int = 0) -> Law:
    """The fitted law of a loss. `cells` numbers the cells: runs with the same number differ in their seed alone."""
    *columns, y = as_columns(**{name: table[name] for name in COLUMNS}, metric=metric)
    named = dict(zip(COLUMNS, columns, strict=True))
    check_positive(**named)
    groups = np.asarray(cells)
    num_cells = len(np.unique(groups))
    if num_cells < _NUM_COEFFICIENTS + 3 + 5:
        why = f"{num_cells} cells; {_NUM_COEFFICIENTS + 3} numbers and five cells to judge them by are needed"
        return law_without_values("recipe_surface", FORM, "too_few", len(y), why)
    error = _errors(named["compute"], y)
    best = _fit(named, y, error, None)
    fitted = evaluate(best, named, _centre(named))
    draws = _refits(named, y, error, groups, best, seed)
    values = {"floor": float(best.coefficients[0])} | {
        name: float(value) for (name, _), value in zip(_POWERS, best.exponents, strict=True)
    }
    by_level = {}
    for level in LEVELS:
        ends = np.quantile(
            [[d.coefficients[0], *d.exponents] for d in draws], [0.5 - level / 2, 0.5 + level / 2], axis=0
        )
        by_level[level] = {name: (float(a), float(b)) for name, a, b in zip(values, *ends, strict=True)}
    return Law(
        law="recipe_surface",
        form=FORM,
        status="ok",
        values=values,
        intervals=make_intervals(widen_to_values(by_level, values)),
        residuals=residuals_of(y, fitted, _NUM_COEFFICIENTS + 3),
        points={**{name: tuple(column) for name, column in named.items()}, "metric": tuple(y)},
        details={
            "exponents": best.exponents.tolist(),
            "coefficients": best.coefficients.tolist(),
            "draws": [[float(f"{v:.8g}") for v in (*d.exponents, *d.coefficients)] for d in draws],
            "scatter": float(np.sqrt(np.mean(((y - fitted) / error) ** 2) * len(y) / max(1, len(y) - 15))),
            "cells": num_cells,
        },
    )


def predict_recipe(law: Law, table: Mapping[str, Numbers], level: float = 0.95) -> tuple[np.ndarray, ...]:
    """The metric of one more run of each recipe near the best of its budget: value, low and high."""
    named = {name: np.atleast_1d(np.asarray(table[name], float)) for name in COLUMNS}
    centre = _centre({name: np.asarray(law.points[name]) for name in COLUMNS})
    best, draws = surfaces(law)
    value = evaluate(best, named, centre)
    drawn = np.stack([evaluate(d, named, centre) for d in draws])
    low, high = np.quantile(drawn, [0.5 - level / 2, 0.5 + level / 2], axis=0)
    dof = max(1, law.residuals.dof)
    noise = float(stats.t.ppf(0.5 + level / 2, dof)) * noise_of(law)
    return (
        value,
        value - np.hypot(value - np.minimum(low, value), noise),
        value + np.hypot(np.maximum(high, value) - value, noise),
    )


def noise_of(law: Law) -> float:
    """Standard deviation of a run near the best of its budget about the law."""
    C, y = (np.asarray(law.points[name]) for name in ("compute", "metric"))
    return float(law.details["scatter"] * _errors(C, y).min())


def recipe_optimum(law: Law, compute: float, cost: SlotCost) -> Law:
    """The best size, share, batch and rate of a budget and the metric there, with intervals that move together."""
    if law.law != "recipe_surface" or not law.values:
        raise FitError(f"a law {law.law!r} with status {law.status!r}", expected="a fitted recipe surface")
    check_positive_number(compute=compute)
    budget = _Budget(law, compute, cost)
    best, draws = surfaces(law)
    first = budget.lowest(best)
    rows = np.array([budget.describe(surface, budget.lowest(surface, first)) for surface in draws])
    values = dict(zip(OPTIMUM, map(float, budget.describe(best, first)), strict=True))
    by_level = {}
    for level in LEVELS:
        low, high = np.quantile(rows, [0.5 - level / 2, 0.5 + level / 2], axis=0)
        by_level[level] = {n: (float(a), float(b)) for n, a, b in zip(OPTIMUM, low, high, strict=True)}
    at_end = [name for name, x, (low, high) in zip(OPTIMUM, first, budget.ends, strict=False)
              if min(x - low, high - x) < _AT_END]  # fmt: skip
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


def surfaces(law: Law) -> tuple[Surface, list[Surface]]:
    """The best fit and the refits."""
    best = Surface(np.asarray(law.details["exponents"]), np.asarray(law.details["coefficients"]))
    return best, [Surface(np.asarray(row[:3]), np.asarray(row[3:])) for row in law.details["draws"]]


def evaluate(surface: Surface, named: Mapping[str, np.ndarray], centre: Mapping[str, float]) -> np.ndarray:
    return np.asarray(_terms(named, surface.exponents, centre) @ surface.coefficients)


def _centre(named: Mapping[str, np.ndarray]) -> dict[str, float]:
    return {name: float(np.mean(np.log(column))) for name, column in named.items()}


def _terms(named: Mapping[str, np.ndarray], exponents: np.ndarray, centre: Mapping[str, float]) -> np.ndarray:
    """1; p_e^−α, p^−γ and D^−β about their centres; then r, r², b, b², r·b, r·c, b·c and r·n."""
    u = {name: np.log(column) - centre[name] for name, column in named.items()}
    r, b, c = u["rate_at_512"], u["batch_sequences"], u["compute"]
    powers = [np.exp(-e * u[name]) for e, (_, name) in zip(exponents, _POWERS, strict=True)]
    return np.stack([np.ones_like(r), *powers, r, r * r, b, b * b, r * b, r * c, b * c, r * u["contextualizer_params"]],
                    axis=-1)  # fmt: skip


def _errors(compute: np.ndarray, y: np.ndarray) -> np.ndarray:
    """How far each run may be from the form, up to a factor: more, the worse it is than the best of its budget."""
    decade = np.round(np.log(compute), 1)
    above = np.array([value - y[decade == d].min() for value, d in zip(y, decade, strict=True)])
    typical = float(np.median(above)) or 1.0
    return np.asarray(_FORM_ERROR * np.hypot(above, typical))


def _fit(named: Mapping[str, np.ndarray], y: np.ndarray, error: np.ndarray, start: np.ndarray | None) -> Surface:
    centre = _centre(named)
    low, high = np.log(_EXPONENTS)

    def solve(log_exponents: np.ndarray) -> tuple[float, np.ndarray]:
        X = _terms(named, np.exp(np.clip(log_exponents, low, high)), centre) / error[:, None]
        keep = np.ones(X.shape[1], bool)
        while True:  # a part that would do harm is worth nothing
            coefficients = np.zeros(X.shape[1])
            coefficients[keep] = np.linalg.lstsq(X[:, keep], y / error, rcond=None)[0]
            bad = [k for k in (1, 2, 3) if keep[k] and coefficients[k] < 0]
            bad += [k for k in (5, 7) if keep[k] and coefficients[k] < 0]
            if not bad:
                break
            keep[min(bad, key=lambda k: coefficients[k])] = False
        missed = X @ coefficients - y / error
        return float(missed @ missed), coefficients

    def height(log_exponents: np.ndarray) -> float:
        beyond = np.maximum(low - log_exponents, 0) + np.maximum(log_exponents - high, 0)
        scale = max(1.0, len(y) - 15.0)
        implausible = np.sum(((log_exponents - np.log(_TYPICAL)) / _SPREAD) ** 2)
        return scale * float(np.log(solve(log_exponents)[0])) + float(implausible) + 1e3 * float(beyond @ beyond)

    starts = [start] if start is not None else [
        np.log([a, g, b]) for a in (0.2, 0.6) for g in (0.2, 0.6) for b in (0.2, 0.6)
    ]  # fmt: skip
    tried = [optimize.minimize(height, s, method="Nelder-Mead", options={"xatol": 0.01, "fatol": 0.01}) for s in starts]
    best = min(tried, key=lambda result: result.fun).x
    return Surface(np.exp(np.clip(best, low, high)), solve(best)[1])


def _refits(
    named: Mapping[str, np.ndarray], y: np.ndarray, error: np.ndarray, groups: np.ndarray, best: Surface, seed: int
) -> list[Surface]:
    """Fits to cells drawn with replacement; all about the centre of the runs."""
    rng = np.random.default_rng(seed)
    centre = _centre(named)
    cells = [np.flatnonzero(groups == g) for g in np.unique(groups)]
    draws = []
    for _ in range(_DRAWS):
        rows = np.concatenate([cells[i] for i in rng.integers(len(cells), size=len(cells))])
        drawn = _fit({n: column[rows] for n, column in named.items()}, y[rows], error[rows], np.log(best.exponents))
        # The draw has a centre of its own: its coefficients about the common one come from its own values.
        X, own = _terms(named, drawn.exponents, centre), {n: column[rows] for n, column in named.items()}
        there = evaluate(drawn, named, _centre(own))
        draws.append(Surface(drawn.exponents, np.linalg.lstsq(X, there, rcond=None)[0]))
    return draws


class _Budget:
    """What a budget may choose from: what was tried of size, share, batch and rate, carried on as it moved."""

    def __init__(self, law: Law, compute: float, cost: SlotCost) -> None:
        points = {name: np.asarray(law.points[name]) for name in COLUMNS}
        self.compute, self.cost, self.centre = compute, cost, _centre(points)
        total = points["embedder_params"] + points["contextualizer_params"]
        tried = (total, points["embedder_params"] / total, points["batch_sequences"], points["rate_at_512"])
        log_c = np.log(points["compute"])
        self.ends = []
        for name, column in zip(OPTIMUM, tried, strict=False):
            moves = name != "share" and np.ptp(log_c) > 0.1
            slope = float(np.polyfit(log_c, np.log(column), 1)[0]) if moves else 0.0
            rest = np.log(column) - slope * (log_c - np.log(compute))
            self.ends.append((float(rest.min()), float(rest.max())))

    def lowest(self, surface: Surface, start: np.ndarray | None = None) -> np.ndarray:
        """Logarithms of size, share and batch where the metric is least."""
        places = [start] if start is not None else [
            np.array([low + f * (high - low) for f, (low, high) in zip(fs, self.ends, strict=False)])
            for fs in product((0.3, 0.7), repeat=3)
        ]  # fmt: skip
        options = {"xatol": 1e-3, "fatol": 1e-6}
        found = [optimize.minimize(lambda x: float(self.metric(surface, x)[0][0]), place, method="Nelder-Mead",
                                   bounds=self.ends[:3], options=options) for place in places]  # fmt: skip
        return np.asarray(min(found, key=lambda result: result.fun).x)

    def metric(self, surface: Surface, x: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """The metric and the recipe of a size, share and batch at the best rate."""
        N, s, B = (np.exp(np.atleast_1d(v)) for v in x)
        p_e, p = s * N, (1 - s) * N
        k, centre = surface.coefficients, self.centre
        c = np.log(self.compute) - centre["compute"]
        slope = k[4] + k[8] * (np.log(B) - centre["batch_sequences"]) + k[9] * c
        slope = slope + k[11] * (np.log(p) - centre["contextualizer_params"])
        low, high = (end - centre["rate_at_512"] for end in self.ends[3])
        r = np.clip(-slope / (2 * k[5]), low, high) if k[5] > 0 else np.where(slope > 0, low, high)
        recipe = {"embedder_params": p_e, "contextualizer_params": p, "batch_sequences": B,
                  "slots_seen": self.cost.slots(self.compute, p_e, p, B),
                  "rate_at_512": np.exp(r + centre["rate_at_512"]),
                  "compute": np.full(len(N), self.compute)}  # fmt: skip
        return evaluate(surface, recipe, centre), recipe

    def describe(self, surface: Surface, x: np.ndarray) -> tuple[float, ...]:
        y, recipe = self.metric(surface, x)
        N, s, B = np.exp(x)
        return N, s, B, recipe["rate_at_512"][0], recipe["slots_seen"][0], y[0]


class LossLink(NamedTuple):
    """log metric = c0 + c1·x + c2·x², x the loss less its mean; with the scatter of runs about it."""

    mean: float
    coefficients: np.ndarray
    scatter: float
    n: int

    def at(self, loss: np.ndarray | float) -> np.ndarray:
        return np.asarray(np.exp(np.polyval(self.coefficients, np.asarray(loss, float) - self.mean)))


def loss_link(loss: Numbers, metric: Numbers, degree: int = 2) -> LossLink:
    """How a ranking metric follows the loss over all runs, whatever made the loss fall."""
    x, y = as_columns(loss=loss, metric=metric)
    check_positive(metric=y)
    mean = float(x.mean())
    coefficients = np.polyfit(x - mean, np.log(y), degree)
    missed = np.log(y) - np.polyval(coefficients, x - mean)
    return LossLink(mean, coefficients, float(np.sqrt(missed @ missed / max(1, len(x) - degree - 1))), len(x))


def columns_of(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Rows as columns."""
    return {name: np.array([row[name] for row in rows], float) for name in rows[0]}
