"""A trained model as a scorer: queries from its contextualizer, candidates from its embedder or the cache.

Candidate vectors are rounded to the type that the cache stores, whether they come from it or not, so that a number
does not depend on whether a cache was there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ModelError
from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.copy_scores import score_past
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import Scores
from habitus.model import (
    CACHE_DTYPES,
    Bundle,
    ContextualizerOutput,
    EmbeddingCache,
    StoredType,
    batch_tensors,
    embed_rows,
)
from habitus.softmax import MEMORY_BYTES


class ModelScorer:
    """Scores by a bundle. `memory_bytes` bounds the working memory of a pass over the candidates.

    Under torchrun every process holds a shard of the candidates, and all of them get all scores.
    """

    def __init__(
        self,
        bundle: Bundle,
        dataset: Dataset,
        cache: EmbeddingCache | None = None,
        *,
        stored: StoredType = "bf16",
        memory_bytes: int = MEMORY_BYTES,
        ranks: Ranks | None = None,
    ) -> None:
        self.name = str(bundle.run_path)
        self.bundle = bundle
        self.dataset = dataset
        self.cache = cache
        self.stored = CACHE_DTYPES[stored] if cache is None else cache.dtype
        self.memory_bytes = memory_bytes
        self.ranks = ranks or Ranks()
        self.temperature = 1.0  # that scores are divided by
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.compute = self.stored if bundle.device.type == "cuda" else torch.float32
        self._last_candidates: tuple[np.ndarray | None, Candidates] | None = None
        self._last_pool: tuple[np.ndarray, Tensor] | None = None

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        """Loss, entropy, rank and top items over the given catalogue rows, or over the full catalogue."""
        output, events = self._contextualize(queries)
        all_queries = output.queries if self.temperature == 1 else output.queries / self.temperature
        vectors = self.ranks.broadcast(self._at_slots(all_queries, queries).to(self.compute))
        target_rows = self._target_rows(queries.targets, candidates)
        past = None
        if output.copy_scores is not None:
            all_queries = self.ranks.broadcast(all_queries.to(self.compute))
            copy_scores = self.ranks.broadcast(output.copy_scores)
            past = score_past(queries, copy_scores, all_queries, events, target_rows, candidates, self.temperature)
        table = self._candidates(candidates)
        scores = candidate_scores(
            vectors, table, target_rows, k, ranks=self.ranks, memory_bytes=self.memory_bytes, losses=losses, past=past
        )
        if candidates is None:
            return scores
        return replace(scores, top=np.where(scores.top >= 0, candidates[scores.top], -1))

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Within the block scores are divided by a temperature: the order of items stays, probabilities change."""
        before, self.temperature = self.temperature, temperature
        try:
            yield
        finally:
            self.temperature = before

    def query_vectors(self, queries: QueryBatch) -> Tensor:
        """The model's vectors [Q, joint_dim] for the queries of a batch, float32."""
        return self._at_slots(self._contextualize(queries)[0].queries, queries)

    @torch.no_grad()
    def _contextualize(self, queries: QueryBatch) -> tuple[ContextualizerOutput, Tensor]:
        """The contextualizer's output for a batch, and the vectors of its events [B, L, joint_dim]."""
        device = self.bundle.device
        batch = batch_tensors(queries.batch, device)
        rows, places = np.unique(queries.batch.items, return_inverse=True)
        events = self._vectors(rows).float()[torch.from_numpy(places.reshape(queries.batch.items.shape)).to(device)]
        with self.bundle.autocast():
            return self.bundle.model.contextualize(batch, events), events

    def _at_slots(self, vectors: Tensor, queries: QueryBatch) -> Tensor:
        """The vectors of the slots that have a query."""
        device = self.bundle.device
        return vectors[torch.from_numpy(queries.windows).to(device), torch.from_numpy(queries.slots).to(device)].float()

    def _vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of catalogue rows in the type of the computation, on the model's device."""
        if self.cache is not None:
            return self.cache.rows(rows).to(self.bundle.device, self.compute)
        vectors = embed_rows(self.bundle.model, self.dataset, rows, precision=self.bundle.recipe.train.precision)
        return vectors.to(self.stored).to(self.compute)

    def _target_rows(self, targets: np.ndarray, candidates: np.ndarray | None) -> Tensor:
        """The vectors of the targets, with the bits that they have among the candidates."""
        if self.cache is not None or candidates is None:
            return self._vectors(targets)
        # Embedded again beside other items, a vector could differ in its last bit from the one in the pool.
        places = torch.from_numpy(np.searchsorted(candidates, targets))
        return self._pool_vectors(candidates)[places.to(self.bundle.device)]

    def _candidates(self, rows: np.ndarray | None) -> Candidates:
        """This process's shard of the candidates; the last ones are kept."""
        if self._last_candidates is None or self._last_candidates[0] is not rows:
            self._last_candidates = rows, self._full_catalogue() if rows is None else self._subset(rows)
        return self._last_candidates[1]

    def _subset(self, rows: np.ndarray) -> Candidates:
        start, stop = self.ranks.shard_range(len(rows))
        if self.cache is None:
            return Candidates([self._pool_vectors(rows)[start:stop]], start, len(rows))
        return Candidates([self.cache.rows(rows[start:stop]).to(self.bundle.device)], start, len(rows))

    def _pool_vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of a pool, embedded once for all processes; the last pool is kept."""
        if self._last_pool is None or self._last_pool[0] is not rows:
            self._last_pool = rows, self.ranks.broadcast(self._vectors(rows))
        return self._last_pool[1]

    def _full_catalogue(self) -> Candidates:
        """The catalogue as stored, mapped from its files; on CUDA it moves there if it fits."""
        if self.cache is None:
            raise ModelError(
                f"the full catalogue cannot be scored without its vectors ({self.name})",
                next_step=f"habitus embed {self.name} --data {self.dataset.path}",
            )
        total = self.cache.manifest.num_items
        start, stop = self.ranks.shard_range(total)
        pieces = self.cache.pieces(start, stop)
        device = self.bundle.device
        if device.type == "cuda":
            needed = sum(piece.nbytes for piece in pieces)
            if needed + self.memory_bytes < torch.cuda.mem_get_info(device)[0] * 0.9:
                catalogue = torch.empty(
                    stop - start, self.cache.manifest.joint_dim, dtype=self.cache.dtype, device=device
                )
                at = 0
                for piece in pieces:
                    catalogue[at : at + len(piece)] = piece
                    at += len(piece)
                pieces = [catalogue]
        return Candidates(pieces, start, total)
