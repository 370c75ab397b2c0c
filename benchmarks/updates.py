"""Tomorrow's log: updates against one preparation, and a model continued against one trained again.

    python benchmarks/updates.py LOG --out out/updates [--since 0.95] [--updates 10] [--passes 4] [--device cpu]
                                 [--rates 0.25 --shares 0.3] [--seed 0] [--per-user 10]

LOG holds events.parquet, items.parquet and schema.toml. The log up to --since of its events is prepared; the rest comes
in --updates stretches of equal time, one after the other, and once as a whole: both must be the same bytes. A model is
trained on the first part for --passes, then continued on the grown log at several rates for a share of its steps,
beside models trained from scratch on the grown log for as many steps and for all of them. All are scored on the events
of validation and test users after the cut, the model that was not updated too: differences to it are paired by user.
Prints tables and ends with one JSON line.
"""

import argparse
import datetime
import json
import platform
import shutil
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from habitus.data import Dataset, PrepareOptions, prepare, update
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs, paired_difference, resolve_device
from habitus.evaluation.paired import query_values
from habitus.evaluation.per_query import PerQuery
from habitus.events import Schema
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.training import TrainOptions, train

RATES = [1.0, 0.5, 0.25, 0.1]
SHARES = [0.1, 0.3]  # of the first run's steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--since", type=float, default=0.95, help="share of the events that are there at first")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--passes", type=float, default=4.0)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--queries", type=int, default=40_000)
    parser.add_argument("--per-user", type=int, help="queries of a user in a window at most: more users for the count")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="of the first run's peak rate")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES, help="of the first run's steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    pieces = cut_log(given.log, given.out, given.since, given.updates)
    grown, prepared = prepare_all(given.log, given.out, pieces)
    result = {
        "benchmark": "updates",
        "log": given.log.name,
        "events": grown.num_events,
        "since": given.since,
        "passes": given.passes,
        "seed": given.seed,
        "per_user": given.per_user,
        "device": given.device,
        "machine": platform.processor() or platform.machine(),
        "date": datetime.date.today().isoformat(),
        "prepare": prepared,
        "runs": train_all(given, Dataset.open(given.out / "first"), grown),
    }
    print(json.dumps(result))


def cut_log(log: Path, out: Path, since: float, num_updates: int) -> list[Path]:
    """The first part and the updates as files; cuts lie between times, so that no update has events of the next."""
    events = pq.read_table(log / "events.parquet")
    column = Schema.read(log / "schema.toml").events.timestamp
    times = np.asarray(events[column].cast("timestamp[us]").to_numpy()).astype(np.int64)
    first = np.quantile(times, since)
    cuts = np.linspace(first, times.max() + 1, num_updates + 1)
    piece = np.searchsorted(cuts, times, side="right")
    names = ["events-first", *(f"events-{number:02d}" for number in range(1, num_updates + 1)), "events-rest"]
    files = [out / f"{name}.parquet" for name in names]
    for number, file in enumerate(files):
        keep = piece > 0 if number > num_updates else piece == number
        if not file.exists() and keep.any():
            pq.write_table(events.filter(keep), file)
    return [file for file in files if file.exists()]


def prepare_all(log: Path, out: Path, pieces: list[Path]) -> tuple[Dataset, dict[str, Any]]:
    """The grown dataset, by updates and at once, with the seconds of each; refuses to go on where they differ."""
    schema, items = Schema.read(log / "schema.toml"), str(log / "items.parquet")
    options = PrepareOptions(threads=1)
    seconds: dict[str, Any] = {}

    def timed(name: str, make: Any) -> Dataset:
        shutil.rmtree(out / name, ignore_errors=True)
        began = time.perf_counter()
        make(out / name)
        seconds[name] = round(time.perf_counter() - began, 2)
        return Dataset.open(out / name)

    first = timed("first", lambda folder: prepare(str(pieces[0]), items, schema, folder, options))
    grown = first
    for number, file in enumerate(pieces[1:-1], 1):
        grown = timed(f"update-{number:02d}", lambda folder, d=grown, f=file: update(d, str(f), items, folder, options))
    once = timed("grown", lambda folder: update(first, str(pieces[-1]), items, folder, options))
    timed("whole", lambda folder: prepare(str(log / "events.parquet"), items, schema, folder, options))
    if grown.manifest.to_values() != once.manifest.to_values():
        raise SystemExit("the updates differ from one update")
    print(f"{len(pieces) - 2} updates and one are the same bytes; {first.num_events:,} → {once.num_events:,} events")
    for name, took in seconds.items():
        print(f"  {name:12} {took:7.2f} s")
    return once, seconds


