"""Candidates sharded over ranks: every rank scores the queries of all ranks against its own rows.

    W  ranks      m  queries of this rank      M = W m  queries of all      V_r  candidates of rank r

Queries are gathered, each rank computes its part, and parts merge by their log-sum-exp. Gradients of the queries are
summed back to the rank that owns them; gradients of the candidates are computed where the rows live.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from habitus.errors import ModelError


class FullCandidates:
    """One process holds all candidates: nothing to gather, nothing to sum."""

    offset = 0  # position of this rank's first candidate in the full table

    def __init__(self, num_candidates: int) -> None:
        self.num_candidates = num_candidates

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in rank order."""
        return rows

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        return values

    def agree_on_cause(self, cause: Tensor) -> Tensor:
        """What is wrong on any rank: a rank that raises alone leaves the others waiting."""
        return cause

    def merge_lse(self, lse: Tensor) -> Tensor:
        """The log-sum-exp over the candidates of all ranks."""
        return lse

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks hold."""
        return rows

    def sum_own_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks."""
        return rows


class ShardedCandidates(FullCandidates):
    """A process group whose ranks hold consecutive shards of the candidate table."""

    def __init__(self, group: dist.ProcessGroup, queries: Tensor, candidates: Tensor) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        sizes = _sizes(group, self.world, queries, candidates)
        if len({(m, d) for m, _, d in sizes}) > 1:
            raise ModelError(
                f"Ranks hold queries of different shapes: {[(m, d) for m, _, d in sizes]}.",
                expected="the same number of queries on every rank",
                next_step="Pad the shorter batches with queries of weight zero.",
            )
        shard_sizes = [candidates for _, candidates, _ in sizes]
        self.offset = sum(shard_sizes[: self.rank])
        super().__init__(sum(shard_sizes))

    def all_gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, in rank order."""
        all_rows = rows.new_empty(self.world * len(rows), *rows.shape[1:])
        dist.all_gather(list(all_rows.chunk(self.world)), rows.contiguous(), group=self.group)
        return all_rows

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum over ranks."""
        values = values.clone()
        dist.all_reduce(values, group=self.group)
        return values

    def agree_on_cause(self, cause: Tensor) -> Tensor:
        """What is wrong on any rank: a rank that raises alone leaves the others waiting."""
        cause = cause.clone()
        dist.all_reduce(cause, dist.ReduceOp.MAX, group=self.group)
        return cause

    def merge_lse(self, lse: Tensor) -> Tensor:
        """The log-sum-exp over the candidates of all ranks."""
        return torch.logsumexp(self.all_gather(lse[None].double()), dim=0).to(lse.dtype)

    def own_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks hold."""
        return rows.chunk(self.world)[self.rank].clone()

    def sum_own_rows(self, rows: Tensor) -> Tensor:
        """This rank's rows of the sum over ranks."""
        if dist.get_backend(self.group) == "gloo":  # has no reduce-scatter for every type
            return self.own_rows(self.all_sum(rows))
        result = torch.empty_like(rows.chunk(self.world)[self.rank])
        dist.reduce_scatter_tensor(result, rows.contiguous(), group=self.group)
        return result


_MOST_CACHED = 64
_cached_sizes: dict[tuple[int, int, int, int], list[tuple[int, int, int]]] = {}


def _sizes(group: dist.ProcessGroup, world: int, queries: Tensor, candidates: Tensor) -> list[tuple[int, int, int]]:
    """(queries, candidates, width) of every rank.

    The host must wait for this, so inside graph capture the answer of the warm-up call with the same shapes is used.
    """
    own = (len(queries), len(candidates), queries.shape[1])
    key = (id(group), *own)
    if queries.is_cuda and torch.cuda.is_current_stream_capturing():
        if key not in _cached_sizes:
            raise ModelError(
                "A softmax over ranks was captured without a warm-up call of the same shapes.",
                next_step="Run the step once before capturing it.",
            )
        return _cached_sizes[key]
    sent = torch.tensor([own], dtype=torch.int64, device=queries.device)
    received = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(received, sent, group=group)
    sizes = [(m, v, d) for m, v, d in torch.cat(received).tolist()]
    if queries.is_cuda:  # each captured bucket asks for few shapes, just before it is captured
        _cached_sizes.pop(key, None)
        if len(_cached_sizes) >= _MOST_CACHED:
            del _cached_sizes[next(iter(_cached_sizes))]  # the oldest
        _cached_sizes[key] = sizes
    return sizes
