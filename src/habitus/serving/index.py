"""Indexes over the candidates: exact search, or faiss with a recall that is measured when the index is built.

    M  queries      V  candidates      d  width of a vector      k  items wanted per query

Exact search scores every candidate, keeps the best and the log-sum-exp of all of them; among equal scores lower rows
come first, as in evaluation.

faiss searches lists around centres (IVF), compressed ones (IVF-PQ) or a graph (HNSW). It only proposes rows: their
scores are computed again from the vectors themselves, so that an item has the score that exact search gives it. What
an approximate index may do is miss an item. How often is measured when it is built, on queries of the run's own users:
half of them choose how thoroughly it searches, the other half give the recall that is reported.

Probabilities need a sum over the whole catalogue. It is estimated: exactly over the rows that faiss proposed and the
items added at run time, and from a fixed random sample over all others. The error is measured too.
"""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from habitus.errors import ConfigError, ModelError
from habitus.files import sha256_of, staged_folder
from habitus.model import Bundle
from habitus.progress import Note, Progress
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.serving.candidates import HIDDEN, CandidateItems
from habitus.softmax import CandidateScan, CandidateTable, topk
from habitus.typed import Typed

if TYPE_CHECKING:
    import faiss

ApproximateKind = Literal["ivf", "ivfpq", "hnsw"]
IndexKind = Literal["exact", "ivf", "ivfpq", "hnsw", "auto"]
INDEX_KINDS: tuple[IndexKind, ...] = ("exact", "ivf", "ivfpq", "hnsw", "auto")
# Items from which 'auto' takes an approximate index on a CPU. A GPU scores millions of items in milliseconds.
_AUTO_IVF, _AUTO_IVFPQ = 200_000, 10_000_000
_FORMAT_VERSION = 1
_FILE, _MANIFEST = "index.faiss", "manifest.json"
_TARGET_RECALL = 0.99  # of the queries that choose the effort
_MIN_RECALL = 0.98  # on the other queries; below it the user is warned
_MIN_PROPOSED = 64  # rows proposed per query, however small k is: they carry most of the sum
_SAMPLED_ROWS = 16_384
_HNSW_LINKS = 32
_HNSW_CONSTRUCTION = 80
_IVFPQ_OVERFETCH = 8  # compressed scores are coarse: so many times k rows are scored again
_NUM_PROBES = (4, 8, 16, 32, 64, 128, 256, 512)
EFFORTS = {
    "ivf": _NUM_PROBES,
    "ivfpq": _NUM_PROBES,
    "hnsw": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024),
}
_ADD_ROWS, _SCANNED_ROWS = 1 << 16, 1 << 18  # at a time


class IndexInfo(Typed):
    """What is searched with, and how well."""

    kind: str
    recall_at_10: float = Field(description="Against exact search, measured when the index was built; 1 for exact.")
    log_sum_error: float = Field(0.0, description="Median error of a log-probability, in nats; 0 for exact.")
    log_sum_error_95: float = Field(0.0, description="95% of the queries are off by less.")


class ScanResult(NamedTuple):
    """Per query: the best scores and their rows, best first, -1 beyond the last; log-sum-exp over the candidates."""

    scores: Tensor  # float32 [M, k]
    rows: Tensor  # int64 [M, k]
    lse: Tensor  # float64 [M]


class SearchIndex(Protocol):
    """Searches the candidates."""

    info: IndexInfo

    def search(self, queries: Tensor, k: int, candidates: CandidateItems) -> ScanResult:
        """The k best active rows for queries [M, d], and the log-sum-exp over all active rows."""
        ...


class ExactIndex:
    """Scores every item."""

    def __init__(self) -> None:
        self.info = IndexInfo(kind="exact", recall_at_10=1.0)

    def search(self, queries: Tensor, k: int, candidates: CandidateItems) -> ScanResult:
        return exact_search(queries, candidates.pieces(), k, candidates.bias())


