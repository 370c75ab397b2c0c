"""What several processes do together: divide items, exchange rows, add gradients up, share weights (FSDP2).

Item i belongs to process i mod W: that one holds its encoded fields or its frozen vector as row i // W, embeds it when
it is in a batch, and scores it as a candidate. So what a process holds falls with their number, and nobody asks another
for an item. Windows go to the processes in blocks. All know the full batch, so all agree without a message.

A process's items of a batch stand in the batch's order, targets first. Two tables hold those of all processes, one
process after the other: the vectors for the events (`stride` rows each) and the candidates.

A sharded tensor is a DTensor; what is not sharded passes through all functions untouched.

Letters: W processes, n distinct items of the full batch.
"""

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from habitus.errors import ModelError
from habitus.evaluation import Ranks
from habitus.model import BehaviorModel
from habitus.sizing import SHARD_ABOVE

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_SIGMAS = 10  # by which a draw of negatives may exceed a process's mean share of it
_MESSAGE_ENTRIES = 1 << 23  # from which on gradients go into the next message: 32 MB


# Items ----------------------------------------------------------------------------------------------------------------


def owned_items(num_items: int, ranks: Ranks) -> slice:
    """The catalogue rows that belong to this process."""
    return slice(ranks.rank, num_items, ranks.world)


class ItemShares(NamedTuple):
    """The distinct items of a batch, divided."""

    own: np.ndarray  # int64: this process's, its targets first; never empty
    num_own_targets: int
    stride: int
    least: int  # items of the process that has the fewest, one at least
    table_places: np.ndarray  # int64 [n]: of each item in the table of all vectors
    pool_places: np.ndarray  # int64 [n]: of each target among the candidates
    table_shifts: np.ndarray  # int64 [W]: what to add to a target's place in the pool for its place in the table
    pool_firsts: np.ndarray  # int64 [W]: where each process's candidates begin

    @classmethod
    def of(cls, items: np.ndarray, num_targets: int, ranks: Ranks) -> "ItemShares":
        """The shares of items of which the first `num_targets` are targets."""
        owner = items % ranks.world
        counts = np.bincount(owner, minlength=ranks.world)
        order = np.argsort(owner, kind="stable")
        local = np.empty_like(items)
        local[order] = np.arange(len(items)) - np.repeat(np.cumsum(counts) - counts, counts)
        stride = max(1, int(counts.max()))
        num_own_targets = np.bincount(owner[:num_targets], minlength=ranks.world)
        firsts = pool_firsts(num_own_targets)
        own = items[owner == ranks.rank]
        return cls(
            own=own if len(own) else np.array([ranks.rank], np.int64),
            num_own_targets=int(num_own_targets[ranks.rank]),
            stride=stride,
            least=max(1, int(counts.min())),
            table_places=owner * stride + local,
            pool_places=firsts[owner] + local,
            table_shifts=np.arange(ranks.world) * stride - firsts,
            pool_firsts=firsts,
        )


def pool_firsts(counts: np.ndarray) -> np.ndarray:
    """Where each process's candidates begin; one that has none holds a row that does not count."""
    held = np.maximum(counts, 1)
    firsts: np.ndarray = np.cumsum(held) - held
    return firsts


def places_among(local: Tensor, items: Tensor, rows_each: int, ranks: Ranks) -> Tensor:
    """Places in a table to which every process contributes `rows_each` rows, from places among the owner's items."""
    if ranks.world == 1:
        return local
    return local + (items.view_as(local) % ranks.world * rows_each).to(local.dtype)


def catalogue_places(rows: Tensor, num_items: int, ranks: Ranks) -> Tensor:
    """Places of catalogue rows where each process contributes all items that it holds."""
    each, more = divmod(num_items, ranks.world)  # the first `more` processes hold one more than the others
    owner = rows % ranks.world
    return rows // ranks.world + owner * each + owner.clamp(max=more)


def owned_counts(num_items: int, candidates: np.ndarray | None, ranks: Ranks) -> np.ndarray:
    """How many of the catalogue's items, or of those that are candidates, belong to each process."""
    if candidates is not None:
        return np.bincount(candidates % ranks.world, minlength=ranks.world)
    return np.array([len(range(rank, num_items, ranks.world)) for rank in range(ranks.world)])


