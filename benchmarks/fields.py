"""Fields: what do categories one by one gain over strings of them, and what do fields of the user gain?

    python benchmarks/fields.py train movielens_1m_order split SHARED/movielens_1m_order WORK/ml --seed 0
    python benchmarks/fields.py score movielens_1m_order WORK/ml --out benchmarks/results/fields-cpu.json

`train` prepares the log with the fields of one arm, unless WORK has it, and gives every arm the same model, windows and
steps. `score` asks all runs that WORK holds for the same events of the validation users; differences to the first arm
are paired by user, over the seeds that both have. It prints a table and ends with one JSON line, which --out keeps
under the log's name.
"""

import argparse
import datetime
import json
import platform
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.evaluation import ComputeOptions, EvaluateOptions, evaluate_runs, paired_difference, resolve_device
from habitus.evaluation.paired import query_values
from habitus.evaluation.per_query import PerQuery
from habitus.events import Schema
from habitus.recipe import Recipe
from habitus.training import TrainOptions, train

SPLIT = {"kind": "category", "separator": "|"}
MOVIES = {"title": "text", "year": "number"}
PRODUCTS = {"title": "text", "department": "category", "product_category": "category", "brand": "category"}
MOVIE_USERS = {"gender": "category", "age_band": "category", "occupation_code": "category"}
HOUSEHOLDS = {
    "age": "category", "income": "category", "home_ownership": "category", "marital_status": "category",
    "household_size": "category", "household_comp": "category", "kids_count": "category",
}  # fmt: skip
# By log: item fields and user fields of each arm. The first is what the others are compared with.
ARMS: dict[str, dict[str, tuple[dict[str, Any], dict[str, str]]]] = {
    "movielens_small": {
        "strings": ({**MOVIES, "genres": "category"}, {}),
        "split": ({**MOVIES, "genres": SPLIT}, {}),
        "text": ({**MOVIES, "genres": "text"}, {}),
        "none": (MOVIES, {}),
    },
    "movielens_1m_order": {
        "strings": ({**MOVIES, "genres": "category"}, {}),
        "split": ({**MOVIES, "genres": SPLIT}, {}),
        "users": ({**MOVIES, "genres": "category"}, MOVIE_USERS),
        "none": (MOVIES, {}),
    },
    "completejourney": {"events": (PRODUCTS, {}), "users": (PRODUCTS, HOUSEHOLDS)},
}
EARLY = 5  # queries after at most so many events count as early: there is little but the user to go by
METRICS = ("recall@10", "ndcg@10", "loss")
UNITS = {"movielens_small": "datetime", "movielens_1m_order": "order", "completejourney": "datetime"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    training = verbs.add_parser("train", help="prepare and train one arm")
    training.add_argument("log", choices=ARMS)
    training.add_argument("arm")
    training.add_argument("data", type=Path, help="folder of events.parquet, items.parquet and perhaps users.parquet")
    training.add_argument("work", type=Path)
    training.add_argument("--steps", type=int, default=1_500)
    training.add_argument("--rate", type=float, default=0.02)
    training.add_argument("--seed", type=int, default=0)
    scoring = verbs.add_parser("score", help="score all runs on the same events")
    scoring.add_argument("log", choices=ARMS)
    scoring.add_argument("work", type=Path)
    scoring.add_argument("--queries", type=int, default=20_000)
    scoring.add_argument("--out", type=Path, help="a JSON file to which the log's results are added")
    given = parser.parse_args()
    {"train": train_arm, "score": score_arms}[given.verb](given)


def train_arm(given: argparse.Namespace) -> None:
    """One run of an arm."""
    dataset = _dataset(given)
    model = {"joint_dim": 32, "text_len": 8, "text_depth": 1, "width": 64, "depth": 2, "head_dim": 32}
    steps = {"batch_sequences": 8, "steps": given.steps, "learning_rate": given.rate, "log_q": True, "dropout": 0.1}
    values = {
        "data": {"seq_len": 128}, "model": model | {"copying": given.log == "completejourney"},
        "train": steps | {"precision": "fp32", "seed": given.seed}, "evaluate": {"queries": 2_000},
    }  # fmt: skip
    folder = given.work / f"{given.arm}-{given.seed}"
    options = TrainOptions(device="cpu", threads=1, resume=(folder / "checkpoints").exists())
    record = train(Recipe.parse(values, "the benchmark"), dataset, folder, options=options)
    print(given.arm, given.seed, record.metrics["batch/loss"].value)


def _dataset(given: argparse.Namespace) -> Dataset:
    folder = given.work / f"data-{given.arm}"
    if not folder.exists():
        items, users = ARMS[given.log][given.arm]
        values: dict[str, Any] = {
            "events": {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "time_unit": UNITS[given.log]},
            "items": {"item": "item_id", "fields": items},
        }
        values |= {"users": {"user": "user_id", "fields": users}} if users else {}
        tables = str(given.data / "events.parquet"), str(given.data / "items.parquet")
        options = PrepareOptions(
            seq_len=128, text_len=8, vocabulary_size=4096, validation_share=0.2, test_share=0, threads=1
        )
        prepare(
            *tables, Schema.parse(values, given.arm), folder, options,
            users=str(given.data / "users.parquet") if users else None,
        )  # fmt: skip
    return Dataset.open(folder)


def score_arms(given: argparse.Namespace) -> None:
    """All runs on the same events of the validation users."""
    options = EvaluateOptions(regimes=("catalogue",), queries=given.queries, metrics=("loss", "ranking"))
    compute = ComputeOptions(device=resolve_device("cpu"))
    answers: dict[str, dict[int, PerQuery]] = {}
    for arm in ARMS[given.log]:
        runs = sorted(path for path in given.work.glob(f"{arm}-*") if (path / "record.json").exists())
        kept: list[PerQuery] = []
        if runs:
            dataset = Dataset.open(given.work / f"data-{arm}")
            evaluate_runs(runs, dataset, options, compute, keep=lambda _name, _regime, values, k=kept: k.append(values))
            answers[arm] = {int(run.name.rpartition("-")[2]): one for run, one in zip(runs, kept, strict=True)}
            offsets = dataset.user_offsets
    first, reference = next(iter(answers.items()))
    one = next(iter(reference.values()))
    early = one.event - offsets[np.searchsorted(offsets, one.event, side="right") - 1] < EARLY
    rows = [_row(arm, runs, reference, early) for arm, runs in answers.items()]
    print(f"{len(one.user):,} events of {len(np.unique(one.user)):,} validation users; differences to {first!r}")
    for row in rows:
        cells = [f"{row[m]:.4f}  {row[f'{m} difference'][0]:+.4f} [{row[f'{m} difference'][1]:+.4f}, "
                 f"{row[f'{m} difference'][2]:+.4f}]" for m in METRICS]  # fmt: skip
        print(f"{row['arm']:10} {row['seeds']} seeds  {'   '.join(cells)}")
    print(f"the {int(early.sum()):,} events after at most {EARLY} others:")
    for row in rows:
        cells = [f"{row[f'{m} early']:.4f}  {row[f'{m} early difference'][0]:+.4f} "
                 f"[{row[f'{m} early difference'][1]:+.4f}, {row[f'{m} early difference'][2]:+.4f}]"
                 for m in METRICS]  # fmt: skip
        print(f"{row['arm']:10} {'   '.join(cells)}")
    result = {
        "benchmark": "fields", "log": given.log, "queries": len(one.user), "users": len(np.unique(one.user)),
        "machine": platform.processor() or platform.machine(), "date": datetime.date.today().isoformat(), "arms": rows,
    }  # fmt: skip
    if given.out is not None:
        kept_results = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps(kept_results | {given.log: result}, indent=1) + "\n")
    print(json.dumps(result))


