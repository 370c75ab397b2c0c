"""Names of items: what the schema displays, as texts beside the ids, and nothing where it displays nothing."""

from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from habitus.data.guess import guess_schema
from habitus.data.item_names import MAX_DISPLAY, to_display
from habitus.errors import ConfigError, DataError
from habitus.events.schema import Schema

from .tables import SCHEMA, make_items, prepared, write_tables


def displaying(*columns: str) -> Schema:
    values = SCHEMA.to_values()
    values["items"]["display"] = columns
    return Schema.parse(values, "test")


def test_displayed_columns_stand_beside_the_ids(tmp_path: Path) -> None:
    items = make_items() | {"url": [f"https://images.example.org/{n}.jpg" for n in range(6)]}
    dataset = prepared(tmp_path / "a", items=items, schema=displaying("title", "url", "price", "brand"))
    names = dataset.item_display()
    assert names is not None
    assert names.column_names == ["title", "url", "price", "brand"]
    assert names["title"].to_pylist() == items["title"]
    assert names["price"].to_pylist() == ["0", "1", None, "3", "4", "5"]
    assert names["brand"].to_pylist() == items["brand"]
    assert "url" not in [field.name for field in dataset.fields.item]  # shown, not read by the model
    assert Schema.read(dataset.path / "schema.toml").items.display == ("title", "url", "price", "brand")


def test_without_display_nothing_is_added(tmp_path: Path) -> None:
    dataset = prepared(tmp_path)
    assert dataset.item_display() is None
    assert not (dataset.path / "items" / "display.parquet").exists()
    assert "display" not in dataset.manifest.to_json()
    assert "display" not in (dataset.path / "schema.toml").read_text()


def test_pairs_of_an_item_have_its_name(tmp_path: Path) -> None:
    values = displaying("title").to_values()
    values["events"]["item"] = ["item_id", "event_type"]
    del values["events"]["fields"]["event_type"]
    dataset = prepared(tmp_path, events=_without_gaps(), schema=Schema.parse(values, "test"))
    names = dataset.item_display()
    assert names is not None
    numbers = [int(item[1:]) for item in dataset.item_ids()["item_id"].to_pylist()]
    assert names["title"].to_pylist() == [f"thing number {number}" for number in numbers]


def _without_gaps() -> dict[str, list[Any]]:
    from .tables import make_events

    events = make_events()
    return events | {"event_type": [value or "view" for value in events["event_type"]]}


def test_a_column_that_does_not_exist_or_cannot_be_shown_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'titel' is missing from .*did you mean 'title'"):
        prepared(tmp_path / "a", schema=displaying("titel"))
    with pytest.raises(DataError, match=r"column 'image' .* has type list") as refused:
        prepared(tmp_path / "b", schema=displaying("title", "image"))
    assert "a column that can be shown" in refused.value.expected
    for columns in ((), ("title", "title"), ("item_id",)):
        with pytest.raises(ConfigError, match="display"):
            displaying(*columns)


def test_values_become_one_short_line() -> None:
    million = "word " * 200_000
    texts = to_display(pa.array([million, " two\n\tlines ", "\x1b[31mred\x07", "\u202egnp.exe", "", None])).to_pylist()
    assert texts[0] == ("word " * 200)[: MAX_DISPLAY - 1] + "…"
    assert len(texts[0]) == MAX_DISPLAY
    assert texts[1:] == ["two lines", "[31mred", "gnp.exe", None, None]
    assert to_display(pa.array(["x" * MAX_DISPLAY])).to_pylist() == ["x" * MAX_DISPLAY]
    assert to_display(pa.array([3.0, 12.5, float("nan"), None])).to_pylist() == ["3", "12.5", None, None]
    assert to_display(pa.array([0.73999995, 2.39, 0.004], pa.float32())).to_pylist() == ["0.74", "2.39", "0.004"]
    assert to_display(pa.array([1e-7, -1234567.891])).to_pylist() == ["1e-7", "-1234567.891"]
    times = [datetime(2024, 5, 31), datetime(2024, 5, 31, 12, 30), None]
    assert to_display(pa.array(times, pa.timestamp("us"))).to_pylist() == ["2024-05-31", "2024-05-31 12:30:00", None]
    assert to_display(pa.array([True, None])).to_pylist() == ["true", None]


def test_a_guess_displays_the_first_short_text(tmp_path: Path) -> None:
    items = make_items(100)
    items = {"item_id": items["item_id"], "plot": [f"{n} " + "a long story " * 20 for n in range(100)]} | items
    items["photo"] = [f"https://images.example.org/{n}.jpg" for n in range(100)]
    write_tables(tmp_path, _without_gaps(), items)
    schema = guess_schema(f"{tmp_path}/events.parquet", f"{tmp_path}/items.parquet")
    assert schema.items.display == ("title",)
    few = {"item_id": items["item_id"], "product_name": ["same words"] * 100}  # too alike to be a text field
    write_tables(tmp_path / "few", _without_gaps(), few)
    schema = guess_schema(f"{tmp_path}/few/events.parquet", f"{tmp_path}/few/items.parquet")
    assert (schema.items.fields, schema.items.display) == ({"product_name": "category"}, ("product_name",))
    write_tables(tmp_path / "none", _without_gaps(), {"item_id": items["item_id"], "price": items["price"]})
    schema = guess_schema(f"{tmp_path}/none/events.parquet", f"{tmp_path}/none/items.parquet")
    assert schema.items.display is None
