"""Stores to report on: the paper's printed tables, a planted study of 600 runs, 10,101 runs, a log that ends, and one
where most laws refuse.

python -m tests.reporting.make_store planted /tmp/planted        (or: paper, tiny, log, large)
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import Plan
from habitus.typed import content_hash
from tests.sealing import seal_store

TABLES = Path(__file__).parents[3] / "shared" / "paper" / "tables"
SHARES = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.10, 0.15, 0.20, 0.27, 0.35, 0.50)
NEGATIVES = (0.0, *(2.0**e for e in range(14, 22)))
CHECKSUM = "5eed" * 16
HOSTILE = "<script>alert(1)</script>"
Row = dict[str, Any]  # axis, cell_id, budget, rate, knobs, metrics and whatever else the Record needs


def write_store(store: Path, rows: Iterable[Row], preset: str = "test") -> Path:
    """A store folder with one Record per row and one manifest per axis. A row without metrics has no Record yet."""
    manifests: dict[str, list[Row]] = {}
    for row in rows:
        seed = int(row.get("seed", 0))
        name = [row["axis"], row["cell_id"], row["budget"], row["rate"], row.get("init", "default"), seed]
        digest = content_hash(name)
        if "metrics" in row or "reason" in row:
            folder = store / "cells" / digest
            folder.mkdir(parents=True)
            _record(row, digest, seed).write(folder / "record.json")
        manifests.setdefault(row["axis"], []).append(
            {
                "cell_id": row["cell_id"], "flops_budget": row["budget"], "wanted": row.get("wanted", {}),
                "realised": {}, "learning_rate": row["rate"], "seed": seed, "recipe_hash": digest,
            }
        )  # fmt: skip
    (store / "sweeps").mkdir(parents=True)
    for axis, cells in manifests.items():
        text = json.dumps({"axis": axis, "preset": preset, "cells": cells})
        (store / "sweeps" / f"{axis}-1.json").write_text(text, encoding="utf-8")
    return seal_store(store, CHECKSUM)


def _record(row: Row, digest: str, seed: int) -> Record:
    knobs = row.get("knobs", {})
    stage = 2 if row["axis"] == "negatives" else 1
    recipe = Recipe.parse(
        {
            "model": {
                "joint_dim": int(knobs.get("joint_dim", 16)), "width": int(knobs.get("width", 64)),
                "depth": int(knobs.get("depth", 4)), "text_depth": int(knobs.get("text_depth", 4)),
                "init": row.get("init", "default"),
            },
            "train": {
                "stage": stage, "batch_sequences": int(knobs.get("batch_sequences", 64)),
                "steps": int(knobs.get("steps", 1000)), "learning_rate": row["rate"], "seed": seed,
                "num_negatives": int(knobs.get("num_negatives", 0)), **({"parent": "0" * 64} if stage == 2 else {}),
                "dropout": knobs.get("dropout", 0.0),
            },
            "data": {name: knobs[name] for name in ("user_share", "user_part") if name in knobs},
        },
        "test",
    )  # fmt: skip
    common = {
        "recipe": recipe,
        "recipe_hash": digest,
        "dataset_checksum": CHECKSUM,
        "seed": seed,
        "flops_budget": row["budget"],
    }
    if "reason" in row:
        return Record.model_validate({**common, "status": "failed", "reason": row["reason"]})
    size = knobs.get("params", 1e6)
    embedder = round(size * knobs.get("embedder_share", 0.02))
    metrics = row["metrics"]
    tail = metrics["train/loss"]
    return Record.model_validate(
        {
            **common,
            "status": "done",
            "params": {"embedder": embedder, "contextualizer": round(size) - embedder, "vocabulary": 10_000},
            "embedder_share": knobs.get("embedder_share", 0.02),
            "embedder_flop_share": knobs.get("embedder_flop_share"),
            "flops_nominal": row["budget"],
            "steps": int(knobs.get("steps", 1000)),
            "slots_seen": round(knobs.get("slots_seen", row["budget"] / (6 * size))),
            "epochs": knobs.get("epochs", 0.4),
            "unique_events": knobs.get("unique_events", 0),
            "train": {
                "loss": tail, "in_batch_loss": metrics.get("train/in_batch_loss", tail),
                "extra_loss": metrics.get("train/extra_loss"),
            },
            "metrics": {m: {"value": float(v), "n": 20_000} for m, v in metrics.items() if not m.startswith("train/")},
            "evaluation": {
                "queries": 20_000, "query_set_checksum": "ab" * 32, "batch_sequences": 64, "candidates": 100_000,
            },
            "trajectory": [{"step": int(s), "metric": m, "value": float(v)} for s, m, v in row.get("trajectory", ())],
            "hardware": {"device": "simulated"},
            "versions": {"habitus": "0.1.0"},
            "seconds": {"warmup": 1.0, "train": 20.0, "evaluate": 3.0},
        }
    )  # fmt: skip


def small_plan(**fields: Any) -> Plan:
    """A plan with no more than it must have, and the fields named."""
    recipe = {
        "model": {"joint_dim": 32, "width": 96, "depth": 4},
        "train": {"batch_sequences": 64, "steps": 1200, "learning_rate": 0.002},
    }
    required = {
        "metric": "catalogue/recall@10", "flops": 1e13, "stage1_flops": 1e13, "stage2_flops": 0.0, "optimizer": "adamw",
        "laws": "planted", "quantities": {}, "stage1": recipe,
    }  # fmt: skip
    return Plan.parse({**required, **fields}, "test")


# --- (b) a planted study ---------------------------------------------------------------------------------------------

BUDGETS = tuple(10.0**e for e in (15, 16, 17, 18, 19))
E, A, ALPHA, B, BETA = 1.8, 1000.0, 0.45, 2500.0, 0.37
SHARE_OPT, K_OPT, B_CRIT = 0.03, 2.0e5, 400.0
LENGTHS = (3, 5, 10, 20, 50, 100)


def planted_size(budget: float) -> float:
    """N* of the planted surface where C = 6ND."""
    return (ALPHA * A / (BETA * B)) ** (1 / (ALPHA + BETA)) * (budget / 6) ** (BETA / (ALPHA + BETA))


def planted_loss(size: float, slots: float) -> float:
    return E + A * size**-ALPHA + B * slots**-BETA


def valley(x: np.ndarray, x_opt: float, alpha: float, beta: float, depth: float) -> np.ndarray:
    """A two-term curve that is zero at x_opt and `depth` at its higher end."""
    u = np.log(x / x_opt)
    rise = np.exp(alpha * u) / alpha + np.exp(-beta * u) / beta - 1 / alpha - 1 / beta
    return depth * rise / rise.max()


def planted_rows(noise: float = 0.002, seed: int = 0) -> list[Row]:
    """About 600 runs over all axes, every headline metric in both regimes, six history lengths, trajectories."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []

    def add(axis: str, cell: str, budget: float, loss: float, knobs: Row, **more: Any) -> None:
        for rate, penalty in ((1e-3, 0.02), (2e-3, 0.0), (4e-3, 0.03)):
            metrics = _metrics(loss + penalty, noise, rng)
            metrics |= {"train/loss": loss + penalty - 0.01, "train/in_batch_loss": loss + penalty - 0.02}
            if axis == "negatives":
                metrics["train/extra_loss"] = loss + penalty + 0.2 * np.log1p(knobs["num_negatives"] / 1e4)
            rows.append(
                {
                    "axis": axis,
                    "cell_id": cell,
                    "budget": budget,
                    "rate": rate,
                    "knobs": knobs,
                    "metrics": metrics,
                    **more,
                }
            )

    for c in BUDGETS:
        for i, n in enumerate(planted_size(c) * np.geomspace(1 / 6, 6, 8)):
            knobs = {"params": n, "slots_seen": c / (6 * n), "width": 64 + 32 * i, "depth": 4 + 2 * (i // 3)}
            add("allocation", f"a{i}", c, planted_loss(n, c / (6 * n)), knobs)
    for c in BUDGETS[:4]:
        size = planted_size(c)
        level = planted_loss(size, c / (6 * size))
        for i, (s, rise) in enumerate(zip(SHARES, valley(np.array(SHARES), SHARE_OPT, 0.6, 0.9, 0.4), strict=True)):
            knobs = {"embedder_share": s, "params": size * (1 + s), "embedder_flop_share": 24 * s / (1 + 23 * s)}
            add("share", f"s{i}", c, level + rise, knobs)
        for i, s in enumerate(np.geomspace(0.004, 0.2, 8)):
            knobs = {
                "embedder_share": s,
                "depth": i + 1,
                "text_depth": 12 - i,
                "embedder_flop_share": 24 * s / (1 + 23 * s),
            }
            add("depth", f"d{i}", c, level + 0.03 * np.log(s / 0.02) ** 2, knobs)
        add("depth", "off", c, level + 0.2, {"embedder_share": 0.01, "depth": 20}, wanted={"on_diagonal": False})
    for c in BUDGETS:
        level = planted_loss(planted_size(c), c / (6 * planted_size(c)))
        rises = [0.35, *valley(np.array(NEGATIVES[1:]), K_OPT, 0.5, 0.45, 0.3)]
        for i, (k, rise) in enumerate(zip(NEGATIVES, rises, strict=True)):
            add("negatives", f"k{i}", c, level + rise, {"num_negatives": k})
    for init, drift in (("default", 5.0), ("mup_lr", 2.0), ("mup", 1.0)):
        for j, n in enumerate((1e7, 5e7, 1e8, 5e8)):
            for rate in (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2):
                best = 1e-2 / (drift if j == 2 else 1.0)
                loss = 4 - 0.2 * j + 0.1 * np.log(rate / best) ** 2
                rows.append(
                    {"axis": "init", "cell_id": f"{init}-{j}", "budget": 1e17, "rate": rate, "init": init,
                     "knobs": {"params": n}, "metrics": {"train/loss": loss}}
                )  # fmt: skip
    rows += [_batch_row(b, noise, rng) for b in 64.0 * 2 ** np.arange(6)]
    rows.append(
        {
            "axis": "share",
            "cell_id": "s-lost",
            "budget": 1e15,
            "rate": 2e-3,
            "reason": f"non-finite loss at step 12 {HOSTILE}",
        }
    )
    rows.append({"axis": "allocation", "cell_id": f"late {HOSTILE}", "budget": 1e16, "rate": 2e-3})
    return rows


def _metrics(loss: float, noise: float, rng: np.random.Generator) -> dict[str, float]:
    """Every headline metric in both regimes, and six history lengths of three of them."""
    metrics: dict[str, float] = {}
    for regime, lift, scale in (("batch", 0.0, 1.0), ("catalogue", 5.0, 0.2)):
        value = lift + loss * (1 + noise * rng.standard_normal())
        hit = scale * np.exp(-0.5 * loss) * (1 + noise * rng.standard_normal())
        metrics |= {
            f"{regime}/loss": value, f"{regime}/perplexity": np.exp(value),
            f"{regime}/entropy": 1.1 * value + 0.02 * rng.standard_normal(),
            f"{regime}/recall@10": hit, f"{regime}/ndcg@10": 0.66 * hit * (1 + noise * rng.standard_normal()),
            f"{regime}/ndcg@100": 0.8 * hit * (1 + noise * rng.standard_normal()),
            f"{regime}/mrr@10": 0.55 * hit * (1 + noise * rng.standard_normal()),
            f"{regime}/coverage@10": 0.5 * np.exp(-0.05 * loss) * (1 + 5 * noise * rng.standard_normal()),
        }  # fmt: skip
        for length in LENGTHS:
            more = 0.3 * np.log(100 / length) * 0.2
            metrics[f"{regime}/loss/history={length}"] = value + more + 0.02 * rng.standard_normal()
            metrics[f"{regime}/recall@10/history={length}"] = (
                hit * np.exp(-more) * (1 + 2 * noise * rng.standard_normal())
            )
            metrics[f"{regime}/ndcg@10/history={length}"] = (
                0.66 * hit * np.exp(-more) * (1 + 3 * noise * rng.standard_normal())
            )
    return metrics


def _batch_row(batch: float, noise: float, rng: np.random.Generator) -> Row:
    end = 1000 * (1 + B_CRIT / batch)
    steps = np.arange(50, 2 * end, 50)
    loss = 3 + 4 * np.exp(-steps / end) + noise * rng.standard_normal(len(steps))
    path = []
    for step, value in zip(steps, loss, strict=True):
        hit = np.exp(-0.5 * value)
        path += [(step, "batch/loss", value), (step, "batch/recall@10", hit), (step, "batch/ndcg@10", 0.66 * hit)]
        path += [(step, "batch/mrr@10", 0.55 * hit), (step, "batch/entropy", 1.1 * value)]
    return {
        "axis": "batch", "cell_id": f"b{batch:g}", "budget": 1e17, "rate": 2e-3 * np.sqrt(batch / 512),
        "trajectory": path, "knobs": {"batch_sequences": batch, "params": 1e7},
        "metrics": {"train/loss": 3.0, "batch/loss": float(loss[-1])},
    }  # fmt: skip


def large_rows(num_runs: int = 10_101) -> list[Row]:
    """The planted study with seventeen seeds."""
    rows = [
        {**row, "seed": seed} for seed in range(17) for row in planted_rows(seed=seed) if seed == 0 or "metrics" in row
    ]
    return rows[:num_runs]


# --- a log that ends -------------------------------------------------------------------------------------------------

LOG_EVENTS = 200_000


def planted_recall(size: float, events: float, passes: float, dropout: float) -> float:
    """Recall@10 that saturates in events, grows with size, and is best at 16 passes and a dropout of 0.3."""
    return float(
        0.40 - 2.2 * events**-0.22 - 0.4 * size**-0.2
        - 0.01 * np.log(passes / 16) ** 2 - 0.1 * (dropout - 0.3) ** 2
    )  # fmt: skip


def log_rows(noise: float = 0.001, seed: int = 0) -> list[Row]:
    """Runs of the passes axis: sizes, passes and dropout on the whole log, then halves to eighths of its users."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []

    def add(cell: str, size: float, passes: float, dropout: float, share: float = 1.0, part: int = 0) -> None:
        events = share * LOG_EVENTS
        recall = planted_recall(size, events, passes, dropout) * (1 + noise * rng.standard_normal())
        loss = 9 - 10 * recall
        metrics = {
            "catalogue/recall@10": recall, "catalogue/ndcg@10": 0.55 * recall, "catalogue/loss": loss,
            "batch/loss": loss - 4, "train/loss": loss - 4.2,
        }  # fmt: skip
        knobs: Row = {"params": size, "epochs": passes, "dropout": dropout, "unique_events": round(events),
                      "slots_seen": events * passes}  # fmt: skip
        knobs |= {"user_share": share, "user_part": part} if share < 1 else {}
        budget = 6 * size * events * passes
        rows.append(
            {"axis": "passes", "cell_id": cell, "budget": budget, "rate": 2e-3, "knobs": knobs, "metrics": metrics}
        )

    for size in (2e5, 8e5, 3.2e6):
        for passes in (4.0, 8.0, 16.0, 32.0):
            for dropout in (0.1, 0.3, 0.5):
                add(f"{size:g}-{passes:g}-{dropout:g}", size, passes, dropout)
    for parts in (2, 4, 8):
        for part in range(parts):
            for passes in (16.0, 32.0):
                add(f"u{parts}-{part}-{passes:g}", 3.2e6, passes, 0.3, 1 / parts, part)
    return rows


# --- (c) too little for most laws ------------------------------------------------------------------------------------


def tiny_rows() -> list[Row]:
    """Two budgets of three sizes, three shares, one failure and one cell that was not run."""
    rows: list[Row] = []
    for c in (1e11, 3e11):
        for i, n in enumerate((2e4, 6e4, 2e5)):
            metrics = {
                "train/loss": 5.0 + 0.1 * i,
                "batch/loss": 5.2 - 0.05 * i,
                "catalogue/recall@10": 0.04 + 0.002 * i,
            }
            rows.append(
                {
                    "axis": "allocation",
                    "cell_id": f"a{i}",
                    "budget": c,
                    "rate": 2e-3,
                    "knobs": {"params": n},
                    "metrics": metrics,
                }
            )
    for i, s in enumerate((0.02, 0.06, 0.2)):
        metrics = {"train/loss": 5.0, "batch/loss": 5.2 + 0.01 * i, "catalogue/recall@10": 0.04}
        rows.append(
            {
                "axis": "share",
                "cell_id": f"s{i}",
                "budget": 1e11,
                "rate": 2e-3,
                "knobs": {"embedder_share": s},
                "metrics": metrics,
            }
        )
    rows.append(
        {"axis": "share", "cell_id": "broken", "budget": 1e11, "rate": 2e-3, "reason": f"out of memory {HOSTILE}"}
    )
    rows.append({"axis": "share", "cell_id": HOSTILE, "budget": 3e11, "rate": 2e-3})
    return rows


if __name__ == "__main__":
    from .paper_rows import paper_rows

    kinds = {
        "planted": planted_rows,
        "tiny": tiny_rows,
        "log": log_rows,
        "large": large_rows,
        "paper": lambda: paper_rows(TABLES),
    }
    write_store(Path(sys.argv[2]), kinds[sys.argv[1]]())
