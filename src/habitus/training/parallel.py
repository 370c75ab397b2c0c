"""Everything that several processes do together: exchange rows, add gradients up, share weights (FSDP2).

A sharded tensor is a DTensor; what is not sharded passes through all of these functions untouched.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from habitus.evaluation import Ranks
from habitus.model import BehaviorModel

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# Trained parameters above which weights, gradients and moments (16 bytes each) are sharded rather than replicated.
SHARD_ABOVE = 500_000_000


# Losses, rows and gradients -----------------------------------------------------------------------------------------


def process_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """The group of all processes; None where there is one only."""
    return dist.group.WORLD if ranks.world > 1 else None


def sum_over_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """The values summed over the processes, in place."""
    if ranks.world > 1:
        dist.all_reduce(values)
    return values


def gather_rows(rows: Tensor, stride: int, world: int) -> Tensor:
    """The rows of all processes [world · stride, h] in rank order, each process's padded with zeros to the stride.

    Their gradient is summed over the processes and goes back to the one that made the row.
    """
    if world == 1:
        return rows
    table: Tensor = _GatherRows.apply(rows, stride, world)
    return table


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, stride: int, world: int) -> Tensor:
        ctx.count, ctx.stride = len(rows), stride
        padded = rows.new_zeros(stride, rows.shape[1])
        padded[: len(rows)] = rows
        table = rows.new_empty(world * stride, rows.shape[1])
        dist.all_gather(list(table.chunk(world)), padded)
        return table

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous()
        dist.all_reduce(total)
        first = dist.get_rank() * ctx.stride
        return total[first : first + ctx.count], None, None


@torch.no_grad()
def reduce_gradients(parameters: list[nn.Parameter]) -> None:
    """Make every gradient the sum over the processes; one message for all of them."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    offset = 0
    for gradient in gradients:
        gradient.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


# Sharded models -----------------------------------------------------------------------------------------------------


def must_shard(model: nn.Module, choice: bool | None, world: int) -> bool:
    """Whether the weights are sharded: as the user chose, else above a size."""
    if world == 1:
        return False
    if choice is not None:
        return choice
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) > SHARD_ABOVE


def shard(model: BehaviorModel) -> None:
    """Shard what is trained, layer by layer. Gradients come out summed over the processes, as the loss is.

    The gain, a single number, is replicated.
    """
    from torch.distributed.fsdp import fully_shard

    # Queries leave the contextualizer as a view; nothing writes into them.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    parts: list[nn.Module] = [*model.contextualizer.blocks, model.contextualizer]
    if any(parameter.requires_grad for parameter in model.embedder.parameters()):
        layers = [] if model.embedder.text is None else list(model.embedder.text.blocks)
        parts += [*layers, model.embedder]
    for part in parts:
        sharded = fully_shard(part, ignored_params={model.contextualizer.gain})
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # a scaled sum is more than gloo can do


@torch.no_grad()
def full_model(model: BehaviorModel) -> BehaviorModel:
    """The model itself, or a copy with full weights where they are sharded."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return model
    device = next(model.parameters()).device
    copy = BehaviorModel(model.fields, model.recipe, seed=None).to(device)
    copy.load_state_dict(full_tensors(model.state_dict()))
    return copy


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put full weights into a model, sharded or not; a RuntimeError names what does not fit."""
    model.load_state_dict(shard_like(weights, model.state_dict()))


# Sharded tensors ----------------------------------------------------------------------------------------------------


def is_sharded(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Whether this is a DTensor. Importing that class to ask takes half a second, which one process need not spend."""
    return type(tensor).__name__ == "DTensor"


def full_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors unsharded; all processes must call this together."""
    return {name: tensor.full_tensor() if is_sharded(tensor) else tensor for name, tensor in tensors.items()}


def shard_like(tensors: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Full tensors sharded as the references of the same name are."""
    return {name: _shard_like(tensor, references.get(name, tensor)) for name, tensor in tensors.items()}


def _shard_like(tensor: Tensor, reference: Tensor) -> Tensor:
    if not is_sharded(reference):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(reference.device), reference.device_mesh, reference.placements)


def local_shard(tensor: Tensor) -> Tensor:
    """The tensor, or this rank's shard of it: the same memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor


def gather_shards(shard: Tensor, parameter: Tensor) -> Tensor:
    """The full tensor of which this rank holds a shard, laid out as its parameter is; all ranks must call this."""
    if not is_sharded(parameter):
        return shard
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = DTensor.from_local(shard, mesh, placements, shape=parameter.shape, stride=parameter.stride())
    return sharded.full_tensor()


def slice_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """This rank's shard of a full tensor, without any communication."""
    if not is_sharded(parameter):
        return tensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tensor[tuple(slice(begin, begin + size) for begin, size in zip(offset, shape, strict=True))]


def norms_over_ranks(norms: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Norms of full gradients out of the norms of this rank's shards; all that are sharded share one mesh axis."""
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not sharded:
        return norms
    mask = torch.tensor([is_sharded(parameter) for parameter in parameters], device=norms.device)
    squares = torch.where(mask, norms.square(), 0)
    dist.all_reduce(squares, group=sharded[0].device_mesh.get_group())
    return torch.where(mask, squares.sqrt(), norms)
