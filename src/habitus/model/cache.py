"""The embedding cache: every item of a catalogue embedded once, in shards of at most a million rows.

Shards are written one by one and kept when the work is interrupted; the manifest comes last and names the embedder
and the dataset whose vectors these are.
"""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Literal, Self

import numpy as np
import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from habitus.data import Dataset, Encoders, ItemFeatures
from habitus.data import Field as FieldSpec
from habitus.errors import ModelError
from habitus.files import sha256_of, staged_file
from habitus.model.behavior import BehaviorModel
from habitus.model.bundle import Bundle, autocast
from habitus.model.tensors import item_tensors
from habitus.progress import Progress
from habitus.typed import Sealed

_SHARD_ROWS = 1 << 20
EMBED_ROWS = 4096
CACHE_MANIFEST = "manifest.json"
_WRITABLE = "habitus embed --out names another folder; to evaluate, copy the run to where you can write"
StoredType = Literal["bf16", "fp16", "fp32"]
STORED_TYPES: tuple[StoredType, ...] = ("bf16", "fp16", "fp32")
CACHE_DTYPES: dict[StoredType, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class CacheManifest(Sealed):
    """manifest.json of a cache."""

    bundle_checksum: str = Field(description="Of the bundle that made it; another with the same embedder may use it.")
    embedder_checksum: str
    dataset_checksum: str
    dtype: StoredType
    num_items: int
    joint_dim: int
    shards: dict[str, str] = Field(description="SHA-256 by name, in catalogue order.")


class EmbeddingCache:
    """The vectors of a catalogue, in catalogue order, mapped from their files."""

    def __init__(self, path: Path, manifest: CacheManifest) -> None:
        self.path = path
        self.manifest = manifest
        self.shards = [_read_shard(path / name) for name in manifest.shards]
        shape = (sum(map(len, self.shards)), self.shards[0].shape[1] if self.shards else manifest.joint_dim)
        if shape != (manifest.num_items, manifest.joint_dim):
            raise ModelError(
                f"{path} holds {shape[0]:,} vectors of width {shape[1]}, and its {CACHE_MANIFEST} says "
                f"{manifest.num_items:,} of width {manifest.joint_dim}",
                next_step=f"remove {path} and embed again",
            )

    @classmethod
    def open(cls, path: str | Path, bundle: Bundle, dataset: Dataset, *, verify: bool = True) -> Self:
        """The cache in a folder; refused where it is of another embedder or catalogue, or has changed.

        `verify` hashes every shard, a few seconds per ten gigabytes; without it the shards are only opened.
        """
        path = Path(path)
        manifest = CacheManifest.read(path / CACHE_MANIFEST)
        for what, checksum, expected in (
            ("model", manifest.embedder_checksum, bundle.embedder_checksum),
            ("dataset", manifest.dataset_checksum, dataset.checksum),
        ):
            if checksum != expected:
                raise ModelError(
                    f"the cache in {path} is of another {what} (checksum {checksum[:12]}, not {expected[:12]})",
                    next_step=f"remove {path} and run: habitus embed {bundle.run_path} --data {dataset.path}",
                )
        for name, checksum in manifest.shards.items():
            if not (path / name).exists() or (verify and sha256_of(path / name) != checksum):
                raise ModelError(f"{path / name} is missing or has changed", next_step=f"remove {path} and embed again")
        return cls(path, manifest)

    @property
    def dtype(self) -> torch.dtype:
        return CACHE_DTYPES[self.manifest.dtype]

    def rows(self, positions: np.ndarray) -> Tensor:
        """The vectors of catalogue rows, as stored."""
        result = torch.empty(len(positions), self.manifest.joint_dim, dtype=self.dtype)
        order = np.argsort(positions, kind="stable")  # each shard is then read once, in the order of its pages
        ranked = torch.from_numpy(positions[order])
        first = begin = 0
        for shard in self.shards:
            end = int(np.searchsorted(ranked.numpy(), first + len(shard)))
            if begin < end:
                result[torch.from_numpy(order[begin:end])] = shard[ranked[begin:end] - first]
            first, begin = first + len(shard), end
        return result

    def pieces(self, start: int, stop: int) -> list[Tensor]:
        """Catalogue rows start..stop as stored, as views of the mapped shards."""
        pieces, first = [], 0
        for shard in self.shards:
            low, high = max(start - first, 0), min(stop - first, len(shard))
            if low < high:
                pieces.append(shard[low:high])
            first += len(shard)
        return pieces


def build_cache(
    bundle: Bundle,
    dataset: Dataset,
    path: str | Path,
    *,
    dtype: StoredType = "bf16",
    shard_rows: int = _SHARD_ROWS,
    progress: Progress | None = None,
) -> EmbeddingCache:
    """The cache of a catalogue under a model; shards that an earlier call finished are not computed again.

    A folder that holds a complete cache of another model, catalogue or type is refused, not overwritten.
    """
    check_same_fields(bundle, dataset)
    path = Path(path)
    if (path / CACHE_MANIFEST).exists():
        return _open_existing(path, bundle, dataset, dtype)
    _make_folder(path)
    identity = {"embedder": bundle.embedder_checksum, "dataset": dataset.checksum, "dtype": dtype}
    num_shards = -(-dataset.num_items // shard_rows)
    precision = bundle.recipe.train.precision
    shards = {}
    for number in range(num_shards):
        name = f"embeddings-{number:05d}-of-{num_shards:05d}.safetensors"
        rows = np.arange(number * shard_rows, min((number + 1) * shard_rows, dataset.num_items))

        def report(share: float, number: int = number) -> None:
            if progress:
                progress("embedding items", (number + share) / num_shards)

        if not _is_finished(path / name, identity, len(rows)):
            vectors = embed_rows(
                bundle.model, dataset, rows, precision=precision, dtype=CACHE_DTYPES[dtype], report=report
            )
            _write_shard(path / name, vectors.cpu(), identity)
        shards[name] = sha256_of(path / name)
        report(1.0)
    manifest = CacheManifest(
        bundle_checksum=bundle.checksum,
        embedder_checksum=bundle.embedder_checksum,
        dataset_checksum=dataset.checksum,
        dtype=dtype,
        num_items=dataset.num_items,
        joint_dim=bundle.recipe.model.joint_dim,
        shards=shards,
    )
    manifest.write(path / CACHE_MANIFEST)
    return EmbeddingCache(path, manifest)


def embed_rows(
    model: BehaviorModel,
    dataset: Dataset,
    rows: np.ndarray,
    *,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float32,
    report: Callable[[float], None] | None = None,
) -> Tensor:
    """The vectors of catalogue rows [n, joint_dim] on the model's device; `report` is called with the share done."""
    on_cpu = next(model.parameters()).device.type == "cpu"
    size = EMBED_ROWS if on_cpu else 4 * EMBED_ROWS  # a GPU waits for launches rather than for products

    def parts() -> Iterable[ItemFeatures]:
        for at in range(0, len(rows), size):
            if report:
                report(at / len(rows))
            yield dataset.item_features(rows[at : at + size])

    return embed_features(model, parts(), precision=precision, dtype=dtype)


@torch.no_grad()
def embed_features(
    model: BehaviorModel,
    parts: Iterable[ItemFeatures],
    *,
    precision: str = "fp32",
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The vectors of encoded items, on the model's device."""
    device = next(model.parameters()).device
    vectors = []
    with autocast(device, precision):
        for part in parts:
            vectors.append(model.embed_items(item_tensors(part, model.recipe, device)).to(dtype))
    return torch.cat(vectors) if vectors else torch.empty(0, model.recipe.joint_dim, device=device, dtype=dtype)


def check_same_fields(bundle: Bundle, dataset: Dataset) -> None:
    """Refuse a dataset whose fields are not encoded as the bundle's were; further categories may have come."""
    tokenizer = dataset.manifest.files.get("tokenizer.json")
    same_tokens = bundle.manifest.files.get("tokenizer.json") == (tokenizer.sha256 if tokenizer else None)
    if _as_stored(bundle.encoders) == _as_stored(dataset.encoders.up_to(bundle.encoders)) and same_tokens:
        return
    ours = {(spec.kind, spec.name, spec.size) for spec in (*bundle.encoders.fields.item, *bundle.encoders.fields.event)}
    theirs = {(spec.kind, spec.name, spec.size) for spec in (*dataset.fields.item, *dataset.fields.event)}
    difference = ", ".join(f"{kind} {name!r} of size {size}" for kind, name, size in sorted(ours ^ theirs)) or (
        "the same fields, but other categories or text tokens"
    )
    raise ModelError(
        f"{bundle.path} was trained on other fields than {dataset.path} has: {difference}",
        expected="a dataset whose items are encoded as those that the run was trained on",
        next_step="evaluate on the dataset that the run was trained on, or train on this one",
    )


def _as_stored(encoders: Encoders) -> Encoders:
    """The encoders without the statistics of numbers: those belong to the model, and numbers are stored as they are."""

    def plain(fields: tuple[FieldSpec, ...]) -> tuple[FieldSpec, ...]:
        return tuple(FieldSpec(name=spec.name, kind=spec.kind, size=spec.size) for spec in fields)

    fields = encoders.fields
    stored = fields.model_copy(update={"item": plain(fields.item), "event": plain(fields.event)})
    return encoders.model_copy(update={"fields": stored})


def _open_existing(path: Path, bundle: Bundle, dataset: Dataset, dtype: StoredType) -> EmbeddingCache:
    cache = EmbeddingCache.open(path, bundle, dataset)
    if cache.manifest.dtype != dtype:
        raise ModelError(
            f"{path} holds these vectors as {cache.manifest.dtype}, not as {dtype}",
            next_step=f"remove {path}, or write to another folder",
        )
    return cache


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        writable = os.access(path, os.W_OK)
    except OSError as error:
        raise ModelError(f"the folder {path} cannot be created: {error.strerror}", next_step=_WRITABLE) from error
    if not writable:
        raise ModelError(f"the folder {path} cannot be written to", next_step=_WRITABLE)


def _is_finished(path: Path, identity: dict[str, str], num_rows: int) -> bool:
    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() == identity and file.get_slice("vectors").get_shape()[0] == num_rows
    except SafetensorError:
        return False


def _write_shard(path: Path, vectors: Tensor, identity: dict[str, str]) -> None:
    """A shard as safetensors, the same bytes every time: the library itself writes metadata in random order."""
    content = memoryview(save({"vectors": vectors}, metadata=identity))
    length = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + length]))
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with staged_file(path) as partial, partial.open("wb") as file:
        file.writelines((len(text).to_bytes(8, "little"), text, content[8 + length :]))


def _read_shard(path: Path) -> Tensor:
    with safe_open(path, "pt") as file:
        vectors: Tensor = file.get_tensor("vectors")
    return vectors
