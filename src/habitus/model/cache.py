"""The embedding cache: every item of a catalogue embedded once, in shards of at most a million rows.

Shards are written one by one and kept when the work is interrupted; the manifest comes last and names the bundle and
the dataset whose vectors these are.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from habitus.data.batch import ItemFeatures
from habitus.data.dataset import Dataset
from habitus.errors import ModelError
from habitus.files import sha256_of, write_atomic
from habitus.model.behavior import BehaviorModel
from habitus.model.bundle import Bundle
from habitus.model.tensors import item_tensors
from habitus.typed import Typed

SHARD_ROWS = 1 << 20
EMBED_ROWS = 4096
StoredType = Literal["bf16", "fp16", "fp32"]
DTYPES: dict[StoredType, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Progress = Callable[[str, float], None]


class CacheManifest(Typed):
    """manifest.json of a cache."""

    bundle_checksum: str
    dataset_checksum: str
    dtype: StoredType
    num_items: int
    joint_dim: int
    shards: dict[str, str] = Field(description="SHA-256 by name, in catalogue order.")


class EmbeddingCache:
    """The vectors of a catalogue, in catalogue order."""

    def __init__(self, path: Path, manifest: CacheManifest, shards: list[Tensor]) -> None:
        self.path = path
        self.manifest = manifest
        self.shards = shards

    @classmethod
    def open(cls, path: str | Path, bundle: Bundle, dataset: Dataset) -> Self:
        """The cache in a folder; refused where it is of another model or catalogue, or has changed."""
        path = Path(path)
        manifest = CacheManifest.read(path / "manifest.json")
        for what, found, expected in (
            ("model", manifest.bundle_checksum, bundle.checksum),
            ("dataset", manifest.dataset_checksum, dataset.checksum),
        ):
            if found != expected:
                raise ModelError(
                    f"the cache in {path} is of another {what} (checksum {found[:12]}, not {expected[:12]})",
                    next_step=f"remove {path} and run: habitus embed {bundle.path} --data {dataset.path}",
                )
        for name, checksum in manifest.shards.items():
            if not (path / name).exists() or sha256_of(path / name) != checksum:
                raise ModelError(f"{path / name} is missing or has changed", next_step=f"remove {path} and embed again")
        return cls(path, manifest, [_read_shard(path / name) for name in manifest.shards])

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.manifest.dtype]

    def rows(self, wanted: np.ndarray) -> Tensor:
        """The vectors of catalogue rows, as stored."""
        result = torch.empty(len(wanted), self.manifest.joint_dim, dtype=self.dtype)
        first = 0
        for shard in self.shards:
            here = (wanted >= first) & (wanted < first + len(shard))
            result[torch.from_numpy(here)] = shard[torch.from_numpy(wanted[here] - first)]
            first += len(shard)
        return result


def build_cache(
    bundle: Bundle,
    dataset: Dataset,
    path: str | Path,
    *,
    dtype: StoredType = "bf16",
    shard_rows: int = SHARD_ROWS,
    progress: Progress | None = None,
) -> EmbeddingCache:
    """The cache of a catalogue under a model; shards that an earlier call finished are not computed again."""
    check_same_fields(bundle, dataset)
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    identity = {"bundle": bundle.checksum, "dataset": dataset.checksum, "dtype": dtype}
    num_shards = -(-dataset.num_items // shard_rows)
    shards = {}
    for number in range(num_shards):
        name = f"embeddings-{number:05d}-of-{num_shards:05d}.safetensors"
        rows = np.arange(number * shard_rows, min((number + 1) * shard_rows, dataset.num_items))
        if not _is_finished(path / name, identity, len(rows)):
            vectors = embed_rows(bundle.model, dataset, rows).to("cpu", DTYPES[dtype])
            write_atomic(path / name, save({"vectors": vectors}, metadata=identity))
        shards[name] = sha256_of(path / name)
        if progress:
            progress("embedding items", (number + 1) / num_shards)
    CacheManifest(
        bundle_checksum=bundle.checksum,
        dataset_checksum=dataset.checksum,
        dtype=dtype,
        num_items=dataset.num_items,
        joint_dim=bundle.recipe.model.joint_dim,
        shards=shards,
    ).write(path / "manifest.json")
    return EmbeddingCache.open(path, bundle, dataset)


def embed_rows(model: BehaviorModel, dataset: Dataset, rows: np.ndarray) -> Tensor:
    """The vectors of catalogue rows [n, joint_dim], float32, on the model's device."""
    return embed_features(model, [dataset.item_features(rows[at : at + EMBED_ROWS]) for at in _starts(len(rows))])


@torch.no_grad()
def embed_features(model: BehaviorModel, parts: list[ItemFeatures]) -> Tensor:
    """The vectors of encoded items, float32, on the model's device."""
    device = next(model.parameters()).device
    vectors = [model.embed_items(item_tensors(part, model.recipe, device)).float() for part in parts]
    return torch.cat(vectors) if vectors else torch.empty(0, model.recipe.joint_dim, device=device)


def check_same_fields(bundle: Bundle, dataset: Dataset) -> None:
    """Refuse a dataset whose fields are not encoded as the bundle's were."""
    if bundle.encoders == dataset.encoders:
        return
    ours = {(spec.kind, spec.name, spec.size) for spec in (*bundle.encoders.fields.item, *bundle.encoders.fields.event)}
    theirs = {(spec.kind, spec.name, spec.size) for spec in (*dataset.fields.item, *dataset.fields.event)}
    difference = ", ".join(f"{kind} {name!r} of size {size}" for kind, name, size in sorted(ours ^ theirs)) or (
        "the same fields, but other values or statistics"
    )
    raise ModelError(
        f"{bundle.path} was trained on other fields than {dataset.path} has: {difference}",
        expected="the dataset that the run was trained on",
        next_step="evaluate on that dataset, or train on this one",
    )


def _starts(count: int) -> range:
    return range(0, count, EMBED_ROWS)


def _is_finished(path: Path, identity: dict[str, str], num_rows: int) -> bool:
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() == identity and file.get_slice("vectors").get_shape()[0] == num_rows
    except SafetensorError:
        return False


def _read_shard(path: Path) -> Tensor:
    with safe_open(path, "pt") as file:
        vectors: Tensor = file.get_tensor("vectors")
    return vectors
