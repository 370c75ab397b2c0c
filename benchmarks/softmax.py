"""The softmax over candidates against its peers: time, rate and extra memory, in one run on one machine.

    python benchmarks/softmax.py [--keep benchmarks/results/softmax-h200.json]
    python benchmarks/softmax.py --part small        # 4k to 131k trainable candidates, launched and captured; 30 s

Frozen candidates: loss, entropy and the queries' gradient. Trainable candidates: loss and both gradients. Every figure
is the median of repeated calls in this run; extra memory is the peak beyond the inputs. Peers are imported if they are
there (liger-kernel, cut-cross-entropy). On a CPU a small comparison with plain PyTorch is made instead.
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint

from habitus.softmax import cached_scores, candidate_softmax, choose_backend

LONG_S = 1.0  # a call that takes longer than this is timed once


def main() -> None:
    """Print the table, then one JSON line."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", type=Path, help="write the JSON here too")
    arguments.add_argument("--part", choices=["all", "frozen", "trainable", "wide", "small"], default="all")
    options = arguments.parse_args()
    rows = on_cuda(options.part) if torch.cuda.is_available() else on_cpu()
    result = {"benchmark": "softmax", **machine(), "rows": rows}
    print(json.dumps(result))
    if options.keep:
        options.keep.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def on_cuda(part: str) -> list[dict[str, Any]]:
    """All comparisons of the issue's list."""
    rows: list[dict[str, Any]] = []
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    seconds, _ = timed(lambda: a @ b)
    product_rate = 2 * 8192**3 / seconds
    report(rows, {"what": "matrix product 8192^3", "seconds": seconds, "tflops": product_rate / 1e12})
    # Under load the chip lowers its clock: 256 products in a row are what a third of a second of softmax is up against.
    out = torch.empty_like(a)
    seconds = timed(lambda: [torch.mm(a, b, out=out) for _ in range(256)])[0] / 256
    report(rows, {"what": "256 of them in a row", "seconds": seconds, "tflops": 2 * 8192**3 / seconds / 1e12})
    if part in ("all", "frozen"):
        for d in (64, 128, 256):
            for V in (131_072, 524_288, 2_097_152, 13_600_000):
                peers = peer_losses() if d == 256 or V <= 131_072 else {}
                compare(rows, "frozen", 16_384, V, d, peers, product_rate)
    if part in ("all", "trainable"):
        for size in (16_384, 65_536, 131_072, 524_288):
            compare(rows, "trainable", size, size, 248, peer_losses(), product_rate)
    if part in ("all", "small"):
        for d in (64, 248):
            for size in (4096, 8192, 16_384, 32_768, 65_536, 131_072):
                compare_small(rows, size, d)
    if part in ("all", "wide"):
        for d in (512, 1024):
            liger = {name: loss for name, loss in peer_losses().items() if name == "liger"}
            compare(rows, "frozen", 16_384, 131_072, d, liger, product_rate)
            compare(rows, "trainable", 65_536, 65_536, d, liger, product_rate)
            compare(rows, "trainable", 16_384, 131_072, d, liger, product_rate)
    return rows


def on_cpu() -> list[dict[str, Any]]:
    """Loss and both gradients at M = 4,096, V = 50,000, d = 64, in float32."""
    rows: list[dict[str, Any]] = []
    losses = {"habitus": ours, "plain": plain_loss, "row-chunked": chunked_loss}
    for mode in ("frozen", "trainable"):
        for name, loss in losses.items():
            h, e, y = draw(4096, 50_000, 64, mode, "cpu", torch.float32)
            seconds, _ = timed(lambda: step(loss, h, e, y), repeats=5)  # noqa: B023
            report(rows, {"what": name, "mode": mode, "M": 4096, "V": 50_000, "d": 64, "seconds": seconds})
    return rows


