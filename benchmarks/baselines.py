"""All baselines on real event logs, both regimes, with standard errors, as a Markdown table.

    python benchmarks/baselines.py LOGS DATASETS [--queries 5000] [--keep benchmarks/results/evaluate-baselines.json]

LOGS holds one folder per log with events.parquet and items.parquet; logs without a shipped schema are passed over.
Datasets are prepared into DATASETS at the defaults of `habitus prepare` where they are not there yet. Ends with one
JSON line.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from softmax import machine

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.evaluation import EvaluateOptions, Evaluation, evaluate_runs
from habitus.events.schema import Schema

SCHEMAS = Path(__file__).parents[1] / "examples" / "schemas"
COLUMNS = ("loss", "entropy", "recall@1", "recall@10", "recall@100", "ndcg@10", "mrr@10", "coverage_union@10")
SLICES = ("loss/cold", "recall@10/cold", "recall@100/cold", "recall@10/repeat", "recall@10/first")


def main() -> None:
    """Print the tables, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("logs", type=Path)
    arguments.add_argument("datasets", type=Path)
    arguments.add_argument("--queries", type=int, default=5000)
    arguments.add_argument("--only", help="one log")
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    for schema in sorted(SCHEMAS.glob("*.toml")):
        name = schema.stem
        if (options.logs / name).is_dir() and options.only in (None, name):
            rows += on_one(name, opened(options.logs / name, schema, options.datasets / name), options.queries)
    result = {"benchmark": "baselines", **machine(), "queries": options.queries, "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def opened(log: Path, schema: Path, folder: Path) -> Dataset:
    """The prepared dataset, prepared now if need be."""
    if not folder.exists():
        options = PrepareOptions(test_share=0, threads=torch.get_num_threads())
        events, items = str(log / "events.parquet"), str(log / "items.parquet")
        prepare(events, items, Schema.read(schema), folder, options, lambda *_: None)
    return Dataset.open(folder)


def on_one(name: str, dataset: Dataset, queries: int) -> list[dict[str, Any]]:
    """The rows of one dataset, printed as they come."""
    start = time.perf_counter()
    found = evaluate_runs([], dataset, EvaluateOptions(queries=queries), with_baselines=True)
    seconds = time.perf_counter() - start
    rows = []
    for regime, spec in found[0].specification.items():
        print(f"\n**{name}**, {regime}: {spec.queries:,} queries, {spec.candidates:,} candidates\n")
        columns = [column for column in COLUMNS + SLICES if f"{regime}/{column}" in found[0].metrics]
        print("| baseline | " + " | ".join(columns) + " |")
        print("|---" * (len(columns) + 1) + "|")
        for one in found:
            print(f"| {one.scorer} | " + " | ".join(shown(one, f"{regime}/{column}") for column in columns) + " |")
            metrics = {column: one.metrics[f"{regime}/{column}"].to_values() for column in columns}
            row = {"dataset": name, "regime": regime, "baseline": one.scorer, "candidates": spec.candidates}
            rows.append(row | {"metrics": metrics})
    counts = found[0].metrics
    slices = {
        part: counts[f"catalogue/recall@10/{part}"].n
        for part in ("cold", "repeat", "first")
        if f"catalogue/recall@10/{part}" in counts
    }
    print(f"\nqueries by target: {slices}; {seconds:.0f} s", flush=True)
    return rows


def shown(one: Evaluation, name: str) -> str:
    metric = one.metrics.get(name)
    if metric is None:
        return "–"
    return f"{metric.value:.3f}" if metric.se is None else f"{metric.value:.3f} ± {metric.se:.3f}"


if __name__ == "__main__":
    main()
