"""Which cost of a wrong learning rate the law of a recipe should have, by cells that were left out.

    python benchmarks/rate_terms.py docs/studies/paper-range/runs.store.xz

For each term: scatter of cells near the best about the law (seeds differ by less where the form is wrong), the error at
cells near the best when a fifth of all cells is left out (ten times, each in turn), the same when the least or most
third of size, share, batch or rate is, and the roll-out of the largest budget at its best cell as a share of the gain.
Prints a table and one JSON line.
"""

import argparse
import datetime
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

import habitus.laws.recipe_form as form
import habitus.laws.recipe_surface as recipe
from habitus.laws.run_sources import read_runs
from habitus.laws.selection import select
from habitus.laws.surface_axis import SurfaceRuns
from habitus.store import SURFACE_AXIS, open_store

Cost = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
FOLDS, TIMES = 5, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("--metrics", nargs="+", default=["batch/loss", "catalogue/loss"])
    options = parser.parse_args()
    with open_store(options.store) as folder:
        runs = [run for run in select(read_runs(folder), False).runs if run.axis == SURFACE_AXIS]
    rows = []
    for metric in options.metrics:
        print(f"{metric:30} {'scatter':>8} {'a fifth':>8} {'a third':>8} {'roll-out':>8}")
        for name, (cost, aspect) in terms().items():
            row = judge(SurfaceRuns(runs, metric), cost, aspect)
            print(f"{name:30} " + " ".join(f"{value:8.4f}" for value in row.values()), flush=True)
            rows.append({"metric": metric, "term": name, **{key: round(value, 5) for key, value in row.items()}})
    print(json.dumps({"benchmark": "rate_terms", "date": datetime.date.today().isoformat(), "rows": rows}))


def terms() -> dict[str, tuple[Cost, float]]:
    """Cost and slope of log r − log r*, and the power of width over depth by which the best rate moves."""

    def skewed(w: float) -> Cost:
        return lambda x: (2 * w * w * (np.expm1(x / w) - x / w), 2 * w * np.expm1(x / w))

    def linear(w: float) -> Cost:  # pseudo-Huber
        return lambda x: (2 * w * w * (np.hypot(1, x / w) - 1), 2 * x / np.hypot(1, x / w))

    def flat(w: float) -> Cost:
        return lambda x: (x**2 / (1 + (x / w) ** 2), 2 * x / (1 + (x / w) ** 2) ** 2)

    found = {"square": (lambda x: (x**2, 2 * x), 0.0)}
    for w in (1.0, 2.0):
        found |= {f"linear far away, w = {w:g}": (linear(w), 0.0), f"flat far away, w = {w:g}": (flat(w), 0.0)}
    found |= {f"skewed, w = {w:g}": (skewed(w), 0.0) for w in (1.0, 1.5, 2.0, 3.0)}
    found["skewed the other way, w = 1.5"] = (lambda x: (skewed(1.5)(-x)[0], -skewed(1.5)(-x)[1]), 0.0)
    return found | {f"skewed, w = 1.5, (W/depth)^{a:g}": (skewed(1.5), a) for a in (0.1, 0.2)}


def judge(runs: SurfaceRuns, cost: Cost, aspect: float) -> dict[str, float]:
    """Scatter, errors at cells left out and the roll-out of one term."""
    kept, form.rate_cost = form.rate_cost, cost
    try:
        ratio = np.array([run.knobs["width"] / run.knobs["depth"] for run in runs.runs])
        table = {**runs.table, "rate_at_512": runs.table["rate_at_512"] / ratio**aspect}
        logs, y, cells = np.log(np.stack([table[c] for c in form.COLUMNS], axis=1)), runs.values, runs.cells
        u = logs - logs.mean(axis=0)
        best, error = fit(u, y, table["compute"])
        near = error <= np.median(error)
        rng, names, fifths = np.random.default_rng(0), np.unique(cells), []
        for _ in range(TIMES):
            fold = (rng.permutation(len(names)) % FOLDS)[np.searchsorted(names, cells)]
            fifths += [missed(u, y, error, best, fold == k)[near[fold == k]] for k in range(FOLDS)]
        knobs = (np.logaddexp(logs[:, 0], logs[:, 1]), logs[:, 0] - logs[:, 1], logs[:, 4], logs[:, 5])
        outs = [out for x in knobs for out in (x <= np.quantile(x, 1 / 3), x >= np.quantile(x, 2 / 3))]
        thirds = [missed(u, y, error, best, out)[near[out]] for out in outs]
        scatter = recipe._scatter(form.Surface.of(best).metric(u) - y, error)
        return {"scatter": scatter, "fifth": rms(fifths), "third": rms(thirds), "rollout": rollout(runs, logs, table)}
    finally:
        form.rate_cost = kept


def fit(u: np.ndarray, y: np.ndarray, compute: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the law and the errors of its runs, as `recipe_surface` has them."""
    error = recipe._errors(compute, y)
    first = recipe._fit(u, y, error, recipe._starts(y, 0))
    error = error * recipe._scale(form.Surface.of(first).metric(u) - y, error)
    return recipe._fit(u, y, error, [first]), error


def missed(u: np.ndarray, y: np.ndarray, error: np.ndarray, best: np.ndarray, out: np.ndarray) -> np.ndarray:
    theta = recipe._fit(u[~out], y[~out], error[~out], [best])
    return form.Surface.of(theta).metric(u[out]) - y[out]


def rollout(runs: SurfaceRuns, logs: np.ndarray, table: dict[str, np.ndarray]) -> float:
    top = runs.budgets[-1]
    below = np.array([run.budget < top for run in runs.runs])
    centre = logs[below].mean(axis=0)
    theta, _ = fit(logs[below] - centre, runs.values[below], table["compute"][below])
    at, observed = best_cell(runs, top)
    told = float(form.Surface.of(theta).metric(logs[at] - centre))
    return (told - observed) / (best_cell(runs, runs.budgets[-2])[1] - observed)


def best_cell(runs: SurfaceRuns, budget: float) -> tuple[int, float]:
    """The first run of a budget's best cell, and the cell's mean over its seeds."""
    numbers = runs.cells
    means = {int(numbers[k]): float(runs.values[numbers == numbers[k]].mean()) for k, run in enumerate(runs.runs)
             if run.budget == budget}  # fmt: skip
    cell = min(means, key=lambda number: means[number])
    return int(np.flatnonzero(numbers == cell)[0]), means[cell]


def rms(parts: list[np.ndarray]) -> float:
    return float(np.sqrt(np.mean(np.concatenate(parts) ** 2)))


if __name__ == "__main__":
    main()
