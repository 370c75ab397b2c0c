"""RecTools' ranking and metrics on given vectors, run by evaluate.py in an environment of RecTools' own.

    VENV/bin/python benchmarks/evaluate_rectools.py VECTORS.npz THREADS

Both of its rankers are tried, each with the table of recommendations and the metrics at six cut-offs behind it. NDCG
is asked for with `divide_by_achievable`, since one item is relevant. Ends with one JSON line.
"""

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import pandas as pd
import torch
from rectools import Columns
from rectools.metrics import MRR, NDCG, CatalogCoverage, Recall, calc_metrics
from rectools.models.rank import Distance, ImplicitRanker, TorchRanker

CUTOFFS = (1, 5, 10, 20, 50, 100)


def main() -> None:
    """Print CPU seconds by ranker and the metrics."""
    torch.set_num_threads(int(sys.argv[2]))
    given = np.load(sys.argv[1])
    queries, items, targets = given["queries"], given["items"], given["targets"]
    users = np.arange(len(queries))
    wanted = pd.DataFrame({Columns.User: users, Columns.Item: targets})
    metrics = {}
    for k in CUTOFFS:
        metrics[f"recall@{k}"] = Recall(k=k)
        metrics[f"ndcg@{k}"] = NDCG(k=k, divide_by_achievable=True)
        metrics[f"mrr@{k}"] = MRR(k=k)
        metrics[f"coverage_union@{k}"] = CatalogCoverage(k=k, normalize=True)
    catalogue = np.arange(len(items))
    rankers = {
        "torch": lambda: TorchRanker(Distance.DOT, "cpu", queries, items).rank(users, k=max(CUTOFFS)),
        "implicit": lambda: ImplicitRanker(Distance.DOT, queries, items, int(sys.argv[2])).rank(users, k=max(CUTOFFS)),
    }
    seconds, found = {}, {}
    for name, rank in rankers.items():
        start = time.process_time()
        user, item, score = rank()
        reco = pd.DataFrame({Columns.User: user, Columns.Item: item, Columns.Score: score})
        reco[Columns.Rank] = reco.groupby(Columns.User, sort=False).cumcount() + 1
        found = calc_metrics(metrics, reco=reco, interactions=wanted, catalog=catalogue)
        seconds[name] = time.process_time() - start
    values = {name: float(value) for name, value in found.items()}
    print(json.dumps({"seconds": seconds, "metrics": values, "version": version("rectools")}))


if __name__ == "__main__":
    main()
