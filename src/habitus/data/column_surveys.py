"""What one pass over a column finds out: how much of it is filled, what is wrong, and what encoding needs."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.columns import is_present, to_categories, to_float32, to_lists, to_strings, vector_lengths
from habitus.data.fields import Field
from habitus.data.problems import EXAMPLES_SHOWN, Problem, quote_value
from habitus.data.text import has_control_characters

MAX_CATEGORIES = 1 << 20


class Fault(NamedTuple):
    """One way in which values can be unusable, as an error says it."""

    what: str
    expected: str
    remedy: str  # what --on-bad drop does about it


_CONTROL_CHARACTERS = Fault(
    "NUL or other control characters",
    "plain text (white space and right-to-left letters are fine)",
    "replaces control characters by spaces",
)
_OTHER_LENGTH = Fault("a vector of another length", "vectors of one length", "makes such vectors missing")
_BAD_ENTRIES = Fault("NaN or infinite entries", "finite entries", "makes such vectors missing")


@dataclass
class _BadValues:
    """How many values have a fault, and the first of them with their rows."""

    rows: int = 0
    examples: list[tuple[int, object]] = field(default_factory=list)


class ColumnSurvey:
    """One item column, chunk by chunk. Each kind of field has its own survey."""

    def __init__(self) -> None:
        self.filled = 0
        self.left_out = 0  # values that are usable and not stored
        self._bad_values: dict[Fault, _BadValues] = {}

    def add(self, row: int, column: pa.Array) -> None:
        """Take in the next chunk; `row` is the catalogue row of its first value."""
        raise NotImplementedError

    def to_field(self, name: str) -> Field:
        """The encoded field that these values make."""
        raise NotImplementedError

    def repair(self, column: pa.Array) -> pa.Array:
        """The column with bad values made missing; the column itself where there are none."""
        return column

    def problems(self, name: str, place: Callable[[int], str]) -> list[Problem]:
        """Everything wrong with the column; `place` says where a row stands in the input."""
        return [
            Problem(
                "items",
                name,
                fault.what,
                bad.rows,
                tuple(f"{place(row)}: {self._show(fault, value)}" for row, value in bad.examples[:EXAMPLES_SHOWN]),
                self._expected(fault),
                fault.remedy,
            )
            for fault, bad in self._bad_values.items()
        ]

    def _note(
        self, fault: Fault, row: int, is_bad: np.ndarray, column: pa.Array, times: np.ndarray | None = None
    ) -> None:
        places = np.flatnonzero(is_bad)
        if len(places):
            bad = self._bad_values.setdefault(fault, _BadValues())
            bad.rows += len(places) if times is None else int(times[places].sum())
            bad.examples += [(row + int(i), _example(column[int(i)])) for i in places[:EXAMPLES_SHOWN]]

    def _show(self, fault: Fault, value: object) -> str:
        return quote_value(value)

    def _expected(self, fault: Fault) -> str:
        return fault.expected


class TextSurvey(ColumnSurvey):
    """All text columns of an item make one field together, so that a single one has none."""

    def add(self, row: int, column: pa.Array, times: np.ndarray | None = None) -> None:
        """Likewise; `times` is how many rows of the table hold each value, one where it is not given."""
        column = to_strings(column)
        empty = pc.sum(pc.equal(pc.utf8_trim_whitespace(column), "")).as_py() or 0
        self.filled += len(column) - column.null_count - empty
        self._note(_CONTROL_CHARACTERS, row, has_control_characters(column), column, times)


class CategorySurvey(ColumnSurvey):
    """Counts how often each value occurs; memory grows with the distinct values only."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: pa.Table | None = None
        self._waiting: list[pa.Table] = []

    def add(self, row: int, column: pa.Array) -> None:
        self.filled += len(column) - column.null_count
        self._count(to_categories(column).drop_null())

    def _count(self, values: pa.Array) -> None:
        counts = pc.value_counts(values)
        self._waiting.append(pa.table({"value": counts.field("values"), "count": counts.field("counts")}))
        if len(self._waiting) >= 64:
            self._merge()

    def to_field(self, name: str) -> Field:
        return Field(name=name, kind="category", size=len(self.vocabulary()) + 1)

    def problems(self, name: str, place: Callable[[int], str]) -> list[Problem]:
        counts = self._merge()
        if counts.num_rows <= MAX_CATEGORIES:
            return []
        examples = counts["value"].slice(0, EXAMPLES_SHOWN).to_pylist()
        return [too_many_categories("items", name, counts.num_rows, examples)]

    def vocabulary(self) -> tuple[str, ...]:
        """The values in order; of too many, the most frequent."""
        counts = self._merge()
        if counts.num_rows > MAX_CATEGORIES:
            counts = counts.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, MAX_CATEGORIES)
        return tuple(sorted(counts["value"].to_pylist()))

    def _merge(self) -> pa.Table:
        none = pa.table({"value": pa.array([], pa.string()), "count": pa.array([], pa.int64())})
        tables = [none if self._counts is None else self._counts, *self._waiting]
        merged = pa.concat_tables(tables).group_by("value").aggregate([("count", "sum")])
        self._counts = merged.rename_columns(["value", "count"]).combine_chunks()
        self._waiting = []
        return self._counts


