"""Regularising the embedder, one knob at a time, on prepared logs: what each does to the metrics of validation users.

    python benchmarks/regularisation.py DATASET ... --workers 14 --out regularisation.json

Every dataset is trained once per variant and seed with one recipe (`habitus.planning.stage1_recipe`), --workers at a
time. A dataset whose items have their id as a category shows whether dropping fields keeps it from being learnt by
heart. Prints a table and ends with one JSON line.
"""

import argparse
import datetime
import json
import multiprocessing
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

METRICS = ("catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")
VARIANTS: dict[str, dict[str, Any]] = {
    "base": {},
    "token_dropout 0.2": {"token_dropout": 0.2},
    "token_dropout 0.4": {"token_dropout": 0.4},
    "field_dropout 0.2": {"field_dropout": 0.2},
    "field_dropout 0.5": {"field_dropout": 0.5},
    "item_dropout 0.1": {"item_dropout": 0.1},
    "item_dropout 0.3": {"item_dropout": 0.3},
    "all three 0.2": {"token_dropout": 0.2, "field_dropout": 0.2, "item_dropout": 0.2},
    "embedder_weight_decay 1": {"embedder_weight_decay": 1.0},
    "table_weight_decay 0.1": {"table_weight_decay": 0.1},
    "wsd": {"schedule": "wsd"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("datasets", type=Path, nargs="+")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--passes", type=float, help="default: those usual for a log of its size")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    jobs = [
        (str(dataset), variant, seed, given.passes, given.queries, given.device)
        for dataset in given.datasets
        for seed in range(given.seeds)
        for variant in given.only
    ]
    if given.device != "cpu":
        from habitus.sweeps import mps_environment

        os.environ.update(mps_environment(print))  # workers inherit it
    with multiprocessing.get_context("spawn").Pool(given.workers) as pool:
        rows = []
        for row in pool.imap_unordered(_run, jobs):
            rows.append(row)
            print(_line(row), flush=True)
    summary = {
        "benchmark": "regularisation",
        "date": datetime.date.today().isoformat(),
        "machine": platform.processor() or platform.machine(),
        "device": rows[0]["device"],
        "rows": sorted(rows, key=lambda row: (row["log"], row["variant"], row["seed"])),
    }
    if given.out:
        given.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary))


def _run(job: tuple[str, str, int, float | None, int, str]) -> dict[str, Any]:
    from habitus.data import Dataset
    from habitus.planning import stage1_recipe, usual_passes
    from habitus.planning.portfolio import SHAPES
    from habitus.recipe import Recipe
    from habitus.sweeps import device_kind
    from habitus.training import TrainOptions, train

    path, variant, seed, passes, queries, device = job
    dataset = Dataset.open(path, verify=False)
    kind = "gpu" if device_kind(device) == "cuda" else "cpu"
    base = stage1_recipe(SHAPES[kind][0], dataset, passes or usual_passes(dataset), kind, seed=seed)
    values = base.to_values()
    values["train"] |= VARIANTS[variant]
    if VARIANTS[variant].get("schedule") == "wsd":
        values["train"]["warmup_steps"] = max(1, round(base.train.warmup * base.train.steps))
    values["evaluate"]["queries"] = queries
    recipe = Recipe.parse(values, variant)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        options = TrainOptions(device=device, threads=1, compile=False if kind == "gpu" else None)
        record = train(recipe, dataset, Path(folder) / "run", options=options)
    return {
        "log": Path(path).name,
        "variant": variant,
        "seed": seed,
        "epochs": record.epochs,
        "device": record.hardware.get("device", kind),
        "seconds": time.perf_counter() - began,
        "train_loss": None if record.train is None else record.train.loss,
        **{name: metric.value for name, metric in record.metrics.items() if name in METRICS},
    }


def _line(row: dict[str, Any]) -> str:
    values = "  ".join(f"{row[name]:.4f}" if name in row else "failed" for name in METRICS)
    return f"{row['log']:24} {row['variant']:26} seed {row['seed']}  {values}  {row['seconds']:.0f} s"


if __name__ == "__main__":
    main()
