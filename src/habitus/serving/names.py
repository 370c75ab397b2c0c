"""Names of items beside their ids, and search over both by the beginnings of words.

    V  rows of the trained catalogue

Search reads plain texts: in lower case, without accents, words between single spaces. What begins a word of such a
text stands after a space, so that looking for words is looking for substrings. Popular items come first.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_CHUNK_ROWS = 1 << 16  # searched at a time: popular items are found without reading the rest


class ItemNames:
    """What people see of the trained items; without displayed columns only their ids can be searched."""

    def __init__(self, ids: pa.Table, display: pa.Table | None, counts: np.ndarray | None) -> None:
        self.ids = ids
        self.display = display
        self.counts = counts  # int64 [V]: training events of each item

    def at(self, rows: Iterable[int]) -> list[dict[str, str]]:
        """The displayed values of catalogue rows; missing ones are absent."""
        rows = list(rows)
        if self.display is None:
            return [{} for _ in rows]
        records = self.display.take(pa.array(rows, pa.int64())).to_pylist()
        return [{name: text for name, text in record.items() if text is not None} for record in records]

    @cached_property
    def popular_rows(self) -> np.ndarray:
        """All rows, the most frequent in training first; in catalogue order where that is not known."""
        if self.counts is None:
            return np.arange(self.ids.num_rows)
        return np.argsort(-self.counts, kind="stable")

    def search(self, words: Sequence[str], limit: int, hidden: set[int]) -> list[int]:
        """The most popular rows whose names or ids hold a word that begins with each of the given ones."""
        rows: list[int] = []
        for at in range(0, self.ids.num_rows, _CHUNK_ROWS):
            chosen = self.popular_rows[at : at + _CHUNK_ROWS]
            if words:
                chosen = chosen[matches(self._plain_texts.slice(at, _CHUNK_ROWS), words)]
            rows += [row for row in chosen.tolist() if row not in hidden][: limit - len(rows)]
            if len(rows) == limit:
                break
        return rows

    @cached_property
    def _plain_texts(self) -> pa.ChunkedArray:
        """What search reads, in the order of `popular_rows`."""
        columns = list(self.ids.columns)
        if self.display is not None:
            columns += [column for column in self.display.columns if not _is_address(column)]
        filled = [pc.fill_null(column.cast(pa.string()), "") for column in columns]
        texts = pc.binary_join_element_wise(*filled, " ").take(pa.array(self.popular_rows))
        return plain_texts(texts)


def words_of(text: str) -> list[str]:
    """The words to search for."""
    return list(dict.fromkeys(plain_texts(pa.array([text]))[0].as_py().split()))


def plain_texts(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Texts as search reads them, each with a space before every word."""
    bare = pc.replace_substring_regex(pc.utf8_normalize(texts, form="NFKD"), r"\p{M}+", "")
    return pc.binary_join_element_wise("", pc.replace_substring_regex(pc.utf8_lower(bare), r"[^\p{L}\p{N}]+", " "), " ")


def matches(plain: pa.Array | pa.ChunkedArray, words: Sequence[str]) -> np.ndarray:
    """Which of the plain texts hold a word that begins with each of the given ones, bool."""
    found = np.ones(len(plain), bool)
    for word in words:
        found &= pc.match_substring(plain, f" {word}").to_numpy(zero_copy_only=False)
    return found


def _is_address(column: pa.ChunkedArray) -> bool:
    """Whether a displayed column holds URLs, whose words nobody searches for."""
    first = column.drop_null()
    return len(first) > 0 and first[0].as_py().startswith(("http://", "https://"))
