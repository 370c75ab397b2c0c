"""RePlay's metrics on given vectors, run by evaluate.py in an environment of RePlay's own.

    VENV/bin/python benchmarks/evaluate_replay.py VECTORS.npz THREADS

Its sequential models score a batch against all items and keep the top by torch.topk; that part is written out here,
and `OfflineMetrics` does the rest, once on pandas and once on polars: without coverage, with it, and once more per
slice. Ends with one JSON line.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import torch
from replay.metrics import MRR, NDCG, Coverage, OfflineMetrics, Recall

CUTOFFS = [1, 5, 10, 20, 50, 100]
BATCH = 128


def main() -> None:
    """Print CPU seconds by kind of frame, and the metrics."""
    torch.set_num_threads(int(sys.argv[2]))
    given = np.load(sys.argv[1])
    slices = {name.removeprefix("slice "): given[name] for name in given.files if name.startswith("slice ")}
    queries, items = torch.from_numpy(given["queries"]), torch.from_numpy(given["items"])
    users = np.arange(len(queries))
    wanted = pd.DataFrame({"query_id": users, "item_id": given["targets"]})
    # Coverage is a share of the items in training: one event of each.
    seen = pd.DataFrame({"query_id": np.arange(len(items)) % len(users), "item_id": np.arange(len(items))})
    kinds: dict[str, Callable[[pd.DataFrame], Any]] = {"pandas": lambda frame: frame, "polars": pl.from_pandas}
    columns = {"query_column": "query_id", "item_column": "item_id", "rating_column": "rating"}
    ranking = OfflineMetrics([Recall(CUTOFFS), NDCG(CUTOFFS), MRR(CUTOFFS)], **columns)
    covered = OfflineMetrics([Recall(CUTOFFS), NDCG(CUTOFFS), MRR(CUTOFFS), Coverage(CUTOFFS)], **columns)
    seconds: dict[str, dict[str, float]] = {}
    found: dict[str, dict[str, float]] = {}
    for name, kind in kinds.items():
        start = time.process_time()
        best = [torch.topk(part @ items.T, max(CUTOFFS)) for part in queries.split(BATCH)]
        frame = pd.DataFrame(
            {
                "query_id": np.repeat(users, max(CUTOFFS)),
                "item_id": torch.cat([part.indices for part in best]).numpy().ravel(),
                "rating": torch.cat([part.values for part in best]).numpy().ravel(),
            }
        )
        listed = time.process_time() - start
        start = time.process_time()
        found["ranking"] = named(ranking(kind(frame), kind(wanted)))
        plain = time.process_time() - start
        start = time.process_time()
        found["with coverage"] = named(covered(kind(frame), kind(wanted), kind(seen)))
        with_coverage = time.process_time() - start
        start = time.process_time()
        found["slices"] = dict(found["ranking"])
        for part, chosen in slices.items():
            inside = frame[chosen[frame["query_id"].to_numpy()]]
            values = named(ranking(kind(inside), kind(wanted[chosen])))
            found["slices"] |= {f"{metric}/{part}": value for metric, value in values.items()}
        by_slice = time.process_time() - start
        seconds[name] = {
            "ranking": listed + plain,
            "with coverage": listed + with_coverage,
            "slices": listed + plain + by_slice,
        }
    print(json.dumps({"seconds": seconds, "metrics": found, "version": version("replay-rec")}))


def named(values: dict[str, float]) -> dict[str, float]:
    """The metrics under our names."""
    found = {}
    for name, value in values.items():
        metric, _, k = name.partition("@")
        found[f"{'coverage_union' if metric == 'Coverage' else metric.lower()}@{k}"] = float(value)
    return found


if __name__ == "__main__":
    main()