def compare(
    rows: list[dict[str, Any]], mode: str, M: int, V: int, d: int, peers: dict[str, Callable], product_rate: float
) -> None:
    """One size: ours, then each peer that can be expected to finish."""
    h, e, y = draw(M, V, d, mode, "cuda", torch.bfloat16)
    useful = (4 if mode == "frozen" else 8) * M * V * d
    for name, loss in {"habitus": ours, **peers}.items():
        row: dict[str, Any] = {"what": name, "mode": mode, "M": M, "V": V, "d": d}
        why = hopeless(name, mode, M, V, d)
        if why:
            report(rows, {**row, "skipped": why})
            continue
        try:
            seconds, extra = timed(lambda: step(loss, h, e, y))  # noqa: B023
        except torch.OutOfMemoryError:
            report(rows, {**row, "skipped": "out of memory"})
        except Exception as error:  # a peer that fails is a result
            report(rows, {**row, "skipped": f"{type(error).__name__}: {error}"[:200]})
        else:
            row |= {"seconds": seconds, "extra_mib": extra / 2**20, "tflops": useful / seconds / 1e12}
            row["of_product"] = useful / seconds / product_rate
            if name == "habitus":
                row["backend"] = choose_backend(h, biased=e.requires_grad)
            report(rows, row)
        h.grad = e.grad = None
        torch.cuda.empty_cache()


def compare_small(rows: list[dict[str, Any]], size: int, d: int) -> None:
    """M = V = size, trainable: what is chosen, fused attention, scores kept, and plain PyTorch, as milliseconds a step.

    Launched from Python, and replayed from a captured graph, as steps of `habitus train` are (there fused attention is
    chosen at every size).
    """
    forms: dict[str, Callable] = {"chosen": ours, "fused": fused}
    if size <= 32_768:
        forms["kept"] = kept
    if not hopeless("plain", "trainable", size, size, d):
        forms["plain"] = plain_loss
    h, e, y = draw(size, size, d, "trainable", "cuda", torch.bfloat16)
    row: dict[str, Any] = {
        "what": "small",
        "mode": "trainable",
        "M": size,
        "V": size,
        "d": d,
        "ms": {},
        "captured_ms": {},
    }
    for name, loss in forms.items():
        row["ms"][name] = 1e3 * timed(lambda: step(loss, h, e, y), repeats=15)[0]  # noqa: B023
        if name in ("fused", "plain"):
            row["captured_ms"][name] = captured_ms(lambda: step(loss, h, e, y))  # noqa: B023
        h.grad = e.grad = None
        torch.cuda.empty_cache()
    if "plain" in row["ms"]:
        row["chosen_of_plain"] = row["ms"]["chosen"] / row["ms"]["plain"]
        row["captured_of_plain"] = row["captured_ms"]["fused"] / row["captured_ms"]["plain"]
    rows.append(row)
    shown = "  ".join(f"{name} {ms:.3f}" for name, ms in row["ms"].items())
    captured = "  ".join(f"{name} {ms:.3f}" for name, ms in row["captured_ms"].items())
    ratio = (
        f" | of plain {row['chosen_of_plain']:.2f}, captured {row['captured_of_plain']:.2f}" if len(forms) == 4 else ""
    )
    print(f"M = V = {size:<7d} d = {d:<4d} ms: {shown} | captured: {captured}{ratio}", flush=True)


def captured_ms(call: Callable[[], object], repeats: int = 15) -> float:
    """Median milliseconds of a call that is replayed from a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    seconds, _ = timed(graph.replay, repeats)
    return 1e3 * seconds


def hopeless(name: str, mode: str, M: int, V: int, d: int) -> str:
    """Why a peer is not even tried, if so."""
    if name == "plain" and M * V * (8 if mode == "frozen" else 10) > 120e9:
        return f"scores alone need {M * V * 4 / 2**30:.0f} GiB in float32, twice"
    if name == "liger" and mode == "frozen" and V > 4_000_000:
        return "splits the queries one by one here: about half a minute by its time at 2M"
    if name == "cut-cross-entropy" and V * d > 2**31:
        return "illegal memory access: its offsets are 32 bits wide"
    if name == "cut-cross-entropy" and mode == "trainable" and M > 200_000:
        return "about 16 times its time at 131k"
    return ""


def draw(
    M: int, V: int, d: int, mode: str, device: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scores with a standard deviation of 2, as a model in training has them."""
    torch.manual_seed(0)
    h = (torch.randn(M, d, device=device) * 2 * d**-0.5).to(dtype).requires_grad_()
    e = torch.randn(V, d, device=device, dtype=dtype).requires_grad_(mode == "trainable")
    return h, e, torch.randint(V, (M,), device=device)


