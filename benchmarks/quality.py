"""Quality of both stages: how much of the gap to a world's floor is closed, and what baselines reach on real logs.

    python benchmarks/quality.py world --budgets 1e15 --items 20000 --out quality-world.json
    python benchmarks/quality.py logs DATASETS --seeds 3 --out quality-logs.json        # DATASETS/<name>: prepared

`world` trains stage 1 at each budget (a cell of a given share, or --model on --batch windows), then stage 2 at a
quarter of it for each K, and scores popularity and the oracle on the same queries. `logs` trains both stages on every
prepared dataset of the folder, some epochs over the log each, and scores all baselines on the same queries. Runs go
--workers at a time, a process each. Rows are printed and written to --out as they come; the last line is JSON.
"""

import argparse
import datetime
import json
import math
import multiprocessing
import os
import platform
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

LOG_METRICS = ("catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10", "batch/recall@10", "batch/ndcg@10")
WORLD_METRICS = ("batch/loss", "catalogue/loss", "catalogue/recall@10", "catalogue/ndcg@10")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["world", "logs"])
    parser.add_argument("datasets", type=Path, nargs="?", help="for `logs`: a folder of prepared datasets")
    parser.add_argument("--only", nargs="+", help="names of datasets")
    parser.add_argument("--items", type=int, default=20_000)
    parser.add_argument("--users", type=int, default=300_000)
    parser.add_argument("--folder", type=Path, help="where the world lies, or is made and kept")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--text-len", type=int, default=24, help="tokens of an item's text at most")
    parser.add_argument("--text-depth", type=int, default=4)
    parser.add_argument("--id", action="store_true", help="the item's id as one more category of the world's items")
    parser.add_argument("--budgets", type=float, nargs="*", default=[1e15])
    parser.add_argument("--data-ratio", type=float, default=30.0)
    parser.add_argument("--share", type=float, default=0.02)
    parser.add_argument("--negatives", type=int, nargs="*", default=[0, 8192])
    parser.add_argument("--batch", type=int, help="windows per step; 8 on logs, by the budget on worlds, unless said")
    parser.add_argument("--epochs", type=float, default=3.0, help="over a log, in stage 1; stage 2 takes a quarter")
    parser.add_argument("--stage2-rate", type=float, default=0.25, help="of stage 1's learning rate")
    parser.add_argument("--steps", type=int, nargs=2, default=[100, 2500], help="least and most of a log's stage 1")
    parser.add_argument(
        "--model", type=int, nargs=4, help="joint_dim text_depth width depth; 64 2 128 3 on logs unless said"
    )
    parser.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--base-rate", type=float, default=2e-2, help="learning rate at 512 windows; √B from there")
    parser.add_argument("--optimizer", default="muon")
    parser.add_argument("--log-q", action="store_true", help="correct the scores by the candidates' inclusion")
    parser.add_argument("--copying", action="store_true", help="let the events of the past speak for their items")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        jobs = world_jobs(given, given.folder or Path(scratch)) if given.what == "world" else log_jobs(given)
        rows = run_all(jobs, given)
    print(json.dumps(document(rows, given)))


def world_jobs(given: argparse.Namespace, folder: Path) -> list[tuple[Any, ...]]:
    """Baselines, and one job per budget and seed."""
    if not (folder / "world").exists():
        make_world(given, folder)
    cells = [("world", folder / "world", seed, budget) for budget in given.budgets for seed in range(given.seeds)]
    return [*([("baselines", folder / "world", 0, None)] if given.baselines else []), *cells]


def make_world(given: argparse.Namespace, folder: Path) -> None:
    from habitus.data import PrepareOptions
    from habitus.data.from_world import prepare_world
    from habitus.events.world import World, WorldConfig
    from habitus.events.world.writing import schema_of

    began = time.perf_counter()
    world = World(WorldConfig(num_users=given.users, num_items=given.items, seed=1))
    schema = schema_of(world)
    if given.id:
        fields = dict(schema.items.fields) | {schema.items.item: "category"}
        schema = schema.model_copy(update={"items": type(schema.items)(item=schema.items.item, fields=fields)})
    options = PrepareOptions(
        seq_len=given.seq_len,
        text_len=given.text_len,
        validation_share=0.05,
        test_share=0,
        threads=max(1, min(12, (os.cpu_count() or 2) - 1)),
    )
    prepare_world(world, schema, folder / "world", options, lambda _what, _share: None)
    print(f"world of {given.items:,} items and {given.users:,} users: {time.perf_counter() - began:.0f} s", flush=True)


