"""Shards of parameters (FSDP2's DTensors) as an optimizer needs them; plain tensors pass through untouched."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether this is a DTensor. Importing that class to ask takes half a second, which one process need not spend."""
    return type(tensor).__name__ == "DTensor"


def local(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's shard of it: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(shard: Tensor, parameter: Tensor) -> Tensor:
    """The whole of which a rank holds a shard, laid out as its parameter is. All ranks must ask."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    spread = DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return spread.full_tensor()


def own_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a whole tensor, without asking anybody."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


def norms_over_ranks(norms: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Norms of whole gradients out of the norms of this rank's shards; all that are sharded share one mesh axis."""
    spread = [parameter for parameter in parameters if is_sharded(parameter)]
    if not spread:
        return norms
    sharded = torch.tensor([is_sharded(parameter) for parameter in parameters], device=norms.device)
    squares = torch.where(sharded, norms.square(), 0)
    dist.all_reduce(squares, group=spread[0].device_mesh.get_group())
    return torch.where(sharded, squares.sqrt(), norms)
