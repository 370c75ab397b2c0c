"""A first pass over the items: what values they hold, and what is wrong with them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.encoders import (
    Encoders,
    Moments,
    as_category,
    as_float32,
    as_list,
    as_number,
    as_text,
    vector_lengths,
)
from habitus.data.fields import Field, Fields
from habitus.data.problems import EXAMPLES_SHOWN, Problem, quote_value
from habitus.data.text import MAX_TRAINING_TEXTS, has_control_characters, joined_texts
from habitus.events import Kind
from habitus.randomness import Stream, random_words

MAX_CATEGORIES = 1 << 20


@dataclass(frozen=True)
class ItemStream:
    """The items of a catalogue in order; can be read more than once."""

    kinds: dict[str, Kind]  # the item fields
    num_items: int
    batches: Callable[[], Iterator[pa.RecordBatch]]  # one column per field
    place: Callable[[int], str]  # where row i of the catalogue stands in the input


@dataclass(frozen=True)
class TextOptions:
    text_len: int = 24
    vocabulary_size: int = 8192
    seed: int = 0


def survey(stream: ItemStream, text: TextOptions) -> "Survey":
    """What a first pass over the items finds: values, statistics, texts to train on, and what is wrong."""
    found = Survey(stream, text)
    row = 0
    for batch in stream.batches():
        for name, kind in stream.kinds.items():
            found.look(row, name, kind, batch.column(name))
        found.keep_texts(row, batch)
        row += batch.num_rows
    return found


class Survey:
    """Collects what encoding needs to know beforehand."""

    def __init__(self, stream: ItemStream, text: TextOptions) -> None:
        self.stream = stream
        self.text = text
        self.moments = {name: Moments() for name, kind in stream.kinds.items() if kind in ("number", "time")}
        self.values = {name: CategoryCount() for name, kind in stream.kinds.items() if kind == "category"}
        self.lengths: dict[str, dict[int, int]] = {n: {} for n, kind in stream.kinds.items() if kind == "vector"}
        self.filled = dict.fromkeys(stream.kinds, 0)
        self.texts: list[str] = []
        self._bad: dict[tuple[str, str], Bad] = {}

    def look(self, row: int, name: str, kind: Kind, column: pa.Array) -> None:
        missing = column.null_count
        if kind == "text":
            column = as_text(column)
            missing += pc.sum(pc.equal(pc.utf8_trim_whitespace(column), "")).as_py() or 0
            self._note(row, name, "control", has_control_characters(column), column)
        elif kind == "category":
            self.values[name].add(as_category(column))
        elif kind in ("number", "time"):
            numbers = as_number(column, kind)
            wrong = ~np.isfinite(numbers) & column.is_valid().to_numpy(zero_copy_only=False)
            self._note(row, name, kind, wrong, column)
            self.moments[name].add(np.where(np.isfinite(numbers), numbers, np.nan))
            missing += int(wrong.sum())
        elif kind == "vector":
            missing += self._look_at_vectors(row, name, column)
        self.filled[name] += len(column) - missing

    def _look_at_vectors(self, row: int, name: str, column: pa.Array) -> int:
        column = as_list(column)
        lengths = vector_lengths(column)
        for length, count in zip(*np.unique(lengths[lengths > 0], return_counts=True), strict=True):
            self.lengths[name][int(length)] = self.lengths[name].get(int(length), 0) + int(count)
        usual = self.vector_size(name)
        present = column.is_valid().to_numpy(zero_copy_only=False)
        self._note(row, name, "length", present & (lengths != usual), column)
        flat = as_float32(pc.list_flatten(column))
        owner = np.repeat(np.arange(len(column)), lengths)
        wrong = np.zeros(len(column), bool)
        wrong[owner[~np.isfinite(flat)]] = True
        self._note(row, name, "vector", wrong, column)
        return int((present & (wrong | (lengths != usual))).sum())

    def keep_texts(self, row: int, batch: pa.RecordBatch) -> None:
        """Keep the texts that a fixed hash-sample of the rows chooses for training the tokenizer."""
        columns = [as_text(batch.column(name)) for name, kind in self.stream.kinds.items() if kind == "text"]
        if not columns:
            return
        texts = joined_texts(columns)
        if self.stream.num_items > MAX_TRAINING_TEXTS:
            drawn = random_words(self.text.seed, Stream.TOKENIZER, 0, np.arange(row, row + batch.num_rows))[0]
            texts = texts.filter(pa.array(drawn * self.stream.num_items < MAX_TRAINING_TEXTS << 32))
        self.texts += texts.to_pylist()

    def vector_size(self, name: str) -> int:
        """The most frequent length so far, the shorter one in a tie."""
        counts = self.lengths[name]
        return min(counts, key=lambda length: (-counts[length], length)) if counts else 1

    def has(self, name: str, what: str) -> bool:
        return (name, what) in self._bad

    def _note(self, row: int, name: str, what: str, wrong: np.ndarray, column: pa.Array) -> None:
        places = np.flatnonzero(wrong)
        if len(places):
            bad = self._bad.setdefault((name, what), Bad())
            bad.rows += len(places)
            bad.examples += [(row + int(i), column[int(i)].as_py()) for i in places[:EXAMPLES_SHOWN]]

    def problems(self) -> list[Problem]:
        """Everything wrong with the values of the items."""
        found = []
        for (name, what), bad in self._bad.items():
            told, expected, remedy = _EXPLAINED[what]
            examples = tuple(
                f"{self.stream.place(row)}: {_told_value(what, value)}" for row, value in bad.examples[:EXAMPLES_SHOWN]
            )
            if what == "length":
                expected = f"length {self.vector_size(name)}, the most frequent"
            found.append(
                Problem(
                    "items",
                    name,
                    told,
                    bad.rows,
                    examples,
                    expected,
                    remedy,
                )
            )
        for name, count in self.values.items():
            if count.distinct > MAX_CATEGORIES:
                found.append(too_many_categories("items", name, count.distinct, count.first_values()))
        return found

    def encoders(self, event_fields: tuple[Field, ...], event_values: dict[str, tuple[str, ...]]) -> Encoders:
        """The item encoders that the survey implies; text fields become one, first in the list."""
        text_columns = tuple(name for name, kind in self.stream.kinds.items() if kind == "text")
        values = {name: count.vocabulary() for name, count in self.values.items()}
        fields = [Field(name=" + ".join(text_columns), kind="text", size=2)] if text_columns else []
        for name, kind in self.stream.kinds.items():
            if kind == "category":
                fields.append(Field(name=name, kind="category", size=len(values[name]) + 1))
            elif kind in ("number", "time"):
                fields.append(self.moments[name].describe(name))
            elif kind == "vector":
                fields.append(Field(name=name, kind="vector", size=self.vector_size(name)))
        return Encoders(
            fields=Fields(item=tuple(fields), event=event_fields, text_len=self.text.text_len if text_columns else 0),
            text_columns=text_columns,
            item_kinds=dict(self.stream.kinds),
            item_values=values,
            event_values=event_values,
        )


@dataclass
class Bad:
    rows: int = 0
    examples: list[tuple[int, object]] = field(default_factory=list)


class CategoryCount:
    """How often each value of a category occurs; memory grows with the distinct values only."""

    def __init__(self) -> None:
        self._counts: pa.Table | None = None
        self._waiting: list[pa.Table] = []

    def add(self, column: pa.Array) -> None:
        counted = pc.value_counts(column.drop_null())
        self._waiting.append(pa.table({"value": counted.field("values"), "count": counted.field("counts")}))
        if len(self._waiting) >= 64:
            self._merge()

    def _merge(self) -> pa.Table:
        tables = ([self._counts] if self._counts is not None else []) + self._waiting
        merged = pa.concat_tables(tables).group_by("value").aggregate([("count", "sum")])
        self._counts = merged.rename_columns(["value", "count"]).combine_chunks()
        self._waiting = []
        return self._counts

    @property
    def distinct(self) -> int:
        return self._merge().num_rows

    def first_values(self) -> list[str]:
        return self._merge()["value"].slice(0, EXAMPLES_SHOWN).to_pylist()

    def vocabulary(self) -> tuple[str, ...]:
        """The values in order; of too many, the most frequent."""
        counts = self._merge()
        if counts.num_rows > MAX_CATEGORIES:
            counts = counts.sort_by([("count", "descending"), ("value", "ascending")]).slice(0, MAX_CATEGORIES)
        return tuple(sorted(counts["value"].to_pylist()))


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


_EXPLAINED = {
    "control": (
        "NUL or other control characters",
        "plain text (white space and right-to-left letters are fine)",
        "replaces control characters by spaces",
    ),
    "number": (
        "NaN, infinite or unreadable numbers",
        "finite numbers; missing values as nulls",
        "makes bad numbers missing",
    ),
    "time": ("times that cannot be read", "times in ISO form; missing values as nulls", "makes bad times missing"),
    "length": ("a vector of another length", "", "makes such vectors missing"),
    "vector": ("NaN or infinite entries", "finite entries", "makes such vectors missing"),
}


def _told_value(what: str, value: object) -> str:
    if what == "length" and isinstance(value, list):
        return f"length {len(value)}"
    return quote_value(value)
