"""The softmax as operators of PyTorch: opaque to `torch.compile`, transparent to graph capture.

    M  queries      V  candidates      d  width of a vector

Each has a description of its outputs for tracing; the work is in `backend.forward` and `backend.backward`.
"""

import torch
from torch import Tensor

from habitus.softmax import backend as backends
from habitus.softmax.attention import kernel_width, shard_rows, working_dtype
from habitus.softmax.backend import SoftmaxBackend


@torch.library.custom_op("habitus::softmax_forward", mutates_args=())
def softmax_forward(
    queries: Tensor, candidates: Tensor, bias: Tensor | None, backend: str, need_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The average candidate [M, d] or [0, d], the log-sum-exp [M] and the entropy [M]."""
    mean, lse, entropy = backends.forward(backend, queries, candidates, bias, need_mean)
    return mean, lse, entropy


@torch.library.custom_op("habitus::softmax_backward", mutates_args=())
def softmax_backward(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    weights: Tensor,
    backend: str,
    trainable: bool,
) -> tuple[Tensor, Tensor]:
    """The queries' gradient [M, d] where `forward` left it out, else [0, d], and the candidates' [V, d] or [0, d]."""
    return backends.backward(backend, queries, candidates, bias, lse, weights, trainable)


@softmax_forward.register_fake
def _(
    queries: Tensor, candidates: Tensor, bias: Tensor | None, backend: str, need_mean: bool
) -> tuple[Tensor, Tensor, Tensor]:
    M, d = queries.shape
    wide = torch.promote_types(queries.dtype, torch.float32)
    deferred = backend == SoftmaxBackend.TRITON or (backend == SoftmaxBackend.CHUNKED and not need_mean)
    mean = queries.new_empty(0 if deferred else M, d, dtype=mean_dtype(queries, candidates, bias, backend))
    return mean, queries.new_empty(M, dtype=wide), queries.new_empty(M, dtype=wide)


@softmax_backward.register_fake
def _(
    queries: Tensor,
    candidates: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    weights: Tensor,
    backend: str,
    trainable: bool,
) -> tuple[Tensor, Tensor]:
    (M, d), V = queries.shape, len(candidates)
    deferred = backend == SoftmaxBackend.TRITON
    return lse.new_empty(M if deferred else 0, d), lse.new_empty(V if trainable else 0, d)


def mean_dtype(queries: Tensor, candidates: Tensor, bias: Tensor | None, backend: str) -> torch.dtype:
    """The average candidate's type: a fused kernel's own where one call saw all candidates, else float32 or wider."""
    if backend == SoftmaxBackend.TRITON:
        return queries.dtype
    dtype = working_dtype(queries)
    if backend != SoftmaxBackend.CHUNKED:
        width = kernel_width(queries.shape[1], dtype, bias is not None)
        if len(candidates) <= shard_rows(candidates, dtype, width):
            return dtype
    return torch.promote_types(dtype, torch.float32)