def step(loss: Callable, h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> None:
    """Mean loss and its gradients."""
    h.grad = e.grad = None
    loss(h, e, y).backward()


def ours(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The candidate softmax as a training loop calls it: input checks included, entropy too where it is free."""
    return candidate_softmax(h, e, y, entropy=not e.requires_grad).loss.mean()


def fused(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same by fused attention at every size."""
    return candidate_softmax(h, e, y, backend=choose_backend(h, biased=True)).loss.mean()


def kept(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The same with its scores kept, whatever their number."""
    most, cached_scores.MAX_CUDA_SCORES = cached_scores.MAX_CUDA_SCORES, 1 << 40
    try:
        return candidate_softmax(h, e, y).loss.mean()
    finally:
        cached_scores.MAX_CUDA_SCORES = most


def plain_loss(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """All scores at once, cross-entropy in float32."""
    return F.cross_entropy((h @ e.T).float(), y)


def chunked_loss(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Rows in chunks, each recomputed in the backward pass."""
    rows = max(16, min(1024, 2**31 // len(e)))
    parts = [
        torch.utils.checkpoint.checkpoint(_chunk_sum, h[a : a + rows], e, y[a : a + rows], use_reentrant=False)
        for a in range(0, len(h), rows)
    ]
    return torch.stack(parts).sum() / len(h)


def _chunk_sum(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((h @ e.T).float(), y, reduction="sum")


def peer_losses() -> dict[str, Callable]:
    """The peers that can be imported here."""
    peers: dict[str, Callable] = {"plain": plain_loss, "row-chunked": chunked_loss}
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

        def liger(h: torch.Tensor, e: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            result = Liger.apply(h, e, y)
            return result[0] if isinstance(result, tuple) else result

        peers["liger"] = liger
    except ImportError as error:
        print(f"liger-kernel is not here: {error}")
    try:
        from cut_cross_entropy import linear_cross_entropy

        peers["cut-cross-entropy"] = linear_cross_entropy
    except ImportError as error:
        print(f"cut-cross-entropy is not here: {error}")
    return peers


def timed(call: Callable[[], object], repeats: int = 7) -> tuple[float, int]:
    """Median seconds of a call and the peak of memory it took beyond what was there."""
    cuda = torch.cuda.is_available()
    call()  # compiles, plans, warms up
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if cuda else 0
    taken: list[float] = []
    while len(taken) < repeats and (not taken or taken[0] < LONG_S):
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    extra = torch.cuda.max_memory_allocated() - before if cuda else 0
    return statistics.median(taken), extra


def report(rows: list[dict[str, Any]], row: dict[str, Any]) -> None:
    """Keep a row and print it as a line of the table."""
    rows.append(row)
    size = f"{row.get('mode', ''):9s} M={row.get('M', 0):<7d} V={row.get('V', 0):<9d} d={row.get('d', 0):<5d}"
    if "skipped" in row:
        print(f"{row['what']:22s} {size} -- {row['skipped']}", flush=True)
        return
    line = f"{row['what']:22s} {size} {row['seconds'] * 1e3:10.2f} ms"
    if "extra_mib" not in row and "tflops" in row:
        line += f" {row['tflops']:7.1f} TFLOP/s"
    if "extra_mib" in row:
        line += f" {row['tflops']:7.1f} TFLOP/s {row['of_product']:6.1%} of a product {row['extra_mib']:9.0f} MiB"
    print(f"{line} {row.get('backend', '')}", flush=True)


def machine() -> dict[str, Any]:
    """Where and when this was measured."""
    hardware = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "cpu"
    return {
        "hardware": hardware,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    main()
