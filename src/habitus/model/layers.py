"""The transformer layer that both parts share. No biases anywhere.

Letters: R rows, w width of the layer, H heads, d head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from habitus.model.activation import gelu
from habitus.model.dropout import Noise, dropped
from habitus.model.layouts import Layout, attend

_EPS = 1e-6


class Block(nn.Module):
    """One pre-norm layer: attention over what the layout allows, then an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = RMSNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.attention_out = Linear(width, width)
        self.mlp_norm = RMSNorm(width)
        self.mlp_up = Linear(width, 4 * width)
        self.mlp_out = Linear(4 * width, width)

    def forward(self, x: Tensor, layout: Layout, noise: Noise | None = None) -> Tensor:
        """x [R, w] after the layer; with noise, parts of what it adds are dropped."""
        # The norms' weights scale the columns of the matrices that follow, not the rows: the same product, and their
        # gradient comes out of the matrix's instead of a sum over all rows.
        qkv = self.qkv(self.attention_norm.direction(x), self.attention_norm.weight).unflatten(-1, (3, self.heads, -1))
        seen = self.attention_out(attend(qkv, layout).flatten(1))
        x = x + (seen if noise is None else dropped(seen, noise.attention, noise.rate))
        thought = self.mlp_out(gelu(self.mlp_up(self.mlp_norm.direction(x), self.mlp_norm.weight)))
        return x + (thought if noise is None else dropped(thought, noise.mlp, noise.rate))


class Linear(nn.Module):
    """x·Wᵀ. What it starts from is decided in `habitus.model.start`, for the whole model at once."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))

    def forward(self, x: Tensor, column_scale: Tensor | None = None) -> Tensor:
        """x·Wᵀ, or x·(W·diag(column_scale))ᵀ."""
        return F.linear(x, self.weight if column_scale is None else self.weight * column_scale)


class RMSNorm(nn.Module):
    """x / rms(x), times a learned weight; computed in float32, returned as it came."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), _EPS).to(x.dtype)

    def direction(self, x: Tensor) -> Tensor:
        """x / rms(x) without the weight, returned as it came."""
        return unit_rms(x).to(x.dtype)


def unit_rms(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, in float32. A vector of zeros stays zero."""
    return F.rms_norm(x.float(), x.shape[-1:], None, _EPS)


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype that activations flow in: autocast's where it is on, else float32."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32
