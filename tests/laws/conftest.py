"""Simulated sweeps with planted laws, as the rows of a flat CSV."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BUDGETS = tuple(10.0**e for e in (15, 16, 17, 18, 19))
E, A, ALPHA, B, BETA = 1.8, 1000.0, 0.45, 2500.0, 0.37
SHARE_OPT, K_OPT, B_CRIT = 0.03, 2.0e5, 400.0


def planted_size(budget: float) -> float:
    """N* of the planted surface where C = 6ND."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (budget / 6) ** (BETA / (ALPHA + BETA))


def planted_loss(N: np.ndarray, D: np.ndarray) -> np.ndarray:
    return E + A * N**-ALPHA + B * D**-BETA


def valley(x: np.ndarray, x_opt: float, alpha: float, beta: float, depth: float) -> np.ndarray:
    """A two-term curve that is zero at x_opt and `depth` at its higher end."""
    u = np.log(x / x_opt)
    rise = np.exp(alpha * u) / alpha + np.exp(-beta * u) / beta - 1 / alpha - 1 / beta
    return depth * rise / rise.max()


def planted_rows(noise: float = 0.001, seed: int = 0, axes: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Runs of all axes (or those named) with relative noise on every metric."""
    rng = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []

    def add(axis: str, cell: str, budget: float, loss: float, **more: Any) -> None:
        for rate, penalty in ((1e-3, 0.02), (2e-3, 0.0), (4e-3, 0.03)):
            true = loss + penalty
            val = true * (1 + noise * rng.standard_normal())
            recall = np.exp(-0.5 * true) * (1 + noise * rng.standard_normal())
            rows.append(
                {
                    "axis": axis, "cell_id": cell, "flops_budget": budget, "learning_rate": rate, "seed": 0,
                    "train/loss": true - 0.01, "train/in_batch_loss": true - 0.01, "epochs": 0.5,
                    "batch/loss": val, "batch/recall@10": recall, "batch/loss/history=3": val + 0.3,
                    "batch/loss/history=100": 0.9 * val, "catalogue/loss": val + 5, "catalogue/recall@10": recall / 5,
                    **more,
                }
            )  # fmt: skip

    for c in BUDGETS:
        best = planted_size(c)
        for i, n in enumerate(best * np.geomspace(1 / 6, 6, 8)):
            loss = float(planted_loss(n, c / (6 * n)))
            add("allocation", f"a{i}", c, loss, params=n, slots_seen=c / (6 * n), embedder_share=0.02)
    for c in BUDGETS[:4]:
        s = np.array([0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.35, 0.5])
        level = float(planted_loss(planted_size(c), c / (6 * planted_size(c))))
        for i, (share, rise) in enumerate(zip(s, valley(s, SHARE_OPT, 0.6, 0.9, 0.4), strict=True)):
            add("share", f"s{i}", c, level + rise, embedder_share=share, params=planted_size(c))
        for i, (share, u) in enumerate((v, np.log(v / 0.02)) for v in np.geomspace(0.004, 0.2, 8)):
            add("depth", f"d{i}", c, level + 0.03 * u * u, embedder_share=share, depth=i + 1)
        K = np.array([0.0, *2.0 ** np.arange(14, 22)])
        rises = [0.35, *valley(K[1:], K_OPT, 0.5, 0.45, 0.3)]
        for i, (k, rise) in enumerate(zip(K, rises, strict=True)):
            add("negatives", f"k{i}", c, level + rise, num_negatives=k)
    for init, drift in (("default", 5.0), ("mup_lr", 2.0)):
        for j, size in enumerate((1e7, 5e7, 1e8, 5e8)):
            for rate in (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2):
                best_rate = 1e-2 / (drift if j == 2 else 1.0)
                loss = 4 - 0.2 * j + 0.1 * np.log(rate / best_rate) ** 2
                rows.append(
                    {
                        "axis": "init", "cell_id": f"i{j}", "flops_budget": 1e17, "learning_rate": rate, "seed": 0,
                        "init": init, "params": size, "train/loss": loss,
                    }
                )  # fmt: skip
    for b in 64.0 * 2 ** np.arange(6):
        end = 1000 * (1 + B_CRIT / b)
        for step in np.arange(50, 2 * end, 50):
            rows.append(
                {
                    "axis": "batch", "cell_id": f"b{b:g}", "flops_budget": 1e17, "learning_rate": 2e-3, "seed": 0,
                    "batch_sequences": b, "step": step, "train/loss": 3.0,
                    "batch/loss": 3 + 4 * np.exp(-step / end), "params": 1e7,
                }
            )  # fmt: skip
    return [row for row in rows if not axes or row["axis"] in axes]


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


@pytest.fixture
def planted() -> Any:
    """The functions and truths of this module, for tests that simulate their own sweeps."""
    import types

    return types.SimpleNamespace(
        rows=planted_rows, write=write_csv, valley=valley, loss=planted_loss, size=planted_size,
        budgets=BUDGETS, share_opt=SHARE_OPT, k_opt=K_OPT, b_crit=B_CRIT,
        surface={"floor": E, "size_coef": A, "size_exponent": ALPHA, "data_coef": B, "data_exponent": BETA},
    )  # fmt: skip
