"""The folder of a store: the names of its files, and those that a sweep writes beside the Records.

docs/store.md describes the format.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from habitus.record import Record
from habitus.typed import Typed

STORE_VERSION = 1
INFO_FILE = "store.json"
LAWS_FILE = "laws.json"
RECORD_FILE = "record.json"
RECIPE_FILE = "recipe.toml"
SEAL_FILE = "seal.json"


class EvaluationFiles(Typed):
    """What every run of the store is evaluated on."""

    queries: int
    batch_sequences: int
    catalogue_items: int | Literal["all"]
    seed: int
    query_set_checksum: str = Field(description="As every Record carries it.")
    queries_sha256: str = Field(description="Of evaluation/queries.npy: log rows of the queries.")
    candidates_sha256: str | None = Field(None, description="Of evaluation/candidates.npy, where not all items are.")


class StoreInfo(Typed):
    """store.json, written by the first sweep and never again."""

    version: int = STORE_VERSION
    dataset_checksum: str
    evaluation: EvaluationFiles


class Seal(Typed):
    """seal.json beside a Record: its checksum and who published it."""

    record_sha256: str
    worker: str
    claims: int = Field(description="How often the cell was claimed.")


def cell_folder(store: Path, recipe_hash: str) -> Path:
    return store / "cells" / recipe_hash


def read_record(store: Path, recipe_hash: str) -> Record | None:
    """The Record of a cell; None where it has none yet."""
    path = cell_folder(store, recipe_hash) / RECORD_FILE
    return Record.read(path) if path.exists() else None


def read_records(store: Path) -> Iterator[Record]:
    """Every Record of the store, in the order of their hashes."""
    for path in sorted((store / "cells").glob(f"*/{RECORD_FILE}")):
        yield Record.read(path)
