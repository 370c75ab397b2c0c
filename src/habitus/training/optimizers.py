"""AdamW and Muon over the parameters of a model, and the learning rate of every step: few launches, no host in between,
all state in tensors.

    optimizer = build_optimizer(model, recipe.train)
    rate = learning_rate_at(step, recipe.train)
    ...
    clip_gradients(model.parameters(), recipe.train.clip)
    optimizer.step(rate)          # a float, or a 0-dim tensor that a captured step has computed itself
    optimizer.zero_grad()

Gradients are expected to be reduced over all ranks already. Parameters may be DTensors (FSDP2): AdamW and the
momentum of Muon work on the local shards, and Muon's update is gathered before it is orthogonalized.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, overload

import torch
from torch import Tensor, nn

from habitus.errors import ModelError
from habitus.model import BehaviorModel, ParameterInfo
from habitus.recipe import TrainRecipe
from habitus.training.parallel import gather_shards, local_shard, norms_over_ranks, slice_shard

BETAS = (0.9, 0.95)
EPSILON = 1e-8
MOMENTUM = 0.95
# The RMS that AdamW's updates tend to have; with it one learning rate suits both.
MUON_RMS = 0.2
_NEWTON_SCHULZ_STEPS = 5
# An odd polynomial a·s + b·s³ + c·s⁵ that, applied five times, brings every singular value between about 0.003 and 1
# into 0.7…1.2 (Keller Jordan and others, "Muon", 2024): exact orthogonality buys nothing, speed at the start does.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_SMALLEST_NORM = 1e-12


def build_optimizer(model: BehaviorModel, recipe: TrainRecipe) -> "Optimizer":
    """The recipe's optimizer over everything that the model still trains."""
    return Optimizer(model.parameter_groups(), recipe)


