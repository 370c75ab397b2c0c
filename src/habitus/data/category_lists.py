"""Categories of which an item has several, as a film has genres: split, flattened, and stored as rows of codes."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.column_surveys import CategorySurvey
from habitus.data.columns import to_categories, to_codes
from habitus.data.fields import Field
from habitus.data.sources import is_list

MAX_VALUES = 16  # of an item: rows of codes have one length, and the longest item should not decide it
_SEPARATORS = {"|": 0.7, ";": 0.7, ",": 0.2}  # with the most values per distinct text at which a guess splits
_MAX_VALUE_LENGTH = 40  # characters of a value, on average; longer ones are sentences


def split_texts(batch: pa.RecordBatch, separators: Mapping[str, str]) -> pa.RecordBatch:
    """The items with texts of several values as lists of them; a column that is a list already stays."""
    for name, separator in separators.items():
        place = batch.schema.get_field_index(name)
        if place >= 0 and pa.types.is_string(batch.column(place).type):
            batch = batch.set_column(place, name, pc.split_pattern(batch.column(place), separator))
    return batch


def flatten_values(column: pa.Array) -> tuple[np.ndarray, pa.Array]:
    """The distinct values of each item in order: (rows of the items, values as texts), without empty ones."""
    if not is_list(column.type):  # one value each
        column = column.cast(pa.string()) if pa.types.is_null(column.type) else column
        owners, values = np.arange(len(column)), column
    else:
        owners, values = pc.list_parent_indices(column).to_numpy(), pc.list_flatten(column)
    texts = pc.utf8_trim_whitespace(to_categories(values))
    keep = pc.fill_null(pc.not_equal(texts, ""), False).to_numpy(zero_copy_only=False)
    owners, texts = owners[keep], texts.filter(pa.array(keep))
    codes = texts.dictionary_encode().indices.to_numpy()
    _, first = np.unique(owners * (len(codes) + 1) + codes, return_index=True)
    first.sort()
    return owners[first], texts.take(pa.array(first))


def distinct_values(column: pa.Array) -> list[str]:
    """The values of a category, single or several to an item, in the order in which they first occur."""
    values = flatten_values(column)[1] if is_list(column.type) else to_categories(column).drop_null()
    distinct: list[str] = values.unique().to_pylist()
    return distinct


def longest_list(column: pa.Array) -> int:
    """The most values that an item has, as far as they are stored."""
    owners = flatten_values(column)[0]
    return min(int(np.bincount(owners).max(initial=0)), MAX_VALUES)


def to_code_rows(column: pa.Array, vocabulary: pa.Array, width: int) -> np.ndarray:
    """The codes of each item's first values, int32 [n, width]; 0 where there are no more. Unknown ones are left out."""
    owners, values = flatten_values(column)
    codes = to_codes(values, vocabulary)
    owners, codes = owners[codes > 0], codes[codes > 0]
    place = np.arange(len(owners)) - np.searchsorted(owners, owners)
    rows = np.zeros((len(column), width), np.int32)
    fits = place < width
    rows[owners[fits], place[fits]] = codes[fits]
    return rows


def widen(rows: np.ndarray, row_shape: tuple[int, ...]) -> np.ndarray:
    """Rows of codes with room for further values; anything else as it is."""
    if rows.ndim != 2 or rows.shape[1] >= row_shape[0]:
        return rows
    return np.pad(rows, ((0, 0), (0, row_shape[0] - rows.shape[1])))


class CategoryListSurvey(CategorySurvey):
    """Counts values as a category does, and how many an item has."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 1

    def add(self, row: int, column: pa.Array) -> None:
        owners, values = flatten_values(column)
        counts = np.bincount(owners, minlength=len(column))
        self.filled += int(np.count_nonzero(counts))
        self.left_out += int(np.maximum(counts - MAX_VALUES, 0).sum())
        self.width = max(self.width, min(int(counts.max(initial=0)), MAX_VALUES))
        self._count(values)

    def to_field(self, name: str) -> Field:
        return Field(name=name, kind="categories", size=len(self.vocabulary()) + 1, width=self.width)


def guess_separator(column: pa.ChunkedArray) -> str | None:
    """What divides the values of a text column, where splitting leaves few values that come again and again."""
    if not pa.types.is_string(column.type):
        return None
    texts = column.combine_chunks().drop_null()
    for separator, most in _SEPARATORS.items():
        is_divided = pc.match_substring(texts, separator)
        if (pc.mean(is_divided.cast(pa.int8())).as_py() or 0) < 0.1:
            continue
        owners, values = flatten_values(pc.split_pattern(texts, separator))
        num_values, num_texts = len(values.unique()), len(texts.unique())
        is_short = (pc.mean(pc.utf8_length(values)).as_py() or 0) <= _MAX_VALUE_LENGTH
        if num_values <= most * num_texts and len(owners) >= 3 * num_values and is_short:
            return separator
    return None