@torch.no_grad()
def exact_search(queries: Tensor, pieces: Sequence[Tensor], k: int, bias: Tensor | None = None) -> ScanResult:
    """The k best candidates of queries [M, d]; `pieces` are one table of any stored type, on any device.

    `bias` [V] on the queries' device is added to the scores; HIDDEN hides a candidate.
    """
    scan = CandidateScan.for_search(queries, k)
    first = 0
    for piece in pieces:
        part = None if bias is None else bias[first : first + len(piece)]
        # Checking all rows at every request would cost about as much as scoring them.
        scan.scan_table(CandidateTable(piece), bias=part, first_id=first, block_rows=_SCANNED_ROWS, check=False)
        first += len(piece)
    keys = scan.topk_keys()
    scores, rows = topk.decode_scores(keys), topk.decode_ids(keys)
    gone = (keys == topk.EMPTY) | (scores < HIDDEN / 2)
    return ScanResult(scores.masked_fill(gone, -torch.inf), rows.masked_fill(gone, -1), scan.lse())


def open_index(
    kind: IndexKind, bundle: Bundle, candidates: CandidateItems, note: Note, progress: Progress | None = None
) -> SearchIndex:
    """The index of a kind. An approximate one is built if it is missing, and `note` says so.

    It is stored in RUN/serve/index-<kind>; an index over other vectors is replaced. `candidates` must not hold items
    added at run time yet.
    """
    if kind not in INDEX_KINDS:
        raise ConfigError(f"unknown index {kind!r}", expected=" or ".join(INDEX_KINDS))
    resolved = _choose_kind(candidates) if kind == "auto" else kind
    if resolved == "exact":
        return ExactIndex()
    folder = bundle.run_path / "serve" / f"index-{resolved}"
    checksums = bundle.embedder_checksum, bundle.manifest.dataset_checksum
    index = _open_approximate(folder, resolved, checksums)
    if index is None:
        note(f"building an index of {candidates.num_trained:,} items in {folder}")
        if folder.exists():
            shutil.rmtree(folder)
        queries = candidates.catalogue.sample_queries.to(candidates.device, candidates.dtype)
        try:
            index = _build_approximate(folder, resolved, candidates, queries, checksums, progress)
        except OSError as error:
            raise ModelError(
                f"{folder} cannot be written: {error.strerror}", next_step="use --index exact, or copy the run"
            ) from error
        note(f"recall@10 against exact search: {index.info.recall_at_10:.4f}")
        if index.info.recall_at_10 < _MIN_RECALL:
            note(f"that is low: --index {'ivf' if resolved != 'ivf' else 'exact'} may suit these vectors better")
    return index


def _choose_kind(candidates: CandidateItems) -> ApproximateKind | Literal["exact"]:
    if candidates.device.type != "cpu" or candidates.num_trained < _AUTO_IVF:
        return "exact"
    _import_faiss()
    return "ivf" if candidates.num_trained < _AUTO_IVFPQ else "ivfpq"


