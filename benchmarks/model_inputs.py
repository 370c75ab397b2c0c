"""Items, windows and sizes that the benchmark of the model runs on.

Letters: B windows, L slots, T text tokens per item at most, n items.
"""

import platform
from itertools import pairwise
from pathlib import Path

import numpy as np

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.recipe import ModelRecipe
from habitus.sizing import Inputs, Workload, executed_step_flops

L, T = 256, 24
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
# width/depth/batch_sequences of a contextualizer alone and the rate to beat in TFLOP/s.
ANCHORS = {"128/4/64": 45, "192/4/128": 130, "320/6/256": 268, "640/8/512": 401}


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
    assert features.tokens is not None
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
