"""Weights spread over processes (FSDP2), for models too large to repeat on each of them."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from habitus.model import BehaviorModel

# Trained parameters above which weights, gradients and moments (16 bytes each) are spread rather than repeated.
SHARD_ABOVE = 500_000_000


def must_shard(model: nn.Module, wanted: bool | None, world: int) -> bool:
    """Whether the weights are spread: as asked for, else above a size."""
    if world == 1:
        return False
    if wanted is not None:
        return wanted
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad) > SHARD_ABOVE


def shard(model: BehaviorModel) -> None:
    """Spread what is trained, layer by layer. Gradients come out summed over the processes, as the loss is.

    The gain, a single number, stays whole: there is nothing to spread.
    """
    from torch.distributed.fsdp import fully_shard

    # Queries leave the contextualizer as a view; nothing writes into them.
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)
    parts: list[nn.Module] = [*model.contextualizer.blocks, model.contextualizer]
    if any(parameter.requires_grad for parameter in model.embedder.parameters()):
        layers = [] if model.embedder.text is None else list(model.embedder.text.blocks)
        parts += [*layers, model.embedder]
    for part in parts:
        spread = fully_shard(part, ignored_params={model.contextualizer.gain})
        spread.set_gradient_divide_factor(1.0)
        spread.set_force_sum_reduction_for_comms(True)  # a scaled sum is more than gloo can do


def is_spread(tensor: Tensor) -> bool:
    return hasattr(tensor, "placements")  # a DTensor, whose module is dear to import


def whole(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without any spreading; all processes must ask together."""
    return {
        name: tensor.full_tensor() if is_spread(tensor) else tensor  # type: ignore[attr-defined]
        for name, tensor in tensors.items()
    }


def spread_like(tensors: Mapping[str, Tensor], models: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors spread as those of the same name are."""
    return {name: _spread(tensor, models.get(name, tensor)) for name, tensor in tensors.items()}


def _spread(tensor: Tensor, like: Tensor) -> Tensor:
    if not is_spread(like):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)  # type: ignore[attr-defined]


@torch.no_grad()
def plain_model(model: BehaviorModel) -> BehaviorModel:
    """The model itself, or a copy with whole weights where they are spread."""
    if not any(is_spread(parameter) for parameter in model.parameters()):
        return model
    device = next(model.parameters()).device
    copy = BehaviorModel(model.fields, model.recipe, seed=None).to(device)
    copy.load_state_dict(whole(model.state_dict()))
    return copy


@torch.no_grad()
def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Put whole weights into a model, spread or not; a RuntimeError names what does not fit."""
    model.load_state_dict(spread_like(weights, model.state_dict()))
