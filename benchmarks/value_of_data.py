"""The value of data: train on disjoint parts of a log's users, forecast the metrics at all users, compare.

    python benchmarks/value_of_data.py runs LOGS --workers 14 --minutes 6 --out rows.json    # LOGS/<name>: prepared
    python benchmarks/value_of_data.py fit rows.json --out value-of-data.json

`runs` trains eight eighths, four quarters, two halves and the whole of every log with one recipe, for the usual passes
of a log of that size, twice and (on some parts) half and four times as many; --workers at a time, the most useful
first, as far as --minutes go. All are scored on the same validation queries. `fit` sees nothing of the runs on all
users when it forecasts them. Both print a table and end with one JSON line.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import queue
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

METRICS = ("catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")
LOGS = ("movielens_1m_order", "completejourney", "online_retail", "git_small")
# The rule of `habitus.planning.usual_passes`, for a number of events.
REFERENCE_EVENTS, REFERENCE_PASSES, PASSES_EXPONENT, LEAST_PASSES, MOST_PASSES = 8e5, 20.0, 0.75, 2.0, 24.0
_EVENTS_PER_SECOND = {"cuda": 1.2e5, "cpu": 4e3}  # of one worker among many, until one has been timed
_OVERHEAD_SECONDS = 4.0  # start and evaluation of a run


@dataclass(frozen=True)
class Cell:
    """One run: a part of a log's users, a number of passes, a seed."""

    log: str
    share: float
    part: int
    factor: float  # passes, as a multiple of the usual ones for a log of this size
    seed: int = 0
    shape: str = "deep"
    tier: int = 0  # the lower, the more useful
    events: float = 0.0  # that it trains on, passes included


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    runs = verbs.add_parser("runs", help="train the cells")
    runs.add_argument("logs", type=Path, help="a folder of prepared datasets")
    runs.add_argument("--only", nargs="+", default=list(LOGS), help="names of datasets")
    runs.add_argument("--workers", type=int, default=14)
    runs.add_argument("--minutes", type=float, default=6.0, help="after these no run is left at work")
    runs.add_argument("--largest", type=float, default=3.3e7, help="events of a run at most, passes included")
    runs.add_argument("--queries", type=int, default=20_000)
    runs.add_argument("--device", default="auto")
    runs.add_argument("--model", type=int, nargs=3, help="joint_dim width depth, instead of the portfolio's")
    runs.add_argument("--dry-run", action="store_true", help="print the cells and stop")
    runs.add_argument("--out", type=Path, required=True)
    fits = verbs.add_parser("fit", help="forecast the runs on all users from the others")
    fits.add_argument("rows", type=Path)
    fits.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.verb == "runs":
        run_cells(given)
    else:
        forecast_all(given)


def run_cells(given: argparse.Namespace) -> None:
    """Train the cells in order of their use; rows are written to --out as they come."""
    from habitus.data import Dataset

    began = time.monotonic()
    datasets = {name: Dataset.open(given.logs / name) for name in given.only}
    cells = design(datasets, given.largest)
    total = sum(cell.events for cell in cells)
    print(f"{len(cells)} runs, {total:.3g} events of training", flush=True)
    for tier in sorted({cell.tier for cell in cells}):
        chosen = [cell for cell in cells if cell.tier == tier]
        print(f"  tier {tier}: {len(chosen)} runs, {sum(cell.events for cell in chosen):.3g} events", flush=True)
    if given.dry_run:
        for cell in cells:
            print(f"  {cell}")
        return
    rows: list[dict[str, Any]] = []
    for row in train_all(cells, given, began):
        rows.append(row)
        write(given.out, document(rows, given, began))
        shown = " ".join(f"{name.split('/')[1]} {row['metrics'][name]['value']:.4f}" for name in METRICS)
        print(
            f"{time.monotonic() - began:5.0f} s {row['log']} {row['shape']} {row['share']:g}/{row['part']} "
            f"x{row['factor']:g} ({row['passes']:.2f} passes) seed {row['seed']}: {shown}, {row['seconds']:.0f} s",
            flush=True,
        )
    print(f"{len(rows)} of {len(cells)} runs in {time.monotonic() - began:.0f} s")
    print(json.dumps({"rows": len(rows), "cells": len(cells), "seconds": round(time.monotonic() - began)}))


