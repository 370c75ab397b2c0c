"""Forward and backward time of the model against the same transformer written plainly, in one run.

Run: python benchmarks/model.py [--device cpu|cuda] [--parts attention contextualizer model] [--out FILE]
Prints tables and ends with one JSON line; kept results are benchmarks/results/model-*.json. On CUDA in bf16
autocast, ours compiled piece by piece and the whole step captured as a graph; the plain one eager, captured,
and (where asked) compiled and captured. On CPU in float32 on one thread, nothing compiled, in processor time.
Rates are executed FLOPs (habitus.sizing); those of the contextualizer alone are 6·p·slots, as in the anchors.
"""

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain_model import plain_block, plain_embed_items, plain_queries
from torch import Tensor
from torch.nn import functional as F

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.model import BatchTensors, BehaviorModel, batch_tensors, item_tensors
from habitus.model.layouts import PackedRows, attend
from habitus.recipe import ModelRecipe
from habitus.sizing import Inputs, Workload, breakdown, executed_step_flops

L, T = 256, 24  # slots per window, text tokens per item at most
FIELDS = Fields(
    item=(
        Field(name="text", kind="text", size=16_384),
        Field(name="group", kind="category", size=1_024),
        Field(name="brand", kind="category", size=4_096),
        Field(name="price", kind="number"),
    ),
    event=(Field(name="type", kind="category", size=8), Field(name="hours", kind="number")),
    text_len=T,
)
# joint_dim, width, depth, text_depth, batch_sequences: the paper's cells, to the multiples that heads of 32 need.
CELLS = {
    "1e15": (44, 128, 8, 4, 64),
    "1e16": (80, 256, 8, 4, 128),
    "1e17": (136, 384, 8, 4, 256),
    "1e18": (192, 448, 24, 8, 256),
}
CPU_CELLS = {"1e15": (44, 128, 8, 4, 4), "1e16": (80, 256, 8, 4, 2), "1e17": (136, 384, 8, 4, 1)}
# width, depth, batch_sequences and the rate to beat in TFLOP/s; uncompiled in brackets there.
ANCHORS = {(128, 4, 64): 45, (192, 4, 128): 130, (320, 6, 256): 268, (640, 8, 512): 401}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", default=["attention", "contextualizer", "model"])
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--compile-plain", nargs="*", default=["1e15", "1e17"], help="cells, on CUDA")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    torch.set_num_threads(1)
    rows: dict[str, list[dict[str, Any]]] = {}
    if "attention" in arguments.parts and cuda:
        rows["attention"] = [text_attention(h) for h in (48, 136)] + [window_attention(w) for w in (128, 448)]
    if "contextualizer" in arguments.parts and cuda:
        rows["contextualizer"] = [contextualizer_alone(*shape) for shape in ANCHORS]
    if "model" in arguments.parts:
        cells = CELLS if cuda else CPU_CELLS
        names = [name for name in arguments.cells if name in cells]
        rows["model"] = [whole_model(name, cells[name], arguments.device, arguments.compile_plain) for name in names]
    result = {
        "benchmark": "model",
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if cuda else f"{processor()}, one thread",
        "torch": torch.__version__,
        **rows,
    }
    print_tables(rows)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result))


