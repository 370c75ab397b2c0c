"""Small tables for the tests of the data room."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from habitus.data import Dataset, PrepareOptions, prepare
from habitus.events.schema import Schema

SHARED_DATA = Path(__file__).parents[3] / "shared" / "data"

SCHEMA = Schema.parse(
    {
        "events": {
            "user": "user_id",
            "item": "item_id",
            "timestamp": "timestamp",
            "fields": {"event_type": "category", "paid": "number"},
        },
        "items": {
            "item": "item_id",
            "fields": {"title": "text", "brand": "category", "price": "number", "image": "vector"},
        },
    },
    "test",
)
SMALL = PrepareOptions(seq_len=8, text_len=4, vocabulary_size=300, memory="256MiB", test_share=0, threads=2)


def make_items(num_items: int = 6) -> dict[str, list[Any]]:
    return {
        "item_id": [f"i{n}" for n in range(num_items)],
        "title": [f"thing number {n}" for n in range(num_items)],
        "brand": [None if n == 1 else f"brand {n % 2}" for n in range(num_items)],
        "price": [None if n == 2 else float(n) for n in range(num_items)],
        "image": [None if n == 3 else [float(n), 0.5] for n in range(num_items)],
    }


def make_events(num_users: int = 20, num_items: int = 6, seed: int = 0) -> dict[str, list[Any]]:
    """Events in a random order: 1 to 30 per user, some at equal times, some values missing."""
    draw = np.random.default_rng(seed)
    rows = []
    for user in range(num_users):
        times = np.sort(draw.integers(0, 40, draw.integers(1, 31))) * 3600 + 1_700_000_000
        for time in times:
            rows.append(
                {
                    "user_id": f"u{user}",
                    "item_id": f"i{draw.integers(num_items)}",
                    "timestamp": np.datetime64(int(time), "s").astype("datetime64[us]").item(),
                    "event_type": [None, "view", "buy"][draw.integers(3)],
                    "paid": None if draw.random() < 0.3 else round(float(draw.random()), 3),
                }
            )
    draw.shuffle(rows)  # type: ignore[arg-type]
    return {name: [row[name] for row in rows] for name in rows[0]}


def write_tables(
    folder: Path, events: dict[str, list[Any]], items: dict[str, list[Any]], kind: str = "parquet"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, columns in (("events", events), ("items", items)):
        table = pa.table(columns)
        path = folder / f"{name}.{kind}"
        if kind == "parquet":
            pq.write_table(table, path)
        elif kind == "csv":
            texts = {n: [json.dumps(v) if isinstance(v, list) else v for v in c] for n, c in columns.items()}
            pacsv.write_csv(pa.table(texts), path)
        else:
            lines = [json.dumps(row, default=str) for row in table.to_pylist()]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepared(
    folder: Path,
    events: dict[str, list[Any]] | None = None,
    items: dict[str, list[Any]] | None = None,
    schema: Schema = SCHEMA,
    options: PrepareOptions = SMALL,
    kind: str = "parquet",
) -> Dataset:
    """A dataset made from the given tables, or from the default ones."""
    write_tables(folder, events or make_events(), items or make_items(), kind)
    prepare(f"{folder}/events.{kind}", f"{folder}/items.{kind}", schema, folder / "dataset", options)
    return Dataset.open(folder / "dataset")
