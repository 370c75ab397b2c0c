"""Event fields that are texts or vectors: each distinct value is stored once, and an event holds its number.

The number 0 stands for a missing value, whose row has no tokens, or is NaN.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
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
    """The distinct values of one event field, in the order of their numbers from 1 on.

    They stay in a file, a chunk of which is read at a time: there may be as many as events.
    """

    name: str
    kind: str
    path: Path  # Parquet: value; origin, the row of the log in which it occurs first; times, the events that hold it
    survey: TextSurvey | VectorSurvey
    trains: np.ndarray | None = None  # bool [num_rows]: whether a training event holds it; None: not known yet

    @classmethod
    def of(cls, name: str, kind: str, path: Path) -> "EventContent":
        """The content with what a look at every value finds."""
        survey = VectorSurvey() if kind == "vector" else TextSurvey()
        for start, chunk, times in _chunks(path):
            survey.add(start, chunk, times)
        return cls(name, kind, path, survey)

    def problems(self, place: Callable[[int], str]) -> list[Problem]:
        """What is wrong with the values; `place` says where a row of the log stands."""
        found = self.survey.problems(self.name, lambda row: place(self._origin(row)))
        return [replace(problem, table="events") for problem in found]

    def field(self) -> Field:
        """The event field; that of a text is still without its number of tokens."""
        size = self.survey.size if isinstance(self.survey, VectorSurvey) else 2
        return Field(name=self.name, kind="vector" if self.kind == "vector" else "text", size=size, rows=self.num_rows)

    @cached_property
    def num_rows(self) -> int:
        """Rows of the table, that of a missing value included."""
        return int(pq.read_metadata(self.path).num_rows) + 1

    @property
    def filled(self) -> int:
        """Events whose value is not missing: neither white space alone nor a vector that was left out."""
        return sum(int(times[self._is_present(chunk)].sum()) for _, chunk, times in _chunks(self.path))

    def training_texts(self, text_len: int) -> Iterator[str]:
        """The beginnings of the texts of training events, for the tokenizer: the first ones where there are very many.

        Texts that only validation or test events hold are not among them, as their users are not trained on.
        """
        assert self.trains is not None
        left = MAX_TRAINING_TEXTS
        for start, chunk, _ in _chunks(self.path) if self.kind == "text" else ():
            chosen = chunk.filter(pa.array(self.trains[start + 1 : start + 1 + len(chunk)])).slice(0, left)
            yield from cut_for_training(join_texts([chosen]), text_len)
            left -= len(chosen)
            if not left:
                return

    def write(self, stage: Path, number: int, spec: Field, text_len: int, tokenizer: "Tokenizer | None") -> None:
        """The table of the encoded values, and the texts as they are."""
        with ArrayWriter(stage / content_file(number), spec.stored_dtype, spec.row_shape(text_len)) as writer:
            writer.append(np.full((1, *spec.row_shape(text_len)), spec.missing, spec.stored_dtype))
            for _, chunk, _ in _chunks(self.path):
                if self.kind == "vector":
                    writer.append(to_vectors(self.survey.repair(chunk), spec.size))
                else:
                    assert tokenizer is not None
                    writer.append(encode_texts(tokenizer, join_texts([chunk]).to_pylist(), text_len))
        if self.kind == "text":
            schema = pa.schema({"text": pa.string()})
            with pq.ParquetWriter(stage / texts_file(number), schema, compression="zstd") as texts:
                for _, chunk, _ in _chunks(self.path):
                    texts.write_table(pa.table({"text": chunk}))

    def _is_present(self, chunk: pa.Array) -> np.ndarray:
        if self.kind == "vector":
            return is_present(self.survey.repair(chunk))
        return pc.not_equal(join_texts([chunk]), "").to_numpy(zero_copy_only=False)

    def _origin(self, row: int) -> int:
        """The row of the log in which a value occurs first."""
        for origins in pq.ParquetFile(self.path).iter_batches(CHUNK_ROWS, columns=["origin"]):
            if row < len(origins):
                return int(origins.column(0)[row].as_py())
            row -= len(origins)
        raise IndexError(row)


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


def _chunks(path: Path) -> Iterator[tuple[int, pa.Array, np.ndarray]]:
    """The place of the first value, values, and how many events hold each, in the order of their numbers."""
    start = 0
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(CHUNK_ROWS, columns=["value", "times"]):
            yield start, batch.column("value"), batch.column("times").to_numpy()
            start += batch.num_rows
