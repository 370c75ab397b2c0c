"""The item side of a dataset: tokenised, encoded and written in catalogue order."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.arrays import ArrayWriter, smallest_unsigned
from habitus.data.encoders import TEXT, Encoders, as_list, as_number
from habitus.data.fields import Field
from habitus.data.survey import ItemStream, Survey
from habitus.data.text import train_tokenizer

Progress = Callable[[str, float], None]


def write_catalogue(stream: ItemStream, found: Survey, encoders: Encoders, stage: Path, progress: Progress) -> Encoders:
    """Write every item's features, and the tokenizer; returns the encoders with the tokenizer's size."""
    tokenizer = None
    if encoders.text_columns:
        progress("training the tokenizer", 0.0)
        tokenizer = train_tokenizer(found.texts, found.text.vocabulary_size)
        tokenizer.save(str(stage / "tokenizer.json"))
        size = tokenizer.get_vocab_size()
        first = encoders.fields.item[0].model_copy(update={"size": size})
        fields = encoders.fields.model_copy(update={"item": (first, *encoders.fields.item[1:])})
        encoders = encoders.model_copy(update={"fields": fields})
    writers = {
        spec.name: ArrayWriter(stage / item_file(number), *_stored(spec, encoders.fields.text_len))
        for number, spec in enumerate(encoders.fields.item)
    }
    done = 0
    for batch in stream.batches():
        features = encoders.encode_items(_mended(batch, found), tokenizer)
        for name, writer in writers.items():
            writer.append(features.tokens if name == TEXT and features.tokens is not None else features.fields[name])
        done += batch.num_rows
        progress("encoding items", done / stream.num_items)
    for writer in writers.values():
        writer.close()
    return encoders


def item_file(number: int) -> str:
    return f"items/field-{number:02d}.npy"


def _stored(spec: Field, text_len: int) -> tuple[np.dtype, tuple[int, ...]]:
    """Type and row shape on disk; codes and tokens as narrow as their range allows."""
    if spec.kind == "text":
        return smallest_unsigned(spec.size - 1), (text_len,)
    if spec.kind == "category":
        return smallest_unsigned(spec.size - 1), ()
    return np.dtype(np.float32), (spec.size,) if spec.kind == "vector" else ()


def _mended(batch: pa.RecordBatch, found: Survey) -> pa.RecordBatch:
    """The batch with bad numbers and vectors made missing; without problems, the batch itself."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if found.has(name, "number"):
            finite = np.isfinite(as_number(column, found.stream.kinds[name]))
            column = pc.if_else(pa.array(finite), column, pa.scalar(None, column.type))
        elif found.has(name, "length") or found.has(name, "vector"):
            size = found.vector_size(name)
            rows = as_list(column).to_pylist()
            good = [r if r is not None and len(r) == size and np.isfinite(r).all() else None for r in rows]
            column = pa.array(good, pa.list_(pa.float32()))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)
