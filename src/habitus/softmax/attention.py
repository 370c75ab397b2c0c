"""The softmax over candidates as fused attention: keys and values are the candidates, the scale is one.

    M  queries      V  candidates      d  width of a vector      w  width given to the kernel

    forward   o = softmax(H E^T + b) E and its log-sum-exp                               one attention over E
    backward  dE_j = sum_i g_i exp(z_ij + b_j - lse_i) h_i                               one attention over H

The backward call has queries E, keys H, values g_i h_i and a per-key bias -lse_i; its own log-sum-exp undoes its
normalisation. Fused kernels take no per-key bias, so a bias rides in extra columns against ones: three bfloat16
parts of a float32 hold all of its 24 bits, and in wider types one column is enough.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from habitus.softmax.merging import SHARD_ROWS, Merger, PartialSoftmax, shard_ranges

Kernel = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # q, k, v of [1, 1, rows, w] -> o, lse

_COPY_BYTES = 64 << 20  # of keys that must be copied (padded, biased or widened) at a time


def attend(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, kernel: Kernel) -> PartialSoftmax:
    """The average value [M, d], log-sum-exp and (where values are keys) entropy of softmax(queries keys^T + bias)."""
    M, d = queries.shape
    dtype = working_dtype(queries)
    width = kernel_width(d, dtype, bias is not None)
    ones = None if bias is None else torch.ones_like(bias[:1], dtype=dtype).expand(M, 1)
    wide_queries = _widen(queries.to(dtype), ones, width)
    merger = Merger()
    for start, stop in shard_ranges(len(keys), shard_rows(keys, dtype, width)):
        columns = None if bias is None else _bias_columns(bias[start:stop], dtype)
        wide_keys = _widen(keys[start:stop].to(dtype), columns, width)
        wide_values = wide_keys if values is keys else _widen(values[start:stop].to(dtype), None, width)
        mean, lse = kernel(wide_queries[None, None], wide_keys[None, None], wide_values[None, None])
        merger.add(PartialSoftmax(mean.reshape(M, width), lse.reshape(-1)[:M], lse.new_empty(0)))
    mean, lse, _ = merger.result()
    # All columns count here: where values are keys, the last ones hold the average bias.
    entropy = lse - torch.linalg.vecdot(wide_queries.to(lse.dtype), mean.to(lse.dtype))
    return PartialSoftmax(mean[:, :d].contiguous(), lse, entropy)


def candidate_gradient(
    candidates: Tensor, bias: Tensor | None, queries: Tensor, weighted: Tensor, lse: Tensor, kernel: Kernel
) -> Tensor:
    """sum_i exp(z_ij + bias_j - lse_i) weighted_i for every candidate j, as [V, d]."""
    part = attend(candidates, queries, weighted, -lse, kernel)
    mass = (part.lse if bias is None else part.lse + bias).exp()
    return part.mean * mass[:, None]


def cudnn_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """cuDNN's fused attention forward, through PyTorch's operator."""
    return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=1.0)[:2]


def flash_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """FlashAttention's forward, through PyTorch's operator."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=1.0)[:2]


def cpu_kernel(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """PyTorch's fused attention forward for CPUs."""
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=1.0)[:2]


def working_dtype(queries: Tensor) -> torch.dtype:
    """The kernel's input type: as given on CUDA; on CPU at least float32, which is no slower there."""
    narrow = queries.device.type == "cpu" and queries.dtype in (torch.bfloat16, torch.float16)
    return torch.float32 if narrow else queries.dtype


def kernel_width(d: int, dtype: torch.dtype, biased: bool) -> int:
    """Columns the kernel is given: the vector, the bias columns, and zeros up to a multiple of 8 in bfloat16."""
    if dtype != torch.bfloat16:
        return d + 1 if biased else d
    return -(-(d + 3 if biased else d) // 8) * 8


def shard_rows(keys: Tensor, dtype: torch.dtype, width: int) -> int:
    """Keys per kernel call: a full shard where they are used in place, _COPY_BYTES of them where they are copied."""
    if keys.dtype == dtype and keys.shape[1] == width:
        return SHARD_ROWS
    return min(SHARD_ROWS, max(64, _COPY_BYTES // (width * dtype.itemsize)))


def _bias_columns(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Columns of `dtype` whose sum is the bias: high, middle and low parts in bfloat16, itself otherwise."""
    if dtype != torch.bfloat16:
        return bias[:, None].to(dtype)
    high = bias.to(dtype)
    middle = (bias - high.to(bias.dtype)).to(dtype)
    low = (bias - high.to(bias.dtype) - middle.to(bias.dtype)).to(dtype)
    return torch.stack((high, middle, low), dim=1)


def _widen(rows: Tensor, columns: Tensor | None, width: int) -> Tensor:
    """Rows, then columns (one column is repeated for the parts of a bfloat16 bias), then zeros up to `width`."""
    d = rows.shape[1]
    if columns is None:
        return rows.contiguous() if d == width else F.pad(rows, (0, width - d))
    wide = rows.new_zeros(len(rows), width)
    wide[:, :d] = rows
    wide[:, d : d + (3 if rows.dtype == torch.bfloat16 else 1)] = columns
    return wide
