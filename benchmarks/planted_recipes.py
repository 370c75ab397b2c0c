"""Surfaces of a recipe with known truth, and sweeps of cells over them, as `paper_range.py` lays them out."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from scipy import optimize
from scipy.stats import qmc

from habitus.laws.recipe_cost import SlotCost
from habitus.laws.recipe_form import PARTS

COST = SlotCost(tokens=24, seq_len=256, quadratic=50, linear=85, constant=0)
CENTRES = {"embedder": 1e5, "contextualizer": 1e6, "data": 1e7, "steps": 1e3, "batch": 64.0}
BUDGETS = {1e14: (5.8e5, 24), 3e14: (8.6e5, 25), 1e15: (1.3e6, 36)}  # usual size and number of cells
SPANS = ((0.2, 5.0), (0.01, 0.6), (8.0, 256.0), (0.01, 0.2))  # size over the usual one, share, batch, rate
KINK = 1e7  # slots: between the best of the least and of the largest budget
SEEDED, SEEDS = 4, 3  # of the largest budget


@dataclass(frozen=True)
class Planted:
    """A true surface: heights and exponents of the parts at their centres, how they combine, and the best rate."""

    heights: tuple[float, ...] = (0.5, 0.25, 0.5, 0.3, 0.3)
    exponents: tuple[float, ...] = (0.25, 0.35, 0.25, 0.3, 0.3)
    power: float = 3.0
    floor: float = 8.0
    curvature: float = 0.03
    rate_width: float = 1.5  # w of the rate's cost; infinite: a square, of no form that is fitted
    far: float = 0.0  # errors of runs far from the best of their budget, of the distance
    cells: float = 0.0  # nats by which cells differ beyond their knobs, as by width and depth: seeds share them
    # Of no form that is fitted:
    starved: float = 0.0  # nats that a contextualizer below 300,000 parameters costs on top
    kinked: float = 1.0  # slots beyond KINK count with so much of their exponent
    saturated: float = math.inf  # windows per step beyond which more do not help

    def loss(self, row: dict[str, float]) -> float:
        columns = ("embedder_params", "contextualizer_params", "slots_seen", "steps", "batch_sequences")
        seen = {**row, "batch_sequences": min(row["batch_sequences"], self.saturated)}
        seen["slots_seen"] *= max(row["slots_seen"] / KINK, 1.0) ** (self.kinked - 1)
        parts = [a * (seen[column] / CENTRES[name]) ** -x for name, column, a, x in
                 zip(PARTS, columns, self.heights, self.exponents, strict=True)]  # fmt: skip
        total = sum(part**self.power for part in parts) ** (1 / self.power)
        off = math.log(row["rate_at_512"] / best_rate(row["embedder_params"], row["contextualizer_params"]))
        jump = self.starved * (row["contextualizer_params"] < 3e5)
        return self.floor + total + self.curvature * self._rate_cost(off) + jump

    def _rate_cost(self, off: float) -> float:
        x = off / self.rate_width
        return 2 * self.rate_width**2 * (math.expm1(x) - x) if x else off**2

    @cache  # noqa: B019 - truths live as long as the process
    def best(self, compute: float) -> dict[str, float]:
        """The best cell of a budget, by a search over size, share and batch."""

        def at(x: np.ndarray) -> dict[str, float]:
            size, share, batch = np.exp(x)
            return cell(compute, size, min(share, 0.95), batch)

        starts = [np.log([n, s, b]) for n in (6e5, 4e6) for s in (0.1, 0.4) for b in (16, 64)]
        exact = {"xatol": 1e-5, "fatol": 1e-10, "maxiter": 2000}
        found = [optimize.minimize(lambda x: self.loss(at(x)), start, method="Nelder-Mead", options=exact)
                 for start in starts]  # fmt: skip
        return at(min(found, key=lambda f: f.fun).x)


TRUTHS = {
    "scarcest decides": Planted(),
    "parts add": Planted(heights=(0.2, 0.12, 0.25, 0.15, 0.12), exponents=(0.3, 0.5, 0.3, 0.4, 0.4), power=1.0),
    "worse far from the best": replace(Planted(), far=0.15),
    "small models starve": replace(Planted(), starved=0.15),
    "data kinks": replace(Planted(), kinked=0.3),
    "data kinks a little": replace(Planted(), kinked=0.6),
    "batch saturates": replace(Planted(), saturated=32.0),
    "rates cost a square": replace(Planted(), rate_width=math.inf),
    "cells differ": replace(Planted(), cells=0.007),
    "data kinks and cells differ": replace(Planted(), kinked=0.3, cells=0.007),
}


def best_rate(embedder_params: float, contextualizer_params: float) -> float:
    return 0.03 * (contextualizer_params / 1e6) ** -0.3 * (embedder_params / 1e5) ** -0.2


def cell(compute: float, size: float, share: float, batch: float, rate: float | None = None) -> dict[str, float]:
    """A cell of a budget, at its best rate unless one is given."""
    p_e, p = share * size, (1 - share) * size
    slots = float(COST.slots(compute, np.asarray(p_e), np.asarray(p), np.asarray(batch)))
    return {"embedder_params": p_e, "contextualizer_params": p, "slots_seen": slots, "steps": slots / batch / 256,
            "batch_sequences": batch, "rate_at_512": best_rate(p_e, p) if rate is None else rate, "compute": compute,
            "seq_len": 256.0, "joint_dim": float(COST.joint_dim(np.asarray(p_e)))}  # fmt: skip


def planted_rows(seed: int) -> tuple[list[dict[str, float]], np.ndarray]:
    """Cells spread over size, share, batch and rate at three budgets, and the number of each row's cell."""
    rows, numbers = [], []
    starts, ratios = np.log([a for a, _ in SPANS]), np.log([z / a for a, z in SPANS])
    for compute, (size, count) in BUDGETS.items():
        points = qmc.LatinHypercube(4, seed=np.random.default_rng([seed, int(compute / 1e13)])).random(count)
        for k, point in enumerate(points):
            n, s, b, r = np.exp(starts + point * ratios)
            seeds = SEEDS if compute == max(BUDGETS) and k < SEEDED else 1
            numbers += [len(set(numbers))] * seeds
            rows += [cell(compute, n * size, s, 2 ** round(math.log2(b)), r)] * seeds
    return rows, np.array(numbers)


def planted_losses(truth: Planted, rows: list[dict[str, float]], noise: float, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    numbers = np.unique([str(sorted(row.items())) for row in rows], return_inverse=True)[1]  # runs of one cell share it
    losses = np.array([truth.loss(row) for row in rows])
    best = {c: min(loss for loss, row in zip(losses, rows, strict=True) if row["compute"] == c) for c in BUDGETS}
    above = np.array([loss - best[row["compute"]] for loss, row in zip(losses, rows, strict=True)])
    own = truth.cells * np.random.default_rng([seed, 1]).standard_normal(len(losses))[numbers]
    return losses + own + np.hypot(noise, truth.far * above) * rng.standard_normal(len(losses))