class ApproximateManifest(Typed):
    """manifest.json of RUN/serve/index-<kind>."""

    format_version: int = _FORMAT_VERSION
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
    """A faiss index over the rows of a catalogue; items added at run time are searched exactly."""

    def __init__(self, index: "faiss.Index", kind: ApproximateKind, effort: int) -> None:
        self.index = index
        self.kind = kind
        self.effort = effort
        self.info = IndexInfo(kind=kind, recall_at_10=0.0)  # until it is measured
        self._sample: tuple[np.ndarray, Tensor] | None = None

    def search(self, queries: Tensor, k: int, candidates: CandidateItems) -> ScanResult:
        """The k best of the proposed rows, with exact scores, and the estimated log-sum-exp over all active rows."""
        width = min(max(k, _MIN_PROPOSED), candidates.num_trained)
        rows = self._propose(queries, width + min(len(candidates.hidden), _MIN_PROPOSED))
        if candidates.hidden:
            rows[np.isin(rows, list(candidates.hidden))] = -1
        scores = self._scores(queries, rows, candidates)
        total = self._log_sum(queries, rows, scores, candidates)
        if candidates.num_added:
            bias = candidates.bias()
            added_bias = None if bias is None else bias[candidates.num_trained :]
            vectors = candidates.added_vectors[: candidates.num_added]
            added = exact_search(queries, [vectors], min(k, len(vectors)), added_bias)
            total = torch.logaddexp(total, added.lse)
            added_rows = torch.where(added.rows >= 0, added.rows + candidates.num_trained, -1)
            rows = np.concatenate([rows, added_rows.cpu().numpy()], axis=1)
            scores = torch.cat([scores, added.scores], dim=1)
        return _top_k(scores, torch.from_numpy(rows).to(scores.device), k, total)

    def _propose(self, queries: Tensor, k: int) -> np.ndarray:
        """Catalogue rows int64 [M, k] that faiss proposes, -1 where it finds fewer."""
        import faiss

        faiss.omp_set_num_threads(torch.get_num_threads())
        count = _IVFPQ_OVERFETCH * k if self.kind == "ivfpq" else k
        vectors = np.ascontiguousarray(queries.float().cpu().numpy())
        _, rows = self.index.search(vectors, min(count, self.index.ntotal), params=self.search_parameters())
        return np.asarray(rows)

    def search_parameters(self) -> Any:
        """How thoroughly faiss searches."""
        faiss = _import_faiss()
        if self.kind == "hnsw":
            return faiss.SearchParametersHNSW(efSearch=self.effort)
        return faiss.SearchParametersIVF(nprobe=self.effort)

    def _scores(self, queries: Tensor, rows: np.ndarray, candidates: CandidateItems) -> Tensor:
        """Exact scores float32 [M, n] of proposed rows, -inf where there is none."""
        vectors = candidates.vectors(np.maximum(rows, 0).ravel()).view(*rows.shape, -1)
        scores = torch.einsum("md,mnd->mn", queries.float(), vectors.float())
        return scores.masked_fill(torch.from_numpy(rows < 0).to(scores.device), -torch.inf)

    def _log_sum(self, queries: Tensor, rows: np.ndarray, scores: Tensor, candidates: CandidateItems) -> Tensor:
        """The estimated log-sum-exp float64 [M] over the active rows of the trained catalogue."""
        if self._sample is None:
            count = min(_SAMPLED_ROWS, candidates.num_trained)
            keys = shuffle_keys(0, Stream.EVALUATION, 100)
            sample = np.sort(permute_index(np.arange(count), candidates.num_trained, keys))
            self._sample = sample, candidates.vectors(sample).float()
        sample, vectors = self._sample
        sample_scores = queries.float() @ vectors.T
        excluded = np.zeros((len(rows), len(sample)), bool)
        place = np.searchsorted(sample, rows).clip(max=len(sample) - 1)
        which, where = np.nonzero(sample[place] == rows)
        excluded[which, place[which, where]] = True  # proposed rows are summed exactly
        if candidates.hidden:
            excluded |= np.isin(sample, list(candidates.hidden))
        sample_scores = sample_scores.masked_fill(torch.from_numpy(excluded).to(sample_scores.device), -torch.inf)
        num_hidden = sum(row < candidates.num_trained for row in candidates.hidden)
        others = candidates.num_trained - num_hidden - (rows >= 0).sum(1)
        num_sampled = np.maximum((~excluded).sum(1), 1)
        weight = torch.from_numpy(np.log(np.maximum(others, 1e-9) / num_sampled)).to(sample_scores.device)
        rest = sample_scores.logsumexp(1).double() + weight
        return torch.logaddexp(scores.double().logsumexp(1), rest)


def _top_k(scores: Tensor, rows: Tensor, k: int, total: Tensor) -> ScanResult:
    """The k best of proposed rows, ties by lower row."""
    by_row = rows.argsort(dim=1)
    scores, rows = scores.gather(1, by_row), rows.gather(1, by_row)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    scores, rows = scores.gather(1, order), rows.gather(1, order)
    return ScanResult(scores, rows.masked_fill(scores.isinf(), -1), total)