def log_jobs(given: argparse.Namespace) -> list[tuple[Any, ...]]:
    found = sorted(path for path in given.datasets.iterdir() if (path / "manifest.json").exists())
    chosen = [path for path in found if not given.only or path.name in given.only]
    runs = [("log", path, seed, None) for seed in range(given.seeds) for path in chosen]
    return [*runs, *(("baselines", path, 0, None) for path in chosen if given.baselines)]


def run_all(jobs: list[tuple[Any, ...]], given: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=context, max_tasks_per_child=1) as pool:
        for future in as_completed([pool.submit(one, job, given) for job in jobs]):
            if future.exception() is not None:
                print(f"failed: {future.exception()!r}", flush=True)
                continue
            for row in future.result():
                rows.append(row)
                shown = " ".join(
                    f"{name} {value['value']:.4f}" + (f" ± {value['se']:.4f}" if value["se"] else "")
                    for name, value in row["metrics"].items()
                )
                print(
                    f"{row['dataset']:20} {row['what']:28} seed {row['seed']} {row.get('seconds', '')} {shown}",
                    flush=True,
                )
            given.out.write_text(json.dumps(document(rows, given), indent=1) + "\n", encoding="utf-8")
    return rows


def one(job: tuple[Any, ...], given: argparse.Namespace) -> list[dict[str, Any]]:
    """One job, in a process of its own."""
    kind, path, seed, budget = job
    if kind == "baselines":
        return baseline_rows(path, given)
    with tempfile.TemporaryDirectory() as out:
        return both_stages(path, seed, budget, given, Path(out))


def baseline_rows(path: Path, given: argparse.Namespace) -> list[dict[str, Any]]:
    from habitus.data import Dataset
    from habitus.evaluation import EvaluateOptions, evaluate
    from habitus.evaluation.baselines import OracleScorer, Popularity, baselines

    dataset = Dataset.open(path, verify=False)
    scorers = [Popularity(dataset), OracleScorer(dataset)] if given.what == "world" else baselines(dataset)
    asked = EvaluateOptions(queries=given.queries)
    return [row(path, scorer.name, 0, evaluate(dataset, scorer, asked).metrics, given) for scorer in scorers]


def both_stages(
    path: Path, seed: int, budget: float | None, given: argparse.Namespace, out: Path
) -> list[dict[str, Any]]:
    from habitus.data import Dataset
    from habitus.training import TrainOptions, train

    dataset = Dataset.open(path, verify=False)
    options = TrainOptions(device=given.device, compile=given.compile, threads=1 if given.device == "cpu" else None)
    first = stage1_recipe(dataset, seed, budget, given)
    rows = []
    began = time.perf_counter()
    record = train(first, dataset, out / "stage1", options=options)
    if record.reason:
        raise RuntimeError(record.reason)
    label = "stage 1" if budget is None else f"stage 1, {budget:.0e}"
    rows.append(row(path, label, seed, record.metrics, given) | facts(record, began))
    for negatives in given.negatives:
        began = time.perf_counter()
        second = stage2_recipe(first, dataset, min(negatives, dataset.num_items), budget, given)
        record = train(second, dataset, out / f"stage2-{negatives}", parent=out / "stage1", options=options)
        label = f"stage 2, K = {second.train.num_negatives}" + ("" if budget is None else f", {budget:.0e}")
        rows.append(row(path, label, seed, record.metrics, given) | facts(record, began))
    return rows


