"""Runs with a planted truth, and Records to go with them."""

import math
from typing import Any

import numpy as np

from habitus.recipe import Recipe
from habitus.record import Params, Record, Seconds, TrainLosses

E, A, ALPHA, B, BETA = 2.0, 40.0, 0.4, 300.0, 0.4
BUDGETS = (1e11, 3e11, 1e12, 3e12, 1e13)
SHARE_OPT, K_OPT, B_CRIT, RATE = 0.05, 400.0, 32.0, 4e-3


def planted_size(budget: float) -> float:
    """N* where α = β and C = 6ND: (A/B)^(1/2α)·(C/6)^½."""
    return (A / B) ** (1 / (2 * ALPHA)) * math.sqrt(budget / 6)


def planted_loss(N: float, D: float) -> float:
    return E + A * N**-ALPHA + B * D**-BETA


def valley(x: float, x_opt: float) -> float:
    """A two-term curve with its optimum at x_opt and value 0 there."""
    u = math.log(x / x_opt)
    return 0.05 * (math.exp(0.7 * u) / 0.7 + math.exp(-0.7 * u) / 0.7 - 2 / 0.7)


def rows() -> list[dict[str, Any]]:
    """One run per cell on share, batch, allocation and negatives, with a little noise."""
    rng = np.random.default_rng(0)
    found: list[dict[str, Any]] = []

    def add(axis: str, cell: str, budget: float, loss: float, **more: Any) -> None:
        loss *= 1 + 2e-4 * rng.standard_normal()
        batch = more.setdefault("batch_sequences", 16)
        found.append(
            {
                "axis": axis, "cell_id": cell, "flops_budget": budget, "seed": 0, "train/loss": loss,
                "learning_rate": RATE * math.sqrt(batch / 512), "batch/loss": loss, "optimizer": "muon",
                "batch/recall@10": math.exp(-loss / 2), "catalogue/recall@10": math.exp(-loss / 2) / 3, **more,
            }
        )  # fmt: skip

    for budget in BUDGETS:
        for factor in (0.2, 0.35, 0.6, 1.0, 1.7, 3.0, 5.0):
            N = factor * planted_size(budget)
            D = budget / (6 * N)
            add("allocation", f"{factor}", budget, planted_loss(N, D), params=N, slots_seen=D)
        best = planted_loss(planted_size(budget), budget / (6 * planted_size(budget)))
        for share in (0.01, 0.02, 0.03, 0.05, 0.08, 0.13, 0.2, 0.4):
            add("share", f"s{share}", budget, best + valley(share, SHARE_OPT), embedder_share=share)
        for K in (0, 50, 100, 200, 400, 800, 1600, 3200):
            add("negatives", f"k{K}", budget, best - 0.1 + (valley(K, K_OPT) if K else 0.3), num_negatives=K)
    for batch in (4, 8, 16, 32, 64, 128):
        steps = 100 * (1 + B_CRIT / batch)
        for step in range(10, 1500, 10):
            # A straight fall: smoothing delays every crossing by the same number of evaluations.
            add("batch", f"b{batch}", 1e12, 4 - step / steps, batch_sequences=batch, step=step)
    return found


def example_recipe(stage: int = 1) -> Recipe:
    return Recipe.parse(
        {
            "data": {"seq_len": 32},
            "model": {"joint_dim": 16, "text_len": 8, "text_depth": 1, "width": 32, "depth": 2},
            "train": {
                "stage": stage, "batch_sequences": 16, "steps": 300, "learning_rate": 1e-3, "precision": "fp32",
                "optimizer": "muon", **({"parent": "0" * 64} if stage == 2 else {}),
            },
            "evaluate": {"queries": 777, "batch_sequences": 32},
        },
        "example",
    )  # fmt: skip


def record_of(recipe: Recipe, checksum: str, **more: Any) -> Record:
    return Record(
        **{
            "recipe": recipe, "recipe_hash": recipe.hash(checksum), "dataset_checksum": checksum, "status": "done",
            "params": Params(embedder=1000, contextualizer=9000, vocabulary=5), "flops_budget": 1e13,
            "flops_nominal": 1e13, "train": TrainLosses(in_batch_loss=3.0, loss=3.0), "seed": 0,
            "seconds": Seconds(warmup=0.0, train=100.0, evaluate=1.0), **more,
        }
    )  # fmt: skip