class NumberSurvey(ColumnSurvey):
    """Mean and deviation of what `read` makes of a column; `fault` is what to say of the values it cannot read."""

    def __init__(self, read: Callable[[pa.Array], np.ndarray], fault: Fault) -> None:
        super().__init__()
        self._read = read
        self._fault = fault
        self.moments = Moments()

    def add(self, row: int, column: pa.Array) -> None:
        numbers = self._read(column)
        is_bad = ~np.isfinite(numbers) & is_present(column)
        self._note(self._fault, row, is_bad, column)
        self.moments.add(np.where(np.isfinite(numbers), numbers, np.nan))
        self.filled += len(column) - column.null_count - int(is_bad.sum())

    def to_field(self, name: str) -> Field:
        return self.moments.to_field(name)

    def repair(self, column: pa.Array) -> pa.Array:
        if not self._bad_values:
            return column
        finite = np.isfinite(self._read(column))
        return pc.if_else(pa.array(finite), column, pa.scalar(None, column.type))


class VectorSurvey(ColumnSurvey):
    """Counts the lengths of the vectors; the most frequent one is the field's."""

    def __init__(self) -> None:
        super().__init__()
        self._lengths: dict[int, int] = {}

    def add(self, row: int, column: pa.Array, times: np.ndarray | None = None) -> None:
        """Likewise; `times` is how many rows of the table hold each value, one where it is not given."""
        given, column = column, to_lists(column)
        lengths = vector_lengths(column)
        counts = np.bincount(lengths, times)
        for length in np.flatnonzero(counts[1:]).tolist():
            self._lengths[length + 1] = self._lengths.get(length + 1, 0) + int(counts[length + 1])
        present = is_present(column)
        has_other_length = lengths != self.size
        self._note(_OTHER_LENGTH, row, present & has_other_length, given, times)
        entries = to_float32(pc.list_flatten(column))
        owner = np.repeat(np.arange(len(column)), lengths)
        has_bad_entry = np.zeros(len(column), bool)
        has_bad_entry[owner[~np.isfinite(entries)]] = True
        self._note(_BAD_ENTRIES, row, has_bad_entry, column, times)
        self.filled += len(column) - column.null_count - int((present & (has_bad_entry | has_other_length)).sum())

    @property
    def size(self) -> int:
        """The most frequent length so far, the shorter one in a tie."""
        return min(self._lengths, key=lambda length: (-self._lengths[length], length)) if self._lengths else 1

    def to_field(self, name: str) -> Field:
        return Field(name=name, kind="vector", size=self.size)

    def repair(self, column: pa.Array) -> pa.Array:
        if not self._bad_values:
            return column
        size = self.size
        rows = to_lists(column).to_pylist()
        usable = [row if row is not None and _is_usable(row, size) else None for row in rows]
        return pa.array(usable, pa.list_(pa.float32()))

    def _show(self, fault: Fault, value: object) -> str:
        return f"length {len(value)}" if fault is _OTHER_LENGTH and isinstance(value, list) else quote_value(value)

    def _expected(self, fault: Fault) -> str:
        return f"length {self.size}, the most frequent" if fault is _OTHER_LENGTH else fault.expected


@dataclass
class Moments:
    """Running mean and deviation of a number and of its signed logarithm, over what is not missing.

    Chunks are merged by their means (Chan et al., 1979): sums of squares would lose a deviation of 10³ around 10⁹.
    """

    count: int = 0
    means: np.ndarray = field(default_factory=lambda: np.zeros(2))
    squares: np.ndarray = field(default_factory=lambda: np.zeros(2))  # of the deviations from the means

    def add(self, values: np.ndarray) -> None:
        values = values[~np.isnan(values)].astype(np.float64)
        if not len(values):
            return
        both = np.stack([values, np.sign(values) * np.log1p(np.abs(values))])
        means = both.mean(axis=1)
        both -= means[:, None]
        total = self.count + len(values)
        shift = means - self.means
        self.squares += (both * both).sum(axis=1) + shift * shift * (self.count * len(values) / total)
        self.means = self.means + shift * (len(values) / total)
        self.count = total

    def to_field(self, name: str) -> Field:
        """The number field with these statistics; a constant gets deviation 1, so nothing is divided by zero."""
        if not self.count:
            return Field(name=name, kind="number")
        stds = np.sqrt(self.squares / self.count)
        stds = np.where(stds > 1e-7 * np.abs(self.means), stds, 1.0)  # float32 cannot represent a smaller one
        return Field(
            name=name,
            kind="number",
            mean=float(self.means[0]),
            std=float(stds[0]),
            log_mean=float(self.means[1]),
            log_std=float(stds[1]),
        )


def too_many_categories(table: str, name: str, distinct: int, examples: list[str]) -> Problem:
    return Problem(
        table,
        name,
        f"one of {distinct:,} distinct values",
        distinct,
        tuple(quote_value(value) for value in examples),
        f"at most {MAX_CATEGORIES:,} values of a category (declare it as text, or leave it out)",
        "keeps the most frequent values of such a category",
    )


def _example(value: pa.Scalar) -> object:
    try:
        return value.as_py()
    except (OverflowError, ValueError):  # a time beyond Python's years
        return value.cast(pa.int64()).as_py()


def _is_usable(row: list[float | None], size: int) -> bool:
    with np.errstate(over="ignore"):  # what is stored is float32, and so is what must be finite
        return len(row) == size and bool(np.isfinite(np.array(row, np.float32)).all())
