"""Runs that would have given the paper's printed tables: curves through its optima, at its budgets.

What is not printed is chosen: exponents of most valleys, the grid around each optimum, the text depth that turns
depths into shares. So the store shows the printed numbers again; it is no evidence for them.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from habitus.laws import EWMA_HALF_LIFE, smooth

Row = dict[str, Any]
SHARES = np.array((0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.10, 0.15, 0.20, 0.27, 0.35, 0.50))
NEGATIVES = 2.0 ** np.arange(14, 22)
NAMES = {"val_loss": "loss", "val_entropy": "entropy", "val_ppl": "perplexity"}
LEVELS = {
    "loss": 3.0,
    "recall@10": 0.55,
    "ndcg@10": 0.4,
    "mrr@10": 0.35,
    "coverage@10": 0.9,
    "entropy": 5.0,
    "perplexity": 20.0,
}
FIRST = 50.0  # step of the first evaluation


def paper_rows(tables: Path) -> list[Row]:
    """One run per cell of the share, depth, batch, allocation, negatives and init axes."""
    return [
        *_share(_read(tables / "share_optimum.csv")),
        *_depth(*(_read(tables / f"depth_{name}.csv") for name in ("val_loss", "eval_1e18", "parabola"))),
        *_batch(_read(tables / "critical_batch.csv")),
        *_allocation(
            _read(tables / "allocation.csv"), _read(tables / "allocation_train_surrogate.csv"),
            _read(tables / "allocation_exponents.csv"),
        ),
        *_negatives(_read(tables / "negatives_optimum.csv")),
        *_init(_read(tables / "mup.csv")),
    ]  # fmt: skip


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def two_term(x: np.ndarray, x_opt: float, alpha: float, beta: float, depth: float) -> np.ndarray:
    """Zero at x_opt, about `depth` at the ends."""
    u = np.log(x / x_opt)
    rise = np.exp(alpha * u) / alpha + np.exp(-beta * u) / beta - 1 / alpha - 1 / beta
    return depth * rise / rise.max()


def _sign(metric: str) -> float:
    return 1.0 if metric in ("loss", "entropy", "perplexity") else -1.0


def _share(rows: list[dict[str, str]]) -> list[Row]:
    runs: list[Row] = []
    for budget in sorted({float(r["budget"]) for r in rows}):
        columns: dict[str, np.ndarray] = {}
        for r in (r for r in rows if float(r["budget"]) == budget):
            metric = NAMES.get(r["metric"], r["metric"])
            x_opt = 0.004 if r["s_star_pct"] == "boundary" else float(r["s_star_pct"]) / 100
            rise = two_term(SHARES, x_opt, float(r["alpha"] or 0.5), float(r["beta"] or 0.9), 0.1 * LEVELS[metric])
            columns[f"batch/{metric}"] = LEVELS[metric] + _sign(metric) * rise
        for i, s in enumerate(SHARES):
            metrics = {name: float(values[i]) for name, values in columns.items()}
            runs.append(_row("share", f"s{i}", budget, metrics, {"embedder_share": float(s)}))
    return runs


def _depth(grid: list[dict[str, str]], evaluation: list[dict[str, str]], best: list[dict[str, str]]) -> list[Row]:
    """Shares under the depth-sum reading, set by the one share that is printed, the winner's."""
    runs = []
    sums = {"1e15": 13, "1e16": 13, "1e17": 17, "1e18": 34}
    winner = {r["budget"]: (float(r["L_ctx_star"]), float(r["s_pct"]) / 100) for r in best}
    at_top = {r["L_ctx"]: r for r in evaluation}
    for budget, total in sums.items():
        depth, share = winner[budget]
        ratio = share / (1 - share) * depth / (total - depth + 0.5)
        for r in grid:
            if not r[budget]:
                continue
            layers = float(r["L_ctx"])
            text = max(total - layers + 0.5, 0.5)
            metrics = {"batch/loss": float(r[budget])}
            if budget == "1e18":
                printed = at_top[r["L_ctx"]]
                metrics |= {f"batch/{m}": float(printed[m]) for m in ("recall@10", "ndcg@10", "mrr@10", "coverage@10")}
            knobs = {"embedder_share": text * ratio / (text * ratio + layers), "depth": layers}
            row = _row("depth", f"d{layers:g}", float(budget), metrics, knobs)
            runs.append({**row, "wanted": {"on_diagonal": r["on_diagonal"] == "yes"}})
    return runs


def _batch(rows: list[dict[str, str]]) -> list[Row]:
    """Straight trajectories that pass the printed target at the printed step, whatever smooths them."""
    runs = []
    for batch in (64, 128, 256, 512, 1024, 2048):
        path: list[tuple[float, str, float]] = []
        for r in rows:
            metric = f"batch/{NAMES.get(r['metric'], r['metric'])}"
            worst = 7.0 if _sign(metric.split("/")[1]) > 0 else 0.1
            target, reached = float(r["target"]), float(r[f"S{batch}"])
            # The target is the strictest value less 1% of what a trajectory covers: all end 1% beyond it.
            for step in _steps_until(FIRST + (reached - FIRST) / 0.99):
                path.append((step, metric, worst + (target - worst) * (step - FIRST) / (reached - FIRST)))
        knobs = {"batch_sequences": batch}
        row = _row("batch", f"b{batch}", 1e17, {"batch/loss": 3.86}, knobs)
        runs.append({**row, "trajectory": sorted(path, key=lambda p: (p[1], p[0]))})
    return runs


