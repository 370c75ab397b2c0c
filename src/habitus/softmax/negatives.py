"""Extra negatives: distinct catalogue items drawn uniformly, and the pool they form with a batch's targets.

    M  targets of the batch      K  negatives      U  slots for distinct targets

Nothing here waits for the host: shapes are fixed, what does not count is moved to the end, and a count on the device
says where the end begins. So a captured step can draw anew at every replay.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.randomness import Stream, permute_index, shuffle_keys

_MAX_ITEMS = 1 << 62  # beyond it the permutation's products leave int64
NUM_KEYS = 8


class CandidatePool(NamedTuple):
    """The items to score and where the targets are among them."""

    items: Tensor  # [U + K] item ids: distinct targets first, then negatives that are no target, then padding
    num_valid: Tensor  # how many of them count, 0-dim int64
    num_targets: Tensor  # how many of those are distinct targets: the in-batch pool is the first `num_targets` rows
    targets: Tensor  # [M] each target's position in `items`


def sample_negatives(num_items: int, k: int, generator: torch.Generator | Tensor) -> Tensor:
    """k distinct item ids below num_items, every set equally likely, as int64 on the generator's device.

    `generator` is a torch.Generator or the eight keys of `negative_keys`. Keys may be changed in place between
    replays of a captured step. The cost grows with k alone: the ids are the first k of a keyed permutation.
    """
    if not 0 <= k <= num_items or num_items >= _MAX_ITEMS:
        raise ModelError(
            f"{k} distinct negatives cannot be drawn from {num_items} items.",
            expected="at least as many items as negatives",
            next_step="Lower num_negatives, or score the full catalogue.",
        )
    keys = generator
    if isinstance(generator, torch.Generator):
        keys = torch.randint(1 << 32, (NUM_KEYS,), generator=generator, device=generator.device)
    assert isinstance(keys, Tensor)
    if keys.shape != (NUM_KEYS,) or keys.dtype != torch.int64:
        raise ModelError(
            f"The generator is a tensor of shape {tuple(keys.shape)} and type {keys.dtype}.",
            expected="eight int64 keys (habitus.softmax.negative_keys) or a torch.Generator",
        )
    return permute_index(torch.arange(k, device=keys.device), num_items, keys)


def negative_keys(seed: int, step: int, device: torch.device | str = "cpu") -> Tensor:
    """The eight keys of one step's draw: no history is needed to draw step t again."""
    return torch.from_numpy(shuffle_keys(seed, Stream.NEGATIVES, step)).to(device)


def candidate_pool(targets: Tensor, negatives: Tensor, *, capacity: int | None = None) -> CandidatePool:
    """The union of a batch's distinct targets and the negatives, and each target's position in it.

    The pool has `capacity` + K rows; by default one row per target, which always suffices. Negatives that are targets
    too are left out, never counted twice. A capacity so small that rows are lost makes `num_valid` exceed the number
    of rows, and `candidate_softmax` refuses that.
    """
    if targets.ndim != 1 or negatives.ndim != 1 or len(targets) == 0:
        raise ModelError(
            f"Targets of shape {tuple(targets.shape)}, negatives of shape {tuple(negatives.shape)}.",
            expected="[M] with at least one target, and [K]",
        )
    capacity = len(targets) if capacity is None else capacity
    negatives = negatives.to(torch.int64)
    ordered, origin = targets.to(torch.int64).sort()
    is_first = torch.ones_like(ordered, dtype=torch.bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    number = is_first.cumsum(0) - 1
    positions = torch.empty_like(number).scatter_(0, origin, number)
    num_targets = number[-1] + 1
    # Where a negative would stand among the sorted targets: if it is there already, it is one of them.
    place = torch.searchsorted(ordered, negatives).clamp_max(len(ordered) - 1)
    extra = ordered[place] != negatives
    num_valid = num_targets + extra.sum()
    size = capacity + len(negatives)
    items = negatives.new_zeros(size + 1)  # the last slot takes what does not count
    items.scatter_(0, number.clamp_max(size), ordered)
    slot = torch.where(extra, num_targets + extra.cumsum(0) - 1, size).clamp_max(size)
    items.scatter_(0, slot, negatives)
    return CandidatePool(items[:size], num_valid, num_targets, positions)


def targets_among(targets: Tensor, drawn: Tensor) -> Tensor:
    """Whether each target [M] is one of the drawn items [K], as bool [M]."""
    if len(drawn) == 0:
        return torch.zeros(targets.shape, dtype=torch.bool, device=targets.device)
    ordered = drawn.to(torch.int64).sort().values
    targets = targets.to(torch.int64)
    place = torch.searchsorted(ordered, targets).clamp_max(len(ordered) - 1)
    return ordered[place] == targets
