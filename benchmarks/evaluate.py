"""The catalogue regime in full: every metric and slice, against bare matrix products and against peers.

    python benchmarks/evaluate.py --rectools VENV/bin/python --replay VENV/bin/python \\
        [--keep benchmarks/results/evaluate-cpu.json]
    python benchmarks/evaluate.py [--keep benchmarks/results/evaluate-h200.json]          (where there is a GPU)

On CPU: 5,000 queries against 10^6 items at d = 64, with the peak of resident memory, and 5,000 against 50,000 items
beside RecTools' and RePlay's ranking and metrics in their own environments, alternating, on the same vectors and the
same threads. Three comparisons at equal metrics: recall, NDCG and MRR at six cut-offs; the same with coverage; and
recall, NDCG and MRR in every slice, for which the peers are called once per slice on the recommendations that they
have. The comparison is in CPU seconds: it holds on a machine that others use too.
On a GPU: 100,000 queries against 13.6M items at d = 256 in bfloat16, after a check against float64. Models are left
out on both sides: the same query vectors are given, and what is timed is everything after them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))

from softmax import machine
from synthetic_queries import query_batches, query_vectors

from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.metrics import coverage_metrics, summarize
from habitus.evaluation.per_query import PerQuery
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import Scores
from habitus.record import Metric
from habitus.store import CUTOFFS, HISTORIES, METRIC_GROUPS

MEMORY_BYTES = 512 << 20
# Python, torch and numpy take some 350 MiB before any work; the mapped cache and the working memory come on top.
PROCESS_BYTES = 512 << 20
REPEATS = 3


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    arguments.add_argument("--rectools", type=Path, help="the Python of an environment with RecTools")
    arguments.add_argument("--replay", type=Path, help="the Python of an environment with RePlay")
    arguments.add_argument("--queries", type=int, default=100_000 if torch.cuda.is_available() else 5_000)
    arguments.add_argument("--items", type=int, default=13_600_000 if torch.cuda.is_available() else 1_000_000)
    arguments.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = arguments.parse_args()
    if options.child:
        print(json.dumps(in_a_child(options.child, options.queries, options.items)))
        return
    if torch.cuda.is_available():
        rows = on_gpu(options.queries, options.items, 256, "cuda")
    else:
        rows = on_cpu(options.queries, options.items, 64)
        peers = {"rectools": options.rectools, "replay": options.replay}
        rows += against_peers(options.queries, 50_000, 64, {name: path for name, path in peers.items() if path})
    result = {"benchmark": "evaluate", **machine(), "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def evaluated(
    batches: list[QueryBatch],
    vectors: list[torch.Tensor],
    table: Candidates,
    rows: list[torch.Tensor],
    groups: tuple[str, ...] = METRIC_GROUPS,
    histories: tuple[int, ...] = HISTORIES,
) -> dict[str, Metric]:
    """The metrics asked for in all slices of the catalogue regime, from query vectors and candidates."""
    counts = item_counts(table.total)
    k = max(CUTOFFS) if "coverage" in groups else 0
    losses = "loss" in groups
    parts = []
    for batch, queries, target_rows in zip(batches, vectors, rows, strict=True):
        scores = candidate_scores(
            queries, table, target_rows, k, ranks=Ranks(), memory_bytes=MEMORY_BYTES, losses=losses
        )
        parts.append(PerQuery.of(batch, scores, counts, table.total))
    values = PerQuery.concatenate(parts)
    metrics = summarize("catalogue", values, CUTOFFS if "ranking" in groups else (), histories)
    if "coverage" in groups:
        metrics |= coverage_metrics("catalogue", values, CUTOFFS, table.total)
    return metrics


def item_counts(num_items: int) -> np.ndarray:
    """How often each item was in training: every seventh is cold."""
    counts = np.ones(num_items, np.int64)
    counts[::7] = 0
    return counts


def on_cpu(num_queries: int, num_items: int, d: int) -> list[dict[str, Any]]:
    """The large catalogue, in a process of its own so that its peak of memory is its own."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache.safetensors"
        torch.manual_seed(0)
        save_file({"vectors": torch.randn(num_items, d).bfloat16()}, cache)
        command = [sys.executable, __file__, "--child", str(cache), "--queries", str(num_queries)]
        found = subprocess.run([*command, "--items", str(num_items)], check=True, stdout=subprocess.PIPE)
    row = json.loads(found.stdout.splitlines()[-1])
    bound = num_items * d * 2 + MEMORY_BYTES + PROCESS_BYTES
    row |= {"what": "evaluation", "queries": num_queries, "items": num_items, "d": d, "bound_mib": bound / 2**20}
    print(
        f"evaluation         {num_queries:,} x {num_items:,} d={d}: {row['seconds']:.1f} s, peak RSS "
        f"{row['peak_rss_mib']:,.0f} MiB, bound {row['bound_mib']:,.0f} MiB (mapped cache + working memory + process)"
    )
    assert row["peak_rss_mib"] < row["bound_mib"]
    return [row]


