"""RecTools' ranking and metrics on given vectors, run by evaluate.py in an environment of RecTools' own.

    VENV/bin/python benchmarks/evaluate_rectools.py VECTORS.npz THREADS

Both of its rankers are tried, each with the table of recommendations and the metrics at six cut-offs behind it: without
coverage, with it, and once more per slice. NDCG is asked for with `divide_by_achievable`, since one item is relevant.
Ends with one JSON line.
"""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

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
    slices = {name.removeprefix("slice "): given[name] for name in given.files if name.startswith("slice ")}
    users = np.arange(len(queries))
    wanted = pd.DataFrame({Columns.User: users, Columns.Item: targets})
    ranking: dict[str, Any] = {}
    for k in CUTOFFS:
        ranking[f"recall@{k}"] = Recall(k=k)
        ranking[f"ndcg@{k}"] = NDCG(k=k, divide_by_achievable=True)
        ranking[f"mrr@{k}"] = MRR(k=k)
    covered = ranking | {f"coverage_union@{k}": CatalogCoverage(k=k, normalize=True) for k in CUTOFFS}
    catalogue = np.arange(len(items))
    rankers = {
        "torch": lambda: TorchRanker(Distance.DOT, "cpu", queries, items).rank(users, k=max(CUTOFFS)),
        "implicit": lambda: ImplicitRanker(Distance.DOT, queries, items, int(sys.argv[2])).rank(users, k=max(CUTOFFS)),
    }
    seconds: dict[str, dict[str, float]] = {}
    found: dict[str, dict[str, float]] = {}
    for name, rank in rankers.items():
        start = time.process_time()
        user, item, score = rank()
        reco = pd.DataFrame({Columns.User: user, Columns.Item: item, Columns.Score: score})
        reco[Columns.Rank] = reco.groupby(Columns.User, sort=False).cumcount() + 1
        listed = time.process_time() - start
        start = time.process_time()
        found["ranking"] = calc_metrics(ranking, reco=reco, interactions=wanted, catalog=catalogue)
        plain = time.process_time() - start
        start = time.process_time()
        found["with coverage"] = calc_metrics(covered, reco=reco, interactions=wanted, catalog=catalogue)
        with_coverage = time.process_time() - start
        start = time.process_time()
        found["slices"] = dict(found["ranking"])
        for part, chosen in slices.items():
            inside = calc_metrics(
                ranking,
                reco=reco[chosen[reco[Columns.User].to_numpy()]],
                interactions=wanted[chosen],
                catalog=catalogue,
            )
            found["slices"] |= {f"{metric}/{part}": value for metric, value in inside.items()}
        by_slice = time.process_time() - start
        seconds[name] = {
            "ranking": listed + plain,
            "with coverage": listed + with_coverage,
            "slices": listed + plain + by_slice,
        }
    values = {what: {name: float(value) for name, value in some.items()} for what, some in found.items()}
    print(json.dumps({"seconds": seconds, "metrics": values, "version": version("rectools")}))


if __name__ == "__main__":
    main()
