"""Documents with anything in them are read or refused, and what is read is written back the same.

`make soak` tries ten thousand; the suite the same two hundred every time.
"""

import copy
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from habitus.data.manifest import DatasetManifest
from habitus.errors import ConfigError
from habitus.events import Schema
from habitus.laws import fit
from habitus.recipe import Recipe
from habitus.record import Record
from habitus.store import Laws, SweepManifest
from habitus.typed import CHECKSUM, Typed
from tests.reporting.make_store import tiny_rows, write_store

RECIPE = {
    "model": {"joint_dim": 8, "width": 32, "depth": 1, "copying": True},
    "train": {"batch_sequences": 4, "steps": 10, "learning_rate": 0.01, "dropout": 0.1},
    "evaluate": {"regimes": ["batch"]},
}
SCHEMA = {
    "events": {"user": "u", "item": ["i", "kind"], "timestamp": "t", "time_unit": "ms", "fields": {"price": "number"}},
    "items": {"item": "i", "fields": {"title": "text", "brand": "category"}},
}
COUNTS = {"users": 1, "events": 2, "queries": 1, "segments": 1, "windows": 1, "max_segments": 1, "left_out": 0}
DATASET = {
    "seq_len": 4, "seed": 0, "split": {"kind": "user", "validation_share": 0.1}, "schema": SCHEMA, "num_users": 1,
    "num_events": 2, "num_items": 2, "time_span": [0, 1], "train": COUNTS, "validation": COUNTS,
    "item_fields_filled": {"title": 2}, "event_fields_filled": {}, "dropped": {}, "versions": {},
    "files": {"schema.toml": {"bytes": 3, "sha256": "0" * 64}}, "checksum": "0" * 64,
}  # fmt: skip
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.sampled_from([0, -1, "", 1e308, "1"])
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
)
EXAMPLES = [200, pytest.param(10_000, marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> dict[type[Typed], dict[str, Any]]:
    store = write_store(tmp_path_factory.mktemp("documents") / "store", tiny_rows())
    fit(store).write(store / "laws.json")
    record = min(store.glob("cells/*/record.json"))
    return {
        Recipe: RECIPE,
        Schema: SCHEMA,
        DatasetManifest: DATASET,
        Record: json.loads(record.read_text()),
        SweepManifest: unsealed(json.loads((store / "sweeps" / "share-1.json").read_text())),
        Laws: shortened(unsealed(json.loads((store / "laws.json").read_text()))),
    }


def unsealed(values: dict[str, Any]) -> dict[str, Any]:
    """Without the checksum, by which every change would be refused at once; test_damaged_files.py is about those."""
    return {name: value for name, value in values.items() if name != CHECKSUM}


def shortened(laws: dict[str, Any]) -> dict[str, Any]:
    """One entry for each law, and two of everything else: as many kinds of values in a tenth of the bytes."""

    def cut(values: Any) -> Any:
        if isinstance(values, dict):
            return {name: cut(value) for name, value in values.items()}
        return [cut(value) for value in values[:2]] if isinstance(values, list) else values

    by_law = {entry["law"]["law"]: entry for entry in reversed(laws["entries"])}
    return {**cut(laws), "entries": [cut(entry) for entry in by_law.values()]}


def places(values: Any, inside: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value in a tree of mappings and lists."""
    children = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    return [inside, *(place for key, value in children for place in places(value, (*inside, key)))]


@st.composite
def damaged(draw: st.DrawFn, document: dict[str, Any]) -> Any:
    """The document with one to three values replaced, removed or added."""
    values: Any = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        if not isinstance(values, dict):
            return values
        *path, key = draw(st.sampled_from(places(values)[1:] or [("x",)]))
        target = values
        for part in path:
            target = target[part]
        what = draw(st.sampled_from(["replace", "remove", "add"]))
        if what == "remove":
            target.pop(key) if isinstance(target, list) or key in target else None
        elif what == "add" and isinstance(target, dict):
            target[draw(st.text(max_size=8))] = draw(VALUES)
        else:
            target[key] = draw(VALUES)
    return values


@pytest.mark.parametrize("cls", [Recipe, Schema, DatasetManifest, Record, SweepManifest, Laws])
@pytest.mark.parametrize("number", EXAMPLES)
def test_a_document_is_refused_in_words_or_written_back_the_same(
    documents: dict[type[Typed], dict[str, Any]], cls: type[Typed], number: int, tmp_path: Path
) -> None:
    path, counts = tmp_path / "document.json", {"read": 0, "refused": 0}

    @settings(
        max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(damaged(documents[cls]))
    def read(values: Any) -> None:
        path.write_text(json.dumps(values))
        try:
            first = cls.read(path)
        except ConfigError as error:
            assert str(path) in error.problem
            counts["refused"] += 1
            return
        first.write(path)
        assert cls.read(path) == first
        assert cls.parse(tomllib.loads(first.to_toml()), "toml") == first if cls in (Recipe, Schema) else True
        counts["read"] += 1

    read()
    assert counts["refused"] > number // 10
    assert cls.parse(documents[cls], "as it was") is not None


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_json_does_not_have_are_refused_anywhere(
    documents: dict[type[Typed], dict[str, Any]], value: str, tmp_path: Path
) -> None:
    text = json.dumps({**documents[Record], "hardware": {"device": "X"}})
    (tmp_path / "record.json").write_text(text.replace('"X"', value))
    with pytest.raises(ConfigError, match=f"{value} is not a number of JSON"):
        Record.read(tmp_path / "record.json")


@pytest.mark.parametrize("number", EXAMPLES)
def test_bytes_that_are_no_document_are_refused_in_words(number: int, tmp_path: Path) -> None:
    @settings(max_examples=number, deadline=None, database=None, derandomize=True)
    @given(st.binary(max_size=100) | st.text(max_size=60).map(str.encode), st.sampled_from([".toml", ".json"]))
    def read(content: bytes, suffix: str) -> None:
        path = tmp_path / f"document{suffix}"
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="document"):
            Recipe.read(path)

    read()
