"""Indexes over the catalogue: exact, or approximate with a recall that was measured when it was built."""

import shutil
from typing import Literal, Protocol

from torch import Tensor

from habitus.errors import ConfigError, ModelError
from habitus.model import Bundle
from habitus.progress import Note, Progress
from habitus.serving.approximate import ApproximateKind, IndexInfo, build_approximate, import_faiss, open_approximate
from habitus.serving.live import LiveItems
from habitus.serving.scan import Found, exact_search

IndexKind = Literal["exact", "ivf", "ivfpq", "hnsw", "auto"]
INDEX_KINDS: tuple[IndexKind, ...] = ("exact", "ivf", "ivfpq", "hnsw", "auto")
# Items from which 'auto' takes an approximate index on a processor. A GPU scores millions of items in milliseconds.
AUTO_IVF, AUTO_IVFPQ = 200_000, 10_000_000
WORTHY_RECALL = 0.98


class SearchIndex(Protocol):
    """Proposes rows of the live items."""

    info: IndexInfo

    def search(self, queries: Tensor, k: int, live: LiveItems) -> Found:
        """The k best live rows of queries [M, d], and the log-sum-exp over all live rows."""
        ...


class ExactIndex:
    """Scores every item."""

    def __init__(self) -> None:
        self.info = IndexInfo(kind="exact", recall_at_10=1.0)

    def search(self, queries: Tensor, k: int, live: LiveItems) -> Found:
        return exact_search(queries, live.pieces(), k, live.bias())


def open_index(
    kind: IndexKind, bundle: Bundle, live: LiveItems, note: Note, progress: Progress | None = None
) -> SearchIndex:
    """The index of a kind; an approximate one is built where it is missing, and `note` is told so.

    It belongs in RUN/serve/index-<kind>; one of other vectors is replaced. `live` holds no run-time items yet.
    """
    if kind not in INDEX_KINDS:
        raise ConfigError(f"index {kind!r} is not known", expected=" or ".join(INDEX_KINDS))
    chosen = _automatic(live) if kind == "auto" else kind
    if chosen == "exact" or chosen == "auto":
        return ExactIndex()
    folder = bundle.run_path / "serve" / f"index-{chosen}"
    checksums = bundle.embedder_checksum, bundle.manifest.dataset_checksum
    found = open_approximate(folder, chosen, checksums)
    if found is None:
        note(f"building an index of {live.num_base:,} items in {folder}")
        if folder.exists():
            shutil.rmtree(folder)
        queries = live.catalogue.sample_queries.to(live.device, live.dtype)
        try:
            found = build_approximate(folder, chosen, live, queries, checksums, progress)
        except OSError as error:
            raise ModelError(
                f"{folder} cannot be written: {error.strerror}", next_step="use --index exact, or copy the run"
            ) from error
        note(f"recall@10 against exact search: {found.info.recall_at_10:.4f}")
        if found.info.recall_at_10 < WORTHY_RECALL:
            note(f"that is little: {'ivf' if chosen != 'ivf' else 'exact'} may serve these vectors better")
    return found


def _automatic(live: LiveItems) -> ApproximateKind | Literal["exact"]:
    if live.device.type != "cpu" or live.num_base < AUTO_IVF:
        return "exact"
    import_faiss()
    return "ivf" if live.num_base < AUTO_IVFPQ else "ivfpq"
