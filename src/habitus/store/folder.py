"""The folder of a store: the names of its files, and those that a sweep writes beside the Records.

docs/store.md describes the format.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from operator import not_
from pathlib import Path
from typing import Literal

from pydantic import Field

from habitus.errors import ConfigError, RunError
from habitus.recipe import Horizon
from habitus.record import Record
from habitus.typed import Sealed, Typed

STORE_VERSION = 1
INFO_FILE = "store.json"
LAWS_FILE = "laws.json"
RECORD_FILE = "record.json"
RECIPE_FILE = "recipe.toml"
SEAL_FILE = "seal.json"
ATTEMPTS = "attempts"  # of a cell: a folder for each claim, until one of them is published


class EvaluationFiles(Typed):
    """What every run of the store is evaluated on."""

    queries: int
    batch_sequences: int
    catalogue_items: int | Literal["all"]
    seed: int
    horizons: tuple[Horizon, ...] = Field((), exclude_if=not_, description="Days after the cut that runs measure too.")
    query_set_checksum: str = Field(description="As every Record carries it.")
    queries_sha256: str = Field(description="Of evaluation/queries.npy: log rows of the queries.")
    candidates_sha256: str | None = Field(None, description="Of evaluation/candidates.npy, where not all items are.")


class StoreInfo(Sealed):
    """store.json, written by the first sweep and never again."""

    version: int = STORE_VERSION
    dataset_checksum: str
    evaluation: EvaluationFiles


class Seal(Typed):
    """seal.json beside a Record: its checksum and who published it."""

    record_sha256: str
    worker: str
    claims: int = Field(description="How often the cell was claimed.")


def read_store_info(store: Path) -> StoreInfo:
    """store.json of a store; refuses what is not a store, or one of another version."""
    path = store / INFO_FILE
    if not path.exists():
        raise RunError(
            f"{store} holds no {INFO_FILE}",
            expected="a folder that `habitus sweep` wrote",
            next_step=f"habitus sweep share --data DATASET --store {store}",
        )
    try:
        version = json.loads(path.read_text(encoding="utf-8")).get("version")
    except (OSError, ValueError, AttributeError) as error:
        raise RunError(f"{path} cannot be read: {error}", expected="the file as a sweep wrote it") from None
    if version != STORE_VERSION:
        newer = isinstance(version, int) and version > STORE_VERSION
        raise RunError(
            f"{store} is a store of version {version}",
            expected=f"version {STORE_VERSION}",
            next_step="update habitus" if newer else "sweep into a new store",
        )
    return StoreInfo.read(path)


def cell_folder(store: Path, recipe_hash: str) -> Path:
    """The folder of a cell. A hash that comes from a file is checked before it becomes a path."""
    if not is_recipe_hash(recipe_hash):
        raise RunError(
            f"{recipe_hash!r} is not the hash of a recipe",
            expected="64 hexadecimal digits, as the sweep wrote them",
            next_step="restore the manifest or the recipe that names it",
        )
    return store / "cells" / recipe_hash


def is_recipe_hash(name: str) -> bool:
    return re.fullmatch("[0-9a-f]{64}", name) is not None


def read_record(store: Path, recipe_hash: str) -> Record | None:
    """The Record of a cell, as it was published; None where it has none yet. One that has changed is refused."""
    path = cell_folder(store, recipe_hash) / RECORD_FILE
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}", expected="a Record as a run wrote it") from None
    _check_seal(path, content)
    try:
        record = Record.from_json(content, str(path))
    except ConfigError as error:
        raise changed_record_error(path, error.problem) from None
    if record.recipe_hash != recipe_hash:
        raise changed_record_error(path, "its recipe is not the one that the folder is named after")
    return record


def read_records(store: Path) -> Iterator[Record]:
    """Every Record of the store, in the order of their hashes."""
    for path in sorted((store / "cells").glob(f"*/{RECORD_FILE}")):
        record = read_record(store, path.parent.name) if is_recipe_hash(path.parent.name) else None
        if record is not None:
            yield record


def read_run_record(run: Path) -> Record:
    """The Record in the folder of a run. A plain run has no seal; a cell of a store has one, and is checked."""
    path = run / RECORD_FILE
    if (run / SEAL_FILE).exists() or (run.parent.name == "cells" and (run.parent.parent / INFO_FILE).exists()):
        _check_seal(path, path.read_bytes())
    return Record.read(path)


def changed_record_error(path: Path, why: str) -> RunError:
    """The error of a Record that is not as it was published."""
    return RunError(
        f"{path} has been changed since it was published: {why}",
        expected="Records as runs wrote them: laws are only as good as they are",
        next_step=f"restore the file, or delete {path.parent} and run the sweep again",
    )


def published_attempt(cell: Path) -> Path | None:
    """The attempt whose Record is the cell's. It goes only after seal.json is there: a Record has one or the other."""
    try:
        content = (cell / RECORD_FILE).read_bytes()
    except FileNotFoundError:
        return None
    for attempt in sorted((cell / ATTEMPTS).glob("*")):
        try:
            if (attempt / RECORD_FILE).read_bytes() == content:
                return attempt
        except OSError:  # none yet, or just moved or removed by its worker
            continue
    return None


def _check_seal(path: Path, content: bytes) -> None:
    """Refuse a Record whose checksum is not the sealed one, or that has lost its seal."""
    seal = _read_seal(path.with_name(SEAL_FILE))
    if seal is None and published_attempt(path.parent) is not None:
        return  # its worker has yet to write the seal
    # Looked up again after the attempt: its worker may have finished between the two.
    seal = seal or _read_seal(path.with_name(SEAL_FILE))
    if seal is None:
        raise RunError(
            f"{path} has no {SEAL_FILE}, so nothing shows that it is as it was published",
            expected="the seal that every sweep writes beside a Record",
            next_step=f"restore the file, or delete {path.parent} and run the sweep again",
        )
    if seal.record_sha256 != hashlib.sha256(content).hexdigest():
        raise changed_record_error(path, "its checksum is not the one that it was published with")


def _read_seal(path: Path) -> Seal | None:
    try:
        return Seal.from_json(path.read_bytes(), str(path))
    except FileNotFoundError:
        return None
    except ConfigError as error:
        raise RunError(
            f"{path} has been changed since it was written: {error.problem}",
            expected="the seal as the sweep wrote it",
            next_step=f"restore the file, or delete {path.parent} and run the sweep again",
        ) from None
