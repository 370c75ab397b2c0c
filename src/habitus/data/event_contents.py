"""Event fields that are texts or vectors: each distinct value is stored once, and an event holds its number.

The number 0 stands for a missing value, whose row has no tokens, or is NaN.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from habitus.data.arrays import ArrayWriter
from habitus.data.column_surveys import TextSurvey, VectorSurvey
from habitus.data.columns import is_present, to_vectors
from habitus.data.fields import Field, Fields
from habitus.data.problems import Problem
from habitus.data.sources import CHUNK_ROWS, is_list
from habitus.data.text import MAX_TRAINING_TEXTS, cut_for_training, encode_texts, join_texts

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTENT_KINDS = ("text", "vector")
MAX_CHARACTERS = 1 << 15  # of a text that are kept: far beyond the tokens that a model reads


def content_file(number: int) -> str:
    """The table of an event field's distinct values, by the field's place among them."""
    return f"events/content-{number:02d}.npy"


def texts_file(number: int) -> str:
    """The distinct texts themselves, from number 1 on."""
    return f"events/content-{number:02d}.parquet"


def content_sql(kind: str, column: str, type_: pa.DataType) -> str:
    """SQL of a text or vector as it is told apart from others; null where it is missing."""
    if kind == "vector" and is_list(type_):  # what float32 cannot hold is infinite, and found by the survey
        number = f"CASE WHEN isfinite(x) AND abs(x) > {np.finfo(np.float32).max!s} THEN 'inf'::FLOAT ELSE x::FLOAT END"
        return f"[{number} for x in CAST({column} AS DOUBLE[])]"
    text = f"CAST({column} AS VARCHAR)"
    return f"nullif(trim({text if kind == 'vector' else f'left({text}, {MAX_CHARACTERS})'}), '')"


@dataclass(frozen=True)
class EventContent:
    """The distinct values of one event field, in the order of their numbers from 1 on."""

    name: str
    kind: str
    values: pa.Array
    origins: np.ndarray  # int64: the row of the log in which each occurs first
    times: np.ndarray  # int64: the events that hold it
    survey: TextSurvey | VectorSurvey

    @classmethod
    def of(cls, name: str, kind: str, values: pa.Array, origins: np.ndarray, times: np.ndarray) -> "EventContent":
        """The content with what a look at every value finds."""
        survey = VectorSurvey() if kind == "vector" else TextSurvey()
        for start, chunk in _chunks(values):
            survey.add(start, chunk, times[start : start + len(chunk)])
        return cls(name, kind, values, origins, times, survey)

    def problems(self, place: Callable[[int], str]) -> list[Problem]:
        """What is wrong with the values; `place` says where a row of the log stands."""
        found = self.survey.problems(self.name, lambda row: place(int(self.origins[row])))
        return [replace(problem, table="events") for problem in found]

    def field(self) -> Field:
        """The event field; that of a text is still without its number of tokens."""
        size = self.survey.size if isinstance(self.survey, VectorSurvey) else 2
        return Field(name=self.name, kind="vector" if self.kind == "vector" else "text", size=size, rows=self.num_rows)

    @property
    def num_rows(self) -> int:
        """Rows of the table, that of a missing value included."""
        return len(self.values) + 1

    @property
    def filled(self) -> int:
        """Events whose value is not missing: neither white space alone nor a vector that was left out."""
        present = [
            is_present(self.survey.repair(chunk))
            if self.kind == "vector"
            else pc.not_equal(join_texts([chunk]), "").to_numpy(zero_copy_only=False)
            for _, chunk in _chunks(self.values)
        ]
        return int(self.times[np.concatenate(present)].sum()) if present else 0

    def training_texts(self, text_len: int) -> Iterator[str]:
        """The beginnings of the texts, for the tokenizer: the first ones where there are very many."""
        for _, chunk in _chunks(self.values.slice(0, MAX_TRAINING_TEXTS)) if self.kind == "text" else ():
            yield from cut_for_training(join_texts([chunk]), text_len)

    def write(self, stage: Path, number: int, spec: Field, text_len: int, tokenizer: "Tokenizer | None") -> None:
        """The table of the encoded values, and the texts as they are."""
        with ArrayWriter(stage / content_file(number), spec.stored_dtype, spec.row_shape(text_len)) as writer:
            writer.append(np.full((1, *spec.row_shape(text_len)), spec.missing, spec.stored_dtype))
            for _, chunk in _chunks(self.values):
                if self.kind == "vector":
                    writer.append(to_vectors(self.survey.repair(chunk), spec.size))
                else:
                    assert tokenizer is not None
                    writer.append(encode_texts(tokenizer, join_texts([chunk]).to_pylist(), text_len))
        if self.kind == "text":
            pq.write_table(pa.table({"text": self.values}), stage / texts_file(number), compression="zstd")


def with_token_count(fields: Fields, num_tokens: int) -> Fields:
    """The fields once the tokenizer is trained."""

    def count(specs: tuple[Field, ...]) -> tuple[Field, ...]:
        return tuple(spec.model_copy(update={"size": num_tokens}) if spec.kind == "text" else spec for spec in specs)

    return fields.model_copy(update={"item": count(fields.item), "event": count(fields.event)})


def write_contents(
    contents: Iterable[EventContent], fields: Fields, stage: Path, tokenizer: "Tokenizer | None"
) -> None:
    """The tables of all event fields that are texts or vectors."""
    places = {spec.name: number for number, spec in enumerate(fields.event)}
    for content in contents:
        number = places[content.name]
        content.write(stage, number, fields.event[number], fields.text_len, tokenizer)


def read_content(spec: Field, codes: np.ndarray, tables: Mapping[str, np.ndarray]) -> np.ndarray:
    """What a model reads of an event field at some events: stored values, or the texts and vectors they number."""
    if spec.name not in tables:
        return codes.astype(spec.dtype)
    return tables[spec.name].take(codes, axis=0).astype(spec.dtype, copy=False)


def _chunks(values: pa.Array) -> Iterator[tuple[int, pa.Array]]:
    for start in range(0, len(values), CHUNK_ROWS):
        yield start, values.slice(start, CHUNK_ROWS)