def whole_model(name: str, cell: tuple[int, ...], device: str, compile_plain: list[str]) -> dict[str, Any]:
    """One cell: milliseconds of embedding the unique items and contextualizing the batch, there and back."""
    h, width, depth, text_depth, B = cell
    recipe = ModelRecipe(joint_dim=h, width=width, depth=depth, text_depth=text_depth, text_len=T)
    features, batch = drawn_items(B * L // 2), drawn_batch(B, B * L // 2)
    model = BehaviorModel(FIELDS, recipe).to(device)
    items, windows = item_tensors(features, recipe, device), batch_tensors(batch, device)
    tokens = torch.from_numpy(features.tokens).to(device)
    upstream = torch.randn(B, L, h, device=device)

    def ours() -> None:
        with autocast(device):
            vectors = model.embed_items(items)
            queries = model.queries(windows, F.embedding(windows.items, vectors))
        queries.backward(upstream)

    def plain() -> None:
        with autocast(device):
            vectors = plain_embed_items(model, tokens, items.fields)
            queries = plain_queries(model, windows, F.embedding(windows.items, vectors))
        queries.float().backward(upstream)

    milliseconds: dict[str, Any] = {}
    if device == "cuda":
        milliseconds["ours, eager"] = timed(ours, model)
        milliseconds["plain, eager"] = timed(plain, model)
        milliseconds["plain, captured"] = timed(plain, model, capture=True)
        if name in compile_plain:
            import plain_model

            plain_model.plain_block = torch.compile(plain_block)
            milliseconds["plain, compiled and captured"] = timed(plain, model, capture=True)
            plain_model.plain_block = plain_block
        model.compile_blocks()
        milliseconds["ours, compiled and captured"] = timed(ours, model, capture=True)
    else:
        milliseconds = processor_time({"ours": ours, "plain": plain}, model)
    flops = step_flops(recipe, features, batch, packed=device == "cuda")
    best = "ours, compiled and captured" if device == "cuda" else "ours"
    return {
        "cell": name,
        "joint_dim": h,
        "width": width,
        "depth": depth,
        "text_depth": text_depth,
        "batch_sequences": B,
        "items": B * L // 2,
        "tokens_per_item": round(float((features.tokens != 0).sum(1).mean()), 2),
        "milliseconds": milliseconds,
        "executed_tflops": rate(flops, milliseconds[best]),
    }


def contextualizer_alone(width: int, depth: int, B: int) -> dict[str, Any]:
    """The contextualizer without embedder and softmax, compiled and captured; 6·p·slots per second."""
    recipe = ModelRecipe(joint_dim=64, width=width, depth=depth, head_dim=64 if width % 64 == 0 else 32)
    fields = Fields(item=FIELDS.item, event=(), text_len=T)
    model = BehaviorModel(fields, recipe).cuda()
    upstream, events = torch.randn(B, L, 64, device="cuda"), torch.randn(B, L, 64, device="cuda")
    p = breakdown(recipe, Inputs.of(fields)).contextualizer_params
    part = model.contextualizer
    row: dict[str, Any] = {"width": width, "depth": depth, "batch_sequences": B}
    row["anchor_tflops"] = ANCHORS[width, depth, B]
    one_user = batch_tensors(drawn_batch(B, 1000, users=1), "cuda")
    six_users = batch_tensors(drawn_batch(B, 1000, users=6), "cuda")
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4, fused=True, capturable=True)

    def step(windows: BatchTensors = one_user) -> None:
        with autocast("cuda"):
            queries = model.queries(windows, events)
        queries.backward(upstream)

    def with_optimizer() -> None:
        step()
        optimizer.step()

    row["eager_tflops"] = rate(6 * p * B * L, timed(step, part))
    model.compile_blocks()
    row["tflops"] = rate(6 * p * B * L, timed(step, part, capture=True))
    packed = timed(lambda: step(six_users), part, capture=True)
    row["tflops_six_users_per_window"] = rate(6 * p * B * L, packed)
    row["tflops_with_adamw"] = rate(6 * p * B * L, timed(with_optimizer, part, capture=True))
    return row