def train_all(given: argparse.Namespace, first: Dataset, grown: Dataset) -> list[dict[str, Any]]:
    """Every model's means after the cut, with the paired difference to the one that was not updated."""
    options = TrainOptions(device=given.device, resume=True)
    recipe = _recipe(given, first)
    steps, rate = recipe.train.steps, recipe.train.learning_rate
    runs = {"not updated": _train(given, first, recipe, "first", options)}
    before = Record.read(runs["not updated"] / "record.json")
    for share in given.shares:
        for factor in given.rates:
            name = f"continued {share:g}, rate {factor:g}"
            runs[name] = _train(given, grown, recipe, name, options, parent=before.recipe_hash,
                                steps=max(1, round(share * steps)), learning_rate=factor * rate)  # fmt: skip
        name = f"from scratch {share:g}"
        runs[name] = _train(given, grown, recipe, name, options, steps=max(1, round(share * steps)))
    longer = round(steps * grown.num_events / first.num_events)
    runs["from scratch, all"] = _train(given, grown, recipe, "from scratch all", options, steps=longer)
    return _compare(given, grown, first.manifest.time_span[1], runs)


def _recipe(given: argparse.Namespace, dataset: Dataset) -> Recipe:
    batch, length = 8, 128
    windows = dataset.with_seq_len(length).counts("train").windows
    return Recipe.parse(
        {
            "data": {"seq_len": length},
            "model": {
                "joint_dim": given.width, "text_len": 12, "text_depth": 1, "width": given.width, "depth": 2,
                "head_dim": 32, "copying": True,
            },
            "train": {
                "batch_sequences": batch, "steps": max(1, round(given.passes * windows / batch)),
                "learning_rate": 0.02, "dropout": 0.1, "log_q": True,
                "precision": "fp32" if given.device == "cpu" else "bf16", "seed": given.seed,
            },
            "evaluate": {"queries": 1000},
        },
        "the benchmark",
    )  # fmt: skip


def _train(
    given: argparse.Namespace, dataset: Dataset, recipe: Recipe, name: str, options: TrainOptions, **changes: Any
) -> Path:
    folder = given.out / "runs" / name.replace(", ", "-").replace(" ", "-")
    own = recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})
    parent = given.out / "runs" / "first" if "parent" in changes else None
    if not (folder / "record.json").exists():
        train(own, dataset, folder, parent=parent, options=options)
    return folder


def _compare(given: argparse.Namespace, grown: Dataset, cut: int, runs: dict[str, Path]) -> list[dict[str, Any]]:
    compute = ComputeOptions(device=resolve_device(given.device), other_dataset=True)
    parts: dict[str, list[PerQuery]] = {name: [] for name in runs}
    for side in ("validation", "test"):
        options = EvaluateOptions(
            regimes=("catalogue",), side=side, queries=given.queries, per_user=given.per_user, metrics=("ranking",)
        )
        kept: list[PerQuery] = []

        def keep(_name: str, _regime: str, values: PerQuery, kept: list[PerQuery] = kept) -> None:
            kept.append(values)

        evaluate_runs(list(runs.values()), grown, options, compute, keep=keep)
        for name, values in zip(runs, kept, strict=True):
            parts[name].append(_select(values, grown.times[values.event + 1] > cut))
    tables = {name: PerQuery.concatenate(both) for name, both in parts.items()}
    stale = tables["not updated"]
    print(f"{len(stale.user):,} queries of {len(np.unique(stale.user)):,} users after the cut")
    print(f"{'':26} {'recall@10, and to not updated':36} NDCG@10, and to not updated")
    rows = []
    for name, values in tables.items():
        row: dict[str, Any] = {"run": name}
        cells = []
        for metric in ("recall@10", "ndcg@10"):
            difference = paired_difference(values, stale, metric)
            row[metric] = float(query_values(values, metric).mean())
            row[f"{metric} difference"] = list(difference)
            cells.append(f"{row[metric]:.4f}  {difference.value:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]")
            if name.startswith("continued"):  # against as many steps from scratch
                again = tables[f"from scratch {name.split()[1].rstrip(',')}"]
                row[f"{metric} to from scratch"] = list(paired_difference(values, again, metric))
        rows.append(row)
        print(f"{name:26} {'  '.join(cells)}")
    return rows


def _select(values: PerQuery, keep: np.ndarray) -> PerQuery:
    columns = {column.name: getattr(values, column.name) for column in fields(values)}
    return PerQuery(**{name: None if column is None else column[keep] for name, column in columns.items()})


if __name__ == "__main__":
    main()
