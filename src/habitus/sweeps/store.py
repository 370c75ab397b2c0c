"""The run store: one folder per content-hashed Recipe, one Record each. docs/store.md describes the format."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from habitus.data import Dataset
from habitus.errors import ConfigError, RunError
from habitus.files import sha256_of, write_atomic, write_once
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import (
    ATTEMPTS,
    INFO_FILE,
    RECIPE_FILE,
    RECORD_FILE,
    EvaluationFiles,
    StoreInfo,
    cell_folder,
    changed_record_error,
    is_recipe_hash,
    read_record,
    read_store_info,
)
from habitus.sweeps.preset import EvaluationSettings


class Store:
    """A store folder that has been checked. Cells are read and written through it."""

    def __init__(self, path: Path, info: StoreInfo) -> None:
        self.path = path
        self.info = info
        self._read: dict[str, tuple[int, Record]] = {}  # by hash, with the time of the file

    @classmethod
    def open(cls, path: str | Path) -> "Store":
        """The store in a folder; refuses what is not a store, or one of another version."""
        path = Path(path)
        return cls(path, read_store_info(path))

    @classmethod
    def create(cls, path: str | Path, dataset: Dataset, settings: EvaluationSettings) -> "Store":
        """The store for this dataset and evaluation: opened where there is one, which must be for the same."""
        path = Path(path)
        if not (path / INFO_FILE).exists():
            if path.exists() and (not path.is_dir() or (any(path.iterdir()) and not (path / "evaluation").is_dir())):
                raise RunError(f"{path} exists and is not a store", expected="a new folder, or a store")
            (path / "evaluation").mkdir(parents=True, exist_ok=True)
            info = StoreInfo(dataset_checksum=dataset.checksum, evaluation=_evaluation_files(path, dataset, settings))
            write_once(path / INFO_FILE, info.to_json().encode())
        store = cls.open(path)
        store.check(dataset.checksum, settings)
        for name in ("cells", "sweeps", "workers"):
            (path / name).mkdir(exist_ok=True)
        return store

    def check(self, dataset_checksum: str, settings: EvaluationSettings | None = None) -> None:
        """Refuse another dataset or another evaluation than the store's."""
        if dataset_checksum != self.info.dataset_checksum:
            raise RunError(
                f"{self.path} belongs to another dataset (checksum {self.info.dataset_checksum[:12]}, "
                f"not {dataset_checksum[:12]})",
                expected="one dataset per store, or losses are not comparable",
                next_step="give another --store",
            )
        for name in settings.to_values() if settings else ():
            value, stored = getattr(settings, name), getattr(self.info.evaluation, name)
            if stored != value:
                raise ConfigError(
                    f"the evaluation has {name} = {value}, and {self.path} was begun with {name} = {stored}",
                    expected="one evaluation for the whole store, or losses are not comparable",
                    next_step="give another --store, or a preset with that evaluation",
                )

    @property
    def laws(self) -> Path:
        return self.path / "laws.json"

    def cell(self, digest: str) -> Path:
        return cell_folder(self.path, digest)

    def trunk(self, recipe: Recipe) -> Path | None:
        """The folder that runs of schedule wsd share until they decay; only its owner's speed depends on it."""
        if recipe.train.schedule != "wsd":
            return None
        return self.path / "trunks" / recipe.trunk_hash(self.info.dataset_checksum)

    def has_record(self, digest: str) -> bool:
        return (self.cell(digest) / RECORD_FILE).exists()

    def settled(self, digest: str) -> bool:
        """Whether the Record is there and nothing is left to be put in its place."""
        cell = self.cell(digest)
        return (cell / RECORD_FILE).exists() and not (cell / ATTEMPTS).exists()

    def add(self, digest: str, recipe: Recipe) -> None:
        """Make the folder of a cell, so that any worker can run it."""
        if not self.has_recipe(digest):
            cell = self.cell(digest)
            cell.mkdir(parents=True, exist_ok=True)
            recipe.write(cell / RECIPE_FILE)

    def has_recipe(self, digest: str) -> bool:
        return (self.cell(digest) / RECIPE_FILE).exists()

    def recipe(self, digest: str) -> Recipe:
        """The recipe of a cell, checked against the name of its folder."""
        path = self.cell(digest) / RECIPE_FILE
        recipe = Recipe.read(path)
        if recipe.hash(self.info.dataset_checksum) != digest:
            raise RunError(
                f"{path} is not the recipe that its folder is named after",
                expected="recipes as the sweep wrote them",
                next_step=f"delete {path.parent} and run the sweep again",
            )
        return recipe

    def record(self, digest: str) -> Record | None:
        """The Record of a cell, checked to be as it was published; None where there is none yet."""
        path = self.cell(digest) / RECORD_FILE
        try:
            modified = path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if digest in self._read and self._read[digest][0] == modified:
            return self._read[digest][1]
        record = read_record(self.path, digest)
        if record is None:
            return None
        if record.recipe.hash(self.info.dataset_checksum) != digest:
            raise changed_record_error(path, "its recipe is not the one that the folder is named after")
        self._read[digest] = (modified, record)
        return record

    def digests(self) -> list[str]:
        """All cells, with a Record or not."""
        folder = self.path / "cells"
        if not folder.is_dir():
            return []
        return sorted(path.name for path in folder.iterdir() if path.is_dir() and is_recipe_hash(path.name))

    def newest_record(self) -> float:
        """When the last Record was published, by the file server's clock; 0 where there is none."""
        return max((path.stat().st_mtime for path in self.path.glob(f"cells/*/{RECORD_FILE}")), default=0.0)

    def events(self) -> Iterator[dict[str, Any]]:
        """What the workers wrote down, one worker after the other."""
        for path in sorted((self.path / "workers").glob("*.jsonl")):
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # the last line of a worker that was killed
                    continue


def _evaluation_files(path: Path, dataset: Dataset, settings: EvaluationSettings) -> EvaluationFiles:
    """The queries and candidates of the store, written as files that anyone can compare."""
    import io

    import numpy as np

    from habitus.evaluation import EvaluateOptions, catalogue_subset, query_set

    options = EvaluateOptions(
        queries=settings.queries,
        batch_sequences=settings.batch_sequences,
        catalogue_items=settings.catalogue_items,
        seed=settings.seed,
    )
    queries = query_set(dataset, options)
    candidates = catalogue_subset(dataset, queries, options)
    arrays = {"queries": np.concatenate([batch.events for batch in queries])}
    if candidates is not None:
        arrays["candidates"] = candidates
    checksums = {}
    for name, array in arrays.items():
        file = path / "evaluation" / f"{name}.npy"
        content = io.BytesIO()
        np.save(content, array.astype(np.int64))
        write_atomic(file, content.getvalue())
        checksums[name] = sha256_of(file)
    return EvaluationFiles(
        **settings.to_values(),
        query_set_checksum=queries.checksum(),
        queries_sha256=checksums["queries"],
        candidates_sha256=checksums.get("candidates"),
    )
