"""The item side of a dataset: tokenised, encoded and written in catalogue order."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from habitus.data.arrays import ArrayWriter, smallest_unsigned
from habitus.data.encoders import Encoders, as_list, as_number
from habitus.data.fields import Field
from habitus.data.survey import ItemStream, Survey
from habitus.data.text import train_tokenizer
from habitus.progress import Progress


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
    done = 0
    with ExitStack() as open_files:
        writers = [
            (
                spec,
                open_files.enter_context(
                    ArrayWriter(stage / item_file(number), *_stored(spec, encoders.fields.text_len))
                ),
            )
            for number, spec in enumerate(encoders.fields.item)
        ]
        for batch in stream.batches():
            features = encoders.encode_items(_mended(batch, found), tokenizer)
            for spec, writer in writers:
                values = features.tokens if spec.kind == "text" else features.fields[spec.name]
                assert values is not None
                writer.append(values)
            done += batch.num_rows
            progress("encoding items", done / stream.num_items)
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
        if found.has(name, "number") or found.has(name, "time"):
            finite = np.isfinite(as_number(column, found.stream.kinds[name]))
            column = pc.if_else(pa.array(finite), column, pa.scalar(None, column.type))
        elif found.has(name, "length") or found.has(name, "vector"):
            size = found.vector_size(name)
            rows = as_list(column).to_pylist()
            good = [row if row is not None and _is_sound(row, size) else None for row in rows]
            column = pa.array(good, pa.list_(pa.float32()))
        columns.append(column)
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _is_sound(row: list[float | None], size: int) -> bool:
    with np.errstate(over="ignore"):  # what is stored is float32, and so is what must be finite
        return len(row) == size and bool(np.isfinite(np.array(row, np.float32)).all())