def design(datasets: dict[str, Any], largest: float) -> list[Cell]:
    """The cells of all logs, the most useful first; in a tier the longest first, so that none is left for the end.

    Tier 0: what is forecast, and all parts for the usual passes. 1: all parts for twice as many, and a second seed of
    what is forecast. 2: fewer and many more passes on some parts, which place the best number. 3: a smaller model.
    """
    cells = []
    for log, dataset in datasets.items():
        parts = [(share, part) for share in (1.0, 0.5, 0.25, 0.125) for part in range(round(1 / share))]
        for share, part in parts:
            cells.append(Cell(log, share, part, 1.0, tier=0))
            cells.append(Cell(log, share, part, 2.0, tier=0 if share == 1 else 1))
            if part < 2:
                cells.append(Cell(log, share, part, 0.5, tier=0 if share == 1 else 2))
            if (share == 0.125 and part < 2) or (share == 0.25 and part == 0):
                cells.append(Cell(log, share, part, 4.0, tier=2))
            if part == 0 and share < 1:
                cells.append(Cell(log, share, part, 1.0, shape="small", tier=3))
        again = Cell(log, 1.0, 0, 1.0, seed=1, tier=1)
        cells.append(again if events_of(again, dataset) < 0.6 * largest else replace(again, factor=0.5))
    sized = [replace(cell, events=events_of(cell, datasets[cell.log])) for cell in cells]
    return sorted((cell for cell in sized if cell.events <= largest), key=lambda cell: (cell.tier, -cell.events))


def events_of(cell: Cell, dataset: Any) -> float:
    return float(passes_of(cell, dataset) * dataset.with_users(cell.share, cell.part).counts("train").events)


def passes_of(cell: Cell, dataset: Any) -> float:
    """Equal for all parts of a share, however many events their users have: those usual for the share of the events."""
    events = cell.share * dataset.counts("train").events
    usual = REFERENCE_PASSES * (events / REFERENCE_EVENTS) ** PASSES_EXPONENT
    return cell.factor * min(max(usual, LEAST_PASSES), MOST_PASSES)


def train_all(cells: Sequence[Cell], given: argparse.Namespace, began: float) -> Any:
    """Rows as the workers finish them, until the minutes are over."""
    from habitus.evaluation import resolve_device

    if resolve_device(given.device).type == "cuda":
        from habitus.sweeps import mps_environment

        os.environ.update(mps_environment(lambda text: print(text, flush=True)))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for cell in cells:
        todo.put(cell)
    deadline = time.time() + 60 * given.minutes - (time.monotonic() - began)
    workers = [
        context.Process(target=work, args=(todo, done, given, deadline), daemon=True)
        for _ in range(min(given.workers, len(cells)))
    ]
    for worker in workers:
        worker.start()
    left = len(cells)
    while left and time.time() < deadline and (any(w.is_alive() for w in workers) or not done.empty()):
        try:
            row = done.get(timeout=0.5)
        except queue.Empty:
            continue
        left -= 1
        if "failed" in row:
            print(row["failed"], flush=True)
        else:
            yield row
    for worker in workers:
        worker.terminate()
    for worker in workers:
        worker.join()


def work(todo: Any, done: Any, given: argparse.Namespace, deadline: float) -> None:
    """Train one cell after the other; leave out those that the time does not pay."""
    from habitus.data import Dataset
    from habitus.evaluation import resolve_device

    rate = _EVENTS_PER_SECOND[resolve_device(given.device).type]
    datasets: dict[str, Any] = {}
    while True:
        try:
            cell = todo.get(timeout=2.0)
        except queue.Empty:
            return
        left = deadline - time.time()
        if cell.events / rate + _OVERHEAD_SECONDS > left:
            done.put({"failed": f"left out, {left:.0f} s before the end: {cell}"})
            continue
        if cell.log not in datasets:
            datasets[cell.log] = Dataset.open(given.logs / cell.log, verify=False)
        began = time.monotonic()
        try:
            row = train_cell(cell, datasets[cell.log], given)
        except Exception as error:  # one cell must not take the others with it
            done.put({"failed": f"failed: {cell}: {error!r}"})
            continue
        row["seconds"] = time.monotonic() - began
        rate = cell.events / max(row["seconds"] - _OVERHEAD_SECONDS, 0.3 * row["seconds"])
        done.put(row)


