"""Targets: what does training on the events that count gain over training on all of them?

    python benchmarks/targets.py prepare world WORK/world
    python benchmarks/targets.py prepare git_small WORK/git_small --data SHARED/git_touches/small
    python benchmarks/targets.py prepare completejourney WORK/cj --data SHARED/completejourney
    python benchmarks/targets.py train WORK/world targets --steps 2000      # and: all, alone
    python benchmarks/targets.py score WORK/world --out benchmarks/results/targets-cpu.json

`prepare` writes three datasets of one log: `targets`, whose schema has [targets]; `all`, the same without it; and
`alone`, only the events that are targets. `train` gives every arm the same model, steps and slots; stopped by a
signal, the same command goes on. `score` asks all of them for the same targets of the validation users, with the
baselines and, in the world, the oracle. In the world a perfect model of each arm is known, and so what targets and
views gain. It prints a table and ends with one JSON line, which --out keeps under the log's name.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

WORLD = {
    "num_users": 12_000, "num_items": 300, "num_groups": 12, "num_brands": 30, "events_per_user": 24, "seed": 2,
    "views_per_purchase": 4, "view_informs": 0.2,
}  # fmt: skip
LOGS = ("world", "git_small", "completejourney")
ARMS = ("targets", "all", "alone")
TARGETS = {
    "world": {"column": "event_type", "weights": {"purchase": 1.0}},
    "git_small": {"column": "event_type", "weights": {"add": 1.0}},
    "completejourney": {
        "column": "event_type",
        "weights": {"purchase": 1.0},
        "candidates": {"item_kind": ["product"]},
    },
}
QUERIES = {"world": 1_000_000, "git_small": 4_000, "completejourney": 4_000}
PER_USER = {"git_small": 8, "completejourney": 4}  # of one window at most: more users


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    preparing = verbs.add_parser("prepare", help="write the datasets of a log")
    preparing.add_argument("log", choices=LOGS)
    preparing.add_argument("work", type=Path)
    preparing.add_argument("--data", type=Path, help="folder of events.parquet and items.parquet")
    training = verbs.add_parser("train", help="train one arm")
    training.add_argument("work", type=Path)
    training.add_argument("arm", choices=ARMS)
    training.add_argument("--steps", type=int, default=2_000)
    training.add_argument("--batch", type=int, default=16, help="windows per step")
    training.add_argument("--rate", type=float, default=6e-3)
    training.add_argument("--seed", type=int, default=0)
    scoring = verbs.add_parser("score", help="score all arms on the same targets")
    scoring.add_argument("work", type=Path)
    scoring.add_argument("--out", type=Path, help="a JSON file to which the log's results are added")
    given = parser.parse_args()
    {"prepare": prepare_log, "train": train_arm, "score": score_arms}[given.verb](given)


def prepare_log(given: argparse.Namespace) -> None:
    """The datasets of all arms, in windows of one length."""
    shutil.rmtree(given.work, ignore_errors=True)
    given.work.mkdir(parents=True)
    (given.work / "log.json").write_text(json.dumps({"log": given.log}))
    if given.log == "world":
        _prepare_world(given.work)
        return
    from habitus.data import PrepareOptions, prepare
    from habitus.events import Schema

    events, items, schema = {"git_small": _git_small, "completejourney": _completejourney}[given.log](given.data)
    targets = TARGETS[given.log]
    for name, table in (("events", events), ("items", items)):
        pq.write_table(table, given.work / f"{name}.parquet")
    wanted = pc.is_in(events["event_type"], pa.array(list(targets["weights"])))
    pq.write_table(events.filter(wanted), given.work / "alone.parquet")
    for arm in ARMS:
        values = schema | ({"targets": targets} if arm == "targets" else {})
        name = "alone" if arm == "alone" else "events"
        tables = (str(given.work / f"{table}.parquet") for table in (name, "items"))
        options = PrepareOptions(seq_len=256, text_len=12, vocabulary_size=4096, split="time", test_share=0, threads=1)
        print(arm, prepare(*tables, Schema.parse(values, arm), given.work / arm, options).train)


def _prepare_world(work: Path) -> None:
    from habitus.data import PrepareOptions, prepare_world
    from habitus.events import World, WorldConfig, schema_of

    options = PrepareOptions(
        seq_len=128, text_len=6, vocabulary_size=400, validation_share=0.2, test_share=0, threads=1
    )
    silent: Any = lambda *_: None  # noqa: E731
    world = World(WorldConfig(**WORLD))
    for arm in ("targets", "all"):
        schema = schema_of(world)
        schema = schema if arm == "targets" else schema.model_copy(update={"targets": None})
        print(arm, prepare_world(world, schema, work / arm, options, silent).train)
    alone = World(WorldConfig(**{name: value for name, value in WORLD.items() if not name.startswith("view")}))
    print("alone", prepare_world(alone, schema_of(alone), work / "alone", options, silent).train)


def _git_small(data: Path) -> tuple[pa.Table, pa.Table, dict[str, Any]]:
    schema = {
        "events": {
            "user": "user_id", "item": "item_id", "timestamp": "timestamp",
            "fields": {"event_type": "category", "repo": "category", "n_files": "number", "subject_kind": "category"},
        },
        "items": {
            "item": "item_id",
            "fields": {
                "path_text": "text", "repo": "category", "top_dir": "category", "extension": "category",
                "depth": "number", "name_length": "number",
            },
        },
    }  # fmt: skip
    return pq.read_table(data / "events.parquet"), pq.read_table(data / "items.parquet"), schema


def _completejourney(data: Path) -> tuple[pa.Table, pa.Table, dict[str, Any]]:
    """Purchases, campaigns received and coupons redeemed as one log; campaigns and coupons are items of their own."""
    bought = pq.read_table(data / "events.parquet", columns=["user_id", "item_id", "timestamp"])
    campaigns = pq.read_table(data / "campaigns.parquet")
    coupons = pq.read_table(data / "coupon_redemptions.parquet")
    products = pq.read_table(data / "items.parquet")

    def ids(kind: str, column: pa.ChunkedArray) -> pa.ChunkedArray:
        return pc.binary_join_element_wise(kind, column.cast(pa.string()), "")

    def events(table: pa.Table, kind: str, item: str, time: str) -> pa.Table:
        return pa.table(
            {
                "user_id": table["user_id"],
                "item_id": ids(kind, table[item]),
                "timestamp": table[time].cast(pa.timestamp("us")),
                "event_type": pa.array(["purchase" if kind == "product" else kind] * len(table), pa.string()),
            }
        )

    log = pa.concat_tables(
        [
            events(bought, "product", "item_id", "timestamp"),
            events(campaigns, "campaign", "campaign_id", "start_date"),
            events(coupons, "coupon", "coupon_upc", "redemption_date"),
        ]
    )
    kinds = campaigns.group_by("campaign_id").aggregate([("campaign_type", "min")])
    redeemed = coupons.group_by("coupon_upc").aggregate([("campaign_id", "min")])
    columns = ("title", "department", "product_category", "brand")
    rows = {name: products[name].cast(pa.string()).to_pylist() for name in columns}
    rows["item_id"] = ids("product", products["item_id"]).to_pylist()
    rows["item_kind"] = ["product"] * len(products)
    for kind, table, number, label in (
        ("campaign", kinds, "campaign_id", kinds["campaign_type_min"]),
        ("coupon", redeemed, "coupon_upc", redeemed["campaign_id_min"].cast(pa.string())),
    ):
        rows["item_id"] += ids(kind, table[number]).to_pylist()
        rows["item_kind"] += [kind] * len(table)
        rows["title"] += [f"{kind} {text}" for text in label.to_pylist()]
        for name in columns[1:]:
            rows[name] += [None] * len(table)
    schema = {
        "events": {
            "user": "user_id", "item": "item_id", "timestamp": "timestamp", "fields": {"event_type": "category"},
        },
        "items": {
            "item": "item_id",
            "fields": {"title": "text", "item_kind": "category", **dict.fromkeys(columns[1:], "category")},
        },
    }  # fmt: skip
    return log, pa.table(rows), schema


def train_arm(given: argparse.Namespace) -> None:
    """One run, in WORK/run-ARM."""
    from habitus.data import Dataset
    from habitus.recipe import Recipe
    from habitus.training import TrainOptions, train

    dataset = Dataset.open(given.work / given.arm)
    out = given.work / f"run-{given.arm}"
    if (out / "record.json").exists():
        shutil.rmtree(out)  # a run that was stopped goes on
    recipe = Recipe.parse(
        {
            "data": {"seq_len": dataset.seq_len},
            "model": {
                "joint_dim": 32, "text_len": dataset.fields.text_len, "text_depth": 1, "width": 64, "depth": 2,
                "head_dim": 32, "copying": True,
            },
            "train": {
                "batch_sequences": given.batch, "steps": given.steps, "learning_rate": given.rate, "precision": "fp32",
                "optimizer": "muon", "log_q": True, "seed": given.seed,
            },
            "evaluate": {"queries": 1_000, "regimes": ["batch"]},
        },
        "the benchmark's recipe",
    )  # fmt: skip
    record = train(recipe, dataset, out, options=TrainOptions(device="cpu", threads=1, resume=True))
    seen = f"{record.slots_seen:,} slots, {record.events_seen:,} events, {record.queries_seen:,} targets"
    print(f"{given.arm}: {seen}, {record.epochs:.1f} passes, {record.seconds.train if record.seconds else 0:.0f} s")


def score_arms(given: argparse.Namespace) -> None:
    """All arms and baselines on the same targets, a table and one JSON line."""
    from habitus.data import Dataset
    from habitus.evaluation import EvaluateOptions, evaluate, paired_difference
    from habitus.evaluation.baselines import baselines
    from habitus.evaluation.runs import ComputeOptions, open_scorer

    log = json.loads((given.work / "log.json").read_text())["log"]
    data = {arm: Dataset.open(given.work / arm) for arm in ARMS}
    options = EvaluateOptions(
        regimes=("catalogue",), queries=QUERIES[log], per_user=PER_USER.get(log), cutoffs=(10,), histories=()
    )
    compute = ComputeOptions(other_dataset=True)
    values: dict[str, Any] = {}
    metrics: dict[str, Any] = {}

    def keep(name: str, dataset: Dataset, scorer: Any) -> None:
        found = evaluate(dataset, scorer, options, keep=lambda _, one: values.__setitem__(name, one))
        metrics[name] = {key: metric.to_values() for key, metric in found.metrics.items() if "slice" not in key}

    for arm in ARMS:
        dataset = data["alone"] if arm == "alone" else data["targets"]
        if (given.work / f"run-{arm}" / "record.json").exists() and not (arm == "alone" and log != "world"):
            keep(arm, dataset, open_scorer(given.work / f"run-{arm}", dataset, options, compute, print))
    for scorer in baselines(data["targets"]):
        keep(scorer.name, data["targets"], scorer)
    result: dict[str, Any] = {"log": log, "metrics": metrics, "queries": len(values["targets"].rank)}
    result["users"] = len(np.unique(values["targets"].user))
    for metric in ("recall@10", "ndcg@10", "loss"):
        result[f"targets less all, {metric}"] = paired_difference(values["targets"], values["all"], metric)._asdict()
    if log == "world":
        result["gains"] = _gains(data, values, keep)
    result["records"] = {arm: _counts(given.work / f"run-{arm}" / "record.json") for arm in ARMS}
    result |= {"date": datetime.date.today().isoformat(), "hardware": _hardware(given.work)}
    _print_table(result)
    if given.out is not None:
        kept = json.loads(given.out.read_text()) if given.out.exists() else {}
        given.out.write_text(json.dumps(kept | {log: result}, indent=1) + "\n")
    print(json.dumps(result))


def _gains(data: dict[str, Any], values: dict[str, Any], keep: Any) -> dict[str, Any]:
    """What targets and views gain, for the models and for perfect ones."""
    from habitus.evaluation.baselines import OracleScorer
    from habitus.events import ViewQueries

    keep("oracle, alone", data["alone"], OracleScorer(data["alone"]))
    oracle = OracleScorer(data["targets"])
    dataset, law = data["targets"], oracle.world.view_oracle
    rows = values["targets"].event + 1
    is_purchase = dataset.is_target(np.arange(dataset.num_events))
    perfect, ranks = np.empty(len(rows)), np.empty(len(rows))
    for first in range(0, len(rows), 4096):
        part = rows[first : first + 4096]
        asked = ViewQueries.of_events(dataset.items, is_purchase, dataset.user_offsets[:-1], part)
        chances = law.next_event(asked)
        own = chances[np.arange(len(part)), dataset.items[part]]
        perfect[first : first + 4096] = -np.log(own)
        ranks[first : first + 4096] = (chances >= own[:, None]).sum(axis=1)
    losses = {name: float(one.loss.mean()) for name, one in values.items() if one.loss is not None}
    hits = {name: float((one.rank <= 10).mean()) for name, one in values.items()}
    losses["oracle, all"], hits["oracle, all"] = float(perfect.mean()), float((ranks <= 10).mean())
    gains = {}
    for other, what in (("all", "targets against all events"), ("alone", "views against none")):
        for metric, by_name, sign in (("loss", losses, -1), ("recall@10", hits, 1)):
            model = sign * (by_name["targets"] - by_name[other])
            best = sign * (by_name["oracle"] - by_name[f"oracle, {other}"])
            gains[f"{what}, {metric}"] = {"model": model, "oracle": best, "share": model / best}
    return gains


def _counts(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    record = json.loads(path.read_text())
    names = ("steps", "slots_seen", "events_seen", "queries_seen", "unique_targets", "epochs")
    return {name: record[name] for name in names if name in record} | {"seconds": record["seconds"]["train"]}


def _hardware(work: Path) -> str:
    cpu = json.loads((work / "run-targets" / "record.json").read_text())["hardware"].get("cpu", platform.machine())
    return f"one core of {cpu}, {os.cpu_count()} cores with other work beside it"


def _print_table(result: dict[str, Any]) -> None:
    print(f"{result['log']}: {result['queries']:,} targets of {result['users']:,} validation users")
    print(f"{'':<20} {'recall@10':>18} {'ndcg@10':>18} {'loss':>18}")
    for name, metrics in result["metrics"].items():
        cells = [metrics.get(f"catalogue/{metric}") for metric in ("recall@10", "ndcg@10", "loss")]
        print(f"{name:<20} " + " ".join(f"{c['value']:>9.4f} ± {c['se']:.4f}" if c else f"{'':>18}" for c in cells))
    for name, difference in result.items():
        if name.startswith("targets less all"):
            print(f"{name}: {difference['value']:+.4f} ({difference['low']:+.4f} to {difference['high']:+.4f})")
    for name, gain in result.get("gains", {}).items():
        print(f"{name}: {gain['model']:.4f} of {gain['oracle']:.4f} that a perfect model gains ({gain['share']:.1%})")


if __name__ == "__main__":
    main()