def drawn_capacity(num_drawn: int, owned: np.ndarray) -> int:
    """Rows for a process's share of a draw from candidates of which each process owns so many: more than any draw
    will ever need of the one that owns the most. Rows may be anything but evenly spread: where items are pairs of an
    item and a kind of event, every second one may be a candidate."""
    most = int(owned.max())
    mean = num_drawn * most / int(owned.sum())
    rows = -(-int(mean + _SIGMAS * mean**0.5 + 1) // 64) * 64
    return min(num_drawn, most, rows)


def own_drawn(drawn: Tensor, capacity: int, ranks: Ranks) -> tuple[Tensor, Tensor]:
    """This process's items among those drawn [capacity], its own first item beyond them; and how many there are."""
    is_own = drawn % ranks.world == ranks.rank
    place = torch.where(is_own, is_own.cumsum(0) - 1, capacity).clamp(max=capacity)
    own = torch.full((capacity + 1,), ranks.rank, dtype=drawn.dtype, device=drawn.device)
    return own.scatter_(0, place, drawn)[:capacity], is_own.sum()


# Losses, rows and gradients -------------------------------------------------------------------------------------------


def process_group(ranks: Ranks) -> dist.ProcessGroup | None:
    """The group of all processes; None where none was set up."""
    return dist.group.WORLD if ranks.in_group else None


def can_be_captured(ranks: Ranks) -> bool:
    """Whether a CUDA graph can hold what the processes exchange: NCCL's kernels yes, gloo's messages no."""
    return not ranks.in_group or "cuda:nccl" in str(dist.get_backend_config())


def sum_over_ranks(values: Tensor, ranks: Ranks) -> Tensor:
    """The values summed over the processes, in place."""
    if ranks.in_group:
        dist.all_reduce(values)
    return values


def gather_rows(rows: Tensor, stride: int, ranks: Ranks) -> Tensor:
    """The rows of all processes [world · stride, h] in rank order, each process's padded with zeros to the stride.

    Their gradient is summed over the processes and goes back to the one that made the row.
    """
    if not ranks.in_group:
        return rows
    table: Tensor = _GatherRows.apply(rows, stride, ranks.world)
    return table


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, stride: int, world: int) -> Tensor:
        ctx.count, ctx.stride = len(rows), stride
        if len(rows) < stride:
            rows = torch.cat((rows, rows.new_zeros(stride - len(rows), rows.shape[1])))
        table = rows.new_empty(world * stride, rows.shape[1])
        dist.all_gather(list(table.chunk(world)), rows.contiguous())
        return table

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = grads[0].contiguous()
        if total.is_cuda and dist.get_backend() != "gloo":
            own = torch.empty_like(total[: ctx.stride])
            dist.reduce_scatter_tensor(own, total)
            return own[: ctx.count], None, None
        dist.all_reduce(total)
        first = dist.get_rank() * ctx.stride
        return total[first : first + ctx.count], None, None


class GradientExchange:
    """Sums gradients over the processes, in messages that leave as soon as the backward pass has filled them.

    Messages leave in one order, and between the same exchanges of rows, on every process: all parameters take part in
    every backward pass, with zeros where a process has no text, say. Where a step has several backward passes
    (`overlapped` is False) messages leave after the last.
    """

    def __init__(self, parameters: list[nn.Parameter], *, overlapped: bool) -> None:
        self._messages: list[list[nn.Parameter]] = []
        self._message_of: dict[nn.Parameter, int] = {}
        size = _MESSAGE_ENTRIES
        for parameter in reversed(parameters):  # as backward reaches them, more or less
            if size >= _MESSAGE_ENTRIES:
                self._messages.append([])
                size = 0
            self._messages[-1].append(parameter)
            self._message_of[parameter] = len(self._messages) - 1
            size += parameter.numel()
            if overlapped:
                parameter.register_post_accumulate_grad_hook(self._note_arrival)
        self._sent: list[tuple[list[Tensor], Tensor, dist.Work]] = []
        self._missing = [len(message) for message in self._messages]

    @torch.no_grad()
    def finish(self) -> None:
        """Make every gradient the sum over the processes."""
        while len(self._sent) < len(self._messages):
            self._send()
        for gradients, flat, work in self._sent:
            work.wait()
            parts = flat.split([gradient.numel() for gradient in gradients])
            torch._foreach_copy_(gradients, [p.view_as(g) for p, g in zip(parts, gradients, strict=True)])
        self._sent = []
        self._missing = [len(message) for message in self._messages]

    def _note_arrival(self, parameter: Tensor) -> None:
        self._missing[self._message_of[cast(nn.Parameter, parameter)]] -= 1
        while len(self._sent) < len(self._messages) and not self._missing[len(self._sent)]:
            self._send()

    @torch.no_grad()
    def _send(self) -> None:
        gradients = []
        for parameter in self._messages[len(self._sent)]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        work = dist.all_reduce(flat, async_op=True)
        assert work is not None
        self._sent.append((gradients, flat, work))


# Sharded models -------------------------------------------------------------------------------------------------------


def must_shard(model: nn.Module, choice: bool | None, ranks: Ranks) -> bool:
    """Whether the weights are sharded: as the user chose, else above a size."""
    if not ranks.in_group:
        return False
    if choice is not None:
        return choice
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ranks.world > 1 and trained > SHARD_ABOVE


def shard(model: BehaviorModel) -> None:
    """Shard what is trained, layer by layer. Gradients come out summed over the processes, as the loss is.

    The gain, a single number, is replicated.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    if model.shared_text is not None and len(model.contextualizer.events.texts):
        raise ModelError(
            "model.event_text is 'shared': the contextualizer would read weights that the embedder keeps in pieces",
            next_step="set model.event_text = 'own', or leave the model unsharded",
        )
    # Where the weights are: by default a mesh is of the machine's GPUs, even for a model on CPUs.
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    # Queries leave the contextualizer as a view; nothing writes into them.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    parts: list[nn.Module] = [*model.contextualizer.blocks, model.contextualizer]
    if any(parameter.requires_grad for parameter in model.embedder.parameters()):
        layers = [] if model.embedder.text is None else list(model.embedder.text.blocks)
        parts += [*layers, model.embedder]
    for part in parts:
        sharded = fully_shard(part, mesh=mesh, ignored_params={model.contextualizer.gain})
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


# Sharded tensors ------------------------------------------------------------------------------------------------------


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
