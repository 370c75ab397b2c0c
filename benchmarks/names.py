"""Search for items by words of their names: `python benchmarks/names.py items.parquet COLUMN [ROWS]`.

The column's texts, repeated to a million rows with popularities drawn from Zipf's law; one JSON line at the end.
"""

import json
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from habitus.serving.catalogue import ItemNames, words_of

WORDS = ("milk", "fluid milk gal", "9999", "zzz")
REPEATS = 5


def main(path: str, column: str, num_rows: int) -> None:
    texts = pq.read_table(path)[column].cast(pa.string()).combine_chunks()
    display = pa.table({column: texts.take(pa.array(np.arange(num_rows) % len(texts)))})
    counts = np.random.default_rng(0).zipf(1.3, num_rows)
    names = ItemNames(pa.table({"item_id": np.arange(num_rows)}), display, counts)
    began = time.perf_counter()
    names.search(words_of("a"), 12, set())
    result = {"rows": num_rows, "name_bytes": display.nbytes, "build_s": round(time.perf_counter() - began, 2)}
    for text in WORDS:
        began = time.perf_counter()
        for _ in range(REPEATS):
            found = names.search(words_of(text), 12, set())
        milliseconds = 1000 * (time.perf_counter() - began) / REPEATS
        print(f"{text!r}: {len(found)} items, {milliseconds:.0f} ms")
        result[text] = round(milliseconds, 1)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1_000_000)