def train_cell(cell: Cell, dataset: Any, given: argparse.Namespace) -> dict[str, Any]:
    from habitus.training import TrainOptions, train

    recipe = cell_recipe(cell, dataset, given)
    with tempfile.TemporaryDirectory() as folder:
        record = train(
            recipe, dataset, Path(folder) / "run", options=TrainOptions(device=given.device, threads=1, compile=False)
        )
    if record.status != "done" or record.params is None:
        raise RuntimeError(record.reason)
    return {
        **asdict(cell),
        "passes": record.epochs,
        "steps": record.steps,
        "params": record.params.total,
        "unique_events": record.unique_events,
        "users": dataset.with_users(cell.share, cell.part).counts("train").users,
        "flops": record.flops_nominal,
        "metrics": {name: {"value": record.metrics[name].value, "se": record.metrics[name].se} for name in METRICS},
    }


def cell_recipe(cell: Cell, dataset: Any, given: argparse.Namespace) -> Any:
    """The portfolio's recipe for a log of the part's size, at the learning rate of the whole log.

    The rate's rule has a step at some number of events; one on each side of it would be two recipes.
    """
    from habitus.evaluation import resolve_device
    from habitus.planning import SHAPES, Shape, stage1_recipe

    kind = "gpu" if resolve_device(given.device).type == "cuda" else "cpu"
    shape = SHAPES["gpu"][0] if cell.shape == "deep" else SHAPES["cpu"][0]
    if given.model:
        joint_dim, width, depth = given.model
        shape = Shape(cell.shape, joint_dim, width, depth, batch_sequences=8, rate=shape.rate, head_dim=16)
    view = dataset.with_users(cell.share, cell.part)
    whole = stage1_recipe(shape, dataset, 1.0, kind)
    recipe = stage1_recipe(shape, view, passes_of(cell, dataset), kind, seed=cell.seed)
    rate = whole.train.learning_rate * math.sqrt(recipe.train.batch_sequences / whole.train.batch_sequences)
    return recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"user_share": cell.share, "user_part": cell.part}),
            "train": recipe.train.model_copy(update={"learning_rate": rate}),
            "evaluate": recipe.evaluate.model_copy(update={"queries": given.queries}),
        }
    )


def forecast_all(given: argparse.Namespace) -> None:
    """Forecast every log's runs on all users from those on parts; print, write and end with one JSON line."""
    measured = json.loads(given.rows.read_text())
    forecasts, beyond = [], []
    for log in sorted({row["log"] for row in measured["rows"]}):
        rows = [row for row in measured["rows"] if row["log"] == log and row["shape"] == "deep"]
        for metric in METRICS:
            forecasts += forecast_whole(rows, metric)
            beyond += forecast_beyond(rows, metric)
    summary = summarise(forecasts)
    result = {
        "benchmark": "value of data: all users forecast from disjoint parts",
        "runs": {name: measured[name] for name in ("date", "hardware", "workers", "torch", "seconds")},
        "forecasts": forecasts,
        "beyond": beyond,
        "summary": summary,
    }
    if given.out:
        write(given.out, result)
    print(
        f"{'log':20s} {'metric':10s} {'by':15s} {'passes':>6s} {'forecast':>28s} {'measured':>9s} {'error':>7s} inside"
    )
    for row in forecasts:
        interval = f"{row['forecast']:.4f} [{row['low']:.4f}, {row['high']:.4f}]"
        print(
            f"{row['log']:20s} {row['metric']:10s} {row['by']:15s} {row['passes']:6.1f} {interval:>28s} "
            f"{row['measured']:9.4f} {row['error']:+7.1%} {'yes' if row['inside'] else 'NO'}"
            f" ({row['at']}) {row['status']}"
        )
    for name, row in summary.items():
        print(
            f"{name}: {row['inside']} of {row['logs']} inside, median error {row['median_error']:.1%}, "
            f"half width {row['median_half_width']:.1%}, widest {row['widest']:.1%}"
        )
    print("\nbeyond the log, from all runs (unchecked):")
    for row in beyond:
        print(f"{row['log']:20s} {row['metric']:10s} {row['users']:3g}x users: {row['words']}")
    print(json.dumps(summary))


