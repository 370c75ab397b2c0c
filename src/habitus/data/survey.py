"""A first pass over the items: what values they hold, and what is wrong with them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from habitus.data.category_lists import MAX_VALUES
from habitus.data.column_surveys import CategorySurvey
from habitus.data.columns import to_strings
from habitus.data.encoders import Encoders
from habitus.data.fields import Field, Fields
from habitus.data.kinds import KINDS
from habitus.data.problems import Problem
from habitus.data.text import MAX_TRAINING_TEXTS, cut_for_training, join_texts
from habitus.randomness import Stream, random_words


@dataclass(frozen=True)
class ItemStream:
    """The items of a catalogue in order; can be read more than once."""

    kinds: dict[str, str]  # the item fields
    num_items: int
    batches: Callable[[], Iterator[pa.RecordBatch]]  # one column per field
    place: Callable[[int], str]  # where row i of the catalogue stands in the input
    separators: Mapping[str, str] = field(default_factory=dict)  # of texts that the batches hold as lists


@dataclass(frozen=True)
class TextOptions:
    text_len: int = 24
    vocabulary_size: int = 8192
    seed: int = 0


def survey_items(stream: ItemStream, text: TextOptions) -> "ItemSurvey":
    """What a first pass over the items finds: values, statistics, texts to train on, and what is wrong."""
    survey = ItemSurvey(stream, text)
    row = 0
    for batch in stream.batches():
        survey.add(row, batch)
        row += batch.num_rows
    return survey


class ItemSurvey:
    """Collects what must be known of the items before they can be encoded."""

    def __init__(self, stream: ItemStream, text: TextOptions) -> None:
        self.stream = stream
        self.text = text
        self.columns = {name: KINDS[kind].survey() for name, kind in stream.kinds.items()}
        self.text_columns = tuple(name for name, kind in stream.kinds.items() if KINDS[kind].encoded_as == "text")
        self.texts: list[str] = []  # to train the tokenizer on

    def add(self, row: int, batch: pa.RecordBatch) -> None:
        """Take in the next items; `row` is the catalogue row of the first."""
        for name, survey in self.columns.items():
            survey.add(row, batch.column(name))
        if self.text_columns:
            self._sample_texts(row, batch)

    def problems(self) -> list[Problem]:
        """Everything wrong with the values of the items."""
        return [
            problem for name, survey in self.columns.items() for problem in survey.problems(name, self.stream.place)
        ]

    def filled(self) -> dict[str, int]:
        """How many items have a value, for each field."""
        return {name: survey.filled for name, survey in self.columns.items()}

    def left_out(self) -> dict[str, int]:
        """How many usable values are not stored, by what they are."""
        return {
            f"items.{name}: values beyond an item's first {MAX_VALUES}": survey.left_out
            for name, survey in self.columns.items()
            if survey.left_out
        }

    def repair(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The items with bad values made missing."""
        columns = [self.columns[name].repair(batch.column(name)) for name in batch.schema.names]
        return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)

    def encoders(self, event_fields: tuple[Field, ...], event_values: dict[str, tuple[str, ...]]) -> Encoders:
        """The item encoders that the survey implies; all text columns become one field, the first."""
        text = [Field(name=" + ".join(self.text_columns), kind="text", size=2)] if self.text_columns else []
        others = [survey.to_field(name) for name, survey in self.columns.items() if name not in self.text_columns]
        categories = {name: s for name, s in self.columns.items() if isinstance(s, CategorySurvey)}
        has_text = bool(text) or any(field.kind == "text" for field in event_fields)
        return Encoders(
            fields=Fields(item=(*text, *others), event=event_fields, text_len=self.text.text_len if has_text else 0),
            text_columns=self.text_columns,
            item_kinds=dict(self.stream.kinds),
            item_values={name: survey.vocabulary() for name, survey in categories.items()},
            event_values=event_values,
            separators=dict(self.stream.separators) or None,
        )

    def _sample_texts(self, row: int, batch: pa.RecordBatch) -> None:
        """Keep the texts of items that a hash of their row selects, about MAX_TRAINING_TEXTS of all."""
        texts = join_texts([to_strings(batch.column(name)) for name in self.text_columns])
        if self.stream.num_items > MAX_TRAINING_TEXTS:
            drawn = random_words(self.text.seed, Stream.TOKENIZER, 0, np.arange(row, row + batch.num_rows))[0]
            texts = texts.filter(pa.array(drawn * self.stream.num_items < MAX_TRAINING_TEXTS << 32))
        self.texts += cut_for_training(texts, self.text.text_len)
