"""The learning rate of every step: a pure function of its number, on the host or on the device."""

import math
from typing import overload

import torch
from torch import Tensor

from habitus.recipe import TrainRecipe


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
