"""Texts of events: their tokens in, what they add to the contextualizer's input at their slots out.

Letters: B windows, L slots, R = B·L slots in all, T text tokens at most, n distinct texts, h joint_dim, w width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from habitus.data import PADDING_TOKEN, Field
from habitus.errors import ModelError
from habitus.model.embedder import TextEncoder
from habitus.model.layers import Linear, RMSNorm
from habitus.model.packing import TextCapacity, pack_text
from habitus.recipe import ModelRecipe


class EventText(nn.Module):
    """One text field. Its own encoder is the mean of its tokens' vectors; a shared one is the items' text encoder,
    whose output is projected. A slot without text has a learned vector."""

    def __init__(self, field: Field, model: ModelRecipe) -> None:
        super().__init__()
        h, w = model.joint_dim, model.width
        self.name = field.name
        self.text_len = model.text_len
        self.num_tokens = field.size
        is_shared = model.event_text == "shared"
        self.tokens = None if is_shared else nn.Parameter(torch.empty(field.size, w))
        self.norm = None if is_shared else RMSNorm(w)
        self.project = Linear(h, w) if is_shared else None
        self.missing = nn.Parameter(torch.empty(w))

    def forward(self, tokens: Tensor, encoder: TextEncoder | None, capacity: TextCapacity | None) -> Tensor:
        """[B, L, w] from tokens [B, L, T]; a text of several slots is encoded once. `encoder` is that of the items."""
        tokens = tokens[..., : self.text_len].long()
        self._check(tokens)
        texts, places = distinct_texts(tokens.flatten(0, 1), None if capacity is None else capacity.texts)
        lengths = (texts != PADDING_TOKEN).sum(1, keepdim=True)
        if self.project is None:
            vectors = self.mean(texts)
        else:
            assert encoder is not None, "a shared encoder is that of the items"
            packed = pack_text(texts, None if capacity is None else capacity.tokens)
            vectors = self.project(encoder.pool(encoder(packed), packed))
        vectors = torch.where(lengths > 0, vectors.float(), self.missing)
        return F.embedding(places.view(tokens.shape[:2]), vectors)

    def mean(self, texts: Tensor) -> Tensor:
        """The mean of the tokens' vectors [n, w], of unit RMS times a learned weight."""
        assert self.tokens is not None and self.norm is not None
        present = (texts != PADDING_TOKEN)[..., None]
        mean: Tensor = self.norm((F.embedding(texts, self.tokens) * present).sum(1) / present.sum(1).clamp(min=1))
        return mean

    def _check(self, tokens: Tensor) -> None:
        """Refuse unknown tokens where the check is free."""
        if tokens.device.type != "cpu" or torch.compiler.is_compiling() or not tokens.numel():
            return
        if int(tokens.max()) >= self.num_tokens:
            raise ModelError(
                f"event field {self.name!r}: token {int(tokens.max())} is not in the vocabulary",
                expected=f"tokens from 0 to {self.num_tokens - 1}",
                next_step="encode the text with the tokenizer that the model was trained with",
            )


def distinct_texts(flat: Tensor, capacity: int | None) -> tuple[Tensor, Tensor]:
    """(distinct rows of tokens [R, T], where each row stands among them [R]); `capacity` fixes how many there are."""
    keys = _keys(flat)
    ordered, origin = keys.sort(stable=True)
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    place = fresh.cumsum(0) - 1
    places = torch.empty_like(place).scatter(0, origin, place)
    if capacity is None:
        return flat[origin[fresh]], places
    first = torch.zeros(capacity + 1, dtype=torch.int64, device=flat.device)
    first = first.scatter(0, torch.where(fresh, place, capacity).clamp(max=capacity), origin)[:capacity]
    is_used = torch.arange(capacity, device=flat.device) <= place[-1]
    return torch.where(is_used[:, None], flat[first], PADDING_TOKEN), places


def _keys(flat: Tensor) -> Tensor:
    """A 64-bit hash of each row of tokens, int64 [R]: equal texts have equal ones, others almost surely not."""
    keys = torch.zeros(flat.shape[0], dtype=torch.int64, device=flat.device)
    for place in range(flat.shape[1]):
        keys = (keys ^ (flat[:, place] + 1)) * 0x5851F42D4C957F2D
        keys = keys ^ (keys >> 29)
    return keys


def check_shared(fields: tuple[Field, ...], model: ModelRecipe, has_item_text: bool) -> None:
    """Refuse to share a text encoder that the items do not have."""
    texts = [field.name for field in fields if field.kind == "text"]
    if texts and model.event_text == "shared" and not has_item_text:
        raise ModelError(
            f"model.event_text is 'shared', and the items have no text (event field {texts[0]!r})",
            expected="items with a text field, whose encoder the events share",
            next_step="set model.event_text = 'own'",
        )
