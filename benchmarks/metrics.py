"""Recall, NDCG and MRR of random rankings, ours against ranx, query by query.

    python benchmarks/metrics.py --ranx VENV/bin/python [--keep benchmarks/results/evaluate-metrics.json]

Ours are computed from ranks that a scorer counted over raw scores; ranx, in an environment of its own, sorts the same
scores itself. Scores are distinct: ties are where libraries differ by choice, and ours count against the model. Ends
with one JSON line, and fails where any query differs by more than 1e-9.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CUTOFFS = (1, 5, 10, 20, 50, 100)
TOLERANCE = 1e-9


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--ranx", type=Path, help="the Python of an environment with ranx")
    arguments.add_argument("--queries", type=int, default=2000)
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        with_ranx(options.child)
        return
    rows = [compared(options.ranx, options.queries, candidates) for candidates in (7, 60, 700)]
    print(f"{'candidates':>10} {'queries':>8} {'values':>8} {'largest difference':>20}")
    for row in rows:
        print(f"{row['candidates']:>10} {row['queries']:>8} {row['values']:>8} {row['largest_difference']:>20.1e}")
    sys.path.insert(0, str(Path(__file__).parent))
    from softmax import machine

    result = {"benchmark": "metrics against ranx", **machine(), "ranx": rows[0]["version"], "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    assert all(row["largest_difference"] <= TOLERANCE for row in rows)


def compared(python: Path, num_queries: int, num_candidates: int) -> dict[str, float]:
    """The largest difference over all metrics, cut-offs and queries."""
    from habitus.evaluation.metrics import mrr, ndcg, recall
    from habitus.evaluation.scores import dense_scores

    draw = np.random.default_rng(num_candidates)
    scores = draw.permuted(np.tile(np.arange(1.0, num_candidates + 1), (num_queries, 1)), axis=1)
    targets = draw.integers(0, num_candidates, num_queries)
    ranks = dense_scores(scores, targets, 1, None).rank
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder) / "given.npz", Path(folder) / "given.json"
        np.savez(given, scores=scores, targets=targets)
        subprocess.run([python, __file__, "--child", given], check=True)
        theirs = json.loads(found.read_text(encoding="utf-8"))
    differences = [
        np.abs(metric(ranks, k) - np.array(theirs["values"][f"{name}@{k}"])).max()
        for name, metric in (("recall", recall), ("ndcg", ndcg), ("mrr", mrr))
        for k in CUTOFFS
    ]
    return {
        "candidates": num_candidates,
        "queries": num_queries,
        "values": 3 * len(CUTOFFS) * num_queries,
        "largest_difference": float(max(differences)),
        "version": theirs["version"],
    }


def with_ranx(given: Path) -> None:
    """Write ranx' values per query beside the file that holds scores and targets."""
    from importlib.metadata import version

    from ranx import Qrels, Run, evaluate

    loaded = np.load(given)
    scores, targets = loaded["scores"], loaded["targets"]
    names = [f"q{number:06d}" for number in range(len(targets))]
    wanted = {name: {f"i{target}": 1} for name, target in zip(names, targets, strict=True)}
    ranked = {
        name: {f"i{item}": float(score) for item, score in enumerate(row)}
        for name, row in zip(names, scores, strict=True)
    }
    run = Run(ranked)
    metrics = [f"{name}@{k}" for name in ("recall", "ndcg", "mrr") for k in CUTOFFS]
    evaluate(Qrels(wanted), run, metrics)
    values = {metric: [float(run.scores[metric][name]) for name in names] for metric in metrics}
    given.with_suffix(".json").write_text(json.dumps({"values": values, "version": version("ranx")}), encoding="utf-8")


if __name__ == "__main__":
    main()
