"""The items that are served: the trained catalogue on disk, and the candidates in memory.

    V  rows of the trained catalogue      n  rows of items added at run time, after them

RUN/serve/catalogue holds the raw ids, names and category codes, copied once from the dataset that the run was trained
on; the vectors are those of RUN/catalogue. With both, a run can be served without its dataset. The candidates are this
catalogue plus the items added since, minus those withdrawn.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
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

from habitus.data import DISPLAY_FILE, Dataset, find_candidates, item_file
from habitus.errors import ModelError
from habitus.evaluation import cache_folder, check_dataset, find_cache
from habitus.files import sha256_of, staged_folder
from habitus.model import CACHE_MANIFEST, Bundle, CacheManifest, EmbeddingCache, batch_tensors, build_cache
from habitus.progress import Note, Progress
from habitus.serving.ids import IdFormat, IdLookup, Key
from habitus.serving.names import ItemNames, matches, plain_texts
from habitus.serving.scan import HIDDEN
from habitus.store import SplitName
from habitus.typed import Sealed

_FORMAT_VERSION = 1
_MANIFEST, _IDS, _QUERIES = "manifest.json", "ids.parquet", "queries.safetensors"
# Catalogues that were written before these existed, or of a schema that displays nothing, are without them.
_DISPLAY, _COUNTS = "display.parquet", "counts.npy"
_SAMPLE_QUERIES, _SAMPLE_WINDOWS = 2_048, 64
# On a CPU the catalogue is held as float32 up to this size; above it, it is read as stored and converted on the way.
_RESIDENT_BYTES = 8 << 30


class CatalogueManifest(Sealed):
    """manifest.json of RUN/serve/catalogue."""

    format_version: int = _FORMAT_VERSION
    bundle_checksum: str
    dataset_checksum: str
    num_items: int
    categories: dict[str, str] = Field(description="File of the codes by field.")
    numbers: dict[str, str] = Field(default_factory=dict, description="File of the values by field, times in days.")
    files: dict[str, str] = Field(description="SHA-256 by name.")


@dataclass(frozen=True)
class TrainedCatalogue:
    """The items that a run was trained with: from row to id, codes and vector, and from id to row."""

    ids: pa.Table
    codes: dict[str, np.ndarray]  # category -> codes [num_items], 0 where missing or too rare to have a code; of
    # several categories [num_items, width]
    numbers: dict[str, np.ndarray]  # number or time -> values float32 [num_items], NaN where missing
    cache: EmbeddingCache
    id_format: IdFormat
    lookup: IdLookup
    sample_queries: Tensor  # float32 [n, joint_dim], of histories of the dataset
    names: ItemNames
    context_rows: frozenset[int] = frozenset()  # items that the schema's [targets] leave out of the candidates

    @property
    def num_items(self) -> int:
        return self.ids.num_rows

    def ids_at(self, rows: Iterable[int]) -> list[Any]:
        """The raw ids of catalogue rows; a mapping each where an item is an item×field pair."""
        ids = self.ids.take(pa.array(list(rows), pa.int64()))
        return ids.to_pylist() if self.id_format.is_pair else ids.column(0).to_pylist()


def open_catalogue(bundle: Bundle, data: Path | None, note: Note, progress: Progress | None = None) -> TrainedCatalogue:
    """The catalogue of a run. `data` is needed the first time only, to copy the ids and to embed the items."""
    folder = bundle.run_path / "serve" / "catalogue"
    if data is not None:
        dataset = Dataset.open(data, verify=False)
        check_dataset(bundle, dataset, other_dataset=False)
        cache = find_cache(bundle, dataset, note)
        if cache is None:
            note(f"{bundle.run_path} has no embedding cache yet; embedding {dataset.num_items:,} items")
            cache = build_cache(bundle, dataset, cache_folder(bundle, dataset), progress=progress)
        if not (folder / _MANIFEST).exists():
            _write_catalogue(bundle, dataset, cache, folder)
        return _load_catalogue(folder, bundle, cache)
    if not (folder / _MANIFEST).exists():
        raise ModelError(
            f"{bundle.run_path} does not hold the ids of its items yet",
            expected="the prepared dataset that the run was trained on, the first time that the run is served",
            next_step=f"pass --data DATASET (in Python: data=), once; they are then stored in {folder}",
        )
    return _load_catalogue(folder, bundle, _find_own_cache(bundle))


def _find_own_cache(bundle: Bundle) -> EmbeddingCache:
    """The vectors of the run's catalogue, or of its stage-1 parent's with the same embedder."""
    parent = bundle.recipe.train.parent
    folders = [bundle.run_path / "catalogue"]
    folders += [bundle.run_path.parent / parent / "catalogue"] if parent else []
    for folder in folders:
        if not (folder / CACHE_MANIFEST).exists():
            continue
        manifest = CacheManifest.read(folder / CACHE_MANIFEST)
        expected = (bundle.embedder_checksum, bundle.manifest.dataset_checksum)
        if (manifest.embedder_checksum, manifest.dataset_checksum) != expected:
            continue
        for name, checksum in manifest.shards.items():
            if not (folder / name).exists() or sha256_of(folder / name) != checksum:
                raise ModelError(
                    f"{folder / name} is missing or has changed", next_step=f"remove {folder} and embed again"
                )
        return EmbeddingCache(folder, manifest)
    raise ModelError(
        f"{folders[0]} holds no vectors of this run's catalogue",
        next_step=f"habitus embed {bundle.run_path} --data DATASET, or pass --data DATASET",
    )


def _write_catalogue(bundle: Bundle, dataset: Dataset, cache: EmbeddingCache, folder: Path) -> None:
    """Copy what serving needs of a dataset into the run folder."""
    try:
        with staged_folder(folder) as stage:
            _copy_file(dataset, f"items/{_IDS}", stage / _IDS)
            if dataset.schema.targets is None:
                _copy_file(dataset, "items/train_count.npy", stage / _COUNTS)
            else:
                np.save(stage / _COUNTS, dataset.item_target_counts)
            if DISPLAY_FILE in dataset.manifest.files:
                _copy_file(dataset, DISPLAY_FILE, stage / _DISPLAY)
            categories, numbers = {}, {}
            for number, spec in enumerate(dataset.fields.item):
                if spec.kind in ("category", "categories"):
                    name = f"codes-{number:02d}.npy"
                    _copy_file(dataset, item_file(number), stage / name)
                    categories[spec.name] = name
                elif spec.kind == "number":
                    numbers[spec.name] = f"numbers-{number:02d}.npy"
                    _copy_file(dataset, item_file(number), stage / numbers[spec.name])
            save_file({"queries": _sample_queries(bundle, dataset, cache)}, stage / _QUERIES)
            shutil.copymode(stage / _IDS, stage / _QUERIES)  # safetensors writes files that only their owner can read
            files = {file.name: sha256_of(file) for file in sorted(stage.iterdir())}
            CatalogueManifest(
                bundle_checksum=bundle.checksum,
                dataset_checksum=dataset.checksum,
                num_items=dataset.num_items,
                categories=categories,
                numbers=numbers,
                files=files,
            ).write(stage / _MANIFEST)
    except FileExistsError:
        pass  # another process has published the same files meanwhile
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written: {error.strerror}",
            expected="a run folder that can be written to when it is first served",
            next_step="copy the run to a folder that you can write to",
        ) from error


@torch.no_grad()
def _sample_queries(bundle: Bundle, dataset: Dataset, cache: EmbeddingCache) -> Tensor:
    """Some queries of the model, to measure approximate indexes with; of validation users if there are any."""
    dataset = dataset.with_seq_len(bundle.recipe.data.seq_len)
    split: SplitName = "validation" if dataset.counts("validation").windows else "train"
    device, samples = bundle.device, []
    for position in range(dataset.num_batches(split, _SAMPLE_WINDOWS)):
        batch = dataset.batch(split, _SAMPLE_WINDOWS, position=position)
        rows, places = np.unique(batch.items, return_inverse=True)
        events = cache.rows(rows).to(device).float()[torch.from_numpy(places.reshape(batch.items.shape)).to(device)]
        with bundle.autocast():
            queries = bundle.model.queries(batch_tensors(batch, device), events)
        samples.append(queries[torch.from_numpy(batch.targets >= 0).to(device)].float().cpu())
        if sum(map(len, samples)) >= 4 * _SAMPLE_QUERIES:
            break
    # Neighbouring queries of one user are alike, so the sample is spread evenly over all of them.
    pool = torch.cat(samples)
    return pool[torch.linspace(0, len(pool) - 1, min(_SAMPLE_QUERIES, len(pool))).long()].contiguous()


def _copy_file(dataset: Dataset, name: str, to: Path) -> None:
    shutil.copyfile(dataset.path / name, to)
    if sha256_of(to) != dataset.manifest.files[name].sha256:
        raise ModelError(f"{dataset.path / name} has changed since it was prepared", next_step="run prepare again")


def _load_catalogue(folder: Path, bundle: Bundle, cache: EmbeddingCache) -> TrainedCatalogue:
    manifest = CatalogueManifest.read(folder / _MANIFEST)
    if manifest.format_version != _FORMAT_VERSION or manifest.bundle_checksum != bundle.checksum:
        raise ModelError(
            f"{folder} belongs to another model, or to another version of habitus",
            next_step=f"remove {folder} and pass --data DATASET",
        )
    for name, checksum in manifest.files.items():
        if not (folder / name).exists() or sha256_of(folder / name) != checksum:
            raise ModelError(
                f"{folder / name} is missing or has changed", next_step=f"remove {folder} and pass --data DATASET"
            )
    ids = pq.read_table(folder / _IDS).combine_chunks()
    if not ids.num_rows == manifest.num_items == cache.manifest.num_items:
        raise ModelError(
            f"{folder} holds {ids.num_rows:,} ids for {cache.manifest.num_items:,} vectors in {cache.path}",
            next_step=f"remove {folder} and pass --data DATASET",
        )
    codes, numbers = (
        {field: np.load(folder / name, mmap_mode="r") for field, name in part.items()}
        for part in (manifest.categories, manifest.numbers)
    )
    id_format = IdFormat.from_schema(bundle.schema, ids)
    queries = load_file(folder / _QUERIES)["queries"]
    display = pq.read_table(folder / _DISPLAY).combine_chunks() if _DISPLAY in manifest.files else None
    counts = np.load(folder / _COUNTS) if _COUNTS in manifest.files else None
    names = ItemNames(ids, display, counts)
    allowed = find_candidates(bundle.schema, bundle.encoders.item_values, codes, lambda: ids.column(0))
    context = frozenset() if allowed is None else frozenset(np.flatnonzero(~allowed).tolist())
    return TrainedCatalogue(ids, codes, numbers, cache, id_format, IdLookup(id_format, ids), queries, names, context)


class CandidateItems:
    """Rows 0 to V-1 are the trained catalogue, the next n the items added at run time. Not safe for several threads."""

    def __init__(self, catalogue: TrainedCatalogue, device: torch.device) -> None:
        self.catalogue = catalogue
        self.device = device
        cache = catalogue.cache
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.dtype = cache.dtype if device.type == "cuda" else torch.float32
        self.trained_vectors = _load_resident(cache.pieces(0, catalogue.num_items), self.dtype, device)
        self.num_trained = catalogue.num_items
        self.num_active = self.num_trained - len(catalogue.context_rows)
        self.added_vectors = torch.empty(0, cache.manifest.joint_dim, dtype=self.dtype, device=device)
        self.num_added = 0
        self.added_keys: list[Key] = []  # by row
        self.added_origins: list[int] = []  # by row: the trained row that it replaces, -1 of a new item
        self.added_categories: list[Mapping[str, Any]] = []  # by row, as texts
        self.added_display: list[dict[str, str]] = []  # by row
        self.added_rows: dict[Key, int] = {}  # of withdrawn items too
        self.hidden: set[int] = set(catalogue.context_rows)  # and rows that are withdrawn or replaced
        self._bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.num_trained + self.num_added

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """The row of each item's newest vector, withdrawn or not; -1 where the item is unknown."""
        rows = self.catalogue.lookup.rows_of(keys)
        if self.added_rows:
            rows = [self.added_rows.get(key, row) for key, row in zip(keys, rows, strict=True)]
        return rows

    def newest_rows(self) -> dict[int, int]:
        """Catalogue row -> row of its newest vector, for trained items that were changed."""
        keys = list(self.added_rows)
        trained = self.catalogue.lookup.rows_of(keys) if keys else []
        return {row: self.added_rows[key] for key, row in zip(keys, trained, strict=True) if row >= 0}

    def vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of rows, in the type that scores are computed in."""
        flat = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        result = torch.empty(len(rows), self.added_vectors.shape[1], dtype=self.dtype, device=self.device)
        first = 0
        for piece in (*self.trained_vectors, self.added_vectors[: self.num_added]):
            here = ((flat >= first) & (flat < first + len(piece))).nonzero().flatten()
            if len(here):
                places = (flat[here] - first).to(piece.device)
                result[here] = piece[places].to(self.device, self.dtype)
            first += len(piece)
        return result

    def pieces(self) -> list[Tensor]:
        """All rows, as the parts of one table."""
        added = [self.added_vectors[: self.num_added]] if self.num_added else []
        return [*self.trained_vectors, *added]

    def bias(self) -> Tensor | None:
        """What to add to scores so that hidden rows are not returned; None if there are none."""
        if not self.hidden:
            return None
        if self._bias is None or len(self._bias) != self.num_rows:
            self._bias = torch.zeros(self.num_rows, device=self.device)
            self._bias[torch.tensor(sorted(self.hidden), device=self.device)] = HIDDEN
        return self._bias

    def put(self, key: Key, categories: Mapping[str, Any], display: dict[str, str], vector: Tensor) -> None:
        """Add an item, or give it another vector."""
        row = self.added_rows.get(key, -1)
        if row < 0:
            trained = self.catalogue.lookup.rows_of([key])[0]
            row = self._append(key, trained)
            if trained >= 0:
                self._hide(trained)
            self.num_active += 1
        elif row in self.hidden:
            self.hidden.discard(row)
            self.num_active += 1
            self._bias = None
        place = row - self.num_trained
        # Rounded as the catalogue's vectors are, so that an item's score does not depend on where it stands.
        self.added_vectors[place] = vector.to(self.catalogue.cache.dtype).to(self.device, self.dtype)
        self.added_categories[place] = categories
        self.added_display[place] = display

    def withdraw(self, key: Key) -> bool:
        """Stop recommending an item; False where it was not being recommended."""
        row = self.rows_of([key])[0]
        if row < 0 or row in self.hidden:
            return False
        self._hide(row)
        return True

    def is_active(self, key: Key) -> bool:
        """Whether an item may be recommended now."""
        row = self.rows_of([key])[0]
        return row >= 0 and row not in self.hidden

    def ids_at(self, rows: Iterable[int]) -> list[Any]:
        """The raw ids of rows."""
        rows = list(rows)
        trained = [row for row in rows if row < self.num_trained]
        ids = dict(zip(trained, self.catalogue.ids_at(trained), strict=True)) if trained else {}
        to_id = self.catalogue.id_format.to_id
        return [ids[row] if row < self.num_trained else to_id(self.added_keys[row - self.num_trained]) for row in rows]

    def display_at(self, rows: Iterable[int]) -> list[dict[str, str]]:
        """What people see of rows beside their ids."""
        rows = list(rows)
        trained = [row for row in rows if row < self.num_trained]
        display = dict(zip(trained, self.catalogue.names.at(trained), strict=True))
        return [display[row] if row in display else self.added_display[row - self.num_trained] for row in rows]

    def find(self, words: Sequence[str], limit: int) -> list[int]:
        """Rows that may be recommended and whose names or ids hold the given words; without words popular ones."""
        trained = self.catalogue.names.search(words, limit, self.hidden)
        if not self.num_added:
            return trained
        texts = [" ".join(map(str, (key, *self.added_display[n].values()))) for n, key in enumerate(self.added_keys)]
        places = np.flatnonzero(matches(plain_texts(pa.array(texts)), words))[::-1] + self.num_trained
        added = [row for row in places.tolist() if row not in self.hidden]
        return (added + trained if words else trained + added)[:limit]

    def _append(self, key: Key, origin: int) -> int:
        if self.num_added == len(self.added_vectors):
            grown = self.added_vectors.new_empty(max(64, 2 * len(self.added_vectors)), self.added_vectors.shape[1])
            grown[: self.num_added] = self.added_vectors[: self.num_added]
            self.added_vectors = grown
        row = self.num_trained + self.num_added
        self.num_added += 1
        self.added_keys.append(key)
        self.added_origins.append(origin)
        self.added_categories.append({})
        self.added_display.append({})
        self.added_rows[key] = row
        return row

    def _hide(self, row: int) -> None:
        if row not in self.hidden:
            self.hidden.add(row)
            self.num_active -= 1
            self._bias = None


def _load_resident(pieces: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The catalogue as one table on the device if it fits, else the mapped files as they are."""
    needed = sum(piece.numel() for piece in pieces) * dtype.itemsize
    if device.type == "cuda":
        fits = needed < torch.cuda.mem_get_info(device)[0] * 0.8
    else:
        fits = needed <= _RESIDENT_BYTES
    if not fits:
        return pieces
    table = torch.empty(sum(map(len, pieces)), pieces[0].shape[1], dtype=dtype, device=device)
    at = 0
    for piece in pieces:
        table[at : at + len(piece)] = piece
        at += len(piece)
    return [table]
