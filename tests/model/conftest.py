"""Random batches and items for tests of the model, and the plain twin it is compared with."""

import importlib.util
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Field, Fields

ALL_FIELDS = Fields(
    item=(
        Field(name="text", kind="text", size=50),
        Field(name="group", kind="category", size=7),
        Field(name="brand", kind="category", size=11),
        Field(name="price", kind="number", mean=3.0, std=2.0, log_mean=1.0, log_std=0.5),
        Field(name="image", kind="vector", size=9),
    ),
    event=(
        Field(name="type", kind="category", size=4),
        Field(name="paid", kind="number", mean=2.0, std=1.5, log_mean=0.9, log_std=0.4),
        Field(name="hours", kind="number", mean=10.0, std=30.0, log_mean=1.0, log_std=1.0),
    ),
    text_len=12,
)


def random_items(fields: Fields, n: int, seed: int = 0, *, missing: float = 0.2) -> ItemFeatures:
    """n items with texts of every length from none to all, and a share of values missing."""
    rng = np.random.default_rng(seed)
    tokens, values = None, {}
    for field in fields.item:
        gone = rng.random(n) < missing
        if field.kind == "text":
            lengths = rng.integers(0, fields.text_len + 1, n)
            drawn = rng.integers(1, field.size, (n, fields.text_len))
            tokens = np.where(np.arange(fields.text_len) < lengths[:, None], drawn, 0).astype(np.int32)
        elif field.kind == "category":
            values[field.name] = np.where(gone, 0, rng.integers(1, field.size, n)).astype(np.int32)
        elif field.kind == "number":
            values[field.name] = np.where(gone, np.nan, rng.gamma(2.0, 2.0, n)).astype(np.float32)
        else:
            vectors = rng.normal(size=(n, field.size)).astype(np.float32)
            vectors[gone] = np.nan
            values[field.name] = vectors
    return ItemFeatures(tokens, values)


def random_batch(fields: Fields, B: int, L: int, num_items: int, seed: int = 0, *, segments: int = 4) -> Batch:
    """B windows packed with up to `segments` users each, the last slots of some left empty."""
    rng = np.random.default_rng(seed)
    items = rng.integers(0, num_items, (B, L))
    targets, ids = np.full((B, L), -1), np.full((B, L), -1, np.int32)
    positions = np.zeros((B, L), np.int32)
    boundaries: list[int] = []
    for row in range(B):
        filled = L - int(rng.integers(0, 3))
        cuts = np.sort(rng.choice(np.arange(1, filled), int(rng.integers(0, segments)), replace=False))
        edges = [0, *cuts.tolist(), filled]
        for number, (a, b) in enumerate(pairwise(edges)):
            ids[row, a:b], positions[row, a:b] = number, np.arange(b - a)
            targets[row, a : b - 1] = items[row, a + 1 : b]
            boundaries.append(row * L + a)
        if filled < L:
            boundaries.append(row * L + filled)
    padded = np.full(B * (segments + 1) + 1, B * L, np.int32)
    padded[: len(boundaries)] = boundaries
    values = {}
    for field in fields.event:
        if field.kind == "category":
            values[field.name] = rng.integers(0, field.size, (B, L)).astype(np.int32)
        else:
            drawn = rng.gamma(2.0, 2.0, (B, L)).astype(np.float32)
            values[field.name] = np.where(rng.random((B, L)) < 0.2, np.float32(np.nan), drawn)
    items = np.where(ids < 0, 0, items)
    users = np.full((B, segments), -1)
    return Batch(items, targets, positions, ids, padded, users, values)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def samples() -> SimpleNamespace:
    """`samples.items`, `samples.batch` and `samples.fields`: the generators above."""
    return SimpleNamespace(items=random_items, batch=random_batch, fields=ALL_FIELDS)


@pytest.fixture(scope="session")
def plain() -> ModuleType:
    """The plain twin of the model, which the benchmark uses too."""
    return _loaded("plain_model")


@pytest.fixture(scope="session")
def shaken() -> Callable[[torch.nn.Module], torch.nn.Module]:
    """A model moved off its start, where residual branches are zero and would hide mistakes."""

    def shake(model: torch.nn.Module) -> torch.nn.Module:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                fan_in = parameter.shape[-1] if parameter.ndim == 2 else 25
                parameter += noise.to(parameter.device) * fan_in**-0.5
        return model

    return shake


def _loaded(name: str) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"habitus_benchmarks_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
