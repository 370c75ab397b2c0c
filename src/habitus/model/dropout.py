"""Dropout whose masks are a function of (seed, step, place in the batch or item) and of nothing else.

A resumed run, several processes, micro-batches and a captured step all draw the same masks: every row of a batch, and
every item, has a few random words of the step's own, and whether an entry is dropped is a hash of one of them and its
column.

Letters: R rows of this process, w width, n items, T text tokens at most, F fields.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from habitus.data import PADDING_TOKEN, UNKNOWN_CODE
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
    return torch.where(_column_hashes(word, x.shape[-1]) >= _threshold(rate), x / (1 - rate), 0)


class ItemDropout(NamedTuple):
    """What the embedder drops of n items: random words of each, int64 [n] holding 32 bits, and shares."""

    token_words: Tensor
    field_words: Tensor
    event_words: Tensor
    candidate_words: Tensor
    token_rate: float
    field_rate: float
    vector_rate: float


def draw_item_dropout(
    seed: int, step: int | Tensor, rows: Tensor, token_rate: float, field_rate: float, vector_rate: float
) -> ItemDropout:
    """The dropout of these catalogue rows [n] in a step; `step` may be a 0-dim tensor."""
    words = random_words(seed, Stream.ITEM_DROPOUT, step, rows.long())
    return ItemDropout(*words, token_rate, field_rate, vector_rate)


def drop_features(
    tokens: Tensor | None, fields: dict[str, Tensor], dropout: ItemDropout
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Encoded items with fields made missing and tokens taken out: what the embedder then reads is less, not noise."""
    if dropout.field_rate:
        tokens, fields = _drop_fields(tokens, fields, dropout.field_words, dropout.field_rate)
    if dropout.token_rate and tokens is not None:
        tokens = _drop_tokens(tokens, dropout.token_words, dropout.token_rate)
    return tokens, fields


def drop_entries(vectors: Tensor, dropout: ItemDropout | None) -> tuple[Tensor, Tensor]:
    """Item vectors [n, h] as events and as candidates.

    Each has a mask of its own: with one for both, an item would be known again by what it has lost.
    """
    if dropout is None or not dropout.vector_rate:
        return vectors, vectors
    rate = dropout.vector_rate
    return apply_dropout(vectors, dropout.event_words, rate), apply_dropout(vectors, dropout.candidate_words, rate)


def _drop_fields(
    tokens: Tensor | None, fields: dict[str, Tensor], words: Tensor, rate: float
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Each field of an item missing with probability `rate`, except one of those that it has: the largest hash."""
    present = [] if tokens is None else [(tokens != PADDING_TOKEN).any(1)]
    present += [_is_present(values) for values in fields.values()]
    hashes = torch.where(torch.stack(present, 1), _column_hashes(words, len(present)), -1)  # [n, F]
    keep = (hashes >= _threshold(rate)) | (hashes == hashes.amax(1, keepdim=True))
    kept = list(keep.unbind(1))
    if tokens is not None:
        tokens = torch.where(kept.pop(0)[:, None], tokens, PADDING_TOKEN)
    return tokens, {
        name: torch.where(
            keep.view(-1, *[1] * (values.dim() - 1)), values, torch.nan if values.is_floating_point() else UNKNOWN_CODE
        )
        for (name, values), keep in zip(fields.items(), kept, strict=True)
    }


def _is_present(values: Tensor) -> Tensor:
    if values.is_floating_point():
        return ~values.isnan().flatten(1).any(1) if values.dim() > 1 else ~values.isnan()
    return (values != UNKNOWN_CODE).flatten(1).any(1) if values.dim() > 1 else values != UNKNOWN_CODE


def _drop_tokens(tokens: Tensor, words: Tensor, rate: float) -> Tensor:
    """[n, T] with each token taken out with probability `rate` and the rest moved up; one text never loses all."""
    T = tokens.shape[1]
    is_token = tokens != PADDING_TOKEN
    keep = is_token & (_column_hashes(words, T) >= _threshold(rate))
    keep = torch.where(keep.any(1, keepdim=True), keep, is_token)
    order = (~keep).to(torch.int8).sort(dim=1, stable=True).indices
    place = torch.arange(T, device=tokens.device)
    return torch.where(place < keep.sum(1, keepdim=True), tokens.gather(1, order), PADDING_TOKEN)


def _column_hashes(words: Tensor, columns: int) -> Tensor:
    """32 bits for each row and column, int64 [R, columns]."""
    return mix_bits(words[:, None] ^ torch.arange(columns, device=words.device), _GOLDEN)


def _threshold(rate: float) -> int:
    """The hash below which an entry is dropped."""
    return int(rate * (MASK + 1))
