"""The softmax over few candidates on a CPU: scores are kept from forward to backward.

    M  queries      V  candidates      d  width of a vector

Fused attention computes all scores again for the gradient of the candidates: four matrix products and twice the
exponentials. Where memory for them is cheap, keeping exp(z - the row's largest) makes three and once. The memory is
used again by the next step, since fresh pages of the system would cost what is saved.
"""

from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.softmax.attention import working_dtype
from habitus.softmax.merging import Part

KEPT_SCORES = 1 << 25  # 128 MiB of float32
_BLOCK_SCORES = 1 << 19  # 2 MiB at a time, to be used again while a cache holds them

_spare: list[Tensor] = []  # the memory of the last step, one piece at most


class Kept(NamedTuple):
    """The softmax of each query, as p_ij = exponentials_ij · inverse_i, in memory that is given back."""

    memory: Tensor
    exponentials: Tensor  # [M, V]
    inverse: Tensor  # [M]


def keeps(queries: Tensor, candidates: Tensor) -> bool:
    """Whether the scores are few enough, and on a CPU. Not in compiled steps, which hold no memory of their own."""
    few = len(queries) * len(candidates) <= KEPT_SCORES
    return few and queries.device.type == "cpu" and not torch.compiler.is_compiling()


def kept_forward(queries: Tensor, candidates: Tensor, bias: Tensor | None) -> tuple[Part, Kept]:
    """The average candidate [M, d], log-sum-exp [M] and entropy [M], and what `kept_pull` needs."""
    dtype = working_dtype(queries)
    queries, candidates = queries.to(dtype), candidates.to(dtype)
    bias = None if bias is None else bias.to(dtype)
    M, V = len(queries), len(candidates)
    memory = _taken(M * V, dtype)
    exponentials = memory[: M * V].view(M, V)
    mean = torch.empty_like(queries)
    largest, total = queries.new_empty(M), queries.new_empty(M)
    rows = max(1, _BLOCK_SCORES // V)
    for start in range(0, M, rows):
        here = slice(start, start + rows)
        scores = exponentials[here]
        if bias is None:
            torch.mm(queries[here], candidates.T, out=scores)
        else:
            torch.addmm(bias, queries[here], candidates.T, out=scores)
        torch.amax(scores, 1, out=largest[here])
        scores.sub_(largest[here, None]).exp_()
        torch.sum(scores, 1, out=total[here])
        torch.mm(scores, candidates, out=mean[here])
    inverse = total.reciprocal()
    mean.mul_(inverse[:, None])
    lse = largest + total.log()
    entropy = lse - torch.linalg.vecdot(queries, mean)
    if bias is not None:
        entropy -= (exponentials @ bias) * inverse
    return Part(mean, lse, entropy), Kept(memory, exponentials, inverse)


def kept_pull(kept: Kept, queries: Tensor, weights: Tensor) -> Tensor:
    """sum_i weights_i p_ij h_i for every candidate j, as [V, d]."""
    dtype = kept.exponentials.dtype
    with torch.autocast("cpu", enabled=False):
        return kept.exponentials.T @ (queries.to(dtype) * (weights.to(dtype) * kept.inverse)[:, None])


def give_back(kept: Kept) -> None:
    """The memory may be used again; nothing may look at what was kept any more."""
    _spare[:] = [kept.memory]


def _taken(count: int, dtype: torch.dtype) -> Tensor:
    with suppress(IndexError):  # another thread may be quicker
        spare = _spare.pop()
        if spare.dtype == dtype and len(spare) >= count:
            return spare
    return torch.empty(count, dtype=dtype)