def in_a_child(cache: Path, num_queries: int, num_items: int) -> dict[str, float]:
    """Seconds and peak memory of one evaluation over a mapped cache."""
    before = peak_rss_mib()
    with safe_open(cache, "pt") as file:
        table = file.get_tensor("vectors")
    batches = list(query_batches(num_queries, num_items))
    rows = [table[torch.from_numpy(batch.targets)].float() for batch in batches]
    vectors = [query_vectors(target_rows, seed) for seed, target_rows in enumerate(rows)]
    start = time.perf_counter()
    metrics = evaluated(batches, vectors, Candidates([table], 0, num_items), rows)
    return {
        "seconds": time.perf_counter() - start,
        "rss_before_mib": before,
        "peak_rss_mib": peak_rss_mib(),
        "num_metrics": len(metrics),
        "recall@10": metrics["catalogue/recall@10"].value,
    }


def peak_rss_mib() -> float:
    """The peak of this process's resident memory; getrusage would count the parent's too."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


# What is compared, and what of ours computes it.
COMPARED: dict[str, tuple[str, ...]] = {
    "ranking": ("ranking",),
    "with coverage": ("ranking", "coverage"),
    "slices": ("ranking",),
    "everything of ours": METRIC_GROUPS,
}


def against_peers(num_queries: int, num_items: int, d: int, pythons: dict[str, Path]) -> list[dict[str, Any]]:
    """Ours and the peers' full-catalogue evaluation on the same vectors, alternating, medians."""
    torch.manual_seed(1)
    table = torch.randn(num_items, d)
    batches = list(query_batches(num_queries, num_items, seed=1))
    rows = [table[torch.from_numpy(batch.targets)] for batch in batches]
    vectors = [query_vectors(target_rows, seed) for seed, target_rows in enumerate(rows)]
    ours: dict[str, list[float]] = {what: [] for what in COMPARED}
    metrics: dict[str, dict[str, Metric]] = {}
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in pythons}
    products = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vectors.npz"
        np.savez(
            file,
            queries=torch.cat(vectors).numpy(),
            items=table.numpy(),
            targets=np.concatenate([batch.targets for batch in batches]),
            **slices_of(batches, num_items),
        )
        for _ in range(REPEATS):
            for what, groups in COMPARED.items():
                histories = HISTORIES if what in ("slices", "everything of ours") else ()
                start = time.process_time()
                metrics[what] = evaluated(batches, vectors, Candidates([table], 0, num_items), rows, groups, histories)
                ours[what].append(time.process_time() - start)
            start = time.process_time()
            _bare_products(vectors, table, 4096)
            products.append(time.process_time() - start)
            for name, python in pythons.items():
                script = Path(__file__).with_name(f"evaluate_{name}.py")
                command = [str(python), str(script), str(file), str(torch.get_num_threads())]
                found = subprocess.run(command, check=True, stdout=subprocess.PIPE)
                theirs[name].append(json.loads(found.stdout.splitlines()[-1]))
    base = {"queries": num_queries, "items": num_items, "d": d, "products_cpu_seconds": statistics.median(products)}
    print(f"bare products      {num_queries:,} x {num_items:,} d={d}: {base['products_cpu_seconds']:.2f} CPU s")
    found_rows = []
    for what in COMPARED:
        seconds = statistics.median(ours[what])
        print(f"ours, {what:18} {seconds:.2f} CPU s, {len(metrics[what])} metrics")
        for name, runs in theirs.items():
            for variant in runs[0]["seconds"]:
                if what in runs[0]["seconds"][variant]:
                    row = peer_row(name, variant, what, runs, metrics[what], seconds)
                    found_rows.append(base | {"cpu_seconds": seconds, "compared": what} | row)
    found_rows.append(
        base | {"what": "everything of ours", "cpu_seconds": statistics.median(ours["everything of ours"])}
    )
    return found_rows


def slices_of(batches: list[QueryBatch], num_items: int) -> dict[str, np.ndarray]:
    """Which queries each slice holds, by its name."""
    empty = Scores(None, None, np.empty(0, np.int64), np.empty((0, 0), np.int64))
    values = PerQuery.concatenate([PerQuery.of(batch, empty, item_counts(num_items), num_items) for batch in batches])
    chosen = {f"history={length}": values.history == length for length in HISTORIES}
    chosen |= {"cold": values.cold, "warm": ~values.cold, "repeat": values.repeat, "first": ~values.repeat}
    return {f"slice {name}": which for name, which in chosen.items() if which.any()}


