"""Approximate search with faiss: lists around centres (IVF), compressed ones (IVF-PQ) or a graph (HNSW).

    M  queries      V  items of the catalogue      d  width of a vector      k  items wanted per query

The index proposes rows; their scores are computed again from the vectors themselves, so that an item has the score
that exact search gives it. What an approximate index may do is miss an item. How often is measured when it is built,
on queries of the run's own users, half of which choose how thoroughly it searches and half of which are reported.

Probabilities need the sum over the whole catalogue. It is estimated: exactly over the items found and the run-time
items, and from a fixed random sample over all others. How far off that is, too, is measured and kept.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from habitus.errors import ConfigError, ModelError
from habitus.files import sha256_of, staged_folder
from habitus.progress import Progress
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.serving.live import LiveItems
from habitus.serving.scan import Found, exact_search
from habitus.typed import Typed

if TYPE_CHECKING:
    import faiss

FORMAT_VERSION = 1
FILE, MANIFEST = "index.faiss", "manifest.json"
TARGET_RECALL = 0.99  # of the queries that choose the effort; the promise to keep on others is 0.98
LEAST_FOUND = 64  # rows proposed per query, however few are wanted: they carry most of the sum
SAMPLED_ROWS = 16_384
HNSW_LINKS = 32
HNSW_CONSTRUCTION = 80
IVF_OVERFETCH = 8  # compressed scores are coarse: so many times k are rescored
_LISTS_VISITED = (4, 8, 16, 32, 64, 128, 256, 512)
EFFORTS = {
    "ivf": _LISTS_VISITED,
    "ivfpq": _LISTS_VISITED,
    "hnsw": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
ADD_ROWS = 1 << 16
ApproximateKind = Literal["ivf", "ivfpq", "hnsw"]


class IndexInfo(Typed):
    """What is searched with, and how well."""

    kind: str
    recall_at_10: float = Field(description="Against exact search, measured when the index was built; 1 for exact.")
    log_sum_error: float = Field(0.0, description="Median error of a log-probability, in nats; 0 for exact.")
    log_sum_error_95: float = Field(0.0, description="95% of the queries are off by less.")


class ApproximateManifest(Typed):
    """manifest.json of RUN/serve/index-<kind>."""

    format_version: int = FORMAT_VERSION
    kind: ApproximateKind
    effort: int = Field(description="Lists visited of IVF and IVF-PQ, efSearch of HNSW.")
    recall_at_10: float = Field(description="Against exact search, on queries that did not choose the effort.")
    queries: int = Field(description="Queries it was measured on.")
    log_sum_error: float = Field(description="Median of the absolute error of the log-sum-exp, in nats.")
    log_sum_error_95: float = Field(description="95% of the queries are off by less.")
    embedder_checksum: str
    dataset_checksum: str
    num_items: int
    joint_dim: int
    build_s: float = Field(description="Seconds that it took to build.")
    build_cpu_s: float = Field(description="The same in CPU seconds, over all threads.")
    faiss: str = Field(description="Version that wrote the file.")
    files: dict[str, str] = Field(description="SHA-256 by name.")

    @property
    def info(self) -> IndexInfo:
        return IndexInfo(
            kind=self.kind,
            recall_at_10=self.recall_at_10,
            log_sum_error=self.log_sum_error,
            log_sum_error_95=self.log_sum_error_95,
        )


class FaissIndex:
    """A faiss index over the rows of a catalogue; run-time items are searched beside it, exactly."""

    def __init__(self, index: "faiss.Index", kind: ApproximateKind, effort: int) -> None:
        self.index = index
        self.kind = kind
        self.effort = effort
        self.info = IndexInfo(kind=kind, recall_at_10=0.0)  # until it is measured
        self._sample: tuple[np.ndarray, Tensor] | None = None

    def search(self, queries: Tensor, k: int, live: LiveItems) -> Found:
        """The k best live rows found, with exact scores, and the estimated log-sum-exp."""
        width = min(max(k, LEAST_FOUND), live.num_base)
        rows = self.proposed(queries, width + min(len(live.hidden), LEAST_FOUND))
        if live.hidden:
            rows[np.isin(rows, list(live.hidden))] = -1
        scores = self._scores(queries, rows, live)
        total = self._log_sum(queries, rows, scores, live)
        if live.num_extra:
            bias = live.bias()
            extra = live.extra[: live.num_extra]
            own = exact_search(queries, [extra], min(k, len(extra)), None if bias is None else bias[live.num_base :])
            total = torch.logaddexp(total, own.lse)
            beside = torch.where(own.rows >= 0, own.rows + live.num_base, -1)
            rows = np.concatenate([rows, beside.cpu().numpy()], axis=1)
            scores = torch.cat([scores, own.scores], dim=1)
        return _best(scores, torch.from_numpy(rows).to(scores.device), k, total)

    def proposed(self, queries: Tensor, k: int) -> np.ndarray:
        """Catalogue rows int64 [M, k] that faiss finds, -1 where it finds fewer."""
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        wanted = IVF_OVERFETCH * k if self.kind == "ivfpq" else k
        vectors = np.ascontiguousarray(queries.float().cpu().numpy())
        _, rows = self.index.search(vectors, min(wanted, self.index.ntotal), params=self._parameters())
        return np.asarray(rows)

    def _parameters(self) -> Any:
        faiss = import_faiss()
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=self.effort)
        return faiss.SearchParametersIVF(nprobe=self.effort)

    def _scores(self, queries: Tensor, rows: np.ndarray, live: LiveItems) -> Tensor:
        """Exact scores float32 [M, n] of proposed rows, -inf where there is none."""
        vectors = live.vectors(np.maximum(rows, 0).ravel()).view(*rows.shape, -1)
        scores = torch.einsum("md,mnd->mn", queries.float(), vectors.float())
        return scores.masked_fill(torch.from_numpy(rows < 0).to(scores.device), -torch.inf)

    def _log_sum(self, queries: Tensor, rows: np.ndarray, scores: Tensor, live: LiveItems) -> Tensor:
        """The estimated log-sum-exp float64 [M] over the catalogue's live rows."""
        if self._sample is None:
            count = min(SAMPLED_ROWS, live.num_base)
            chosen = np.sort(permute_index(np.arange(count), live.num_base, shuffle_keys(0, Stream.EVALUATION, 100)))
            self._sample = chosen, live.vectors(chosen).float()
        chosen, vectors = self._sample
        sampled = queries.float() @ vectors.T
        known = np.zeros((len(rows), len(chosen)), bool)
        place = np.searchsorted(chosen, rows).clip(max=len(chosen) - 1)
        which, where = np.nonzero(chosen[place] == rows)
        known[which, place[which, where]] = True  # found rows are counted themselves
        hidden = np.isin(chosen, list(live.hidden)) if live.hidden else np.zeros(len(chosen), bool)
        known |= hidden
        sampled = sampled.masked_fill(torch.from_numpy(known).to(sampled.device), -torch.inf)
        num_hidden = sum(row < live.num_base for row in live.hidden)
        others = live.num_base - num_hidden - (rows >= 0).sum(1)
        counted = np.maximum((~known).sum(1), 1)
        weight = torch.from_numpy(np.log(np.maximum(others, 1e-9) / counted)).to(sampled.device)
        rest = sampled.logsumexp(1).double() + weight
        return torch.logaddexp(scores.double().logsumexp(1), rest)


