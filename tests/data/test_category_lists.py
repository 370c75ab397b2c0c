"""Fields with several categories of an item: lists, or texts that a separator divides."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from habitus.data import Dataset, guess_schema, update
from habitus.data.structure import _field_table
from habitus.errors import ConfigError, DataError
from habitus.events import Schema

from .tables import SCHEMA, SMALL, make_events, make_items, prepared, write_tables

TEXTS = ["drama|comedy", "comedy", None, "", "crime | drama||drama| comedy", "drama"]
LISTS = [["drama", "comedy"], ["comedy"], None, [], ["crime", "drama", None, "drama", " comedy", ""], ["drama"]]
SPLIT = {"kind": "category", "separator": "|"}


def schema_with(field: Any) -> Schema:
    values = SCHEMA.to_values()
    values["items"]["fields"]["genres"] = field
    return Schema.parse(values, "test")


def codes_of(dataset: Dataset) -> np.ndarray:
    return dataset.item_features(np.arange(dataset.num_items)).fields["genres"]


@pytest.mark.parametrize(("column", "field"), [(TEXTS, SPLIT), (LISTS, "categories")], ids=["text", "list"])
def test_items_have_the_codes_of_their_distinct_values(tmp_path: Path, column: list[Any], field: Any) -> None:
    items = make_items() | {"genres": column}
    dataset = prepared(tmp_path, items=items, schema=schema_with(field))
    assert dataset.encoders.item_values["genres"] == ("comedy", "crime", "drama")
    spec = next(spec for spec in dataset.fields.item if spec.name == "genres")
    assert (spec.kind, spec.size, spec.width) == ("categories", 4, 3)
    expected = [[3, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0], [2, 3, 1], [3, 0, 0]]
    np.testing.assert_array_equal(codes_of(dataset), expected)
    assert dataset.manifest.item_fields_filled["genres"] == 4
    assert dataset.encoders.separators == (None if field == "categories" else {"genres": "|"})
    assert Schema.read(tmp_path / "dataset" / "schema.toml") == dataset.schema == schema_with(field)
    # A row of the item table, raw as `habitus embed --items` reads it, is encoded as it was; new values are left out.
    again = pa.RecordBatch.from_pydict(
        {**items, "genres": [*column[:5], TEXTS[5] + "|noir" if field == SPLIT else ["noir"]]}
    )
    new = dataset.encoders.encode_items(again.select(list(schema_with(field).items.fields)), dataset.tokenizer)
    np.testing.assert_array_equal(new.fields["genres"][:5], expected[:5])
    np.testing.assert_array_equal(new.fields["genres"][5], [3, 0, 0] if field == SPLIT else [0, 0, 0])


def test_a_field_in_one_line_of_toml_comes_back_in_its_place() -> None:
    schema = schema_with(SPLIT)
    assert 'genres = { kind = "category", separator = "|" }' in schema.to_toml().splitlines()
    values = schema.to_values()
    values["items"]["fields"] = {"genres": SPLIT, "title": "text"}
    assert list(Schema.parse(values, "test").to_values()["items"]["fields"]) == ["genres", "title"]


def test_values_beyond_sixteen_are_counted(tmp_path: Path) -> None:
    many = [f"v{n:02d}" for n in range(20)]
    items = make_items() | {"genres": [many, ["v19"], *LISTS[2:]]}
    dataset = prepared(tmp_path, items=items, schema=schema_with("categories"))
    assert codes_of(dataset).shape == (6, 16)
    values = dataset.encoders.item_values["genres"]
    assert [values[code - 1] for code in codes_of(dataset)[0]] == many[:16]
    assert dataset.manifest.dropped == {"items.genres: values beyond an item's first 16": 4}


def test_other_datasets_do_not_mention_them(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    text = (dataset.path / "encoders.json").read_text() + (dataset.path / "manifest.json").read_text()
    assert not any(word in text for word in ("separator", "width", "categories"))


@pytest.mark.parametrize(
    ("column", "field", "message"),
    [
        (LISTS, "category", 'a list of them is of kind "categories"'),
        (LISTS, SPLIT, 'for a list write genres = "categories"'),
        (TEXTS, "categories", "a list of categories"),
    ],
)
def test_a_column_of_the_other_form_is_refused(tmp_path: Path, column: list[Any], field: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, items=make_items() | {"genres": column}, schema=schema_with(field))
    assert not (tmp_path / "dataset").exists()


@pytest.mark.parametrize(
    "field", [{"kind": "text", "separator": "|"}, {"kind": "category"}, {"kind": "category", "separator": ""}, 7]
)
def test_a_field_that_is_no_field_is_refused(field: Any) -> None:
    with pytest.raises(ConfigError, match=r'expected .*kind = "category", separator = "\|"'):
        schema_with(field)


def test_a_guess_divides_what_comes_again_and_nothing_else(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    names, count = [f"genre {n}" for n in range(12)], 400
    drawn = [draw.choice(names, draw.integers(1, 4), replace=False).tolist() for _ in range(count)]
    items = make_items(count) | {
        "genres": ["|".join(one) for one in drawn],
        "tags": [", ".join(one) for one in drawn],
        "listed": drawn,
        "place": [f"street {n}, town {n}" for n in range(count)],
        "ids": [[len(one), 7][: len(one)] for one in drawn],
    }
    write_tables(tmp_path, make_events(20, count), items)
    fields = guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet").to_values()["items"]["fields"]
    assert fields["genres"] == SPLIT
    assert fields["tags"] == SPLIT | {"separator": ","}
    assert fields["listed"] == fields["ids"] == "categories"
    assert (fields["place"], fields["image"], fields["brand"]) == ("text", "vector", "category")


def test_an_update_adds_values_and_room_for_them(tmp_path: Path) -> None:
    items, events = make_items(8), make_events(20, 6)
    items["genres"] = [*TEXTS, "noir|drama|comedy|western", "western"]
    first = {name: column[:6] for name, column in items.items()}
    dataset = prepared(tmp_path, events, first, schema_with(SPLIT))
    later = {**make_events(4, 8, seed=5)}
    later["timestamp"] = [moment.replace(year=2030) for moment in later["timestamp"]]
    write_tables(tmp_path / "later", later, items)
    update(dataset, f"{tmp_path}/later/events.parquet", f"{tmp_path}/later/items.parquet", tmp_path / "grown", SMALL)
    grown = Dataset.open(tmp_path / "grown")
    assert grown.encoders.item_values["genres"] == ("comedy", "crime", "drama", "noir", "western")
    np.testing.assert_array_equal(codes_of(grown)[:6], np.pad(codes_of(dataset), ((0, 0), (0, 1))))
    np.testing.assert_array_equal(codes_of(grown)[6:], [[4, 3, 1, 5], [5, 0, 0, 0]])
    assert grown.encoders.up_to(dataset.encoders).fields.item == dataset.fields.item


def test_the_structure_of_a_log_sees_each_value(tmp_path: Path) -> None:
    dataset = prepared(tmp_path, items=make_items() | {"genres": TEXTS}, schema=schema_with(SPLIT))
    features = dataset.item_features(np.arange(6))
    with_genres = _field_table(features)
    features.fields.pop("genres")
    added = with_genres.toarray().sum(axis=1) - _field_table(features).toarray().sum(axis=1)
    np.testing.assert_allclose(added, [2, 1, 0, 0, 2, 1], atol=1e-5)  # crime is one item's only
