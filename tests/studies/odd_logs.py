"""Logs at the edge of what can be learnt from."""

from pathlib import Path

import numpy as np
import pyarrow as pa

import habitus as hb
from habitus.data import Dataset

_SCHEMA = {
    "events": {"user": "user_id", "item": "item_id", "timestamp": "timestamp", "time_unit": "order"},
    "items": {"item": "item_id", "fields": {"title": "text"}},
}


def odd_dataset(kind: str, out: Path) -> Dataset:
    """A small dataset of that kind; prepare may refuse it."""
    rng = np.random.default_rng(0)
    users, length, items = {
        "one user": (1, 60, 20),
        "two items": (60, 8, 2),
        "90% repeats": (60, 20, 30),
        "without repeats": (60, 10, 400),
        "two events each": (400, 2, 30),
        "cold": (60, 6, 400),
    }[kind]
    rows = []
    for user in range(users):
        if kind == "without repeats":
            history = rng.permutation(items)[:length]
        elif kind == "90% repeats":
            history = np.where(rng.random(length) < 0.9, rng.integers(0, items), rng.integers(0, items, length))
        elif kind == "cold":  # every user has items of its own
            history = user * length + np.arange(length)
        else:
            history = rng.integers(0, items, length)
        rows += [(user, int(item), place) for place, item in enumerate(history)]
    events = pa.table(dict(zip(("user_id", "item_id", "timestamp"), zip(*rows, strict=True), strict=True)))
    names = [f"thing {number} of kind {number % 7}" for number in range(items)]
    catalogue = pa.table({"item_id": list(range(items)), "title": names})
    return hb.prepare(events, catalogue, _SCHEMA, out=out, seq_len=16, text_len=6, validation_share=0.2)