def _steps_until(end: float) -> list[float]:
    """Steps of evaluations, about 50 apart, whose smoothed value ends at `end`."""
    lags = smooth(np.arange(1000.0), EWMA_HALF_LIFE)
    num = int(np.searchsorted(lags, (end - FIRST) / 50)) + 1
    return [float(step) for step in np.round(FIRST + (end - FIRST) / lags[num - 1] * np.arange(num))]


def _allocation(rows: list[dict[str, str]], train: list[dict[str, str]], exponents: list[dict[str, str]]) -> list[Row]:
    """Valleys through the printed optima; the printed best cell stands nearest to each optimum of the loss."""
    budgets = np.array([float(r["budget"]) for r in rows])
    optima = np.array([float(r["parabolic_N"]) for r in rows])
    u = np.log(budgets) - np.log(budgets).mean()
    slope, level = np.polyfit(u, np.log(optima), 1)
    scatter = np.log(optima) - level - slope * u
    places = {"loss": optima}
    for r in exponents:
        metric = NAMES.get(r["metric"], r["metric"])
        if metric != "loss":  # the same scatter about the line, to the printed slope and error
            places[metric] = np.exp(level + float(r["a_N"]) * u + scatter * float(r["a_N_err"]) / 0.0249)
    runs = []
    for i, (r, t) in enumerate(zip(rows, train, strict=True)):
        cell, data, best = float(r["grid_N"]), float(r["grid_D"]), float(optima[i])
        gap = max(abs(np.log(cell / best)), 0.15)
        ratios = np.exp(gap * np.array([-4.0, -3.0, -2.0, -1.4, 1.05, 1.6, 2.2, 3.0, 4.0]))
        sizes = np.sort(np.append(best * ratios, cell))
        curves = {m: _symmetric(sizes, at[i], 0.08 * LEVELS[m]) for m, at in places.items()}
        train_curve = _symmetric(np.append(sizes, float(t["N"])), float(t["N"]), 0.25)
        nearest = int(np.argmin(np.abs(sizes / cell - 1)))
        for j, n in enumerate(sizes):
            metrics = {"train/loss": float(t["L_star"]) + train_curve[j]}
            for m, rise in curves.items():
                printed = {"loss": r["val_loss"], "recall@10": r["recall@10"], "ndcg@10": r["ndcg@10"]}
                level_here = float(printed[m]) if m in printed else LEVELS[m]
                metrics[f"batch/{m}"] = level_here + _sign(m) * (rise[j] - rise[nearest])
            knobs = {"params": float(n), "slots_seen": data * cell / n}
            runs.append(_row("allocation", f"a{j}", float(r["budget"]), metrics, knobs))
        # The cell that wins by training loss; where it is another one, its validation loss is not printed.
        if not np.isclose(sizes, float(t["N"]), rtol=1e-3).any():
            knobs = {"params": float(t["N"]), "slots_seen": float(t["D"])}
            runs.append(_row("allocation", "train", float(r["budget"]), {"train/loss": float(t["L_star"])}, knobs))
    return runs


def _symmetric(sizes: np.ndarray, at: float, depth: float) -> np.ndarray:
    u = np.log(sizes / at)
    return depth * (np.cosh(0.35 * u) - 1)


def _negatives(rows: list[dict[str, str]]) -> list[Row]:
    runs: list[Row] = []
    for budget in sorted({float(r["budget"]) for r in rows}):
        columns: dict[str, np.ndarray] = {}
        at_zero: dict[str, float] = {}
        for r in (r for r in rows if float(r["budget"]) == budget):
            metric = NAMES.get(r["metric"], r["metric"])
            low_edge = r["grid_argmax"] == "0"
            x_opt = (3e3 if low_edge else 8e6) if r["k_star"] == "boundary" else float(r["k_star"])
            rise = two_term(NEGATIVES, x_opt, 0.5, float(r["beta"] or 0.45), 0.05 * LEVELS[metric])
            columns[f"catalogue/{metric}"] = LEVELS[metric] + _sign(metric) * rise
            at_zero[f"catalogue/{metric}"] = LEVELS[metric] + _sign(metric) * (
                -0.001 if low_edge else float(rise.max()) * 1.1
            )
        for i, k in enumerate((0.0, *NEGATIVES)):
            metrics = {m: at_zero[m] if i == 0 else float(v[i - 1]) for m, v in columns.items()}
            runs.append(_row("negatives", f"k{i}", budget, metrics, {"num_negatives": k}))
    return runs


def _init(rows: list[dict[str, str]]) -> list[Row]:
    """Best rates of MuP are printed; those of the default are not, only that they span 0.70 decades."""
    best = {"default": (1e-2, 1e-2, 2e-3, 1e-2), "mup": (1e-2, 1e-2, 5e-3, 1e-2)}
    names = {"default": "default", "mup": "mup_lr"}  # the paper's MuP scales learning rates only
    runs = []
    for r in rows:
        for j, (size, n) in enumerate((("tiny", 1e7), ("small", 5e7), ("medium", 1e8), ("large", 5e8))):
            for rate in (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2):
                loss = float(r[size]) + 0.1 * np.log(rate / best[r["init"]][j]) ** 2
                row = _row("init", f"{r['init']}-{size}", 1e17, {"train/loss": loss}, {"params": n})
                runs.append({**row, "rate": rate, "init": names[r["init"]]})
    return runs


def _row(axis: str, cell: str, budget: float, metrics: dict[str, float], knobs: dict[str, float]) -> Row:
    metrics = {"train/loss": 3.0, **metrics}
    return {"axis": axis, "cell_id": cell, "budget": budget, "rate": 2e-3, "knobs": knobs, "metrics": metrics}
