"""A trained model as a scorer: queries from its contextualizer, candidates from its embedder or the cache.

Candidate vectors are rounded to the type that the cache stores, whether they come from it or not, so that a number
does not depend on whether a cache was there.
"""

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.evaluate.queries import QueryBatch
from habitus.evaluate.scores import Scores
from habitus.model import batch_tensors
from habitus.model.bundle import Bundle
from habitus.model.cache import DTYPES, EmbeddingCache, StoredType, embed_rows
from habitus.softmax import catalogue_scores


class ModelScorer:
    """Scores by a bundle. `memory_bytes` bounds the working memory of a pass over the candidates."""

    def __init__(
        self,
        bundle: Bundle,
        dataset: Dataset,
        cache: EmbeddingCache | None = None,
        *,
        stored: StoredType = "bf16",
        memory_bytes: int = 512 << 20,
    ) -> None:
        self.name = str(bundle.path)
        self.bundle = bundle
        self.dataset = dataset
        self.cache = cache
        self.stored = DTYPES[stored] if cache is None else cache.dtype
        self.memory_bytes = memory_bytes
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.compute = self.stored if bundle.device.type == "cuda" else torch.float32
        self._catalogue: list[Tensor] | None = None

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int) -> Scores:
        vectors = self._query_vectors(queries).to(self.compute)
        if candidates is None:
            table, places = self._whole_catalogue(), queries.targets
        else:
            table, places = [self._vectors(candidates)], np.searchsorted(candidates, queries.targets)
        width = min(k, sum(len(piece) for piece in table))
        found = catalogue_scores(
            vectors, table, torch.from_numpy(places).to(vectors.device), k=width, memory_bytes=self.memory_bytes
        )
        top = found.top_items.cpu().numpy()
        if candidates is not None:
            top = candidates[top]
        return Scores(
            loss=found.loss.double().cpu().numpy(),
            entropy=found.entropy.double().cpu().numpy(),
            rank=found.rank.cpu().numpy(),
            top=np.pad(top, ((0, 0), (0, k - width)), constant_values=-1),
        )

    @torch.no_grad()
    def _query_vectors(self, queries: QueryBatch) -> Tensor:
        device = self.bundle.device
        batch = batch_tensors(queries.batch, device)
        rows, places = np.unique(queries.batch.items, return_inverse=True)
        events = self._vectors(rows).float()[torch.from_numpy(places.reshape(queries.batch.items.shape)).to(device)]
        precision = self.bundle.recipe.train.precision
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16" and device.type == "cuda"):
            vectors = self.bundle.model.queries(batch, events)
        return vectors[torch.from_numpy(queries.windows).to(device), torch.from_numpy(queries.slots).to(device)]

    def _vectors(self, rows: np.ndarray) -> Tensor:
        if self.cache is not None:
            return self.cache.rows(rows).to(self.bundle.device, self.compute)
        return embed_rows(self.bundle.model, self.dataset, rows).to(self.stored).to(self.compute)

    def _whole_catalogue(self) -> list[Tensor]:
        """The catalogue in the type of the computation, converted once; on CUDA it moves there if it fits."""
        if self._catalogue is None:
            assert self.cache is not None, "the catalogue regime needs a cache"
            shards = [shard.to(self.compute) for shard in self.cache.shards]
            device = self.bundle.device
            if device.type == "cuda":
                needed = sum(shard.nbytes for shard in shards)
                if needed + self.memory_bytes < torch.cuda.mem_get_info(device)[0] * 0.9:
                    shards = [torch.cat([shard.to(device) for shard in shards])]
            self._catalogue = shards
        return self._catalogue
