"""The softmax over candidates in plain PyTorch, a bounded block of scores at a time: any device, any width, any type.

    M  queries      V  candidates      d  width of a vector

The last backend in the order, and the one that float32 on CUDA gets. Scores are float32 at least (tensor-core products
of bfloat16 accumulate and return float32), so it has no rounding that the fused backends lack.
"""

import torch
from torch import Tensor

from habitus.softmax.merging import Merger, PartialSoftmax, shard_ranges

_BLOCK_SCORES = 1 << 24  # 64 MiB of float32
_BLOCK_ROWS = 4096


def block_scores(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> Tensor:
    """queries candidates^T + bias in float32 (float64 for float64), never rounded to the inputs' type."""
    if queries.dtype in (torch.bfloat16, torch.float16):
        if queries.is_cuda:
            z = torch.mm(queries, candidates.T, out_dtype=torch.float32)
        else:
            z = queries.float() @ candidates.float().T
    else:
        z = queries @ candidates.T
    return z if bias is None else z.add_(bias.to(z.dtype))


def chunked_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None, need_mean: bool) -> PartialSoftmax:
    """The average candidate [M, d] ([0, d] if not needed), the log-sum-exp [M] and the entropy [M]."""
    blocks = [
        _forward_block(queries[a:b], candidates, bias, need_mean) for a, b in shard_ranges(len(queries), _BLOCK_ROWS)
    ]
    return PartialSoftmax(*(torch.cat(column) for column in zip(*blocks, strict=True)))


def _forward_block(queries: Tensor, candidates: Tensor, bias: Tensor | None, need_mean: bool) -> PartialSoftmax:
    merger = Merger()
    for start, stop in shard_ranges(len(candidates), max(64, _BLOCK_SCORES // len(queries))):
        part = candidates[start:stop]
        z = block_scores(queries, part, None if bias is None else bias[start:stop])
        lse = torch.logsumexp(z, dim=1)
        p = z.sub_(lse[:, None]).exp()
        # z is log p by now, so the entropy needs no difference of large numbers.
        mean = product(p, part) if need_mean else z.new_empty(len(z), 0)
        merger.add(PartialSoftmax(mean, lse, -torch.linalg.vecdot(p, z)))
    mean, lse, entropy = merger.result()
    return PartialSoftmax(mean.reshape(-1, queries.shape[1]), lse, entropy)


def chunked_backward(queries: Tensor, candidates: Tensor, bias: Tensor | None, lse: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i exp(z_ij + bias_j - lse_i) h_i for every candidate j, as [V, d]."""
    result = lse.new_zeros(candidates.shape)
    for a, b in shard_ranges(len(queries), _BLOCK_ROWS):
        for start, stop in shard_ranges(len(candidates), max(64, _BLOCK_SCORES // (b - a))):
            p = block_scores(queries[a:b], candidates[start:stop], None if bias is None else bias[start:stop])
            p = p.sub_(lse[a:b, None]).exp_().mul_(weights[a:b, None])
            result[start:stop] += product(p.T, queries[a:b])
    return result


def product(p: Tensor, rows: Tensor) -> Tensor:
    """p rows with float32 accumulation: on tensor cores where the rows are bfloat16, in p's type otherwise."""
    if rows.is_cuda and rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(p.to(rows.dtype), rows, out_dtype=torch.float32)
    return p @ rows.to(p.dtype)