def peer_row(
    name: str, variant: str, what: str, runs: list[dict[str, Any]], metrics: dict[str, Metric], seconds: float
) -> dict[str, Any]:
    """One way of one peer: its time, and how far its metrics are from ours."""
    taken = statistics.median(run["seconds"][variant][what] for run in runs)
    values = runs[0]["metrics"][what]
    apart = max(abs(metrics[f"catalogue/{key}"].value - value) for key, value in values.items())
    print(
        f"  {name + ' ' + variant:18} {taken:.2f} CPU s, {taken / seconds:.2f}x ours; {len(values)} metrics "
        f"differ by at most {apart:.1e}"
    )
    return {
        "what": f"{name} {runs[0]['version']} {variant}",
        "peer_cpu_seconds": taken,
        "times_ours": taken / seconds,
        "metrics_compared": len(values),
        "largest_difference": apart,
    }


def on_gpu(num_queries: int, num_items: int, d: int, device: str) -> list[dict[str, Any]]:
    """A check against float64, then the pipeline against the bare products of the same sizes."""
    torch.manual_seed(0)
    table = torch.randn(num_items, d, device=device, dtype=torch.bfloat16)
    batches = list(query_batches(num_queries, num_items))
    rows = [table[torch.from_numpy(batch.targets).to(device)] for batch in batches]
    vectors = [query_vectors(target_rows.float() * 0.5, seed).bfloat16() for seed, target_rows in enumerate(rows)]
    candidates = Candidates([table], 0, num_items)
    worst = checked(vectors[0][:64], candidates, rows[0][:64])
    evaluated(batches[:1], vectors[:1], candidates, rows[:1])  # compiles the kernels
    products = min(_seconds(lambda: _bare_products(vectors, table)) for _ in range(2))
    taken = min(_seconds(lambda: evaluated(batches, vectors, candidates, rows)) for _ in range(2))
    start = time.perf_counter()
    for queries, target_rows in zip(vectors, rows, strict=True):
        candidate_scores(queries, candidates, target_rows, max(CUTOFFS), ranks=Ranks(), memory_bytes=MEMORY_BYTES)
    _finish()
    scans = time.perf_counter() - start
    row = {"what": "evaluation", "queries": num_queries, "items": num_items, "d": d, "seconds": taken}
    row |= {"scan_seconds": scans, "products_seconds": products, "of_products": taken / products, **worst}
    row["products_tflops"] = 2 * num_queries * num_items * d / products / 1e12
    print(
        f"evaluation  {num_queries:,} x {num_items:,} d={d}: {taken:.2f} s (scans {scans:.2f} s), bare products "
        f"{products:.2f} s at {row['products_tflops']:.0f} TFLOP/s: {row['of_products']:.2f}x; worst errors {worst}"
    )
    return [row]


def checked(queries: torch.Tensor, candidates: Candidates, target_rows: torch.Tensor) -> dict[str, float]:
    """The largest errors of a few queries against float64 scores of the whole catalogue."""
    found = candidate_scores(queries, candidates, target_rows, 10, ranks=Ranks(), memory_bytes=MEMORY_BYTES)
    parts = [queries.double() @ part.double().T for part in candidates.pieces[0].split(1 << 20)]
    scores = torch.cat(parts, 1)
    wanted = (queries.double() * target_rows.double()).sum(1, keepdim=True)
    # Scores within rounding of the target's may count on either side.
    high, low = (scores >= wanted - 1e-5).sum(1), (scores > wanted + 1e-5).sum(1)
    rank = torch.from_numpy(found.rank).to(queries.device)
    assert bool(((rank <= high) & (rank >= low)).all()), "a rank is wrong"
    lse = scores.logsumexp(1)
    log_p = scores - lse[:, None]
    loss = (lse - wanted[:, 0]).cpu().numpy()
    entropy = -(log_p.exp() * log_p).sum(1).cpu().numpy()
    top = torch.from_numpy(found.top[:, 0]).to(queries.device)
    best = (scores.amax(1) - scores.gather(1, top[:, None])[:, 0]).max().item()
    return {
        "loss_error": float(np.abs(found.loss - loss).max()),
        "entropy_error": float(np.abs(found.entropy - entropy).max()),
        "best_score_missed_by": best,
    }


def _bare_products(vectors: list[torch.Tensor], table: torch.Tensor, columns: int = 65_536) -> None:
    for queries in vectors:
        scores = queries.new_empty(len(queries), columns)
        for part in table.split(columns):
            torch.mm(queries, part.T, out=scores if len(part) == columns else None)


def _seconds(call: Any) -> float:
    _finish()
    start = time.perf_counter()
    call()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    """Wait for a GPU; there is none where this file is tried out."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
