"""A dataset's card, README.md: written beside the manifest and no part of the dataset's identity."""

from pathlib import Path

import numpy as np

from habitus.cards import CARD_FILE, DataFacts, FieldFacts, SideFacts, dataset_card
from habitus.data.manifest import DatasetManifest
from habitus.files import write_atomic


def data_facts(manifest: DatasetManifest) -> DataFacts:
    """What cards say about a dataset."""
    schema = manifest.schema_
    times = [str(np.datetime64(moment, "us").astype("datetime64[D]")) for moment in manifest.time_span]
    return DataFacts(
        checksum=manifest.checksum,
        events=manifest.num_events,
        users=manifest.num_users,
        items=manifest.num_items,
        days=None if schema.events.time_unit == "order" else (times[0], times[1]),
        split=manifest.split.kind,
        seq_len=manifest.seq_len,
        sides={
            name: SideFacts(users=side.users, events=side.events, queries=side.queries)
            for name, side in manifest.sides().items()
        },
        item_fields=_fields(schema.items.kinds, manifest.item_fields_filled, manifest.num_items),
        event_fields=_fields(schema.event_fields, manifest.event_fields_filled, manifest.num_events),
        dropped=manifest.dropped,
        synthetic=schema.world is not None,
    )


def write_dataset_card(folder: Path, manifest: DatasetManifest) -> str:
    """README.md of a dataset's folder; returns the card."""
    card = dataset_card(data_facts(manifest))
    write_atomic(folder / CARD_FILE, card.encode())
    return card


def _fields(kinds: dict[str, str], filled: dict[str, int], rows: int) -> tuple[FieldFacts, ...]:
    return tuple(
        FieldFacts(name=name, kind=kind, filled=filled[name] / rows if name in filled and rows else None)
        for name, kind in kinds.items()
    )
