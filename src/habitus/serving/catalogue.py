"""The trained catalogue on disk: what its items are called, and from an id or from words to their rows.

    V  rows of the catalogue

RUN/serve/catalogue holds the raw ids, names and category codes, copied once from the dataset that the run was trained
on; the vectors are those of RUN/catalogue. With both, a run can be served without its dataset.
"""

import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
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
from habitus.serving.values import IdFormat, Key
from habitus.store import SplitName
from habitus.typed import Sealed

_FORMAT_VERSION = 1
_MANIFEST, _IDS, _QUERIES = "manifest.json", "ids.parquet", "queries.safetensors"
# Catalogues that were written before these existed, or of a schema that displays nothing, are without them.
_DISPLAY, _COUNTS = "display.parquet", "counts.npy"
_SAMPLE_QUERIES, _SAMPLE_WINDOWS = 2_048, 64
_SEARCHED_ROWS = 1 << 16  # at a time: popular items are found without reading the rest


class IdLookup:
    """From keys to catalogue rows: sorted 64-bit hashes and their rows, 16 bytes per item whatever the ids are."""

    def __init__(self, id_format: IdFormat, ids: pa.Table) -> None:
        self.id_format = id_format
        self.ids = ids
        hashes = np.fromiter(map(hash, _iterate_keys(id_format, ids)), np.int64, ids.num_rows)
        self._order = np.argsort(hashes, kind="stable")
        self._hashes = hashes[self._order]

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """The catalogue row of each key, -1 where there is none."""
        hashes = np.fromiter(map(hash, keys), np.int64, len(keys))
        low = np.searchsorted(self._hashes, hashes, "left")
        counts = np.searchsorted(self._hashes, hashes, "right") - low
        places = np.repeat(low - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        alike = self._order[places]  # rows of equal hash: nearly always one or none per key
        alike_keys = self.id_format.keys(self.ids.take(pa.array(alike)))
        numbers = np.repeat(np.arange(len(keys)), counts).tolist()
        rows = [-1] * len(keys)
        for number, row, key in zip(numbers, alike.tolist(), alike_keys, strict=True):
            if key == keys[number]:
                rows[number] = row
        return rows


def _iterate_keys(id_format: IdFormat, ids: pa.Table) -> Iterator[Key]:
    for start in range(0, ids.num_rows, 1 << 18):  # as Python objects, ids take ten times their size
        yield from id_format.keys(ids.slice(start, 1 << 18))


class ItemNames:
    """What people see of the trained items, and search over it and the ids by the beginnings of words.

    Search reads plain texts: in lower case, without accents, words between single spaces. What begins a word of such a
    text stands after a space, so that looking for words is looking for substrings. Popular items come first; without
    displayed columns only ids can be searched.
    """

    def __init__(self, ids: pa.Table, display: pa.Table | None, counts: np.ndarray | None) -> None:
        self.ids = ids
        self.display = display
        self.counts = counts  # int64 [V]: training events of each item

    def at(self, rows: Iterable[int]) -> list[dict[str, str]]:
        """The displayed values of catalogue rows; missing ones are absent."""
        rows = list(rows)
        if self.display is None:
            return [{} for _ in rows]
        records = self.display.take(pa.array(rows, pa.int64())).to_pylist()
        return [{name: text for name, text in record.items() if text is not None} for record in records]

    @cached_property
    def popular_rows(self) -> np.ndarray:
        """All rows, the most frequent in training first; in catalogue order where that is not known."""
        if self.counts is None:
            return np.arange(self.ids.num_rows)
        return np.argsort(-self.counts, kind="stable")

    def search(self, words: Sequence[str], limit: int, hidden: set[int]) -> list[int]:
        """The most popular rows whose names or ids hold a word that begins with each of the given ones."""
        rows: list[int] = []
        for at in range(0, self.ids.num_rows, _SEARCHED_ROWS):
            chosen = self.popular_rows[at : at + _SEARCHED_ROWS]
            if words:
                chosen = chosen[matches(self._plain_texts.slice(at, _SEARCHED_ROWS), words)]
            rows += [row for row in chosen.tolist() if row not in hidden][: limit - len(rows)]
            if len(rows) == limit:
                break
        return rows

    @cached_property
    def _plain_texts(self) -> pa.ChunkedArray:
        """What search reads, in the order of `popular_rows`."""
        columns = list(self.ids.columns)
        if self.display is not None:
            columns += [column for column in self.display.columns if not _is_address(column)]
        filled = [pc.fill_null(column.cast(pa.string()), "") for column in columns]
        texts = pc.binary_join_element_wise(*filled, " ").take(pa.array(self.popular_rows))
        return plain_texts(texts)


def words_of(text: str) -> list[str]:
    """The words to search for."""
    return list(dict.fromkeys(plain_texts(pa.array([text]))[0].as_py().split()))


def plain_texts(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts as search reads them, each with a space before every word."""
    bare = pc.replace_substring_regex(pc.utf8_normalize(texts, form="NFKD"), r"\p{M}+", "")
    return pc.binary_join_element_wise("", pc.replace_substring_regex(pc.utf8_lower(bare), r"[^\p{L}\p{N}]+", " "), " ")


def matches(plain: pa.Array | pa.ChunkedArray, words: Sequence[str]) -> np.ndarray:
    """Which of the plain texts hold a word that begins with each of the given ones, bool."""
    found = np.ones(len(plain), bool)
    for word in words:
        found &= pc.match_substring(plain, f" {word}").to_numpy(zero_copy_only=False)
    return found


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


class CatalogueManifest(Sealed):
    """manifest.json of RUN/serve/catalogue."""

    format_version: int = _FORMAT_VERSION
    bundle_checksum: str
    dataset_checksum: str
    num_items: int
    categories: dict[str, str] = Field(description="File of the codes by field.")
    numbers: dict[str, str] = Field(default_factory=dict, description="File of the values by field, times in days.")
    files: dict[str, str] = Field(description="SHA-256 by name.")


def open_catalogue(bundle: Bundle, data: Path | None, note: Note, progress: Progress | None = None) -> TrainedCatalogue:
    """The catalogue of a run. `data` is needed the first time only, to copy the ids and to embed the items."""
    folder = bundle.run_path / "serve" / "catalogue"
    if data is not None:
        dataset = Dataset.open(data, verify=False)
        check_dataset(bundle, dataset, other_dataset=None)
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


def _is_address(column: pa.ChunkedArray) -> bool:
    """Whether a displayed column holds URLs, whose words nobody searches for."""
    first = column.drop_null()
    return len(first) > 0 and first[0].as_py().startswith(("http://", "https://"))