def stage1_recipe(dataset: Any, seed: int, budget: float | None, given: argparse.Namespace) -> Any:
    from habitus.recipe import Recipe
    from habitus.sizing import CellRequest, Inputs, ladder_batch_sequences, solve

    text_len = dataset.fields.text_len
    if budget is None:
        batch = given.batch or 8
        per_step = batch * dataset.seq_len
        steps = given.epochs * dataset.counts("train").events / per_step
        steps = int(min(max(steps, given.steps[0]), given.steps[1]))
        model = dict(zip(("joint_dim", "text_depth", "width", "depth"), given.model or [64, 2, 128, 3], strict=True))
        model |= {"head_dim": 32, "text_len": text_len or 24, "copying": given.copying}
    else:
        batch = given.batch or ladder_batch_sequences(budget)
        if given.model:
            shape = dict(zip(("joint_dim", "text_depth", "width", "depth"), given.model, strict=True))
        else:
            shape = {"share": given.share, "data_ratio": given.data_ratio, "text_depth": given.text_depth}
        shape |= {"seq_len": dataset.seq_len, "text_len": text_len, "copying": given.copying}
        request = CellRequest(batch_sequences=batch, flops=budget, **shape)
        cell = solve(request, Inputs.of(dataset.fields))
        model, steps = cell.model.to_values(), cell.steps
    rate = given.base_rate * math.sqrt(batch / 512)
    train = {
        "batch_sequences": batch,
        "steps": steps,
        "learning_rate": rate,
        "optimizer": given.optimizer,
        "log_q": given.log_q,
        "dropout": given.dropout,
        "seed": seed,
    }
    train |= {"precision": "fp32" if given.device == "cpu" else "bf16"}
    evaluate = {"queries": given.queries, "regimes": ["batch", "catalogue"]}
    return Recipe.parse(
        {"data": {"seq_len": dataset.seq_len}, "model": model, "train": train, "evaluate": evaluate}, "quality"
    )


def stage2_recipe(first: Any, dataset: Any, negatives: int, budget: float | None, given: argparse.Namespace) -> Any:
    """A quarter of stage 1's steps, or the steps that a quarter of its budget buys."""
    from habitus.sizing import Inputs, breakdown

    steps = max(1, first.train.steps // 4)
    if budget is not None:
        p = breakdown(first.model, Inputs.of(dataset.fields)).contextualizer_params
        slots = first.train.batch_sequences * dataset.seq_len
        per_step = 6 * slots * (p + 3 * (slots + negatives) * first.model.joint_dim)
        steps = max(1, round(budget / 4 / per_step))
    update = {
        "stage": 2, "parent": first.hash(dataset.checksum), "num_negatives": negatives, "steps": steps,
        "learning_rate": given.stage2_rate * first.train.learning_rate,
    }  # fmt: skip
    return first.model_copy(update={"train": type(first.train).parse(first.train.to_values() | update, "quality")})


def row(path: Path, what: str, seed: int, metrics: Any, given: argparse.Namespace) -> dict[str, Any]:
    wanted = WORLD_METRICS if given.what == "world" else LOG_METRICS
    found = {name: {"value": metrics[name].value, "se": metrics[name].se} for name in wanted if name in metrics}
    return {"dataset": path.name, "what": what, "seed": seed, "metrics": found}


def facts(record: Any, began: float) -> dict[str, Any]:
    return {
        "params": record.params.total, "steps": record.steps, "epochs": round(record.epochs, 2),
        "flops": record.flops_nominal, "train_loss": None if record.train is None else record.train.loss,
        "model": record.recipe.model.to_values(), "batch_sequences": record.recipe.train.batch_sequences,
        "learning_rate": record.recipe.train.learning_rate, "seconds": round(time.perf_counter() - began, 1),
        "status": record.status, "engine": record.hardware.get("engine"),
    }  # fmt: skip


def document(rows: list[dict[str, Any]], given: argparse.Namespace) -> dict[str, Any]:
    import torch

    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    found = {
        "benchmark": f"quality {given.what}", "date": datetime.date.today().isoformat(), "hardware": hardware,
        "torch": torch.__version__, "queries": given.queries, "optimizer": given.optimizer, "log_q": given.log_q,
        "copying": given.copying, "dropout": given.dropout,
        "rows": rows,
    }  # fmt: skip
    if given.what == "world":
        found["closed"] = closed(rows)
    return found


def closed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """The share of the gap between popularity and the oracle that each run closes, by catalogue loss."""
    level = {
        r["what"]: r["metrics"]["catalogue/loss"]["value"]
        for r in rows
        if "oracle" in r["what"] or r["what"] == "popularity"
    }
    if len(level) < 2:
        return {}
    top, floor = level["popularity"], level["oracle"]
    return {
        f"{r['what']}, seed {r['seed']}": round((top - r["metrics"]["catalogue/loss"]["value"]) / (top - floor), 4)
        for r in rows
        if r["what"].startswith("stage") and math.isfinite(r["metrics"]["catalogue/loss"]["value"])
    }


if __name__ == "__main__":
    main()