def law_of(rows: list[dict[str, Any]], metric: str) -> Any:
    from habitus.laws import finite_log
    from habitus.store import direction_of

    values = [row["metrics"][metric]["value"] for row in rows]
    loss = None if metric == METRICS[0] else [row["metrics"][METRICS[0]]["value"] for row in rows]
    return finite_log(
        [row["params"] for row in rows],
        [row["unique_events"] for row in rows],
        [row["passes"] for row in rows],
        values,
        share=[row["share"] for row in rows],
        part=[f"{row['share']:g}/{row['part']}" for row in rows],
        loss=loss,
        direction=direction_of(metric),
    )


def forecast_whole(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """All users, forecast: at the best passes, those that the law calls best against those that were, and at each."""
    from habitus.laws import open_finite_log

    parts = [row for row in rows if row["share"] < 1]
    law = law_of(parts, metric)
    if not law.points:
        return []
    fitted = open_finite_log(law)
    cells: dict[float, list[dict[str, Any]]] = {}
    for row in rows:
        if row["share"] == 1:
            cells.setdefault(row["factor"], []).append(row)
    answers = []
    for same in cells.values():
        place = (same[0]["params"], same[0]["unique_events"], same[0]["passes"])
        value, low, high = fitted.forecast(*place, new_runs=len(same))
        got = sum(row["metrics"][metric]["value"] for row in same) / len(same)
        answers.append(
            {
                "log": same[0]["log"], "metric": metric.split("/")[1], "by": law.details["forecast_by"],
                "as_good": law.details.get("as_good", []), "status": law.status, "passes": place[2],
                "forecast": value, "low": low, "high": high, "measured": got, "seeds": len(same),
                "error": value / got - 1, "width": (high - low) / 2 / got, "inside": low <= got <= high,
                "held_out": law.details.get("forecast_held_out"), "widen": law.details.get("widen"),
                "predicted": fitted.sign * (fitted.predict(*place)[0] if fitted.surface else value),
            }
        )  # fmt: skip
    chosen = min(answers, key=lambda answer: answer["predicted"])
    best = min(answers, key=lambda answer: fitted.sign * answer["measured"])
    headline = {name: best[name] for name in ("measured", "seeds")} | {"passes_measured": best["passes"]}
    headline |= {"error": chosen["forecast"] / best["measured"] - 1}
    headline |= {"inside": chosen["low"] <= best["measured"] <= chosen["high"]}
    return [
        {**chosen, **headline, "at": "the best passes"},
        *(
            {**answer, "at": "the passes that the law chose" if answer is chosen else "other passes"}
            for answer in answers
        ),
    ]


def forecast_beyond(rows: list[dict[str, Any]], metric: str) -> list[dict[str, Any]]:
    """The metric at more users than the log has, from all runs."""
    from habitus.planning import log_limits

    limits = log_limits(law_of(rows, metric), metric)
    return [
        {"log": rows[0]["log"], "metric": metric.split("/")[1], "users": row.factor, "words": str(row.value)}
        for row in limits.more_users
    ]


def summarise(forecasts: list[dict[str, Any]]) -> dict[str, Any]:
    """Per metric over the logs: how many forecasts hold, how far off they are, how wide their intervals."""
    summary = {}
    for metric in dict.fromkeys(row["metric"] for row in forecasts):
        for at in ("the best passes", "the passes that the law chose"):
            rows = [row for row in forecasts if row["metric"] == metric and row["at"] == at]
            summary[f"{metric} at {at}"] = {
                "logs": len(rows),
                "inside": sum(1 for row in rows if row["inside"]),
                "median_error": statistics.median(abs(row["error"]) for row in rows),
                "median_half_width": statistics.median(row["width"] for row in rows),
                "widest": max(row["width"] for row in rows),
            }
    return summary


def document(rows: list[dict[str, Any]], given: argparse.Namespace, began: float) -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() and given.device != "cpu" else None
    return {
        "benchmark": "value of data: runs on disjoint parts of the users",
        "date": datetime.date.today().isoformat(),
        "hardware": gpu or platform.processor() or platform.machine(),
        "workers": given.workers,
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - began, 1),
        "rows": sorted(rows, key=lambda row: (row["log"], -row["share"], row["part"], row["factor"], row["seed"])),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(content))
    beside.rename(path)


if __name__ == "__main__":
    main()
