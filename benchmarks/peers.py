"""Training speed on one CPU thread against RecTools' SASRec and RePlay's SasRec, in one run.

    python benchmarks/peers.py --rectools VENV/bin/python --replay VENV/bin/python [--out FILE]

The environments hold `RecTools[torch]` and `replay-rec[torch]`, each with a CPU build of torch. All read the same
sequences: every user has 101 events, every item occurs, so 100 inputs and 100 targets per sequence and no padding.
2 layers, 64 wide, 2 heads, batches of 64 sequences, softmax over the whole catalogue, float32, one thread, no dropout.
Ours has an id-like embedder: the only item field is the item's id as a category, so an item's vector is a table row
and the fusion layer behind it. Everything learns, the table too, as in theirs. Our MLP is four times as wide as the
model, theirs once: we do more work per event. Three ways of ours are shown:

    full       all catalogue items are candidates, all learn: what the peers do, from the library's parts
    stage 1    habitus.train as it is: the batch's own targets are the candidates
    stage 2    habitus.train as it is: frozen items, the whole catalogue among the candidates (K = all)

Rates are events (= predicted positions) per CPU second, medians of --repeats alternating runs. At 698,606 items
everybody may use 12 GB of address space; who cannot allocate is reported with its error. The last line is JSON.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

LENGTH = 101
BATCH = 64
SMALL, LARGE = 5_000, 698_606
LIMIT_GB = 12.0  # a score per query and item would be 17.9 GB
STEPS = {SMALL: 8, LARGE: 1}
OURS = ("full", "stage 1", "stage 2")
STAGE2_BATCH_AT_LARGE = 8  # a step over 698,606 items costs a minute at 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rectools", type=Path, help="the Python of an environment with RecTools[torch]")
    parser.add_argument("--replay", type=Path, help="the Python of an environment with replay-rec[torch]")
    parser.add_argument("--items", type=int, nargs="+", default=[SMALL, LARGE])
    parser.add_argument("--repeats", type=int, default=3, help="at 5,000 items; once at 698,606")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=3, metavar=("WAY", "SEQUENCES", "STEPS"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(ours_here(given.one[0], Path(given.one[1]), int(given.one[2]))))
        return
    pythons = {name: path for name in ("rectools", "replay") if (path := getattr(given, name))}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for items in given.items:
            file = Path(folder) / f"sequences-{items}.npz"
            np.savez(file, sequences=sequences(items, BATCH * (STEPS.get(items, 8) + 1)))
            rows += compare(file, items, pythons, given.repeats if items <= SMALL else 1)
    result = {
        "benchmark": "peers",
        "date": datetime.date.today().isoformat(),
        "hardware": f"{processor()}, one thread",
        "rows": rows,
        "times_the_faster_peer": ratio(rows),
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def sequences(items: int, at_least: int) -> np.ndarray:
    """Users [n, 101] whose events are random orders of the whole catalogue, one after another: every item occurs."""
    rng = np.random.default_rng(0)
    users = max(at_least, -(-items // LENGTH))
    orders = [rng.permutation(items) for _ in range(-(-users * LENGTH // items))]
    return np.concatenate(orders)[: users * LENGTH].reshape(users, LENGTH)


def compare(file: Path, items: int, pythons: dict[str, Path], repeats: int) -> list[dict[str, Any]]:
    """Everybody on one file, alternating."""
    steps = STEPS.get(items, 8)
    runs: dict[str, list[dict[str, Any]]] = {}
    here = Path(__file__)
    for _ in range(repeats):
        for way in OURS:
            command = [sys.executable, str(here), "--one", way, str(file), str(steps)]
            runs.setdefault(f"habitus, {way}", []).append(run_to_end(command))
        for name, python in pythons.items():
            script = here.with_name(f"peers_{name}.py")
            command = [str(python), str(script), str(file), str(steps), str(BATCH), str(LIMIT_GB)]
            runs.setdefault(name, []).append(run_to_end(command))
    rows = []
    for name, results in runs.items():
        rates = [run["events_per_cpu_second"] for run in results if "events_per_cpu_second" in run]
        row = {
            "what": name, "items": items, "events_per_cpu_second": round(statistics.median(rates)) if rates else None,
            "all_rates": [round(rate) for rate in rates], "peak_gb": round(max(run["peak_gb"] for run in results), 2),
            "batch_sequences": results[0]["batch_sequences"], "version": results[0].get("version"),
            "failed": results[0].get("failed"),
        }  # fmt: skip
        print(
            f"{items:>8,} items  {name:18} {row['events_per_cpu_second'] or 0:>8,} events/CPU s, batch "
            f"{row['batch_sequences']}, peak {row['peak_gb']} GB  {row['failed'] or ''}",
            flush=True,
        )
        rows.append(row)
    return rows


def run_to_end(command: list[str]) -> dict[str, Any]:
    """The JSON line that a run of its own ends with."""
    alone = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    process = subprocess.run(command, capture_output=True, text=True, env=alone)
    lines = process.stdout.strip().splitlines()
    if process.returncode or not lines:
        return {"failed": (process.stderr.strip().splitlines() or ["killed"])[-1][:200], "peak_gb": 0.0,
                "batch_sequences": BATCH}  # fmt: skip
    return json.loads(lines[-1])


def ratio(rows: list[dict[str, Any]]) -> float | None:
    """Ours over the faster peer, full softmax at 5,000 items."""
    rates = {row["what"]: row["events_per_cpu_second"] for row in rows if row["items"] == SMALL}
    peers = [rate for name, rate in rates.items() if not name.startswith("habitus") and rate]
    return round(rates["habitus, full"] / max(peers), 2) if peers and "habitus, full" in rates else None


Clock = list[tuple[int, float]]  # (steps done, CPU seconds)

# Ours, in a process of its own ------------------------------------------------------------------------------------


def ours_here(way: str, file: Path, steps: int) -> dict[str, Any]:
    """One way of ours in this process; the first step is left out of the time unless it is the only one."""
    import torch

    torch.set_num_threads(1)
    given = np.load(file)["sequences"]
    items = int(given.max()) + 1
    limit = int(LIMIT_GB * 1e9)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if way == "full":
        clock, batch = full_steps(given, items, steps), BATCH
    else:
        clock, batch = trained_steps(way, given, items, steps)
    (first, began), (last, ended_at) = clock[0], clock[-1]
    rate = (last - first) * batch * (LENGTH - 1) / (ended_at - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    return {"events_per_cpu_second": rate, "peak_gb": peak, "batch_sequences": batch, "version": None}


def full_steps(given: np.ndarray, items: int, steps: int) -> Clock:
    """Steps over the whole catalogue, everything trained."""
    import torch
    from torch.nn import functional as F

    from habitus.data import Batch, Field, Fields, ItemFeatures
    from habitus.model import BehaviorModel, batch_tensors, item_tensors
    from habitus.recipe import ModelRecipe, TrainRecipe
    from habitus.softmax import candidate_softmax
    from habitus.training.optimizers import build_optimizer, clip_gradients, learning_rate_at

    size = ModelRecipe(joint_dim=64, width=64, depth=2, head_dim=32, text_len=1, text_depth=1)
    recipe = TrainRecipe(batch_sequences=BATCH, steps=1_000, learning_rate=1e-3, optimizer="adamw")
    fields = Fields(item=(Field(name="id", kind="category", size=items + 1),), event=())
    model = BehaviorModel(fields, size)
    optimizer, parameters = build_optimizer(model, recipe), list(model.parameters())
    catalogue = item_tensors(ItemFeatures(None, {"id": np.arange(1, items + 1, dtype=np.int32)}), size)
    places = np.tile(np.arange(LENGTH - 1, dtype=np.int32), (BATCH, 1))
    edges = np.arange(BATCH + 1, dtype=np.int32) * (LENGTH - 1)
    clock = [(0, time.process_time())]
    for step in range(steps + (steps > 1)):
        rows = given[step * BATCH : (step + 1) * BATCH]
        windows = batch_tensors(
            Batch(rows[:, :-1], rows[:, 1:], places, np.zeros_like(places), edges, np.arange(BATCH)[:, None], {})
        )
        vectors = model.embed_items(catalogue)
        queries = model.queries(windows, F.embedding(windows.items, vectors)).flatten(0, 1)
        loss = candidate_softmax(queries, vectors, windows.targets.flatten()).loss.mean()
        loss.backward()
        clip_gradients(parameters, recipe.clip)
        optimizer.step(learning_rate_at(step, recipe))
        optimizer.zero_grad()
        assert torch.isfinite(loss)
        clock.append((step + 1, time.process_time()))
    return clock[1:] if steps > 1 else clock


def trained_steps(way: str, given: np.ndarray, items: int, steps: int) -> tuple[Clock, int]:
    """Steps of habitus.train, and the batch; the first one is warm-up."""
    from habitus.data import Dataset
    from habitus.recipe import DataRecipe, EvaluateRecipe, ModelRecipe, Recipe, TrainRecipe
    from habitus.training import TrainingProgress, TrainOptions, train

    size = ModelRecipe(joint_dim=64, width=64, depth=2, head_dim=32, text_len=1, text_depth=1)
    batch = STAGE2_BATCH_AT_LARGE if way == "stage 2" and items > SMALL else BATCH
    clock: Clock = []

    def note(progress: TrainingProgress) -> None:
        if progress.phase == "training" and progress.step:
            clock.append((progress.step, time.process_time()))

    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset.open(prepared(given, items, Path(folder)), verify=False)

        def recipe(**train_values: Any) -> Recipe:
            values = {"batch_sequences": batch, "learning_rate": 1e-3, "precision": "fp32", "optimizer": "adamw"}
            return Recipe(
                data=DataRecipe(seq_len=LENGTH),
                model=size,
                train=TrainRecipe(**(values | train_values)),
                evaluate=EvaluateRecipe(queries=100, batch_sequences=1),
            )

        options = TrainOptions(device="cpu", threads=1)
        if way == "stage 1":
            train(recipe(steps=steps + 1), dataset, Path(folder) / "run", options=options, progress=note)
        else:
            first = train(recipe(steps=1), dataset, Path(folder) / "first", options=options)
            second = recipe(steps=steps + 1, stage=2, parent=first.recipe_hash, num_negatives=items)
            train(second, dataset, Path(folder) / "run", parent=Path(folder) / "first", options=options, progress=note)
    return clock, batch


def prepared(given: np.ndarray, items: int, folder: Path) -> Path:
    """The sequences as a dataset: the id of an item is its only field."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from habitus.data import PrepareOptions, prepare
    from habitus.events.schema import Schema

    users, length = given.shape
    events = {
        "user": np.repeat(np.arange(users), length),
        "item": given.ravel(),
        "time": np.tile(np.arange(length), users),
    }
    pq.write_table(pa.table(events), folder / "events.parquet")
    ids = pa.array(np.arange(items))
    pq.write_table(pa.table({"item": ids, "id": ids.cast(pa.string())}), folder / "items.parquet")
    schema = Schema.parse(
        {
            "events": {"user": "user", "item": "item", "timestamp": "time", "time_unit": "order"},
            "items": {"item": "item", "fields": {"id": "category"}},
        },
        "peers",
    )
    options = PrepareOptions(seq_len=LENGTH, validation_share=0.02, test_share=0)
    prepare(str(folder / "events.parquet"), str(folder / "items.parquet"), schema, folder / "dataset", options)
    return folder / "dataset"


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
