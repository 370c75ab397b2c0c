"""Text without its padding: the tokens of many items one after another, and their mean per item.

Letters: n items, T tokens per item at most, P packed tokens, h joint_dim.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from habitus.data import PADDING_TOKEN
from habitus.model.attention import LengthGroups, PackedRows


class PackedText(NamedTuple):
    """The tokens of n items in P rows. Rows beyond the last token are empty and belong to item n."""

    tokens: Tensor  # int64 [P]; 0 in empty rows
    places: Tensor  # int64 [P]: place of the token in its text
    items: Tensor  # int64 [P]: the item a row belongs to, n in empty rows
    starts: Tensor  # int64 [n]: the item's first row
    lengths: Tensor  # int64 [n]; 0 where an item has no text
    layout: PackedRows | LengthGroups


class TextCapacity(NamedTuple):
    """Room for the distinct texts of a batch, the empty one included, and for their tokens: the fixed shapes of a
    captured step."""

    texts: int
    tokens: int


def pack_text(tokens: Tensor, capacity: int | None = None) -> PackedText:
    """The packed form of tokens [n, T], padding (0) at the end of each text.

    On CUDA `capacity` fixes P so that a captured graph can be replayed with other texts; nothing then waits
    for the host, and the caller sees to it that the tokens fit. Without it P is the exact count. On CPU texts
    are sorted by length, so that those of one length form a dense block.
    """
    mask = tokens != PADDING_TOKEN
    lengths = mask.sum(1)
    if tokens.device.type == "cpu":
        return _pack_by_length(tokens, lengths)
    return _pack_in_order(tokens, mask, lengths, capacity)


def _pack_in_order(tokens: Tensor, mask: Tensor, lengths: Tensor, capacity: int | None) -> PackedText:
    n, T = tokens.shape
    ends = lengths.cumsum(0)
    starts = ends - lengths
    P = int(lengths.sum()) if capacity is None else capacity
    device = tokens.device
    place = torch.arange(T, device=device)
    # Padding is written to one row beyond the end, which is cut off again.
    rows = torch.where(mask, starts[:, None] + place, P).clamp(max=P).flatten()

    def packed(values: Tensor, empty: int) -> Tensor:
        return torch.full((P + 1,), empty, device=device).scatter(0, rows, values.flatten())[:P]

    row = torch.arange(P, device=device)
    items = packed(torch.arange(n, device=device)[:, None].expand(n, T), n)
    # An empty row is a text of its own: it attends to itself and to nothing else.
    begin = torch.where(items < n, starts[items.clamp(max=n - 1)], row).int()
    end = torch.where(items < n, ends[items.clamp(max=n - 1)], row + 1).int()
    return PackedText(
        tokens=packed(tokens.long(), PADDING_TOKEN),
        places=packed(place.expand(n, T), 0),
        items=items,
        starts=starts,
        lengths=lengths,
        layout=PackedRows.bidirectional(begin, end),
    )


def _pack_by_length(tokens: Tensor, lengths: Tensor) -> PackedText:
    n, T = tokens.shape
    sorted_lengths, order = lengths.sort(stable=True)
    ends = sorted_lengths.cumsum(0)
    starts = torch.empty_like(lengths).scatter(0, order, ends - sorted_lengths)
    place = torch.arange(T)
    present = place < sorted_lengths[:, None]
    counts = torch.bincount(sorted_lengths, minlength=T + 1).tolist()
    return PackedText(
        tokens=tokens[order][present].long(),
        places=place.expand(n, T)[present],
        items=order[:, None].expand(n, T)[present],
        starts=starts,
        lengths=lengths,
        layout=LengthGroups(tuple((count, t) for t, count in enumerate(counts) if count and t)),
    )


def packed_mean(x: Tensor, text: PackedText, text_len: int) -> Tensor:
    """The mean [n, h], in float32, of each item's rows of x [P, h]; zero where an item has none."""
    mean: Tensor = _PackedMean.apply(x, text.items, text.starts, text.lengths, text_len)
    return mean


class _PackedMean(torch.autograd.Function):
    """Gathers in both directions: no atomic additions, so the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, items: Tensor, starts: Tensor, lengths: Tensor, text_len: int) -> Tensor:
        place = torch.arange(text_len, device=x.device)
        present = place < lengths[:, None]
        if x.shape[0] == 0:
            total = x.new_zeros(lengths.shape[0], x.shape[1], dtype=torch.float32)
        else:
            rows = (starts[:, None] + place).clamp(max=x.shape[0] - 1)
            total = (x[rows].float() * present[:, :, None]).sum(1)
        ctx.save_for_backward(items, lengths)
        ctx.dtype = x.dtype
        return total / lengths.clamp(min=1)[:, None]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        items, lengths = ctx.saved_tensors
        scaled = (grads[0] / lengths.clamp(min=1)[:, None]).to(ctx.dtype)
        zero = scaled.new_zeros(1, scaled.shape[1])
        return torch.cat((scaled, zero))[items], None, None, None, None