def text_attention(h: int, items: int = 32_768) -> dict[str, Any]:
    """Short texts, forward and backward: ours packed, and two usual forms on padded or packed tokens."""
    from habitus.sizing.structure import text_heads

    features = drawn_items(items)
    recipe = ModelRecipe(joint_dim=h, width=32, depth=1)
    packed = item_tensors(features, recipe, "cuda").text
    heads = text_heads(h)
    qkv = torch.randn(len(packed.tokens), 3, heads, h // heads, device="cuda", dtype=torch.bfloat16)
    padded = torch.randn(3, items, heads, T, h // heads, device="cuda", dtype=torch.bfloat16)
    mask = torch.from_numpy(features.tokens != 0).cuda()[:, None, None, :]
    starts = torch.cat([packed.starts, packed.starts.new_tensor([len(packed.tokens)])]).int()
    forms = {
        "ours": there_and_back(lambda x: attend(x, packed.layout), qkv),
        "padded, masked": there_and_back(
            lambda x: F.scaled_dot_product_attention(x[0], x[1], x[2], attn_mask=mask), padded
        ),
    }
    if (h // heads) % 8 == 0:
        forms["flash, variable length"] = there_and_back(lambda x: flash(x, starts, T, causal=False), qkv)
    return {"attention": f"text, {items} items, joint_dim {h}", "milliseconds": forms}


def window_attention(width: int, B: int = 256, head_dim: int = 32) -> dict[str, Any]:
    """Packed histories, causal, forward and backward."""
    windows = batch_tensors(drawn_batch(B, 1000, users=4), "cuda")
    layout = PackedRows.causal(windows.boundaries, B * L)
    qkv = torch.randn(B * L, 3, width // head_dim, head_dim, device="cuda", dtype=torch.bfloat16)
    forms = {
        "ours": there_and_back(lambda x: attend(x, layout), qkv),
        "flash, variable length": there_and_back(lambda x: flash(x, windows.boundaries, L, causal=True), qkv),
    }
    return {"attention": f"windows, {B} of {L} slots, width {width}", "milliseconds": forms}


def flash(qkv: Tensor, boundaries: Tensor, longest: int, *, causal: bool) -> Tensor:
    query, key, value = qkv.unbind(1)
    return torch.ops.aten._flash_attention_forward(
        query, key, value, boundaries, boundaries, longest, longest, 0.0, causal, False
    )[0]


def there_and_back(attention: Callable[[Tensor], Tensor], x: Tensor) -> float | str:
    """Milliseconds of one call and its gradient, captured."""
    x = x.requires_grad_()
    holder = torch.nn.Module()
    holder.x = torch.nn.Parameter(x)

    def step() -> None:
        out = attention(holder.x)
        out.backward(torch.ones_like(out))

    return timed(step, holder, capture=True)


def processor_time(steps: dict[str, Callable[[], None]], module: torch.nn.Module) -> dict[str, Any]:
    """Median milliseconds of processor time, taken in turns: the machine may have other things to do."""
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(8):
        for name, step in steps.items():
            module.zero_grad(set_to_none=True)
            begin = time.process_time()
            step()
            samples[name].append(1e3 * (time.process_time() - begin))
    return {name: round(statistics.median(values[1:]), 2) for name, values in samples.items()}


def timed(step: Callable[[], None], module: torch.nn.Module, *, capture: bool = False) -> float | str:
    """Median milliseconds of a step, or the reason why there is none."""
    try:
        return _timed(step, module, capture)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    finally:
        module.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()


def _timed(step: Callable[[], None], module: torch.nn.Module, capture: bool) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            module.zero_grad(set_to_none=True)
            step()
    torch.cuda.synchronize()
    module.zero_grad(set_to_none=True)
    run = step
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    samples, spent = [], 0.0
    while len(samples) < 10 or (spent < 300 and len(samples) < 100):
        if not capture:
            module.zero_grad(set_to_none=True)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
        spent += samples[-1]
    return round(statistics.median(samples), 4)


def drawn_items(n: int) -> ItemFeatures:
    """Texts of 6 to 24 tokens, 15 on average, with tokens as unevenly used as words are."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(6, T + 1, n)
    tokens = 2 + np.minimum(rng.zipf(1.3, (n, T)), 16_000)
    tokens = np.where(np.arange(T) < lengths[:, None], tokens, 0).astype(np.int32)
    fields = {
        "group": rng.integers(0, 1_024, n).astype(np.int32),
        "brand": rng.integers(0, 4_096, n).astype(np.int32),
        "price": rng.normal(size=n).astype(np.float32),
    }
    return ItemFeatures(tokens, fields)


def drawn_batch(B: int, num_items: int, users: int = 3) -> Batch:
    """Full windows that `users` share, cut at random."""
    rng = np.random.default_rng(1)
    segments, positions = np.zeros((B, L), np.int32), np.zeros((B, L), np.int32)
    boundaries = []
    for row in range(B):
        edges = [0, *np.sort(rng.choice(np.arange(1, L), users - 1, replace=False)).tolist(), L]
        for number, (begin, end) in enumerate(pairwise(edges)):
            segments[row, begin:end], positions[row, begin:end] = number, np.arange(end - begin)
            boundaries.append(row * L + begin)
    padded = np.full(B * 17 + 1, B * L, np.int32)  # room for 16 users per window
    padded[: len(boundaries)] = boundaries
    items = rng.integers(0, num_items, (B, L))
    values = {
        "type": rng.integers(0, 8, (B, L)).astype(np.int32),
        "hours": rng.normal(size=(B, L)).astype(np.float32),
    }
    return Batch(items, np.roll(items, -1, 1), positions, segments, padded, np.zeros((B, 16), np.int64), values)


def step_flops(recipe: ModelRecipe, features: ItemFeatures, batch: Batch, *, packed: bool) -> float:
    """Executed FLOPs of one step without a softmax."""
    lengths = (features.tokens != 0).sum(1)
    own = np.diff(np.unique(batch.boundaries))
    B = len(batch.items)
    work = Workload(
        slots=B * L,
        items=len(lengths),
        text_tokens=int(lengths.sum()),
        text_pairs=int((lengths**2).sum()),
        context_pairs=int((own * (own + 1) // 2).sum()) if packed else B * L * L,
        queries=0,
        candidates=0,
        softmax="none",
    )
    return sum(executed_step_flops(recipe, Inputs.of(FIELDS), work).values())


def processor() -> str:
    """The CPU's name, where the system tells it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def autocast(device: str) -> torch.autocast:
    return torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda")


def rate(flops: float, milliseconds: float | str) -> float | str:
    """TFLOP/s, or the reason why there are none."""
    return milliseconds if isinstance(milliseconds, str) else float(f"{flops / milliseconds / 1e9:.4g}")


def print_tables(rows: dict[str, list[dict[str, Any]]]) -> None:
    for part, entries in rows.items():
        print(f"\n{part}")
        for entry in entries:
            flat = {k: v for k, v in entry.items() if k != "milliseconds"} | entry.get("milliseconds", {})
            print("  " + " | ".join(f"{key} {value}" for key, value in flat.items()))


if __name__ == "__main__":
    main()
