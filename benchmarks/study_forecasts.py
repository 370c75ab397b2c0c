"""How often a plan's forecast holds what a run measures: studies of one knob at a time on planted surfaces.

    python benchmarks/study_forecasts.py --studies 40

Every study is laid out as preset `quick`: four budgets of a factor of 4.3 with one batch, six sizes each, seeds of
three sizes, rates at the largest, seven shares at three budgets. The law over shares and sizes is fitted
(laws/study_recipe.py), held to its roll-outs, and asked for a run of 6.4 times the largest budget, of a size and share
that the study would choose; the run has noise of its own. A table, then one line of JSON.
"""

import argparse
import json
import math
import time
from datetime import UTC, datetime

import numpy as np
from planted_recipes import TRUTHS, Planted, cell
from prepare import hardware

from habitus.laws import MeasuredRun
from habitus.laws.study_recipe import fit_study_recipe
from habitus.planning.predict import PlannedRun, predict_metrics
from habitus.planning.sources import SourcedLaws
from habitus.store import Laws, RunRow

LOSS = "batch/loss"
BUDGETS = (1e14, 1.57e14, 2.57e14, 4.3e14)
SHARES, SHARE_BUDGETS = (0.03, 0.06, 0.10, 0.15, 0.22, 0.32, 0.45), (1.4e14, 2e14, 2.9e14)
SIZES = (0.25, 0.45, 0.8, 1.4, 2.5, 4.5)  # of the middle one
BATCH, SHARE, NOISE = 64.0, 0.15, 0.005
AHEAD = 6.4  # times the largest budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", type=int, default=40)
    arguments = parser.parse_args()
    began, rows = time.process_time(), []
    print(f"{'planted':28}{'forecast':>10}{'held':>8}{'width / gain':>14}{'error / gain':>14}")
    for name, truth in TRUTHS.items():
        results = [forecast(truth, seed) for seed in range(arguments.studies)]
        made = [r for r in results if r is not None]
        held = float(np.mean([r["held"] for r in made])) if made else math.nan
        row = {
            "planted": name,
            "studies": len(results),
            "forecast": len(made) / len(results),
            "held": held,
            "width_of_gain": float(np.median([r["width"] for r in made])) if made else math.nan,
            "error_of_gain": float(np.median([abs(r["error"]) for r in made])) if made else math.nan,
        }
        rows.append(row)
        print(
            f"{name:28}{row['forecast']:>10.0%}{held:>8.0%}{row['width_of_gain']:>14.2f}{row['error_of_gain']:>14.2f}"
        )
    date = f"{datetime.now(UTC):%Y-%m-%d}"
    seconds = round(time.process_time() - began, 1)
    print(json.dumps({"benchmark": "study_forecasts", "date": date, "hardware": hardware(), "noise": NOISE,
                      "ahead": AHEAD, "cpu_seconds": seconds, "rows": rows}))  # fmt: skip


def forecast(truth: Planted, seed: int) -> dict[str, float] | None:
    """Whether the interval held one more run, its width and the error as shares of the gain; None without."""
    rng = np.random.default_rng(seed)
    runs = study(truth, rng)
    fitted = fit_study_recipe(runs, LOSS)
    rows = tuple(RunRow(axis=r.axis, budget=r.budget, cell_id=r.cell_id, learning_rate=r.learning_rate, seed=r.seed,
                        init="", chosen=True, knobs=dict(r.knobs), metrics=dict(r.metrics)) for r in runs)  # fmt: skip
    laws = Laws(source="x", seed=0, metrics=(LOSS,), entries=fitted.entries, rollouts=fitted.rollouts, runs=rows)
    planned = cell(AHEAD * BUDGETS[-1], middle(truth, BUDGETS[-1]) * AHEAD**0.6, SHARE, BATCH)
    p_e, p = planned["embedder_params"], planned["contextualizer_params"]
    run = PlannedRun(planned["compute"], p_e + p, planned["slots_seen"], None, p_e, BATCH, 256, planned["rate_at_512"])
    found, _ = predict_metrics(run, 0.0, LOSS, [SourcedLaws(laws, "this study")], {})
    told = next((p for p in found if p.metric == LOSS), None)
    if told is None or told.low is None or told.high is None:
        return None
    measured = truth.loss(planned) + math.hypot(NOISE, truth.cells) * rng.standard_normal()
    gain = min(r.metrics[LOSS] for r in runs if r.budget == BUDGETS[-1] and r.axis == "allocation") - measured
    return {
        "held": told.low <= measured <= told.high,
        "width": (told.high - told.low) / abs(gain),
        "error": (told.value - measured) / abs(gain),
    }


def study(truth: Planted, rng: np.random.Generator) -> list[MeasuredRun]:
    asked: list[tuple[str, float, str, dict[str, float], int]] = []

    def ask(axis: str, budget: float, name: str, row: dict[str, float], seed: int = 0, multiple: float = 1.0) -> None:
        asked.append((axis, budget, name, {**row, "rate_at_512": multiple * row["rate_at_512"]}, seed))

    for budget in SHARE_BUDGETS:
        for share in SHARES:
            ask("share", budget, f"s={share}", cell(budget, middle(truth, budget), share, BATCH))
    for budget in BUDGETS:
        for k, factor in enumerate(SIZES):
            row = cell(budget, factor * middle(truth, budget), SHARE, BATCH)
            ask("allocation", budget, f"n={k}", row)
            if k in (1, 3, 4):
                ask("allocation", budget, f"n={k}", row, seed=1)
            for multiple in (0.5, 2) if k in (1, 3, 4) and budget == BUDGETS[-1] else ():
                ask("allocation", budget, f"n={k}", row, multiple=multiple)
    runs = []
    for (axis, budget, name, row, seed), loss in zip(asked, losses(truth, asked, rng), strict=True):
        rate = row["rate_at_512"] * math.sqrt(BATCH / 512)
        knobs = {**row, "flops_nominal": budget, "params": row["embedder_params"] + row["contextualizer_params"]}
        metrics = {LOSS: loss, "train/loss": loss}
        runs.append(MeasuredRun(axis, name, budget, rate, seed, knobs=knobs, metrics=metrics))
    return runs


def losses(
    truth: Planted, asked: list[tuple[str, float, str, dict[str, float], int]], rng: np.random.Generator
) -> list[float]:
    """What the runs measure. Seeds and rates of a cell share what it has beyond its knobs, as its width and depth."""
    exact = np.array([truth.loss(row) for *_, row, _ in asked])
    best = {budget: exact[[b == budget for _, b, *_ in asked]].min() for _, budget, *_ in asked}
    above = exact - [best[budget] for _, budget, *_ in asked]
    numbers = np.unique([f"{axis} {budget} {name}" for axis, budget, name, *_ in asked], return_inverse=True)[1]
    own = truth.cells * rng.spawn(1)[0].standard_normal(len(asked))[numbers]
    return list(exact + own + np.hypot(NOISE, truth.far * above) * rng.standard_normal(len(asked)))


def middle(truth: Planted, budget: float) -> float:
    """A size that a study would centre on: near the best of its smallest budget, carried on."""
    if truth not in _MIDDLES:
        best = truth.best(BUDGETS[0])
        _MIDDLES[truth] = best["embedder_params"] + best["contextualizer_params"]
    return _MIDDLES[truth] * (budget / BUDGETS[0]) ** 0.5


_MIDDLES: dict[Planted, float] = {}


if __name__ == "__main__":
    main()
