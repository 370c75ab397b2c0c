"""What the metrics beside accuracy cost, as a ratio to ranking metrics alone.

    OMP_NUM_THREADS=1 python benchmarks/list_metrics.py [--keep benchmarks/results/list-metrics-cpu.json]

5,000 queries against 50,000 items at d = 64, six cut-offs up to 100; items have three category fields and a vector of
16. Models are left out: the same query vectors are given, and what is timed is everything after them. In CPU seconds,
medians of three, alternating.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))

from softmax import machine
from synthetic_queries import query_batches, query_vectors

from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.list_metrics import field_diversity, gini, list_metrics, mean_over_lists, vector_diversity
from habitus.evaluation.metrics import summarize
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.ranks import Ranks
from habitus.store import CUTOFFS, HISTORIES

QUERIES, ITEMS, WIDTH, REPEATS = 5_000, 50_000, 64, 3
COMPARED: dict[str, tuple[str, ...]] = {
    "ranking": ("ranking",),
    "ranking, classic, auc": ("ranking", "classic", "auc"),
    "ranking, lists": ("ranking", "lists"),
}


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    options = arguments.parse_args()
    torch.manual_seed(1)
    table = torch.randn(ITEMS, WIDTH)
    batches = list(query_batches(QUERIES, ITEMS, seed=1))
    rows = [table[torch.from_numpy(batch.targets)] for batch in batches]
    vectors = [query_vectors(target_rows, seed) for seed, target_rows in enumerate(rows)]
    items = item_statistics()
    seconds: dict[str, list[float]] = {what: [] for what in COMPARED}
    for _ in range(REPEATS):
        for what, groups in COMPARED.items():
            began = time.process_time()
            values = score(batches, vectors, table, rows, max(CUTOFFS) if "lists" in groups else 0)
            summarize("catalogue", values, CUTOFFS, HISTORIES, groups)  # type: ignore[arg-type]
            if "lists" in groups:
                list_metrics("catalogue", values, CUTOFFS, items, ITEMS)
            seconds[what].append(time.process_time() - began)
    medians = {what: statistics.median(times) for what, times in seconds.items()}
    for what, median in medians.items():
        print(f"{what:24} {median:6.2f} s  {median / medians['ranking']:5.2f} times ranking")
    result = {"benchmark": "list_metrics", **machine(), "seconds": medians, "parts": parts(values.top, items)}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def score(batches: list[Any], vectors: list[Any], table: torch.Tensor, rows: list[Any], k: int) -> PerQuery:
    """The values per query of one pass over the catalogue."""
    counts, kept = np.ones(ITEMS, np.int64), []
    for batch, queries, target_rows in zip(batches, vectors, rows, strict=True):
        candidates = Candidates([table], 0, ITEMS)
        scores = candidate_scores(queries, candidates, target_rows, k, ranks=Ranks(), losses=False)
        kept.append(PerQuery.of(batch, scores, counts, ITEMS))
    return PerQuery.concatenate(kept)


def item_statistics() -> Any:
    """What list metrics read of items, drawn."""
    draw = np.random.default_rng(0)
    vectors = draw.normal(size=(ITEMS, 16))
    return SimpleNamespace(
        novelty=draw.random(ITEMS),
        popularity=draw.random(ITEMS),
        codes=np.stack([draw.integers(0, size, ITEMS) for size in (10, 100, 1000)], axis=1),
        vectors=vectors / np.linalg.norm(vectors, axis=1, keepdims=True),
    )


def parts(top: np.ndarray, items: Any) -> dict[str, float]:
    """CPU seconds of each list metric on lists that are there."""
    calls = {
        "diversity": lambda: field_diversity(top, items.codes, CUTOFFS),
        "vector_diversity": lambda: vector_diversity(top, items.vectors, CUTOFFS),
        "novelty or popularity": lambda: mean_over_lists(top, items.novelty, CUTOFFS),
        "gini": lambda: [gini(np.bincount(top[:, :k].ravel()), ITEMS) for k in CUTOFFS],
    }
    found = {}
    for name, call in calls.items():
        began = time.process_time()
        call()
        found[name] = time.process_time() - began
        print(f"  {name:22} {found[name]:6.2f} s")
    return found


if __name__ == "__main__":
    main()
