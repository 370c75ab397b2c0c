"""The frozen vectors of stage 2: built or found once, then looked up."""

import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ModelError
from habitus.evaluation import Ranks
from habitus.model import CACHE_MANIFEST, Bundle, CacheManifest, EmbeddingCache, build_cache
from habitus.progress import Progress

_RESIDENT_BYTES = 2 << 30  # on CPU; beyond it rows come from the mapped files


class FrozenVectors:
    """Item vectors on a device, or in mapped files where they are too many to hold."""

    def __init__(self, cache: EmbeddingCache, device: torch.device, precision: str = "fp32") -> None:
        self.cache = cache
        self.device = device
        # Products on CPU are in float32; on a GPU in the recipe's precision.
        self.dtype = cache.dtype if device.type == "cuda" and precision == "bf16" else torch.float32
        manifest = cache.manifest
        size = manifest.num_items * manifest.joint_dim * self.dtype.itemsize
        room = _RESIDENT_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
        self.table: Tensor | None = None
        if size <= room:
            self.table = torch.empty(manifest.num_items, manifest.joint_dim, dtype=self.dtype, device=device)
            at = 0
            for shard in cache.shards:
                self.table[at : at + len(shard)] = shard.to(device)
                at += len(shard)

    def rows(self, items: Tensor) -> Tensor:
        """The vectors of catalogue rows of any shape."""
        if self.table is not None:
            return self.table[items]
        found = self.cache.rows(items.flatten().cpu().numpy().astype(np.int64))
        return found.to(self.device, self.dtype).view(*items.shape, -1)


def catalogue_of(
    bundle: Bundle, dataset: Dataset, own: Path, parent: Path | None, report: Progress
) -> EmbeddingCache:
    """The cache of a bundle's embedder, in the run's own folder `own`.

    A stage-2 run has its parent's embedder and so its parent's vectors: they are built there once, where that can
    be written, and linked here, so that a hundred runs from one parent embed the catalogue once.
    """
    ranks = Ranks()
    if ranks.is_first and not (own / CACHE_MANIFEST).exists():
        shared = parent / own.name if parent is not None and os.access(parent, os.W_OK) else None
        if shared is not None:
            if (shared / CACHE_MANIFEST).exists():
                found = CacheManifest.read(shared / CACHE_MANIFEST)
                if found.embedder_checksum != bundle.embedder_checksum or found.dataset_checksum != dataset.checksum:
                    raise ModelError(
                        f"the cache in {shared} is of another embedder or dataset",
                        next_step=f"remove {shared}; it is made again when needed",
                    )
            else:
                build_cache(bundle, dataset, shared, progress=report)
            _link(shared, own)
        else:
            build_cache(bundle, dataset, own, progress=report)
    ranks.wait()
    return EmbeddingCache.open(own, bundle, dataset, verify=ranks.is_first)


def _link(source: Path, target: Path) -> None:
    """The files of a cache under another name; the manifest last, since it says that all is there."""
    target.mkdir(parents=True, exist_ok=True)
    names = [*CacheManifest.read(source / CACHE_MANIFEST).shards, CACHE_MANIFEST]
    for name in names:
        (target / name).unlink(missing_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:  # another file system
            shutil.copyfile(source / name, target / name)
