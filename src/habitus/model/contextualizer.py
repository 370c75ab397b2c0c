"""The contextualizer: a user's events in, one query per event for the next item out.

Letters: B windows, L slots, R = B·L rows, h joint_dim, w width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from habitus.data import Field
from habitus.errors import ModelError
from habitus.model.copying import Copying, Marks
from habitus.model.dropout import Noise, dropped
from habitus.model.features import Categories, Numbers, of_kind
from habitus.model.layers import Block, Linear, RMSNorm, compute_dtype, unit_rms
from habitus.model.layouts import Layout, MaskedWindows, PackedRows, rotary_turns
from habitus.model.tensors import BatchTensors
from habitus.recipe import ModelRecipe


class Reading(NamedTuple):
    """What a model makes of a batch: a query per slot, and what the past says for itself where that is heard."""

    queries: Tensor  # [B, L, h], float32
    copying: Tensor | None  # [B, L, L] by query and event, float32: see `habitus.model.copying`


class Contextualizer(nn.Module):
    """A decoder-only transformer; attention stays inside a user's segment and never looks ahead."""

    def __init__(self, fields: tuple[Field, ...], model: ModelRecipe, query_scale: float) -> None:
        super().__init__()
        h, w = model.joint_dim, model.width
        self.head_dim = model.head_dim
        self.query_scale = query_scale
        self.input = Linear(h, w)
        self.events = EventFields(fields, w)
        self.blocks = nn.ModuleList(Block(w, w // model.head_dim) for _ in range(model.depth))
        self.norm = RMSNorm(w)
        self.output = Linear(w, h)
        self.gain = nn.Parameter(torch.empty(()))
        self.copying = Copying(w) if model.copying else None

    def forward(self, batch: BatchTensors, event_embeddings: Tensor) -> Reading:
        """Queries are directions of unit RMS times the learned gain, so that a score is a plain dot product with an
        item vector."""
        noise, looked_up = batch.noise, self.events.looked_up(batch.fields, like=event_embeddings)
        turns = rotary_turns(torch.arange(batch.positions.shape[1], device=batch.positions.device), self.head_dim)
        x, layout = self.begin(
            event_embeddings, looked_up, batch.fields, turns, batch.positions, batch.segments, batch.boundaries, noise
        )
        for number, block in enumerate(self.blocks):
            x = block(x, layout, None if noise is None else noise.of_layer(number))
        queries, marks = self.leave(x)
        copying = None if self.copying is None or marks is None else self.copying(marks, batch.segments)
        return Reading(queries.view(event_embeddings.shape), copying)

    def begin(
        self,
        event_embeddings: Tensor,
        looked_up: Tensor,
        fields: dict[str, Tensor],
        turns: Tensor,
        positions: Tensor,
        segments: Tensor,
        boundaries: Tensor,
        noise: Noise | None,
    ) -> tuple[Tensor, Layout]:
        """What the first layer reads, and who sees whom: all that comes before the layers but lookups in tables.

        `turns` [L, 2, d/2] are those of every place: few sines, and none of them compiled.
        """
        x = self.enter(event_embeddings, looked_up + self.events.multiplied(fields, like=event_embeddings))
        x = x if noise is None else dropped(x, noise.inputs, noise.rate)
        return x, self.layout(turns[positions.flatten()], segments, boundaries)

    def enter(self, event_embeddings: Tensor, event_fields: Tensor) -> Tensor:
        """[R, w] out of the vectors of the events and what their own fields add."""
        dtype = compute_dtype(event_embeddings.device)
        return (self.input.aligned(event_embeddings.to(dtype)) + event_fields).to(dtype).flatten(0, 1)

    def leave(self, x: Tensor) -> tuple[Tensor, Marks | None]:
        """Queries [R, h] out of [R, w], and what copying is made of."""
        hidden = self.norm(x)
        queries = unit_rms(self.output.aligned(hidden)) * (self.gain * self.query_scale)
        return queries, None if self.copying is None else self.copying.marks(hidden)

    def layout(self, turns: Tensor, segments: Tensor, boundaries: Tensor) -> Layout:
        """Who sees whom, and how far each slot is turned: packed rows on CUDA, a block-causal mask elsewhere."""
        if segments.device.type == "cuda":
            return PackedRows.causal(boundaries, segments.numel(), turns)
        return MaskedWindows.causal(segments, turns)


class EventFields(nn.Module):
    """What an event's own fields add to the contextualizer's input at its slot; zero where there are none."""

    def __init__(self, fields: tuple[Field, ...], w: int) -> None:
        super().__init__()
        other = [field for field in fields if field.kind not in ("category", "number")]
        if other:
            raise ModelError(
                f"event field {other[0].name!r} is a {other[0].kind}",
                expected="event fields that are categories or numbers",
                next_step="make it an item field, or leave it out of schema.toml",
            )
        categories, numbers = of_kind(fields, "category"), of_kind(fields, "number")
        self.categories = Categories(categories, w) if categories else None
        self.numbers = Numbers(numbers, w) if numbers else None

    def forward(self, values: dict[str, Tensor], like: Tensor) -> Tensor:
        """[B, L, w], or a zero that broadcasts."""
        return self.looked_up(values, like) + self.multiplied(values, like)

    def looked_up(self, values: dict[str, Tensor], like: Tensor) -> Tensor:
        """What large tables add: [B, L, w], or a zero that broadcasts."""
        if self.categories is None or self.categories.one_hot:
            return like.new_zeros(())
        rows: Tensor = self.categories(values)
        return rows

    def multiplied(self, values: dict[str, Tensor], like: Tensor) -> Tensor:
        """What everything else adds: [B, L, w], or a zero that broadcasts."""
        total = like.new_zeros(())
        if self.categories is not None and self.categories.one_hot:
            total = total + self.categories(values)
        return total if self.numbers is None else total + self.numbers(values)
