"""The scores of a batch of queries, the protocol of scorers, and how dense logits become scores.

Q  queries      C  candidates      k  items per query
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from habitus.evaluation.queries import QueryBatch

_DENSE_BYTES = 128 << 20


@dataclass(frozen=True)
class Scores:
    """Per query: loss and entropy in nats, rank from 1 with ties against, and the best items, best first."""

    loss: np.ndarray | None  # float64 [Q]; absent without losses
    entropy: np.ndarray | None  # float64 [Q]; the same
    rank: np.ndarray  # int64 [Q]
    top: np.ndarray  # int64 [Q, k]: catalogue rows; -1 beyond the last candidate
    top_log_probs: np.ndarray | None = None  # float64 [Q, k]: of a model, with losses


class Scorer(Protocol):
    """Anything that ranks candidates for queries: a model, a baseline, the oracle."""

    name: str

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        """Scores over the given catalogue rows (sorted), or over the full catalogue where they are None.

        k may be 0, and `losses` false: what is not requested need not be computed.
        """
        ...


class DenseScorer(ABC):
    """A scorer that can write out log-probabilities; the rest follows, a few queries at a time."""

    num_items: int
    writes_full_rows = False  # whether log_probs holds the full catalogue even where candidates are few

    @abstractmethod
    def log_probs(self, queries: QueryBatch, chosen: slice, candidates: np.ndarray | None) -> np.ndarray:
        """Unnormalised log-probabilities [q, C] of the chosen queries over the candidates."""

    def score(self, queries: QueryBatch, candidates: np.ndarray | None, k: int, *, losses: bool = True) -> Scores:
        num_candidates = self.num_items if candidates is None else len(candidates)
        places = queries.targets if candidates is None else np.searchsorted(candidates, queries.targets)
        step = max(1, _DENSE_BYTES // (8 * (self.num_items if self.writes_full_rows else num_candidates)))
        parts = []
        for first in range(0, len(places), step):
            chosen = slice(first, first + step)
            logits = self.log_probs(queries, chosen, candidates)
            parts.append(dense_scores(logits, places[chosen], k, candidates, losses=losses))
        return concatenate(parts)


def dense_scores(
    logits: np.ndarray, places: np.ndarray, k: int, candidates: np.ndarray | None, *, losses: bool = True
) -> Scores:
    """Scores from logits [q, C] and the targets' places among the candidates; equal scores by lower place."""
    z = torch.from_numpy(np.ascontiguousarray(logits, np.float64))
    target_logits = z.gather(1, torch.from_numpy(places)[:, None])
    loss = entropy = None
    if losses:
        lse = z.logsumexp(1, keepdim=True)
        log_p = z - lse
        loss = (lse - target_logits)[:, 0].numpy()
        entropy = -torch.where(log_p > -torch.inf, log_p.exp() * log_p, 0.0).sum(1).numpy()
    top = _stable_top(z, min(k, z.shape[1]))
    if candidates is not None:
        top = candidates[top]
    if top.shape[1] < k:
        top = np.pad(top, ((0, 0), (0, k - top.shape[1])), constant_values=-1)
    return Scores(loss=loss, entropy=entropy, rank=(z >= target_logits).sum(1).numpy(), top=top)


def concatenate(parts: list[Scores]) -> Scores:
    """The scores of consecutive queries as one."""
    columns: dict[str, Any] = {}
    for name in Scores.__dataclass_fields__:
        values = [getattr(part, name) for part in parts]
        columns[name] = None if values[0] is None else np.concatenate(values)
    return Scores(**columns)


def _stable_top(z: torch.Tensor, k: int) -> np.ndarray:
    """Places of the k highest scores of each row, best first; among equals the lower place first."""
    if k == 0:
        return np.empty((len(z), 0), np.int64)
    threshold = z.topk(k, dim=1).values[:, -1:]
    above = (z > threshold).sum(1, keepdim=True)
    equal = z == threshold
    among_top = (z > threshold) | (equal & (equal.cumsum(1) <= k - above))
    places = among_top.nonzero()[:, 1].reshape(len(z), k)  # ascending within each row
    order = z.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return places.gather(1, order).numpy()
