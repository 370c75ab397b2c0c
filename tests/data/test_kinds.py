"""The table of field kinds: every kind of a schema is in it, and one that is added there works from file to batch."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from habitus.data.kinds import KINDS, ColumnSample, Number
from habitus.errors import ConfigError
from habitus.events import EVENT_KINDS, ITEM_KINDS
from habitus.events.schema import Schema

from .tables import SCHEMA, make_items, prepared


class Money(Number):
    """Amounts as a shop prints them: '€3.50'."""

    expected = "amounts of money as text"
    arrow_type = pa.string()

    def accepts(self, type_: pa.DataType) -> bool:
        return bool(pa.types.is_string(type_))

    def looks_like(self, sample: ColumnSample) -> bool:
        return self.accepts(sample.type) and pc.all(pc.starts_with(sample.values, "€")).as_py()

    def read(self, column: pa.Array) -> np.ndarray:
        return super().read(pc.replace_substring(column, "€", ""))


def test_every_kind_of_a_schema_is_in_the_table() -> None:
    assert set(KINDS) == set(ITEM_KINDS) >= set(EVENT_KINDS)


def test_a_kind_that_is_added_to_the_table_is_checked_surveyed_and_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "money", Money())
    monkeypatch.setattr("habitus.events.schema.ITEM_KINDS", (*ITEM_KINDS, "money"))
    values = SCHEMA.to_values()
    values["items"]["fields"]["cost"] = "money"
    items = make_items()
    count = len(items["item_id"])
    items["cost"] = ["€3.50", None, *(f"€{number}" for number in range(2, count))]
    dataset = prepared(tmp_path, items=items, schema=Schema.parse(values, "test"))
    cost = dataset.item_features(np.arange(count)).fields["cost"]
    np.testing.assert_array_equal(cost, np.array([3.5, np.nan, *range(2, count)], np.float32))
    spec = next(spec for spec in dataset.fields.item if spec.name == "cost")
    assert spec.kind == "number"
    assert spec.mean == pytest.approx(np.nanmean(cost))


def test_a_misspelt_kind_is_refused_with_the_nearest_one() -> None:
    values = SCHEMA.to_values()
    values["items"]["fields"]["price"] = "nunber"
    with pytest.raises(ConfigError, match=r"not a kind of item field \(did you mean 'number'\?\)"):
        Schema.parse(values, "test")