class Optimizer:
    """AdamW for everything, or another rule for the layers' matrices and AdamW for the rest."""

    def __init__(self, infos: Sequence[ParameterInfo], recipe: TrainRecipe) -> None:
        rule = HIDDEN_RULES[recipe.optimizer]
        self.infos = tuple(infos)
        self.recipe = recipe
        device = self.infos[0].parameter.device
        self.count = torch.zeros((), device=device)  # steps taken, float32 as the fused kernel wants it
        self.states: dict[str, Tensor] = {}
        adam = [info for info in infos if not (rule and info.muon)]
        self._adam = [self._adam_group(group) for group in _group_alike(adam, recipe)]
        hidden = [info for info in infos if info.muon]
        self._hidden = [rule(self, group) for group in _group_alike(hidden, recipe)] if rule else []

    @torch.no_grad()
    def step(self, lr: float | Tensor) -> None:
        """Move every parameter that has a gradient. A tensor as rate must be 0-dim, float32 and on the device."""
        if isinstance(lr, Tensor) and lr.device.type == "cpu":
            lr = lr.item()
        self.count += 1
        for adam in self._adam:
            adam.step(lr, self.count)
        for hidden in self._hidden:
            hidden.step(lr)

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients; `set_to_none=False` writes zeros into the same memory, as a captured step needs."""
        for info in self.infos:
            if set_to_none:
                info.parameter.grad = None
            elif info.parameter.grad is not None:
                info.parameter.grad.zero_()

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything that a resumed run needs, by name; the live tensors, not copies."""
        return {"count": self.count, **self.states}

    @torch.no_grad()
    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `state_tensors` of the same model and recipe gave; in place, so that graphs stay valid."""
        own = self.state_tensors()
        if own.keys() != tensors.keys():
            differing = sorted(own.keys() ^ tensors.keys())
            raise ModelError(
                f"the optimizer's state differs in {len(differing)} tensors, {differing[0]!r} among them",
                expected=f"the state of {self.recipe.optimizer} for this model",
                next_step="resume with the recipe that the checkpoint was written with",
            )
        for name, tensor in own.items():
            if tensor.shape != tensors[name].shape:
                raise ModelError(
                    f"state {name!r} has shape {tuple(tensors[name].shape)}",
                    expected=f"{tuple(tensor.shape)}",
                    next_step="resume with the recipe that the checkpoint was written with",
                )
            tensor.copy_(tensors[name])

    def _adam_group(self, infos: list[ParameterInfo]) -> "_Adam":
        firsts = [self.make_state(f"first.{info.name}", info.parameter) for info in infos]
        seconds = [self.make_state(f"second.{info.name}", info.parameter) for info in infos]
        return _Adam(*self.group_settings(infos), firsts=firsts, seconds=seconds)

    def group_settings(self, infos: list[ParameterInfo]) -> tuple[list[nn.Parameter], float, float]:
        """The parameters of a group, their rate multiplier and their weight decay."""
        return [info.parameter for info in infos], infos[0].lr_multiplier, weight_decay_of(infos[0], self.recipe)

    def make_state(self, name: str, parameter: nn.Parameter) -> Tensor:
        """Zeros of a parameter's shape that checkpoints keep; a DTensor's are sharded as it is."""
        self.states[name] = torch.zeros_like(parameter, memory_format=torch.contiguous_format, requires_grad=False)
        return self.states[name]


@dataclass
class _Adam:
    """AdamW over parameters of one rate multiplier and one weight decay, as one fused operation."""

    parameters: list[nn.Parameter]
    lr_multiplier: float
    weight_decay: float
    firsts: list[Tensor]
    seconds: list[Tensor]

    def step(self, lr: float | Tensor, count: Tensor) -> None:
        moved = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not moved:
            return
        torch._fused_adamw_(
            [local_shard(self.parameters[i]) for i in moved],
            [_gradient(self.parameters[i]) for i in moved],
            [local_shard(self.firsts[i]) for i in moved],
            [local_shard(self.seconds[i]) for i in moved],
            [],
            [count] * len(moved),  # read only
            lr=lr if self.lr_multiplier == 1 else lr * self.lr_multiplier,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )


@dataclass
class _Muon:
    """Muon (momentum, orthogonalized) over matrices of one rate multiplier.

    Matrices of one shape, of all layers and of both orientations, are orthogonalized in one batch.
    """

    parameters: list[nn.Parameter]
    lr_multiplier: float
    weight_decay: float
    momenta: list[Tensor]
    stacked: list[int]

    def step(self, lr: float | Tensor) -> None:
        moved = [number for number, parameter in enumerate(self.parameters) if parameter.grad is not None]
        if not moved:
            return
        parameters = [self.parameters[i] for i in moved]
        gradients = [_gradient(parameter) for parameter in parameters]
        momenta = [local_shard(self.momenta[i]) for i in moved]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        updates = list(torch._foreach_lerp(gradients, momenta, MOMENTUM))  # Nesterov: a look ahead
        updates = [gather_shards(update, parameter) for update, parameter in zip(updates, parameters, strict=True)]
        # An orthogonal update twice as wide has √2 times the largest singular value where AdamW's, aligned as it is,
        # has twice: what MuP corrects by a factor there, it corrects by its root here.
        rate = lr * self.lr_multiplier**0.5
        updates = _orthogonalize_alike(updates, [self.stacked[i] for i in moved], rate)
        updates = [slice_shard(update, parameter) for update, parameter in zip(updates, parameters, strict=True)]
        own = [local_shard(parameter) for parameter in parameters]
        if self.weight_decay:
            torch._foreach_mul_(own, 1 - rate * self.weight_decay)
        torch._foreach_sub_(own, updates)


def _muon_group(optimizer: Optimizer, infos: list[ParameterInfo]) -> _Muon:
    momenta = [optimizer.make_state(f"momentum.{info.name}", info.parameter) for info in infos]
    return _Muon(*optimizer.group_settings(infos), momenta=momenta, stacked=[info.stacked for info in infos])


class HiddenRule(Protocol):
    """What moves a group of matrices of the transformer layers."""

    def step(self, lr: float | Tensor) -> None: ...


# By the names of `habitus.recipe.OPTIMIZERS`: what moves the layers' matrices, where it is not AdamW.
HIDDEN_RULES: dict[str, Callable[[Optimizer, list[ParameterInfo]], HiddenRule] | None] = {
    "adamw": None,
    "muon": _muon_group,
}


def _orthogonalize_alike(updates: list[Tensor], stacked: list[int], rate: float | Tensor) -> list[Tensor]:
    """Each update as orthogonal matrices whose entries have an RMS of rate·MUON_RMS; one batch per shape."""
    blocks = [update.unflatten(0, (parts, -1)) for update, parts in zip(updates, stacked, strict=True)]
    batches: dict[tuple[int, ...], list[int]] = {}
    for number, block in enumerate(blocks):
        batches.setdefault(tuple(sorted(block.shape[1:])), []).append(number)
    for (_, longer), numbers in batches.items():
        wide = [number for number in numbers if blocks[number].shape[1] <= blocks[number].shape[2]]
        tall = [number for number in numbers if blocks[number].shape[1] > blocks[number].shape[2]]
        # A few copies of everything, whatever the depth: tall matrices lie on their side for a while.
        joined = [torch.cat([blocks[n] for n in wide])] if wide else []
        joined += [torch.cat([blocks[n] for n in tall]).mT] if tall else []
        batch = orthogonalize(joined[0] if len(joined) == 1 else torch.cat(joined))
        batch *= rate * (MUON_RMS * longer**0.5)
        num_wide = sum(stacked[n] for n in wide)
        parts = list(batch[:num_wide].split([stacked[n] for n in wide])) if wide else []
        parts += list(batch[num_wide:].mT.contiguous().split([stacked[n] for n in tall])) if tall else []
        for number, block in zip(wide + tall, parts, strict=True):
            blocks[number] = block
    return [block.flatten(0, 1) for block in blocks]


def orthogonalize(matrices: Tensor) -> Tensor:
    """[n, r, c], r ≤ c, with the singular vectors it had and singular values near 1, in float32.

    Products run in bfloat16 on CUDA and in float32 elsewhere. A matrix of zeros stays zero.
    """
    a, b, c = _COEFFICIENTS
    norm = torch.linalg.matrix_norm(matrices.float(), keepdim=True)
    x = (matrices / norm.clamp(min=_SMALLEST_NORM)).to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()


@torch.no_grad()
def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """The norm of all gradients together, 0-dim on the device; gradients above `max_norm` are scaled down to it.

    Nothing waits for the host. A norm that is not finite leaves gradients that are not finite either.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [_gradient(parameter) for parameter in moved]
    if not gradients:
        return torch.zeros(())
    norms = torch.stack(torch._foreach_norm(gradients))
    norm = torch.linalg.vector_norm(norms_over_ranks(norms, moved))
    if norm.device.type == "cpu" and norm <= max_norm:
        return norm  # looking is free here
    torch._foreach_mul_(gradients, (max_norm / norm).clamp(max=1.0))
    return norm


