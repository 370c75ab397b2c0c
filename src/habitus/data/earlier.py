"""The dataset that an update adds to: what stays as it is, and what later events and items bring to it.

Ids, codes, the tokenizer, statistics of numbers and the split stay; new items, categories and users come after them,
in the order in which the log brings them, so that it makes no difference in how many pieces they arrive.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data.category_lists import distinct_values, longest_list
from habitus.data.column_surveys import MAX_CATEGORIES
from habitus.data.dataset import Dataset
from habitus.data.encoders import Encoders
from habitus.data.event_columns import EVENT_CHUNK_ROWS
from habitus.data.fields import Field
from habitus.data.item_names import DISPLAY_FILE, display_batch
from habitus.data.sources import CHUNK_ROWS, rechunk
from habitus.data.survey import ItemStream
from habitus.errors import DataError

Batches = Callable[[], Iterable[pa.RecordBatch]]


@dataclass(frozen=True)
class Earlier:
    """A prepared dataset, as the source of the first items and events of another."""

    dataset: Dataset

    @property
    def item_ids(self) -> Path:
        return self.dataset.path / "items" / "ids.parquet"

    def write_events(self, path: Path) -> None:
        """Every event as u, t, item_row, then each field: k_* with a category's code, f_* with a number."""
        data = self.dataset
        users, offsets = data.user_ids(), data.user_offsets
        names = list(data.schema.event_fields)
        writer: pq.ParquetWriter | None = None
        for start in range(0, data.num_events, EVENT_CHUNK_ROWS):
            stop = min(start + EVENT_CHUNK_ROWS, data.num_events)
            user = np.searchsorted(offsets, np.arange(start, stop), side="right") - 1
            columns = {"u": users.take(pa.array(user)), "t": data.times[start:stop], "item_row": data.items[start:stop]}
            for number, name in enumerate(names):
                values = data.event_fields[name][start:stop]
                if name in data.encoders.event_values:
                    columns[f"k_{number}"] = values.astype(np.int32)
                else:
                    columns[f"f_{number}"] = pa.array(values.astype(np.float64), from_pandas=True)  # NaN is missing
            if data.target_weight is not None:
                columns["w"] = data.target_weight[start:stop]
            table = pa.table(columns)
            writer = writer or pq.ParquetWriter(path, table.schema, compression="zstd")
            writer.write_table(table)
        assert writer is not None, "a dataset has events"
        writer.close()

    def event_values(self, name: str, later: Iterable[str]) -> tuple[str, ...]:
        """The values of an event category with those that come later, as many as a category may have."""
        return _extend(self.dataset.encoders.event_values[name], later)

    def encoders(self, stream: ItemStream, event_values: dict[str, tuple[str, ...]]) -> Encoders:
        """The dataset's encoders with the categories of further items and events; nothing else of them changes."""
        old = self.dataset.encoders
        seen: dict[str, dict[str, None]] = {name: {} for name in old.item_values}
        widths = {field.name: field.width for field in self._items("categories") if field.width}
        for batch in stream.batches() if seen else ():
            for name, values in seen.items():
                values |= dict.fromkeys(distinct_values(batch.column(name)))
            widths = {name: max(width, longest_list(batch.column(name))) for name, width in widths.items()}
        item_values = {name: _extend(values, seen[name]) for name, values in old.item_values.items()}
        return old.with_values(item_values, event_values).with_widths(widths)

    def check_vectors(self, stream: ItemStream) -> None:
        """Refuse vectors of another length than those that the model reads."""
        sizes = {field.name: field.size for field in self._items("vector")}
        row = 0
        for batch in stream.batches() if sizes else ():
            for name, size in sizes.items():
                for place, vector in enumerate(batch.column(name).to_pylist()):
                    if vector is not None and len(vector) != size:
                        raise DataError(
                            f"items: column {name!r}: a vector of length {len(vector)} at {stream.place(row + place)}",
                            expected=f"length {size}, as the items of {self.dataset.path} have",
                        )
            row += batch.num_rows

    def copy_tokenizer(self, stage: Path) -> None:
        shutil.copyfile(self.dataset.path / "tokenizer.json", stage / "tokenizer.json")

    def item_chunks(self) -> Iterator[dict[str, np.ndarray]]:
        """The encoded items, a chunk at a time: by field, text tokens under the text field's name."""
        for start in range(0, self.dataset.num_items, CHUNK_ROWS):
            features = self.dataset.item_features(np.arange(start, min(start + CHUNK_ROWS, self.dataset.num_items)))
            text = {field.name: features.tokens for field in self._items("text")}
            yield {name: values for name, values in {**text, **features.fields}.items() if values is not None}

    def ids_with(self, later: Batches) -> Batches:
        """The item ids with those of further items."""
        return lambda: _chained(self.item_ids, later())

    def display_with(self, later: Batches) -> Batches:
        """What people see of the items, with that of further items."""
        columns = self.dataset.schema.items.display or ()
        return lambda: _chained(self.dataset.path / DISPLAY_FILE, (display_batch(batch, columns) for batch in later()))

    def check_ids(self, users: pa.DataType, items: pa.DataType) -> None:
        """Refuse ids of another type than the dataset has: 7 and '7' are not the same user."""
        files = {"user": (users, self.dataset.path / "users" / "ids.parquet"), "item": (items, self.item_ids)}
        for what, (here, path) in files.items():
            (before,) = pq.read_schema(path).types
            if pa.types.is_integer(before) != pa.types.is_integer(here):
                raise DataError(
                    f"{what} ids are {here} here and {before} in {self.dataset.path}",
                    expected="ids of one type: those of the dataset are found again by their value",
                    next_step="cast the column",
                )

    def _items(self, kind: str) -> list[Field]:
        return [field for field in self.dataset.fields.item if field.kind == kind]


def _chained(path: Path, later: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of a file and further ones, of the file's types, in chunks of one size."""
    with pq.ParquetFile(path) as file:
        types = file.schema_arrow
        more = (batch.cast(types) for batch in later if batch.num_rows)
        yield from rechunk(chain(file.iter_batches(CHUNK_ROWS), more), CHUNK_ROWS)


def _extend(values: tuple[str, ...], later: Iterable[str]) -> tuple[str, ...]:
    known = set(values)
    new = [value for value in dict.fromkeys(later) if value not in known]
    return (*values, *new[: MAX_CATEGORIES - len(values)])
