"""Batches and item features as tensors on a device.

Letters: B windows, L slots, S segments per window at most, n items, T text tokens at most.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from habitus.data import Batch, ItemFeatures
from habitus.errors import ModelError
from habitus.model.dropout import DropoutMask, ItemDropout, drop_features
from habitus.model.packing import PackedText, TextCapacity, pack_text
from habitus.recipe import ModelRecipe


@dataclass(frozen=True)
class BatchTensors:
    """A batch as the contextualizer takes it, and its item ids."""

    items: Tensor  # int64 [B, L]
    targets: Tensor  # int64 [B, L]; -1: no query
    positions: Tensor  # int32 [B, L]
    segments: Tensor  # int32 [B, L]; -1 in empty slots
    boundaries: Tensor  # int32 [B·(S+1)+1]
    fields: dict[str, Tensor]  # [B, L]; of texts [B, L, T], of vectors [B, L, size]
    dropout_mask: DropoutMask | None = None  # in training only
    text_capacity: TextCapacity | None = None  # in captured steps only


@dataclass(frozen=True)
class ItemTensors:
    """n items as the embedder takes them."""

    text: PackedText | None
    fields: dict[str, Tensor]


def batch_tensors(batch: Batch, device: torch.device | str = "cpu") -> BatchTensors:
    """The batch on a device. Copies do not wait for each other on CUDA."""
    return BatchTensors(
        items=_tensor(batch.items, device),
        targets=_tensor(batch.targets, device),
        positions=_tensor(batch.positions, device),
        segments=_tensor(batch.segments, device),
        boundaries=_tensor(batch.boundaries, device),
        fields={name: _tensor(values, device) for name, values in batch.fields.items()},
    )


def item_tensors(
    features: ItemFeatures,
    model: ModelRecipe,
    device: torch.device | str = "cpu",
    *,
    token_capacity: int | None = None,
    dropout: ItemDropout | None = None,
) -> ItemTensors:
    """The items on a device, their text packed; less what `dropout` takes away.

    Text beyond the first `model.text_len` tokens is left out: a recipe may read less than was stored.
    `token_capacity` fixes the packed length on CUDA, for graph capture; it must hold all tokens.
    """
    fields = {name: _tensor(values, device) for name, values in features.fields.items()}
    tokens, capacity = None, None
    if features.tokens is not None:
        read = features.tokens[:, : model.text_len]
        needed = int(np.count_nonzero(read))
        if token_capacity is not None and needed > token_capacity:
            raise ModelError(
                f"{needed} tokens do not fit a capacity of {token_capacity}",
                expected="room for every token: text is never cut to fit a bucket",
                next_step="take the next larger bucket",
            )
        on_device = torch.device(device).type != "cpu"
        capacity = (token_capacity or needed) if on_device else None
        tokens = _tensor(read, device)
    if dropout is not None:
        tokens, fields = drop_features(tokens, fields, dropout)
    return ItemTensors(None if tokens is None else pack_text(tokens, capacity), fields)


def _tensor(values: np.ndarray, device: torch.device | str) -> Tensor:
    # Arrays may be read-only maps of a file; torch wants memory of its own.
    return torch.from_numpy(np.array(values)).to(device, non_blocking=True)
