"""The catalogue as serving needs it: raw ids, category codes and vectors, without the rest of the dataset.

RUN/serve/catalogue holds the ids and the codes, copied once from the dataset that the run was trained on; the vectors
are those of RUN/catalogue. With both, a run can be served where its dataset is not.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor

from habitus.data import Dataset, SplitName, item_file
from habitus.errors import ModelError
from habitus.evaluation import cache_folder, check_dataset, find_cache
from habitus.files import sha256_of, staged_folder
from habitus.model import CACHE_MANIFEST, Bundle, CacheManifest, EmbeddingCache, batch_tensors, build_cache
from habitus.progress import Note, Progress
from habitus.serving.ids import IdKind, IdLookup
from habitus.typed import Typed

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
IDS, QUERIES = "ids.parquet", "queries.safetensors"
SAMPLE_QUERIES, SAMPLE_WINDOWS = 2_048, 64


class CatalogueManifest(Typed):
    """manifest.json of RUN/serve/catalogue."""

    format_version: int = FORMAT_VERSION
    bundle_checksum: str
    dataset_checksum: str
    num_items: int
    categories: dict[str, str] = Field(description="File of the codes by field.")
    files: dict[str, str] = Field(description="SHA-256 by name.")


@dataclass(frozen=True)
class ServedCatalogue:
    """The items that a run was trained with: catalogue row -> id, codes and vector, and id -> row."""

    ids: pa.Table
    codes: dict[str, np.ndarray]  # category -> codes [num_items], 0 where missing or rare beyond counting
    cache: EmbeddingCache
    kind: IdKind
    lookup: IdLookup
    sample_queries: Tensor  # float32 [n, joint_dim]: the model's, for histories of the dataset

    @property
    def num_items(self) -> int:
        return self.ids.num_rows

    def ids_at(self, rows: Iterable[int]) -> list[Any]:
        """The raw ids of catalogue rows; a mapping each where an item is an item×field pair."""
        found = self.ids.take(pa.array(list(rows), pa.int64()))
        return found.to_pylist() if self.kind.is_pair else found.column(0).to_pylist()


def open_catalogue(
    bundle: Bundle, data: Path | None, note: Note, progress: Progress | None = None
) -> ServedCatalogue:
    """The catalogue of a run. `data` is needed the first time only, to copy the ids and to embed the items."""
    folder = bundle.run_path / "serve" / "catalogue"
    if data is not None:
        dataset = Dataset.open(data, verify=False)
        check_dataset(bundle, dataset, other_dataset=False)
        cache = find_cache(bundle, dataset, note)
        if cache is None:
            note(f"{bundle.run_path} has no embedding cache; embedding {dataset.num_items:,} items")
            cache = build_cache(bundle, dataset, cache_folder(bundle, dataset), progress=progress)
        if not (folder / MANIFEST).exists():
            _publish(bundle, dataset, cache, folder)
        return _served(folder, bundle, cache)
    if not (folder / MANIFEST).exists():
        raise ModelError(
            f"{bundle.run_path} does not hold the ids of its items yet",
            expected="the prepared dataset that the run was trained on, the first time that the run is served",
            next_step=f"pass --data DATASET (in Python: data=), once; the ids are then kept in {folder}",
        )
    return _served(folder, bundle, _own_cache(bundle))


def _own_cache(bundle: Bundle) -> EmbeddingCache:
    """The vectors of the run's catalogue, or of its stage-1 parent's with the same embedder."""
    parent = bundle.recipe.train.parent
    folders = [bundle.run_path / "catalogue"]
    folders += [bundle.run_path.parent / parent / "catalogue"] if parent else []
    for folder in folders:
        if not (folder / CACHE_MANIFEST).exists():
            continue
        manifest = CacheManifest.read(folder / CACHE_MANIFEST)
        mine = (bundle.embedder_checksum, bundle.manifest.dataset_checksum)
        if (manifest.embedder_checksum, manifest.dataset_checksum) != mine:
            continue
        for name, checksum in manifest.shards.items():
            if not (folder / name).exists() or sha256_of(folder / name) != checksum:
                raise ModelError(
                    f"{folder / name} is missing or has changed", next_step=f"remove {folder}, embed again"
                )
        return EmbeddingCache(folder, manifest)
    raise ModelError(
        f"{folders[0]} holds no vectors of this run's catalogue",
        next_step=f"habitus embed {bundle.run_path} --data DATASET, or pass --data DATASET",
    )


def _publish(bundle: Bundle, dataset: Dataset, cache: EmbeddingCache, folder: Path) -> None:
    """Copy what serving needs of a dataset beside the run."""
    try:
        with staged_folder(folder) as stage:
            _copy(dataset, f"items/{IDS}", stage / IDS)
            categories = {}
            for number, spec in enumerate(dataset.fields.item):
                if spec.kind == "category":
                    name = f"codes-{number:02d}.npy"
                    _copy(dataset, item_file(number), stage / name)
                    categories[spec.name] = name
            save_file({"queries": _sample_queries(bundle, dataset, cache)}, stage / QUERIES)
            shutil.copymode(stage / IDS, stage / QUERIES)  # safetensors gives its files to their owner alone
            files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
            CatalogueManifest(
                bundle_checksum=bundle.checksum,
                dataset_checksum=dataset.checksum,
                num_items=dataset.num_items,
                categories=categories,
                files=files,
            ).write(stage / MANIFEST)
    except FileExistsError:
        pass  # another process has published the same files meanwhile
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written: {error.strerror}",
            expected="a run folder that can be written to when it is first served",
            next_step="copy the run to where you can write",
        ) from error


@torch.no_grad()
def _sample_queries(bundle: Bundle, dataset: Dataset, cache: EmbeddingCache) -> Tensor:
    """Some queries of the model, to measure approximate indexes with: of validation users, where there are any."""
    split: SplitName = "validation" if dataset.counts("validation").windows else "train"
    device, found = bundle.device, []
    for position in range(dataset.num_batches(split, SAMPLE_WINDOWS)):
        batch = dataset.batch(split, SAMPLE_WINDOWS, position=position)
        rows, places = np.unique(batch.items, return_inverse=True)
        events = cache.rows(rows).to(device).float()[torch.from_numpy(places.reshape(batch.items.shape)).to(device)]
        with bundle.autocast():
            queries = bundle.model.queries(batch_tensors(batch, device), events)
        found.append(queries[torch.from_numpy(batch.targets >= 0).to(device)].float().cpu())
        if sum(map(len, found)) >= 4 * SAMPLE_QUERIES:
            break
    # Neighbouring queries of one user resemble each other, so they are taken from all over.
    together = torch.cat(found)
    return together[torch.linspace(0, len(together) - 1, min(SAMPLE_QUERIES, len(together))).long()].contiguous()


def _copy(dataset: Dataset, name: str, to: Path) -> None:
    shutil.copyfile(dataset.path / name, to)
    if sha256_of(to) != dataset.manifest.files[name].sha256:
        raise ModelError(f"{dataset.path / name} has changed since it was prepared", next_step="prepare it again")


def _served(folder: Path, bundle: Bundle, cache: EmbeddingCache) -> ServedCatalogue:
    manifest = CatalogueManifest.read(folder / MANIFEST)
    if manifest.format_version != FORMAT_VERSION or manifest.bundle_checksum != bundle.checksum:
        raise ModelError(
            f"{folder} is of another model, or of another version of habitus",
            next_step=f"remove {folder} and pass --data DATASET",
        )
    for name, checksum in manifest.files.items():
        if not (folder / name).exists() or sha256_of(folder / name) != checksum:
            raise ModelError(
                f"{folder / name} is missing or has changed", next_step=f"remove {folder} and pass --data DATASET"
            )
    ids = pq.read_table(folder / IDS).combine_chunks()
    if not ids.num_rows == manifest.num_items == cache.manifest.num_items:
        raise ModelError(
            f"{folder} holds {ids.num_rows:,} ids for {cache.manifest.num_items:,} vectors in {cache.path}",
            next_step=f"remove {folder} and pass --data DATASET",
        )
    codes = {field: np.load(folder / name, mmap_mode="r") for field, name in manifest.categories.items()}
    kind = IdKind.of(bundle.schema, ids)
    queries = load_file(folder / QUERIES)["queries"]
    return ServedCatalogue(ids, codes, cache, kind, IdLookup(kind, ids), queries)
