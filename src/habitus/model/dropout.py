"""Dropout whose masks are a function of (seed, step, place in the batch) and of nothing else.

A resumed run, several processes, micro-batches and a captured step all draw the same masks: every row of a batch has
three random words of the step's own, and whether an entry is dropped is a hash of one of them and its column.

Letters: R rows of this process, w width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from habitus.randomness import MASK, Stream, mix_bits, random_words

_GOLDEN = 0x9E3779B9


class DropoutMask(NamedTuple):
    """A mask in compact form: random words of each row, int64 [R] holding 32 bits, and the share of entries to drop."""

    inputs: Tensor
    attention: Tensor
    mlp: Tensor
    rate: float

    def for_layer(self, number: int) -> "DropoutMask":
        """The mask of one layer: words of its own, so that all layers may run the same code."""
        salt = (number + 1) * _GOLDEN & MASK
        return self._replace(attention=mix_bits(self.attention, salt), mlp=mix_bits(self.mlp, salt))


def draw_dropout_mask(
    seed: int, step: int | Tensor, first: int, rows: int, rate: float, device: torch.device
) -> DropoutMask:
    """The mask of rows first..first + rows - 1 of a step's full batch; `step` may be a 0-dim tensor."""
    index = torch.arange(first, first + rows, device=device)
    inputs, attention, mlp, _ = random_words(seed, Stream.DROPOUT, step, index)
    return DropoutMask(inputs, attention, mlp, rate)


def apply_dropout(x: Tensor, word: Tensor, rate: float) -> Tensor:
    """x [R, w] with each entry zeroed with probability `rate` and the others scaled so that the mean stays."""
    keep = mix_bits(word[:, None] ^ torch.arange(x.shape[-1], device=x.device), _GOLDEN) >= int(rate * (MASK + 1))
    return torch.where(keep, x / (1 - rate), 0)
