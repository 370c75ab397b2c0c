"""Loss, entropy, rank and top-100 together against the bare matrix products, and on CPU against faiss.

    python benchmarks/ranking.py [--keep benchmarks/results/ranking-h200.json]

On CUDA: 16,384 queries against 13.6M items at d = 256, bfloat16. On CPU: 1,000 queries against 10^6 items at d = 64
and 128, float32, median of 5, same threads for all; faiss computes its top-100 alone.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

from softmax import machine

from habitus.softmax import catalogue_scores

K = 100
COLUMNS = 65_536  # candidates per bare product


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    arguments.add_argument("--items", type=int, help="instead of the issue's number of items")
    arguments.add_argument("--repeats", type=int, default=5)
    options = arguments.parse_args()
    rows: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        compare(rows, 16_384, options.items or 13_600_000, 256, "cuda", torch.bfloat16, options.repeats)
    else:
        for d in (64, 128):
            compare(rows, 1000, options.items or 1_000_000, d, "cpu", torch.float32, options.repeats)
    result = {"benchmark": "ranking", **machine(), "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def compare(rows: list[dict[str, Any]], M: int, V: int, d: int, device: str, dtype: torch.dtype, repeats: int) -> None:
    """One size: the bare products, all four read-outs, and faiss where it runs on the same processor."""
    torch.manual_seed(0)
    h = (torch.randn(M, d, device=device) * 2 * d**-0.5).to(dtype)
    e = torch.randn(V, d, device=device, dtype=dtype)
    y = torch.randint(V, (M,), device=device)
    columns = COLUMNS if device == "cuda" else 4096
    scores = torch.empty(M, columns, device=device, dtype=dtype)

    def products() -> None:
        for part in e.split(columns):
            torch.mm(h, part.T, out=scores[:, : len(part)] if len(part) == columns else None)

    calls: dict[str, Callable[[], object]] = {
        "bare products": products,
        "all four read-outs": lambda: catalogue_scores(h, e, y, k=K),
    }
    if device == "cpu":
        calls |= faiss_call(h, e)
    base: dict[str, float] = {}
    for name, call in calls.items():
        base[name], extra = timed(call, repeats)
        row = {"what": name, "M": M, "V": V, "d": d, "k": K, "seconds": base[name], "extra_mib": extra / 2**20}
        row["of_products"] = base[name] / base["bare products"]
        rows.append(row)
        line = f"{name:22s} M={M} V={V} d={d} {base[name] * 1e3:10.1f} ms {row['of_products']:6.2f} x products"
        print(f"{line} {row['extra_mib']:8.0f} MiB", flush=True)


def faiss_call(h: torch.Tensor, e: torch.Tensor) -> dict[str, Callable[[], object]]:
    """faiss' exact inner-product search for the top items alone, if faiss is here."""
    try:
        import faiss
    except ImportError as error:
        print(f"faiss is not here: {error}")
        return {}
    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(e.shape[1])
    index.add(e.numpy())
    queries = h.numpy()
    return {"faiss top-100": lambda: index.search(queries, K)}


def timed(call: Callable[[], object], repeats: int) -> tuple[float, int]:
    """Median seconds of a call and, on CUDA, the peak of memory beyond what was there."""
    cuda = torch.cuda.is_available()
    call()
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), torch.cuda.max_memory_allocated() - before if cuda else 0


if __name__ == "__main__":
    main()