def _row(arm: str, runs: dict[int, PerQuery], reference: dict[int, PerQuery], early: np.ndarray) -> dict[str, Any]:
    """Means over seeds, and the paired difference of all queries of all seeds that both arms have; `early` queries
    also by themselves."""
    seeds = sorted(runs.keys() & reference.keys())
    ours, theirs = (PerQuery.concatenate([side[seed] for seed in seeds]) for side in (runs, reference))
    row: dict[str, Any] = {"arm": arm, "seeds": len(seeds)}
    for metric in METRICS:
        row[metric] = float(query_values(ours, metric).mean())
        row[f"{metric} difference"] = list(paired_difference(ours, theirs, metric))
        few, few_there = (_select(side, np.tile(early, len(seeds))) for side in (ours, theirs))
        row[f"{metric} early"] = float(query_values(few, metric).mean())
        row[f"{metric} early difference"] = list(paired_difference(few, few_there, metric))
        row[f"{metric} by seed"] = [float(query_values(runs[seed], metric).mean()) for seed in seeds]
    return row


def _select(values: PerQuery, keep: np.ndarray) -> PerQuery:
    columns = {column.name: getattr(values, column.name) for column in fields(values)}
    return PerQuery(**{name: None if column is None else column[keep] for name, column in columns.items()})


if __name__ == "__main__":
    main()
