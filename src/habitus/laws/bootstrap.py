"""The hierarchical bootstrap: seeds within cells, cells within budgets, through the whole pipeline.

Every resampling chooses learning rates again, places the valleys again and draws the laws again, so that
what it spreads over is all that a second sweep would change except the budgets themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from habitus.errors import FitError
from habitus.laws.checks import sign_of
from habitus.laws.runs import MeasuredRun
from habitus.laws.selection import choose_rate
from habitus.laws.separable import Curve, fit_separable
from habitus.laws.two_term import EXPONENTS, log_optimum, optimum_height, valley_terms
from habitus.store import LEVELS, BootstrapIntervals, Direction, Interval, level_key
from habitus.units import pluralize

Pipeline = Callable[[Sequence[MeasuredRun]], dict[str, float]]


def hierarchical_bootstrap(
    runs: Sequence[MeasuredRun], pipeline: Pipeline, times: int = 100, seed: int = 0
) -> BootstrapIntervals:
    """Intervals of a pipeline's numbers over resampled cells and seeds. Deterministic for a seed."""
    if times < 2:
        raise FitError(pluralize(times, "resampling"), expected="2 or more; 100 or more for a 95% interval")
    values = pipeline(runs)
    budgets: dict[float, dict[str, list[MeasuredRun]]] = {}
    for run in runs:
        budgets.setdefault(run.budget, {}).setdefault(run.cell_id, []).append(run)
    rng = np.random.default_rng(seed)
    drawn: list[dict[str, float]] = []
    for _ in range(times):
        try:
            drawn.append(pipeline(_resample(budgets, rng)))
        except FitError:
            continue  # counted below: a resampling may lose a budget's valley
    intervals: dict[str, dict[str, Interval]] = {}
    for level in LEVELS:
        named = {}
        for name in values:
            column = [d[name] for d in drawn if name in d]
            if len(column) >= 0.5 * times:
                low, high = np.quantile(column, [0.5 - level / 2, 0.5 + level / 2])
                named[name] = Interval(low=float(low), high=float(high))
        intervals[level_key(level)] = named
    return BootstrapIntervals(times=times, failed=times - len(drawn), values=values, intervals=intervals)


def allocation_pipeline(metric: str, direction: Direction = "min", ahead: float = 10.0) -> Pipeline:
    """From runs to the recipe's numbers: size exponent, N* and the metric at `ahead` times the top budget."""
    sign = sign_of(direction)

    def pipeline(runs: Sequence[MeasuredRun]) -> dict[str, float]:
        # A cell drawn twice comes under two names, so that it counts twice.
        cells: dict[tuple[float, str], list[MeasuredRun]] = {}
        for run in runs:
            cells.setdefault((run.budget, run.cell_id), []).append(run)
        columns: dict[float, list[tuple[float, float]]] = {}
        for (budget, _), cell in cells.items():
            rate = choose_rate(cell).learning_rate
            for run in cell:
                if run.learning_rate == rate and metric in run.metrics and "params" in run.knobs:
                    columns.setdefault(budget, []).append((run.knobs["params"], run.metrics[metric]))
        table = {c: np.array(rows) for c, rows in columns.items() if len({r[0] for r in rows}) >= 4}
        if len(table) < 3:
            raise FitError(f"{len(table)} budgets with four sizes", expected="three or more")
        return _recipe_numbers(table, sign, ahead)

    return pipeline


def _recipe_numbers(table: dict[float, np.ndarray], sign: float, ahead: float) -> dict[str, float]:
    middles = {c: float(np.log(rows[:, 0]).mean()) for c, rows in table.items()}
    curves = [
        Curve(
            valley_terms,
            np.log(rows[:, 0]) - middles[c],
            sign * rows[:, 1],
            np.full(len(rows), 1 / np.abs(rows[:, 1]).mean()),
        )
        for c, rows in table.items()
    ]
    best = fit_separable(curves, (EXPONENTS, EXPONENTS))
    log_c, log_n, heights = [], [], []
    for (c, rows), linear in zip(table.items(), best.linear, strict=True):
        place = float(log_optimum(best.theta[None], linear[None])[0]) + middles[c]
        if np.log(rows[:, 0].min()) < place < np.log(rows[:, 0].max()):
            log_c.append(np.log(c))
            log_n.append(place)
            heights.append(sign * float(optimum_height(best.theta[None], linear[None])[0]))
    if len(log_c) < 3:
        raise FitError(f"{len(log_c)} interior optima", expected="three or more")
    slope, level = np.polyfit(log_c, log_n, 1)
    top = max(table)
    return {
        "size_exponent": float(slope),
        f"size_at_{ahead:g}x": float(np.exp(level + slope * np.log(ahead * top))),
        "best_at_top": heights[int(np.argmax(log_c))],
    }


def _resample(budgets: dict[float, dict[str, list[MeasuredRun]]], rng: np.random.Generator) -> list[MeasuredRun]:
    """Cells drawn with replacement within each budget, and seeds within each drawn cell and rate."""
    drawn = []
    for cells in budgets.values():
        names = sorted(cells)
        for copy, at in enumerate(rng.integers(0, len(names), len(names))):
            cell = cells[names[at]]
            for rate in sorted({run.learning_rate for run in cell}):
                seeds = [run for run in cell if run.learning_rate == rate]
                for i in rng.integers(0, len(seeds), len(seeds)):
                    drawn.append(replace(seeds[i], cell_id=f"{names[at]}#{copy}"))
    return drawn
