"""Approximate search against exact search over a million items: recall, speed, and what probabilities lose.

    python benchmarks/index.py --work FOLDER [--items 1000000] [--keep benchmarks/results/index.json]

The vectors are those of a small model trained on a synthetic world of that many items (benchmarks/served_run.py), and
the queries are the model's for histories of its validation users; neither the index's effort nor anything else is
chosen on the queries that are reported. Searches are those of `habitus serve`, with everything: proposals, exact
scores, log-sum-exp. The comparison is in CPU seconds over all threads, which holds on a machine that others use too;
wall seconds, the best of some repeats, stand beside it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from served_run import STEPS, served_run
from softmax import machine

from habitus.serving import Retriever
from habitus.serving.candidates import CandidateItems
from habitus.serving.index import EFFORTS, ApproximateManifest, ExactIndex, SearchIndex

BATCHES = (1, 32, 256)
REPEATS = 3


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--work", type=Path, required=True, help="folder for the world, the run and the indexes")
    arguments.add_argument("--items", type=int, default=1_000_000)
    arguments.add_argument("--kinds", default="ivf,ivfpq,hnsw")
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    options = arguments.parse_args()
    run, _ = served_run(options.items, options.work)
    result: dict[str, Any] = {
        "items": options.items,
        "joint_dim": 64,
        "vectors": f"of a world's items under a model trained for {STEPS} steps; queries of its validation users",
        "threads": torch.get_num_threads(),
        "indexes": {},
    }
    exact: dict[str, dict[str, float]] = {}
    for kind in ("exact", *options.kinds.split(",")):
        retriever = Retriever.open(run, device="cpu", index=kind)  # type: ignore[arg-type]
        speeds = measure(retriever.index, retriever.candidates)
        exact = exact or speeds
        info = retriever.index_info
        row: dict[str, Any] = {**info.to_values(), "speed": speeds}
        if kind != "exact":
            manifest = ApproximateManifest.read(run / "serve" / f"index-{kind}" / "manifest.json")
            names = ("effort", "queries", "build_s", "build_cpu_s", "faiss")
            row |= {name: getattr(manifest, name) for name in names}
            row["efforts"] = list(EFFORTS[kind])
            row["bytes"] = (run / "serve" / f"index-{kind}" / "index.faiss").stat().st_size
        result["indexes"][kind] = row
        print(f"{kind}: recall@10 {info.recall_at_10:.4f}, log-sum error {info.log_sum_error:.3f} nats (median)")
        for batch, one in speeds.items():
            one["times_exact"] = exact[batch]["cpu_ms_per_query"] / one["cpu_ms_per_query"]
            one["times_exact_wall"] = exact[batch]["wall_ms_per_query"] / one["wall_ms_per_query"]
            print(
                f"  {batch:>4} queries at once: {one['cpu_ms_per_query']:8.3f} ms CPU per query, "
                f"{one['times_exact']:6.1f} times exact; {one['wall_ms_per_query']:8.3f} ms wall"
            )
    result |= machine() | {"load": round(os.getloadavg()[0], 1)}  # above the cores, wall seconds mean little
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=2) + "\n")


def measure(index: SearchIndex, candidates: CandidateItems) -> dict[str, dict[str, float]]:
    """CPU and wall milliseconds per query by batch size."""
    queries = candidates.catalogue.sample_queries
    held_out = queries[len(queries) // 2 :]
    index.search(held_out[:4], 10, candidates)
    speeds = {}
    for batch in BATCHES:
        count = min(len(held_out), 16 if batch == 1 and isinstance(index, ExactIndex) else 256)
        wall, cpu = [], []
        for _ in range(REPEATS):
            began, used = time.perf_counter(), time.process_time()
            for at in range(0, count, batch):
                index.search(held_out[at : at + batch], 10, candidates)
            wall.append(time.perf_counter() - began)
            cpu.append(time.process_time() - used)
        speeds[str(batch)] = {
            "cpu_ms_per_query": min(cpu) / count * 1e3,
            "wall_ms_per_query": min(wall) / count * 1e3,
        }
    return speeds


if __name__ == "__main__":
    main()
