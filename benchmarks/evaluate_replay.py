"""RePlay's metrics on given vectors, run by evaluate.py in an environment of RePlay's own.

    VENV/bin/python benchmarks/evaluate_replay.py VECTORS.npz THREADS

Its sequential models score a batch against all items and keep the top by torch.topk; that part is written out here,
and `OfflineMetrics` does the rest, once on pandas and once on polars. Ends with one JSON line.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version

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
    queries, items = torch.from_numpy(given["queries"]), torch.from_numpy(given["items"])
    users = np.arange(len(queries))
    wanted = pd.DataFrame({"query_id": users, "item_id": given["targets"]})
    # Coverage is a share of the items in training: one event of each.
    seen = pd.DataFrame({"query_id": np.arange(len(items)) % len(users), "item_id": np.arange(len(items))})
    kinds: dict[str, Callable[[pd.DataFrame], object]] = {"pandas": lambda frame: frame, "polars": pl.from_pandas}
    metrics = OfflineMetrics(
        [Recall(CUTOFFS), NDCG(CUTOFFS), MRR(CUTOFFS), Coverage(CUTOFFS)],
        query_column="query_id",
        item_column="item_id",
        rating_column="rating",
    )
    seconds, found = {}, {}
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
        found = metrics(kind(frame), kind(wanted), kind(seen))
        seconds[name] = time.process_time() - start
    values = {}
    for name, value in found.items():
        metric, _, k = name.partition("@")
        values[f"{'coverage_union' if metric == 'Coverage' else metric.lower()}@{k}"] = float(value)
    print(json.dumps({"seconds": seconds, "metrics": values, "version": version("replay-rec")}))


if __name__ == "__main__":
    main()
