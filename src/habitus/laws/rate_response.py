"""The learning rate as a covariate: how much a run lost by a rate that was not its best.

Cells that were run at several rates say how sign·y rises on both sides of the best one, and how that one moves with
size and compute. Within a cell i, with ρ the log of a rate over the usual one of its budget (a line in log C through
the budgets' medians, at 512 windows),

    sign·y_ij = cell_i + q·ρ² + (l_0 + l_1·log N_i + l_2·log C_i)·ρ,      ρ* = −(l_0 + l_1·log N + l_2·log C) / 2q

by least squares on the differences within cells, so that no cell's own level enters. Every run is then moved to its
best rate, by −q·(ρ − ρ*)², before a valley is placed: N* does not absorb mistuning.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from habitus.laws.checks import sign_of
from habitus.laws.pure_error import SIGNIFICANT
from habitus.laws.runs import MeasuredRun
from habitus.store import Direction, Interval, Law, Residuals

FORM = (
    "sign*y = cell + curvature*(log(rate) - log(best))^2;  "
    "best = rate_at_512 * (N/size)^size_power * (C/budget)^budget_power"
)


@dataclass(frozen=True)
class RateResponse:
    """What cells with several rates say."""

    curvature: float  # q, of sign·metric
    curvature_se: float
    level: float  # ρ* at the middle size and budget
    size_power: float
    budget_power: float
    middle: tuple[float, float]  # log N and log C
    usual: tuple[float, float]  # slope and level in log C of the usual rate
    tried: tuple[float, float]  # ρ: smallest and largest
    dof: int
    num_cells: int

    def best(self, N: float, C: float) -> float:
        """log of the best rate at 512 windows, within what was tried about the usual one."""
        log_n, log_c = math.log(N) - self.middle[0], math.log(C) - self.middle[1]
        rho = self.level + self.size_power * log_n + self.budget_power * log_c
        return _at(self.usual, C) + min(max(rho, self.tried[0]), self.tried[1])

    def lost(self, run: MeasuredRun) -> float:
        """How much sign·metric of a run is above what its best rate would give."""
        return self.curvature * (_log_rate(run) - self.best(run.knobs["params"], run.budget)) ** 2

    def law(self, N: float, C: float) -> Law:
        """As an entry of laws.json, with the best rate at a size and budget."""
        half = float(stats.t.ppf(0.975, self.dof)) * self.curvature_se
        return Law(
            law="rate_response",
            form=FORM,
            status="ok",
            values={
                "rate_at_512": math.exp(self.best(N, C)),
                "curvature": self.curvature,
                "size_power": self.size_power,
                "budget_power": self.usual[0] + self.budget_power,
            },
            intervals={"0.95": {"curvature": Interval(low=self.curvature - half, high=self.curvature + half)}},
            residuals=Residuals(n=self.dof, dof=self.dof),
            details={
                "size": N,
                "budget": C,
                "tried": [math.exp(_at(self.usual, C) + end) for end in self.tried],
                "cells": self.num_cells,
            },
        )


def rate_response(runs: Iterable[MeasuredRun], metric: str, direction: Direction) -> RateResponse | None:
    """From all cells that were run at several rates; None where they show no valley in the rate beyond chance."""
    runs = [run for run in runs if metric in run.metrics and {"params", "batch_sequences"} <= set(run.knobs)]
    cells = _cells_with_rates(runs)
    members = [run for cell in cells for run in cell]
    if len(members) - len(cells) < 4:
        return None
    sign = sign_of(direction)
    log_n, log_c = (np.array([f(run) for run in members]) for f in (_log_size, _log_budget))
    middle = (float(log_n.mean()), float(log_c.mean()))
    usual = _usual_rates(runs)
    rho = np.array([_log_rate(run) - _at(usual, run.budget) for run in members])
    y = sign * np.array([run.metrics[metric] for run in members])
    columns = [rho**2, rho]
    moves = [len({_log_size(cell[0]) for cell in cells}) > 1, len({cell[0].budget for cell in cells}) > 1]
    for moving, values, centre in zip(moves, (log_n, log_c), middle, strict=True):
        if moving:
            columns.append((values - centre) * rho)
    owner = np.repeat(np.arange(len(cells)), [len(cell) for cell in cells])
    X = np.stack([_within(column, owner) for column in columns], axis=1)
    dof = len(y) - len(cells) - X.shape[1]
    if dof < 1 or np.linalg.matrix_rank(X) < X.shape[1]:
        return None
    coefficients, *_ = np.linalg.lstsq(X, _within(y, owner), rcond=None)
    missed = _within(y, owner) - X @ coefficients
    se = np.sqrt(float(missed @ missed) / dof * np.diag(np.linalg.inv(X.T @ X)))
    q, slope, *powers = (float(c) for c in coefficients)
    if q <= 0 or stats.t.sf(q / max(float(se[0]), 1e-300), dof) > SIGNIFICANT:
        return None
    remaining = iter(powers)
    by_size, by_budget = (-next(remaining) / (2 * q) if moving else 0.0 for moving in moves)
    tried = (float(rho.min()), float(rho.max()))
    return RateResponse(q, float(se[0]), -slope / (2 * q), by_size, by_budget, middle, usual, tried, dof, len(cells))


def _usual_rates(runs: Sequence[MeasuredRun]) -> tuple[float, float]:
    """Slope and level of a line in log C through the medians of the budgets."""
    budgets = sorted({run.budget for run in runs})
    medians = [float(np.median([_log_rate(run) for run in runs if run.budget == c])) for c in budgets]
    if len(budgets) < 2:
        return 0.0, medians[0]
    slope, level = np.polyfit(np.log(budgets), medians, 1)
    return float(slope), float(level)


def _at(line: tuple[float, float], C: float) -> float:
    return line[0] * math.log(C) + line[1]


def _cells_with_rates(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    cells: dict[tuple[float, str], list[MeasuredRun]] = {}
    for run in runs:
        cells.setdefault((run.budget, run.cell_id), []).append(run)
    return [cell for _, cell in sorted(cells.items()) if len({run.learning_rate for run in cell}) > 1]


def _log_rate(run: MeasuredRun) -> float:
    """At 512 windows, by the root of the batch."""
    return math.log(run.learning_rate / math.sqrt(run.knobs["batch_sequences"] / 512))


def _log_size(run: MeasuredRun) -> float:
    return math.log(run.knobs["params"])


def _log_budget(run: MeasuredRun) -> float:
    return math.log(run.budget)


def _within(values: np.ndarray, owner: np.ndarray) -> np.ndarray:
    """Less the mean of its cell."""
    return values - (np.bincount(owner, values) / np.bincount(owner))[owner]
