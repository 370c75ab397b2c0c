"""What a slot costs as nominal FLOPs (Equation 1) and as executed ones, so that budgets can be spent by either."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from scipy.optimize import nnls

from habitus.errors import FitError
from habitus.laws.checks import Numbers

_COST_ERROR = 0.02  # of what a run paid
_EXECUTED_ERROR = 0.1
_UNIQUE = (0.0, -0.3, -0.6)  # powers of the batch by which each slot needs fewer items of its own


class Cost(Protocol):
    """What a budget pays of slots."""

    @property
    def seq_len(self) -> float: ...

    def slots(self, compute: float, p_e: np.ndarray, p: np.ndarray, B: np.ndarray) -> np.ndarray:
        """D of models of so many parameters and windows per step."""
        ...


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


@dataclass(frozen=True)
class ExecutedCost:
    """FLOPs of a slot as they were executed: each distinct item of a step once, attention's own term.

    A sum of terms in p_e, p and scores that shrink with the batch as its items repeat, fitted to what runs executed.
    """

    nominal: SlotCost
    coefficients: tuple[float, ...]

    @property
    def seq_len(self) -> float:
        return self.nominal.seq_len

    def slots(self, compute: float, p_e: np.ndarray, p: np.ndarray, B: np.ndarray) -> np.ndarray:
        """D that a budget of executed FLOPs pays."""
        terms = _executed_terms(self.nominal, np.asarray(p_e), np.asarray(p), np.asarray(B))
        return np.asarray(compute / (6 * np.tensordot(self.coefficients, terms, axes=1)))

    def of(self, compute: float, p_e: float, p: float, B: float) -> float:
        """Executed FLOPs of a nominal budget's run."""
        one = [np.asarray(v, float) for v in (p_e, p, B)]
        return float(self.nominal.slots(compute, *one) / self.slots(1.0, *one))


def slot_cost(table: Mapping[str, Numbers]) -> SlotCost:
    """The nominal cost of runs of one text depth, from their columns, `compute`, `joint_dim` and `seq_len`."""
    p_e, p, D, B, C, h, L = _columns(table, "compute")
    if len(set(h)) < 3:
        raise FitError(f"{len(set(h))} joint dimensions", expected="runs of three or more")
    quadratic, linear, constant = np.polyfit(h, p_e, 2)
    tokens = float(np.median((C / (6 * D) - p - 3 * B * L * h) / p_e))
    cost = SlotCost(tokens, float(np.median(L)), float(quadratic), float(linear), float(constant))
    missed = float(np.max(np.abs(np.log(cost.slots(1.0, p_e, p, B) * C / D))))
    if missed > _COST_ERROR:
        raise FitError(f"Equation 1 misses what some run paid by {missed:.1%}", expected="runs of one text depth")
    return cost


def executed_cost(table: Mapping[str, Numbers]) -> ExecutedCost:
    """The executed cost of the same runs, from `executed`."""
    nominal = slot_cost(table)
    p_e, p, D, B, executed, _, _ = _columns(table, "executed")
    per_slot = executed / (6 * D)
    terms = (_executed_terms(nominal, p_e, p, B) / per_slot).T
    coefficients, _ = nnls(terms, np.ones(len(per_slot)))
    missed = float(np.max(np.abs(terms @ coefficients - 1)))
    if missed > _EXECUTED_ERROR:
        raise FitError(f"executed FLOPs of some run are missed by {missed:.0%}", expected="runs of one dataset")
    return ExecutedCost(nominal, tuple(map(float, coefficients)))


def _columns(table: Mapping[str, Numbers], compute: str) -> list[np.ndarray]:
    names = ("embedder_params", "contextualizer_params", "slots_seen", "batch_sequences", compute, "joint_dim")
    return [np.asarray(table[name], float) for name in (*names, "seq_len")]


def _executed_terms(nominal: SlotCost, p_e: np.ndarray, p: np.ndarray, B: np.ndarray) -> np.ndarray:
    """[terms, ...]; the root of p stands for width·depth in attention's own term."""
    scores = 3 * B * nominal.seq_len * nominal.joint_dim(p_e)
    repeats = [B**power for power in _UNIQUE]
    return np.stack([*(nominal.tokens * p_e * r for r in repeats), p, *(scores * r for r in repeats[:2]), np.sqrt(p),
                     np.ones_like(p)])  # fmt: skip
