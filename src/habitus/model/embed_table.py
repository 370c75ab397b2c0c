"""Items that are in no dataset, from a table of their raw fields to vectors that every query can be scored with."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.data import KINDS, Encoders, SourceTable, open_table, quote_value, require_columns
from habitus.errors import DataError
from habitus.events import comma_numbers
from habitus.files import staged_file
from habitus.interrupts import hold_interrupts
from habitus.model.bundle import Bundle
from habitus.model.cache import EMBED_ROWS, embed_features
from habitus.progress import Progress
from habitus.typed import Typed


class EmbeddedItems(Typed):
    """What `embed_table` wrote."""

    path: str
    num_items: int
    joint_dim: int
    unknown_values: dict[str, int]


def embed_table(bundle: Bundle, items: str, out: str | Path, progress: Progress | None = None) -> EmbeddedItems:
    """Write a Parquet file with the ids and vectors of a table's items, in its order.

    The table is Parquet, CSV or JSON lines with the item columns of the bundle's schema. Values of a category that
    training did not see are encoded as unknown and counted. The file appears complete or not at all.
    """
    with hold_interrupts():
        import duckdb

    out = Path(out)
    if out.exists():
        raise DataError(f"{out} exists already", next_step="remove it, or name another file with --out")
    if not out.parent.is_dir():
        raise DataError(f"the folder {out.parent} does not exist", next_step=f"mkdir -p {out.parent}")
    if not os.access(out.parent, os.W_OK):
        raise DataError(f"the folder {out.parent} cannot be written to", next_step="name a file elsewhere")
    ids = [bundle.schema.items.item, *bundle.schema.events.pair_columns]
    fields = list(bundle.encoders.item_kinds)
    unknown = dict.fromkeys(bundle.encoders.item_values, 0)
    with (
        staged_file(out) as partial,
        tempfile.TemporaryDirectory(dir=out.parent) as scratch,
        duckdb.connect() as con,
    ):
        table = open_table("items", items, con, Path(scratch), comma_numbers(bundle.schema.items))
        require_columns(table, list(dict.fromkeys(ids + fields)))
        _write_vectors(bundle, table, ids, fields, partial, unknown, progress)
    return EmbeddedItems(
        path=str(out), num_items=table.num_rows, joint_dim=bundle.recipe.model.joint_dim, unknown_values=unknown
    )


def _write_vectors(
    bundle: Bundle,
    table: SourceTable,
    ids: list[str],
    fields: list[str],
    path: Path,
    unknown: dict[str, int],
    progress: Progress | None,
) -> None:
    joint_dim = bundle.recipe.model.joint_dim
    kind = pa.list_(pa.float32(), joint_dim)
    schema = pa.schema([(name, table.types[name]) for name in ids] + [("vector", kind)])
    done = 0
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for block in table.batches(list(dict.fromkeys(ids + fields))):
            for at in range(0, block.num_rows, EMBED_ROWS):
                batch = block.slice(at, EMBED_ROWS)
                _refuse_bad_values(bundle.encoders, batch, table, done)
                features = bundle.encoders.encode_items(batch.select(fields), bundle.tokenizer)
                for name in unknown:
                    present = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
                    codes = features.fields[name].reshape(batch.num_rows, -1)
                    unknown[name] += int((present & ~codes.any(axis=1)).sum())
                vectors = embed_features(bundle.model, [features], precision=bundle.recipe.train.precision)
                flat = pa.array(vectors.cpu().numpy().ravel())
                columns = [batch.column(name) for name in ids]
                columns.append(pa.FixedSizeListArray.from_arrays(flat, joint_dim))
                writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
                done += batch.num_rows
                if progress is not None:
                    progress("embedding items", done / table.num_rows)


def _refuse_bad_values(encoders: Encoders, batch: pa.RecordBatch, table: SourceTable, first: int) -> None:
    """Raise on numbers and vectors that cannot be used; missing ones are allowed."""
    for spec in encoders.fields.item:
        if spec.kind == "text":
            continue
        column, kind = batch.column(spec.name), KINDS[encoders.item_kinds[spec.name]]
        unusable = kind.is_unusable(column, spec)
        if unusable.any():
            row = int(np.flatnonzero(unusable)[0])
            raise DataError(
                f"items, column {spec.name!r}: {int(unusable.sum()):,} values of rows {first + 1:,} to "
                f"{first + batch.num_rows:,} cannot be used "
                f"(first: {table.place(first + row)}: {quote_value(column[row].as_py())})",
                expected=kind.expected_values(spec),
                next_step="correct the file and run again",
            )
