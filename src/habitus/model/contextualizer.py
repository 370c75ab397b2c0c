"""The contextualizer: a user's events in, one query per event for the next item out.

Letters: B windows, L slots, R = B·L rows, h joint_dim, w width.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from habitus.data import Field
from habitus.errors import ModelError
from habitus.model.attention import Layout, MaskedWindows, PackedRows, rope_table
from habitus.model.copying import Copying, CopyInputs
from habitus.model.dropout import DropoutMask, apply_dropout
from habitus.model.embedder import TextEncoder
from habitus.model.event_text import EventText
from habitus.model.features import Categories, Numbers, Vectors, column, fields_of_kind
from habitus.model.layers import Block, Linear, RMSNorm, compute_dtype, unit_rms
from habitus.model.packing import TextCapacity
from habitus.model.tensors import BatchTensors
from habitus.recipe import ModelRecipe


class ContextualizerOutput(NamedTuple):
    """A query per slot and, where the recipe has copying, copy scores."""

    queries: Tensor  # [B, L, h], float32
    copy_scores: Tensor | None  # [B, L, L] by query and event, float32: see `habitus.model.copying`


class Contextualizer(nn.Module):
    """A decoder-only transformer; attention stays inside a user's segment and never looks ahead."""

    def __init__(self, fields: tuple[Field, ...], model: ModelRecipe, query_scale: float) -> None:
        super().__init__()
        h, w = model.joint_dim, model.width
        self.head_dim = model.head_dim
        self.query_scale = query_scale
        self.input = Linear(h, w)
        self.events = EventFields(fields, model)
        self.blocks = nn.ModuleList(Block(w, w // model.head_dim) for _ in range(model.depth))
        self.norm = RMSNorm(w)
        self.output = Linear(w, h)
        self.gain = nn.Parameter(torch.empty(()))
        self.copying = Copying(w) if model.copying else None

    def forward(
        self, batch: BatchTensors, event_embeddings: Tensor, text_encoder: TextEncoder | None = None
    ) -> ContextualizerOutput:
        """Queries are directions of unit RMS times the learned gain, so that a score is a plain dot product with an
        item vector. `text_encoder` is that of the items, which texts of events may share."""
        dropout_mask = batch.dropout_mask
        category_rows = self.events.look_up(batch.fields, event_embeddings, text_encoder, batch.text_capacity)
        rope = rope_table(torch.arange(batch.positions.shape[1], device=batch.positions.device), self.head_dim)
        x, layout = self.prepare_inputs(
            event_embeddings,
            category_rows,
            batch.fields,
            rope,
            batch.positions,
            batch.segments,
            batch.boundaries,
            dropout_mask,
        )
        for number, block in enumerate(self.blocks):
            x = block(x, layout, None if dropout_mask is None else dropout_mask.for_layer(number))
        queries, copy_inputs = self.project_out(x)
        copy_scores = None if self.copying is None else self.copying(copy_inputs, batch.segments)
        return ContextualizerOutput(queries.view(event_embeddings.shape), copy_scores)

    def prepare_inputs(
        self,
        event_embeddings: Tensor,
        category_rows: Tensor,
        fields: dict[str, Tensor],
        rope: Tensor,
        positions: Tensor,
        segments: Tensor,
        boundaries: Tensor,
        dropout_mask: DropoutMask | None,
    ) -> tuple[Tensor, Layout]:
        """The first layer's input and the layout: all that comes before the layers but lookups in tables.

        `rope` [L, 2, d/2] is that of every position: few sines, and none of them compiled.
        """
        x = self.project_in(event_embeddings, category_rows + self.events.project(fields, like=event_embeddings))
        x = x if dropout_mask is None else apply_dropout(x, dropout_mask.inputs, dropout_mask.rate)
        return x, self.layout(rope[positions.flatten()], segments, boundaries)

    def project_in(self, event_embeddings: Tensor, event_fields: Tensor) -> Tensor:
        """[R, w] from the vectors of the events plus what their own fields add."""
        dtype = compute_dtype(event_embeddings.device)
        return (self.input.forward_padded(event_embeddings.to(dtype)) + event_fields).to(dtype).flatten(0, 1)

    def project_out(self, x: Tensor) -> tuple[Tensor, CopyInputs | None]:
        """Queries [R, h] from [R, w], and what copy scores are made of."""
        hidden = self.norm(x)
        queries = unit_rms(self.output.forward_padded(hidden)) * (self.gain * self.query_scale)
        return queries, None if self.copying is None else self.copying.project(hidden)

    def layout(self, rope: Tensor, segments: Tensor, boundaries: Tensor) -> Layout:
        """Which slots attend to which, with rope: packed rows on CUDA, a block-causal mask elsewhere."""
        if segments.device.type == "cuda":
            return PackedRows.causal(boundaries, segments.numel(), rope)
        return MaskedWindows.causal(segments, rope)


class EventFields(nn.Module):
    """What an event's own fields add to the contextualizer's input at its slot; zero where there are none."""

    def __init__(self, fields: tuple[Field, ...], model: ModelRecipe) -> None:
        super().__init__()
        other = [field for field in fields if field.kind == "categories"]
        if other:
            raise ModelError(
                f"event field {other[0].name!r} holds several {other[0].kind}",
                expected="event fields that are categories, numbers, times, texts or vectors",
                next_step="make it an item field, or leave it out of schema.toml",
            )
        w = model.width
        categories, numbers = fields_of_kind(fields, "category"), fields_of_kind(fields, "number")
        texts, vectors = fields_of_kind(fields, "text"), fields_of_kind(fields, "vector")
        self.categories = Categories(categories, w) if categories else None
        self.numbers = Numbers(numbers, w) if numbers else None
        self.texts = nn.ModuleList(EventText(field, model) for field in texts)
        self.vectors = Vectors(vectors, w) if vectors else None

    def forward(self, values: dict[str, Tensor], like: Tensor) -> Tensor:
        """[B, L, w], or a zero that broadcasts."""
        return self.look_up(values, like) + self.project(values, like)

    def look_up(
        self,
        values: dict[str, Tensor],
        like: Tensor,
        text_encoder: TextEncoder | None = None,
        capacity: TextCapacity | None = None,
    ) -> Tensor:
        """Rows of large category tables and texts, summed: [B, L, w], or a zero that broadcasts."""
        rows = like.new_zeros(())
        if self.categories is not None and not self.categories.one_hot:
            rows = self.categories(values)
        for text in self.texts:
            rows = rows + text(column(values, str(text.name)), text_encoder, capacity)
        return rows

    def project(self, values: dict[str, Tensor], like: Tensor) -> Tensor:
        """All other fields, multiplied by their matrices and summed: [B, L, w], or a zero that broadcasts."""
        total = like.new_zeros(())
        if self.categories is not None and self.categories.one_hot:
            total = total + self.categories(values)
        for encoder in (self.numbers, self.vectors):
            total = total if encoder is None else total + encoder(values)
        return total
