"""The transformer layer that both parts share. No biases anywhere.

Letters: R rows, w width of the layer, H heads, d head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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

    def forward(self, x: Tensor, layout: Layout, turns: Tensor | None) -> Tensor:
        """x [R, w] after the layer; `turns` are the rotary angles' cosines and sines, [R, 2, d/2]."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        if turns is not None:
            qkv = turned(qkv, turns)
        x = x + self.attention_out(attend(qkv, layout).flatten(1))
        return x + self.mlp_out(F.gelu(self.mlp_up(self.mlp_norm(x))))


class Linear(nn.Module):
    """x·Wᵀ. What it starts from is decided in `habitus.model.start`, for the whole model at once."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class RMSNorm(nn.Module):
    """x / rms(x), times a learned weight; computed in float32, returned as it came."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), _EPS).to(x.dtype)


def unit_rms(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, in float32. A vector of zeros stays zero."""
    return F.rms_norm(x.float(), x.shape[-1:], None, _EPS)


def rotary_turns(positions: Tensor, d: int) -> Tensor:
    """Cosines and sines [R, 2, d/2] of the angles by which each position turns the pairs of a head."""
    # Base 10,000 as is usual; the slowest pair turns by a fraction of a degree within a window of 256.
    exponents = torch.arange(0, d, 2, dtype=torch.float32, device=positions.device) / d
    angles = positions.float()[:, None] * 10_000.0**-exponents
    return torch.stack((angles.cos(), angles.sin()), 1)


def turned(qkv: Tensor, turns: Tensor) -> Tensor:
    """qkv [R, 3, H, d] with queries and keys turned pairwise; entry i pairs with entry i + d/2."""
    cos, sin = turns[:, :1, None], turns[:, 1:, None]  # [R, 1, 1, d/2]
    left, right = qkv[:, :2].chunk(2, dim=-1)
    pairs = torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1)
    return torch.cat((pairs.to(qkv.dtype), qkv[:, 2:]), dim=1)


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype that activations flow in: autocast's where it is on, else float32."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32
