"""What people see of an item: the columns that the schema displays, as texts in catalogue order.

The model does not read them. They are stored beside the ids, so that whatever shows an id can show a name.
"""

from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from habitus.data.columns import to_categories

DISPLAY_FILE = "items/display.parquet"
MAX_DISPLAY = 1_000  # characters of a value; longer ones end in an ellipsis
# Control characters, and marks that turn the direction of what follows them.
_UNSEEN = r"[\p{Cc}\x{202A}-\x{202E}\x{2066}-\x{2069}]"


def write_display(batches: Iterable[pa.RecordBatch], columns: tuple[str, ...], path: Path) -> None:
    """Write the given columns of the items as texts."""
    schema = pa.schema([(name, pa.string()) for name in columns])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for batch in batches:
            writer.write_batch(display_batch(batch, columns))


def display_batch(batch: pa.RecordBatch, columns: tuple[str, ...]) -> pa.RecordBatch:
    """The given columns of some items as people read them."""
    schema = pa.schema([(name, pa.string()) for name in columns])
    return pa.RecordBatch.from_arrays([to_display(batch.column(name)) for name in columns], schema=schema)


def to_display(column: pa.Array) -> pa.Array:
    """The values as people read them: texts of one line and at most MAX_DISPLAY characters; null where empty."""
    if pa.types.is_timestamp(column.type) or pa.types.is_date(column.type):
        times = column.cast(pa.timestamp("s"), safe=False).cast(pa.string())
        return pc.replace_substring(times, " 00:00:00", "")
    texts = to_categories(column)
    if pa.types.is_floating(column.type):  # prices as 0.74, where sums or float32 made 0.73999995 of it
        rounded = to_categories(pc.round(column.cast(pa.float64()), 4))
        texts = pc.if_else(pc.greater(pc.abs(column), 0.01), rounded, texts)
    # Cut before it is cleaned, so that a text of a million characters costs no more than one of a few thousand.
    texts = pc.utf8_slice_codeunits(texts, 0, 4 * MAX_DISPLAY)
    texts = pc.replace_substring_regex(texts, _UNSEEN, " ")
    texts = pc.utf8_trim_whitespace(pc.replace_substring_regex(texts, r"\s+", " "))
    cut = pc.binary_join_element_wise(pc.utf8_slice_codeunits(texts, 0, MAX_DISPLAY - 1), "…", "")
    texts = pc.if_else(pc.greater(pc.utf8_length(texts), MAX_DISPLAY), cut, texts)
    return pc.if_else(pc.equal(texts, ""), None, texts)