def weight_decay_of(info: ParameterInfo, recipe: TrainRecipe) -> float:
    """The recipe's weight decay of a parameter's part; scales, positions and what stands for missing have none."""
    if info.vocabulary:
        return recipe.table_weight_decay
    if not info.weight_decay:
        return 0.0
    own = recipe.embedder_weight_decay if info.name.startswith("embedder.") else None
    return recipe.weight_decay if own is None else own


def _group_alike(infos: Iterable[ParameterInfo], recipe: TrainRecipe) -> list[list[ParameterInfo]]:
    """Parameters that one operation can move: of one rate multiplier and one weight decay."""
    groups: dict[tuple[float, float], list[ParameterInfo]] = {}
    for info in infos:
        groups.setdefault((info.lr_multiplier, weight_decay_of(info, recipe)), []).append(info)
    return list(groups.values())


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local_shard(parameter.grad)


# The learning rate of every step --------------------------------------------------------------------------------------


@overload
def learning_rate_at(step: int, recipe: TrainRecipe) -> float: ...
@overload
def learning_rate_at(step: Tensor, recipe: TrainRecipe) -> Tensor: ...
def learning_rate_at(step: int | Tensor, recipe: TrainRecipe) -> float | Tensor:
    """The rate of optimizer step `step`, counted from 0.

    The warm-up rises linearly and reaches the peak at its last step; the cosine falls from there towards zero, which
    the step after the last would have; wsd stays at the peak until its decay, which is linear. A tensor (a 0-dim
    counter) gives a float32 tensor on its device: a captured step computes its own rate and waits for nothing.
    """
    warmup = _warmup_steps(recipe)
    begin = recipe.stable_steps if recipe.schedule == "wsd" else warmup  # of the decay
    if isinstance(step, Tensor):
        now = step.double()
        share = _decay_tensor((now - begin) / max(1, recipe.steps - begin), recipe.schedule)
        return (recipe.learning_rate * torch.where(now < warmup, (now + 1) / max(1, warmup), share)).float()
    if step < warmup:
        return recipe.learning_rate * (step + 1) / warmup
    return recipe.learning_rate * _decay((step - begin) / max(1, recipe.steps - begin), recipe.schedule)


def _warmup_steps(recipe: TrainRecipe) -> int:
    """Steps that warm up: the recipe's, or its share, rounded; at least one where the share is not zero."""
    if recipe.warmup_steps is not None:
        return recipe.warmup_steps
    return max(1, round(recipe.warmup * recipe.steps)) if recipe.warmup else 0


def _decay(done: float, schedule: str) -> float:
    """What is left of the peak when a share `done` of the decay is over; none of it has begun below zero."""
    if schedule == "wsd":
        return 1.0 - min(1.0, max(0.0, done))
    return 1.0 if schedule == "constant" else 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def _decay_tensor(done: Tensor, schedule: str) -> Tensor:
    if schedule == "constant":
        return torch.ones_like(done)
    if schedule == "wsd":
        return 1 - done.clamp(0.0, 1.0)
    return 0.5 * (1 + torch.cos(math.pi * done.clamp(max=1.0)))
