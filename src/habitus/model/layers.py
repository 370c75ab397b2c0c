"""The transformer layer that both parts share. No biases anywhere.

Letters: R rows, w width of the layer, H heads, d head size.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from habitus.model.activation import gelu
from habitus.model.attention import Layout, attend
from habitus.model.dropout import DropoutMask, apply_dropout

_EPS = 1e-6


class Block(nn.Module):
    """One pre-norm layer: attention over what the layout allows, then an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.heads = heads
        self.attention_norm = RMSNorm(width)
        self.qkv = Linear(width, 3 * width)
        self.attention_out = Linear(width, width)
        self.mlp_norm = RMSNorm(width)
        self.mlp_up = Linear(width, 4 * width)
        self.mlp_out = Linear(4 * width, width)

    def forward(self, x: Tensor, layout: Layout, dropout_mask: DropoutMask | None = None) -> Tensor:
        """x [R, w] after the layer; a dropout mask applies to what attention and MLP add.

        Rows may end in zeros beyond w, which stay zeros: the matrices get zeros of their own.
        """
        if dropout_mask is None:
            x = x + self._attention(x, layout)
            return x + self._mlp(x)
        x = x + apply_dropout(self._attention(x, layout), dropout_mask.attention, dropout_mask.rate)
        return x + apply_dropout(self._mlp(x), dropout_mask.mlp, dropout_mask.rate)

    def _attention(self, x: Tensor, layout: Layout) -> Tensor:
        d, more = self.width // self.heads, x.shape[-1] - self.width
        weight = self.qkv.weight * self._column_scale(self.attention_norm, x)
        out: Tensor = self.attention_out.weight
        if more:
            more_d = -(-x.shape[-1] // (8 * self.heads)) * 8 - d
            weight = pad_zeros(weight.unflatten(0, (3, self.heads, d)), (0, more, 0, more_d)).flatten(0, 2)
            out = pad_zeros(out.unflatten(1, (self.heads, d)), (0, more_d, 0, 0, 0, more)).flatten(1)
        qkv = self.qkv(self.attention_norm.normalize(x), weight).unflatten(-1, (3, self.heads, -1))
        added: Tensor = self.attention_out(attend(qkv, layout, scale=d**-0.5).flatten(1), out)
        return added

    def _mlp(self, x: Tensor) -> Tensor:
        more = x.shape[-1] - self.width
        up = self.mlp_up.weight * self._column_scale(self.mlp_norm, x)
        out: Tensor = self.mlp_out.weight
        if more:
            up, out = pad_zeros(up, (0, more)), pad_zeros(out, (0, 0, 0, more))
        added: Tensor = self.mlp_out(gelu(self.mlp_up(self.mlp_norm.normalize(x), up)), out)
        return added

    def _column_scale(self, norm: "RMSNorm", x: Tensor) -> Tensor:
        """A norm's weight, which scales the columns of the matrix that follows, not the rows: the same product, and its
        gradient comes out of the matrix's instead of a sum over all rows."""
        if x.shape[-1] == self.width:
            return norm.weight
        return norm.weight * (self.width / x.shape[-1]) ** 0.5  # padded rows are normalized over the padded width


class Linear(nn.Module):
    """x·Wᵀ. Its weights are filled by `habitus.model.init`, for the whole model at once."""

    def __init__(self, fan_in: int, fan_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(fan_out, fan_in))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x·Wᵀ, where `weight` may be W scaled or padded."""
        return F.linear(x, self.weight if weight is None else weight)

    def forward_padded(self, x: Tensor) -> Tensor:
        """x·Wᵀ with odd sizes padded by zeros, where that is faster."""
        # For the matrices between joint_dim, which may be 28 or 52, and the width; in layers the rows come padded.
        fan_out, fan_in = self.weight.shape
        more_in, more_out = padded_width(fan_in, x.device) - fan_in, padded_width(fan_out, x.device) - fan_out
        if not (more_in or more_out):
            return self(x)
        return F.linear(pad_zeros(x, (0, more_in)), pad_zeros(self.weight, (0, more_in, 0, more_out)))[..., :fan_out]


class RMSNorm(nn.Module):
    """x / rms(x), times a learned weight; computed in float32, returned in the type of x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.rms_norm(x.float(), self.weight.shape, self.weight.float(), _EPS).to(x.dtype)

    def normalize(self, x: Tensor) -> Tensor:
        """x / rms(x) without the weight, in the type of x."""
        return unit_rms(x).to(x.dtype)


def unit_rms(x: Tensor) -> Tensor:
    """x / rms(x) over the last axis, in float32. A vector of zeros stays zero."""
    return torch.rms_norm(x.float(), x.shape[-1:], None, _EPS)


def pad_zeros(x: Tensor, pad: tuple[int, ...]) -> Tensor:
    """x with zeros around it, `pad` as in F.pad: (before, after) of the last axis, then of the one before it."""
    # F.pad and F.rms_norm are Python functions, and PyTorch's compiler splits the whole file of every function that it
    # traces into tokens: seven thousand lines, a tenth of a second of every start. What is called here is none.
    return torch.constant_pad_nd(x, pad)


def padded_width(width: int, device: torch.device) -> int:
    """How wide rows of `width` numbers should be for tensor cores, which load eight of them at a time.

    Only compiled, where zeros are written along with the rest: as a copy of its own they cost what they gain.
    """
    half = device.type == "cuda" and compute_dtype(device) != torch.float32
    return -(-width // 8) * 8 if half and torch.compiler.is_compiling() else width


def compute_dtype(device: torch.device) -> torch.dtype:
    """The dtype that activations flow in: autocast's where it is on, else float32."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type)
    return torch.float32