def _best(scores: Tensor, rows: Tensor, k: int, total: Tensor) -> Found:
    """The k best of proposed rows, ties by lower row."""
    by_row = rows.argsort(dim=1)
    scores, rows = scores.gather(1, by_row), rows.gather(1, by_row)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    scores, rows = scores.gather(1, order), rows.gather(1, order)
    return Found(scores, rows.masked_fill(scores.isinf(), -1), total)


def open_approximate(folder: Path, kind: ApproximateKind, checksums: tuple[str, str]) -> FaissIndex | None:
    """The index in a folder; None where it is absent or of other vectors."""
    if not (folder / MANIFEST).exists():
        return None
    manifest = ApproximateManifest.read(folder / MANIFEST)
    if (manifest.embedder_checksum, manifest.dataset_checksum) != checksums or manifest.kind != kind:
        return None
    for name, checksum in manifest.files.items():
        if not (folder / name).exists() or sha256_of(folder / name) != checksum:
            raise ModelError(f"{folder / name} is missing or has changed", next_step=f"remove {folder}")
    faiss = import_faiss()
    found = FaissIndex(faiss.read_index(str(folder / FILE)), kind, manifest.effort)
    found.info = manifest.info
    return found


def build_approximate(
    folder: Path,
    kind: ApproximateKind,
    live: LiveItems,
    queries: Tensor,
    checksums: tuple[str, str],
    progress: Progress | None = None,
) -> FaissIndex:
    """Build an index over the catalogue's rows, choose its effort, measure it and write it to `folder`."""
    faiss = import_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    began, cpu = time.perf_counter(), time.process_time()
    index = _filled(kind, live, progress or (lambda *_: None))
    took = round(time.perf_counter() - began, 1), round(time.process_time() - cpu, 1)
    truth = exact_search(queries, live.base, min(10, live.num_base))
    half = max(len(queries) // 2, 1)
    found = FaissIndex(index, kind, EFFORTS[kind][0])
    for effort in EFFORTS[kind]:
        found.effort = effort
        if _recall(found, queries[:half], truth.rows[:half], live) >= TARGET_RECALL:
            break
    check = slice(half, None) if len(queries) > half else slice(None)
    answers = found.search(queries[check], 10, live)
    off = (answers.lse - truth.lse[check]).abs()
    with staged_folder(folder) as stage:
        faiss.write_index(index, str(stage / FILE))
        manifest = ApproximateManifest(
            kind=kind,
            effort=found.effort,
            recall_at_10=_recall(found, queries[check], truth.rows[check], live),
            queries=len(queries[check]),
            log_sum_error=float(off.median()),
            log_sum_error_95=float(off.quantile(0.95)),
            embedder_checksum=checksums[0],
            dataset_checksum=checksums[1],
            num_items=live.num_base,
            joint_dim=live.extra.shape[1],
            build_s=took[0],
            build_cpu_s=took[1],
            faiss=faiss.__version__,
            files={FILE: sha256_of(stage / FILE)},
        )
        manifest.write(stage / MANIFEST)
    found.info = manifest.info
    return found


def import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "an approximate index needs faiss, which is not installed",
            next_step="pip install -c constraints.txt '.[serve]' in the clone, or use --index exact",
        ) from error
    return faiss


