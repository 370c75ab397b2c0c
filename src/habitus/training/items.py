"""Items as training reads them: encoded fields for the embedder of stage 1, frozen vectors for stage 2."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset, ItemFeatures
from habitus.errors import ModelError
from habitus.evaluation import Ranks
from habitus.model import (
    CACHE_MANIFEST,
    Bundle,
    CacheManifest,
    EmbeddingCache,
    ItemDropout,
    ItemTensors,
    build_cache,
    draw_item_dropout,
    item_tensors,
)
from habitus.progress import Progress
from habitus.recipe import Recipe, TrainRecipe
from habitus.training.parallel import owned_items

_FEATURES_IN_MEMORY = 1 << 30  # bytes up to which item features are held in memory rather than mapped
_VECTORS_IN_MEMORY = 2 << 30  # the same of frozen vectors, on a CPU
_ROWS_AT_ONCE = 1 << 18  # of all items, where one pass over them suffices


class HostItems:
    """Encoded items as tensors: from memory where all of them fit, else from the dataset's files."""

    def __init__(self, dataset: Dataset, recipe: Recipe, device: torch.device, ranks: Ranks | None = None) -> None:
        ranks = ranks or Ranks()
        self.model, self.seed = recipe.model, recipe.train.seed
        self.dropout_rates = item_dropout_rates(recipe.train)
        self.device = device
        self.read: Callable[[np.ndarray], ItemFeatures] = dataset.item_features
        self.held: ItemFeatures | None = None  # of this process's items, where they are in memory
        self.lengths: np.ndarray | None = None  # tokens of every item
        if feature_bytes(dataset) * dataset.num_items // ranks.world <= _FEATURES_IN_MEMORY:
            encoded = dataset.item_features(np.arange(dataset.num_items)[owned_items(dataset.num_items, ranks)])
            tokens = encoded.tokens
            tokens = None if tokens is None else np.ascontiguousarray(tokens[:, : recipe.model.text_len])
            held = self.held = ItemFeatures(tokens, encoded.fields)
            self.lengths = text_lengths(dataset, recipe.model.text_len)
            self.read = lambda rows: ItemFeatures(
                None if held.tokens is None else held.tokens[rows // ranks.world],
                {name: values[rows // ranks.world] for name, values in held.fields.items()},
            )

    def tensors(self, rows: np.ndarray, step: int) -> ItemTensors:
        """What the embedder reads of these items in a step."""
        return item_tensors(self.read(rows), self.model, self.device, dropout=self.dropout(rows, step))

    def dropout(self, rows: np.ndarray, step: int) -> ItemDropout | None:
        """What a step drops of these items."""
        if not any(self.dropout_rates):
            return None
        return draw_item_dropout(self.seed, step, torch.from_numpy(rows).to(self.device), *self.dropout_rates)

    def text_counts(self, rows: np.ndarray) -> tuple[int, int]:
        """Tokens of these items, and the sum of their squares per item: what text attention scores."""
        if self.lengths is not None:
            lengths = self.lengths[rows].astype(np.int64)
        else:
            tokens = self.read(rows).tokens
            lengths = np.zeros(0, np.int64) if tokens is None else (tokens[:, : self.model.text_len] != 0).sum(1)
        return int(lengths.sum()), int((lengths * lengths).sum())


def text_lengths(dataset: Dataset, text_len: int) -> np.ndarray:
    """Text tokens of every item, int16 [I]."""
    lengths = np.zeros(dataset.num_items, np.int16)
    for first in range(0, dataset.num_items, _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, dataset.num_items))
        tokens = dataset.item_features(rows).tokens
        if tokens is None:
            break
        lengths[rows] = np.count_nonzero(tokens[:, :text_len], axis=1)
    return lengths


def item_dropout_rates(recipe: TrainRecipe) -> tuple[float, float, float]:
    """Shares of tokens, fields and entries of item vectors that a step drops."""
    return recipe.token_dropout, recipe.field_dropout, recipe.item_dropout


def feature_bytes(dataset: Dataset) -> int:
    """Bytes of one item's encoded fields."""
    one = dataset.item_features(np.arange(1))
    return sum(values.nbytes for values in one.fields.values()) + (0 if one.tokens is None else one.tokens.nbytes)


class FrozenVectors:
    """The item vectors of this process on its device, or in mapped files where they are too many to hold."""

    def __init__(
        self, cache: EmbeddingCache, device: torch.device, precision: str = "fp32", ranks: Ranks | None = None
    ) -> None:
        self.cache, self.ranks = cache, ranks or Ranks()
        self.device = device
        # Products on CPU are in float32; on a GPU in the recipe's precision.
        self.dtype = cache.dtype if device.type == "cuda" and precision == "bf16" else torch.float32
        manifest = cache.manifest
        count = len(range(manifest.num_items)[owned_items(manifest.num_items, self.ranks)])
        size = count * manifest.joint_dim * self.dtype.itemsize
        limit = _VECTORS_IN_MEMORY if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
        self.table: Tensor | None = None
        if size <= limit:
            self.table = torch.empty(count, manifest.joint_dim, dtype=self.dtype, device=device)
            at = first = 0
            for shard in cache.shards:
                own = shard[(self.ranks.rank - first) % self.ranks.world :: self.ranks.world]
                self.table[at : at + len(own)] = own.to(device)
                at += len(own)
                first += len(shard)

    def rows(self, items: Tensor) -> Tensor:
        """The vectors of catalogue rows of any shape, all of them this process's."""
        if self.table is not None:
            return self.table[items if self.ranks.world == 1 else items // self.ranks.world]
        vectors = self.cache.rows(items.flatten().cpu().numpy().astype(np.int64))
        return vectors.to(self.device, self.dtype).view(*items.shape, -1)


def open_catalogue(
    bundle: Bundle, dataset: Dataset, own: Path, parent: Path | None, progress: Progress
) -> EmbeddingCache:
    """The cache of a bundle's embedder, in the run's own folder `own`.

    A stage-2 run has its parent's embedder and so its parent's vectors: they are built there once, where that can
    be written, and linked here, so that a hundred runs from one parent embed the catalogue once.
    """
    ranks = Ranks()
    with ranks.together():
        if ranks.is_first and not (own / CACHE_MANIFEST).exists():
            _build_catalogue(bundle, dataset, own, parent, progress)
    ranks.barrier(own / CACHE_MANIFEST)
    return EmbeddingCache.open(own, bundle, dataset, verify=ranks.is_first)


def _build_catalogue(bundle: Bundle, dataset: Dataset, own: Path, parent: Path | None, progress: Progress) -> None:
    shared = parent / own.name if parent is not None and os.access(parent, os.W_OK) else None
    if shared is None:
        build_cache(bundle, dataset, own, progress=progress)
        return
    if (shared / CACHE_MANIFEST).exists():
        manifest = CacheManifest.read(shared / CACHE_MANIFEST)
        if (manifest.embedder_checksum, manifest.dataset_checksum) != (bundle.embedder_checksum, dataset.checksum):
            raise ModelError(
                f"the cache in {shared} is of another embedder or dataset",
                next_step=f"remove {shared}; it is built again when needed",
            )
    else:
        build_cache(bundle, dataset, shared, progress=progress)
    _link(shared, own)


def _link(source: Path, target: Path) -> None:
    """The files of a cache under another name; the manifest last, since it says that all files are there."""
    target.mkdir(parents=True, exist_ok=True)
    names = [*CacheManifest.read(source / CACHE_MANIFEST).shards, CACHE_MANIFEST]
    for name in names:
        (target / name).unlink(missing_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:  # another file system
            shutil.copyfile(source / name, target / name)
