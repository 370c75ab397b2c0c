"""The softmax over few candidates: scores are cached from forward to backward.

    M  queries      V  candidates      d  width of a vector

Fused attention computes all scores again for the gradient of the candidates: four matrix products and twice the
exponentials. Where memory for them is cheap, caching exp(z - the row's maximum) makes three and once. On a CPU the next
step reuses the memory, since fresh pages of the system would cost what is saved. On a GPU fused attention is the faster
one, but the launches around it take milliseconds of the host: a step that is not captured has fewer of them here
(docs/decisions/0138).
"""

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.softmax.attention import working_dtype
from habitus.softmax.chunked import block_scores, product
from habitus.softmax.merging import PartialSoftmax

MAX_CACHED_SCORES = 1 << 25  # 128 MiB of float32
MAX_CUDA_SCORES = 1 << 27  # launched: faster than fused attention at 8,192², slower at 16,384² (one H200, d = 248)
_BLOCK_SCORES = 1 << 19  # 2 MiB at a time, to be used again while a cache holds them

_spare_buffers: list[Tensor] = []  # the buffer of the last step, one at most


class CachedScores(NamedTuple):
    """The softmax of each query, as p_ij = exponentials_ij · inverse_i, on a CPU in a buffer to be released."""

    exponentials: Tensor  # [M, V]
    inverse: Tensor | None = None  # [M]; None: ones
    buffer: Tensor | None = None


def can_cache_scores(queries: Tensor, candidates: Tensor) -> bool:
    """Whether the scores are few enough. Not in compiled steps, which hold no memory of their own, nor in captured
    ones, whose launches cost nothing."""
    if torch.compiler.is_compiling():
        return False
    scores = len(queries) * len(candidates)
    if queries.is_cuda:
        return scores <= MAX_CUDA_SCORES and not torch.cuda.is_current_stream_capturing()
    return queries.device.type == "cpu" and scores <= MAX_CACHED_SCORES


def cached_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> tuple[PartialSoftmax, CachedScores]:
    """The average candidate [M, d], log-sum-exp [M] and entropy [M], and what `cached_candidate_gradient` needs."""
    return (device_forward if queries.is_cuda else _cpu_forward)(queries, candidates, bias)


def device_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> tuple[PartialSoftmax, CachedScores]:
    """All scores at once, in as few operations as there can be."""
    scores = block_scores(queries, candidates, bias)
    largest, place = scores.max(1, keepdim=True)
    probabilities = torch.softmax(scores, 1)
    # The largest probability is at least 1/V: its logarithm is as good as the sum's.
    lse = (largest - probabilities.gather(1, place).log_()).squeeze(1)
    kept = probabilities.to(queries.dtype)
    mean = product(kept, candidates)
    entropy = lse - torch.linalg.vecdot(queries.to(lse.dtype), mean)
    if bias is not None:
        entropy -= probabilities @ bias.to(lse.dtype)
    return PartialSoftmax(mean, lse, entropy), CachedScores(kept)


def _cpu_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> tuple[PartialSoftmax, CachedScores]:
    dtype = working_dtype(queries)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    M, V = len(queries), len(candidates)
    buffer = _take_buffer(M * V, dtype)
    exponentials = buffer[: M * V].view(M, V)
    mean = torch.empty_like(queries)
    largest, total = queries.new_empty(M), queries.new_empty(M)
    rows = max(1, _BLOCK_SCORES // V)
    for start in range(0, M, rows):
        block = slice(start, start + rows)
        scores = exponentials[block]
        if bias is None:
            torch.mm(queries[block], candidates.T, out=scores)
        else:
            torch.addmm(bias, queries[block], candidates.T, out=scores)
        torch.amax(scores, 1, out=largest[block])
        scores.sub_(largest[block, None]).exp_()
        torch.sum(scores, 1, out=total[block])
        torch.mm(scores, candidates, out=mean[block])
    inverse = total.reciprocal()
    mean.mul_(inverse[:, None])
    lse = largest + total.log()
    entropy = lse - torch.linalg.vecdot(queries, mean)
    if bias is not None:
        entropy -= (exponentials @ bias) * inverse
    return PartialSoftmax(mean, lse, entropy), CachedScores(exponentials, inverse, buffer)


def cached_candidate_gradient(cached: CachedScores, queries: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i p_ij h_i for every candidate j, as [V, d]."""
    dtype = cached.exponentials.dtype
    with torch.autocast(queries.device.type, enabled=False):
        if cached.inverse is None:
            return product(cached.exponentials.T, (queries * weights[:, None]).to(dtype))
        return cached.exponentials.T @ (queries.to(dtype) * (weights.to(dtype) * cached.inverse)[:, None])


def release(cached: CachedScores) -> None:
    """Let the next step use the buffer; the cached scores must not be read any more."""
    if cached.buffer is not None:
        _spare_buffers[:] = [cached.buffer]


def _take_buffer(size: int, dtype: torch.dtype) -> Tensor:
    with suppress(IndexError):  # another thread may be quicker
        spare = _spare_buffers.pop()
        if spare.dtype == dtype and len(spare) >= size:
            return spare
    return torch.empty(size, dtype=dtype)