def _filled(kind: ApproximateKind, live: LiveItems, progress: Progress) -> "faiss.Index":
    """A fresh index with every catalogue row in it, row numbers as ids."""
    import faiss

    d, total = live.extra.shape[1], live.num_base
    if kind == "hnsw":
        index: Any = faiss.IndexHNSWFlat(d, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_CONSTRUCTION
    else:
        lists = max(1, min(int(4 * total**0.5), total // 40))
        quantizer = faiss.IndexFlatIP(d)
        if kind == "ivf":
            index = faiss.IndexIVFFlat(quantizer, d, lists, faiss.METRIC_INNER_PRODUCT)
        else:
            bits = 8 if total >= 40 * 256 else max(1, int(np.log2(max(total // 40, 2))))
            index = faiss.IndexIVFPQ(quantizer, d, lists, d // 2, bits, faiss.METRIC_INNER_PRODUCT)
            # Pairs of entries are simple things to cluster: a quarter of the points and half of the rounds do.
            index.pq.cp.max_points_per_centroid, index.pq.cp.niter = 64, 12
        progress("training the index", 0.0)
        count = min(total, 64 * lists)
        chosen = permute_index(np.arange(count), total, shuffle_keys(0, Stream.EVALUATION, 101))
        index.train(_rows(live, np.sort(chosen)))
    for at in range(0, total, ADD_ROWS):
        index.add(_rows(live, np.arange(at, min(at + ADD_ROWS, total))))
        progress("building the index", min(1.0, (at + ADD_ROWS) / total))
    return index


def _rows(live: LiveItems, rows: np.ndarray) -> np.ndarray:
    return live.vectors(rows).float().cpu().numpy()


def _recall(index: FaissIndex, queries: Tensor, truth: Tensor, live: LiveItems) -> float:
    """The share of the true best that are found."""
    width = truth.shape[1]
    found = index.search(queries, width, live).rows
    hits = (found[:, :, None] == truth[:, None, :]).any(1)
    return float(hits.double().mean())
