"""A trained model as a scorer: queries from its contextualizer, candidates from its embedder or the cache.

Candidate vectors are rounded to the type that the cache stores, whether they come from it or not, so that a number
does not depend on whether a cache was there.
"""

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.errors import ModelError
from habitus.evaluation.candidates import MEMORY_BYTES, Candidates, candidate_scores
from habitus.evaluation.copy_scores import past_of
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


class ModelScorer:
    """Scores by a bundle. `memory_bytes` bounds the working memory of a pass over the candidates.

    Under torchrun every process holds an equal stretch of the candidates, and all of them get all scores.
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
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.compute = self.stored if bundle.device.type == "cuda" else torch.float32
        self._held: tuple[np.ndarray | None, Candidates] | None = None
        self._pool: tuple[np.ndarray, Tensor] | None = None

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        """Loss, entropy, rank and top items over the given catalogue rows, or over the whole catalogue."""
        read, events = self._read(queries)
        vectors = self.ranks.from_first(self._asked(read.queries, queries).to(self.compute))
        target_rows = self._target_rows(queries.targets, candidates)
        past = None
        if read.copy_scores is not None:
            every = self.ranks.from_first(read.queries.to(self.compute))
            past = past_of(queries, self.ranks.from_first(read.copy_scores), every, events, target_rows, candidates)
        table = self._candidates(candidates)
        found = candidate_scores(
            vectors, table, target_rows, k, ranks=self.ranks, memory_bytes=self.memory_bytes, losses=losses, past=past
        )
        if candidates is None:
            return found
        top = np.where(found.top >= 0, candidates[found.top], -1)
        return Scores(found.loss, found.entropy, found.rank, top)

    def query_vectors(self, queries: QueryBatch) -> Tensor:
        """The model's vectors [Q, joint_dim] for the queries of a batch, float32."""
        return self._asked(self._read(queries)[0].queries, queries)

    @torch.no_grad()
    def _read(self, queries: QueryBatch) -> tuple[ContextualizerOutput, Tensor]:
        """What the model makes of a batch, and the vectors of its events [B, L, joint_dim]."""
        device = self.bundle.device
        batch = batch_tensors(queries.batch, device)
        rows, places = np.unique(queries.batch.items, return_inverse=True)
        events = self._vectors(rows).float()[torch.from_numpy(places.reshape(queries.batch.items.shape)).to(device)]
        with self.bundle.autocast():
            return self.bundle.model.contextualize(batch, events), events

    def _asked(self, vectors: Tensor, queries: QueryBatch) -> Tensor:
        """The vectors of the slots that have a query."""
        device = self.bundle.device
        return vectors[torch.from_numpy(queries.windows).to(device), torch.from_numpy(queries.slots).to(device)].float()

    def _vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of catalogue rows in the type of the computation, on the model's device."""
        if self.cache is not None:
            return self.cache.rows(rows).to(self.bundle.device, self.compute)
        found = embed_rows(self.bundle.model, self.dataset, rows, precision=self.bundle.recipe.train.precision)
        return found.to(self.stored).to(self.compute)

    def _target_rows(self, targets: np.ndarray, candidates: np.ndarray | None) -> Tensor:
        """The vectors of the targets, with the bits that they have among the candidates."""
        if self.cache is not None or candidates is None:
            return self._vectors(targets)
        # Embedded again in other company, a vector could differ in its last bit from the one in the pool.
        places = torch.from_numpy(np.searchsorted(candidates, targets))
        return self._embedded(candidates)[places.to(self.bundle.device)]

    def _candidates(self, rows: np.ndarray | None) -> Candidates:
        """This process's stretch of the candidates; the last ones asked for are kept."""
        if self._held is None or self._held[0] is not rows:
            self._held = rows, self._whole_catalogue() if rows is None else self._subset(rows)
        return self._held[1]

    def _subset(self, rows: np.ndarray) -> Candidates:
        start, stop = self.ranks.stretch(len(rows))
        if self.cache is None:
            return Candidates([self._embedded(rows)[start:stop]], start, len(rows))
        return Candidates([self.cache.rows(rows[start:stop]).to(self.bundle.device)], start, len(rows))

    def _embedded(self, rows: np.ndarray) -> Tensor:
        """The vectors of a pool, embedded in one company on every process; the last pool is kept."""
        if self._pool is None or self._pool[0] is not rows:
            self._pool = rows, self.ranks.from_first(self._vectors(rows))
        return self._pool[1]

    def _whole_catalogue(self) -> Candidates:
        """The catalogue as stored, mapped from its files; on CUDA it moves there if it fits."""
        if self.cache is None:
            raise ModelError(
                f"the whole catalogue was asked for without its vectors ({self.name})",
                next_step=f"habitus embed {self.name} --data {self.dataset.path}",
            )
        total = self.cache.manifest.num_items
        start, stop = self.ranks.stretch(total)
        pieces = self.cache.pieces(start, stop)
        device = self.bundle.device
        if device.type == "cuda":
            needed = sum(piece.nbytes for piece in pieces)
            if needed + self.memory_bytes < torch.cuda.mem_get_info(device)[0] * 0.9:
                whole = torch.empty(stop - start, self.cache.manifest.joint_dim, dtype=self.cache.dtype, device=device)
                at = 0
                for piece in pieces:
                    whole[at : at + len(piece)] = piece
                    at += len(piece)
                pieces = [whole]
        return Candidates(pieces, start, total)