def _open_approximate(folder: Path, kind: ApproximateKind, checksums: tuple[str, str]) -> FaissIndex | None:
    """The index in a folder; None where it is absent or of other vectors."""
    if not (folder / _MANIFEST).exists():
        return None
    manifest = ApproximateManifest.read(folder / _MANIFEST)
    if (manifest.embedder_checksum, manifest.dataset_checksum) != checksums or manifest.kind != kind:
        return None
    for name, checksum in manifest.files.items():
        if not (folder / name).exists() or sha256_of(folder / name) != checksum:
            raise ModelError(f"{folder / name} is missing or has changed", next_step=f"remove {folder}")
    faiss = _import_faiss()
    index = FaissIndex(faiss.read_index(str(folder / _FILE)), kind, manifest.effort)
    index.info = manifest.info
    return index


def _build_approximate(
    folder: Path,
    kind: ApproximateKind,
    candidates: CandidateItems,
    queries: Tensor,
    checksums: tuple[str, str],
    progress: Progress | None = None,
) -> FaissIndex:
    """Build an index over the catalogue's rows, choose its effort, measure it and write it to `folder`."""
    faiss = _import_faiss()
    faiss.omp_set_num_threads(torch.get_num_threads())
    began, cpu = time.perf_counter(), time.process_time()
    faiss_index = _build_faiss(kind, candidates, progress or (lambda *_: None))
    build_s, build_cpu_s = round(time.perf_counter() - began, 1), round(time.process_time() - cpu, 1)
    truth = exact_search(queries, candidates.trained_vectors, min(10, candidates.num_trained))
    half = max(len(queries) // 2, 1)
    index = FaissIndex(faiss_index, kind, EFFORTS[kind][0])
    for effort in EFFORTS[kind]:
        index.effort = effort
        if _measure_recall(index, queries[:half], truth.rows[:half], candidates) >= _TARGET_RECALL:
            break
    held_out = slice(half, None) if len(queries) > half else slice(None)
    errors = (index.search(queries[held_out], 10, candidates).lse - truth.lse[held_out]).abs()
    with staged_folder(folder) as stage:
        faiss.write_index(faiss_index, str(stage / _FILE))
        manifest = ApproximateManifest(
            kind=kind,
            effort=index.effort,
            recall_at_10=_measure_recall(index, queries[held_out], truth.rows[held_out], candidates),
            queries=len(queries[held_out]),
            log_sum_error=float(errors.median()),
            log_sum_error_95=float(errors.quantile(0.95)),
            embedder_checksum=checksums[0],
            dataset_checksum=checksums[1],
            num_items=candidates.num_trained,
            joint_dim=candidates.added_vectors.shape[1],
            build_s=build_s,
            build_cpu_s=build_cpu_s,
            faiss=faiss.__version__,
            files={_FILE: sha256_of(stage / _FILE)},
        )
        manifest.write(stage / _MANIFEST)
    index.info = manifest.info
    return index


def _import_faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise ConfigError(
            "an approximate index needs faiss, which is not installed",
            next_step="pip install 'habitus[serve]', or use --index exact",
        ) from error
    return faiss


def _build_faiss(kind: ApproximateKind, candidates: CandidateItems, progress: Progress) -> "faiss.Index":
    """A fresh index with every catalogue row in it, row numbers as ids."""
    import faiss

    d, total = candidates.added_vectors.shape[1], candidates.num_trained
    if kind == "hnsw":
        index: Any = faiss.IndexHNSWFlat(d, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _HNSW_CONSTRUCTION
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
        rows = permute_index(np.arange(count), total, shuffle_keys(0, Stream.EVALUATION, 101))
        index.train(_vectors_of(candidates, np.sort(rows)))
    for at in range(0, total, _ADD_ROWS):
        index.add(_vectors_of(candidates, np.arange(at, min(at + _ADD_ROWS, total))))
        progress("building the index", min(1.0, (at + _ADD_ROWS) / total))
    return index


def _vectors_of(candidates: CandidateItems, rows: np.ndarray) -> np.ndarray:
    return candidates.vectors(rows).float().cpu().numpy()


def _measure_recall(index: FaissIndex, queries: Tensor, truth: Tensor, candidates: CandidateItems) -> float:
    """The share of the true best rows that the index returns."""
    rows = index.search(queries, truth.shape[1], candidates).rows
    hits = (rows[:, :, None] == truth[:, None, :]).any(1)
    return float(hits.double().mean())
