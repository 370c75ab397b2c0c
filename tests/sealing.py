"""Seals for stores that tests write by hand: store.json, and seal.json beside every Record."""

from pathlib import Path

from habitus.files import sha256_of
from habitus.store import EvaluationFiles, Seal, StoreInfo


def seal_store(store: Path, dataset_checksum: str) -> Path:
    """Make a folder of manifests and Records what a sweep would have left."""
    evaluation = EvaluationFiles(
        queries=777, batch_sequences=32, catalogue_items="all", seed=0, query_set_checksum="q", queries_sha256="s"
    )
    StoreInfo(dataset_checksum=dataset_checksum, evaluation=evaluation).write(store / "store.json")
    seal_records(store)
    return store


def seal_records(store: Path) -> None:
    """Seal every Record of a store as it is now."""
    for record in store.glob("cells/*/record.json"):
        Seal(record_sha256=sha256_of(record), worker="test", claims=1).write(record.with_name("seal.json"))
