"""The embedder: the raw fields of items in, one vector of width joint_dim per item out.

Letters: n items, T text tokens at most, P packed tokens, h joint_dim.
"""

from functools import reduce
from operator import add

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from habitus.data import Field, Fields
from habitus.errors import ModelError
from habitus.model.features import Categories, CategoryLists, Numbers, Vectors, fields_of_kind
from habitus.model.layers import Block, Linear, RMSNorm, compute_dtype, pad_zeros, padded_width, unit_rms
from habitus.model.packing import PackedText, packed_mean
from habitus.model.tensors import ItemTensors
from habitus.recipe import ModelRecipe
from habitus.sizing import text_heads


class Embedder(nn.Module):
    """Text, categories, numbers and vectors of an item, summed and fused. Any of them may be absent."""

    def __init__(self, fields: tuple[Field, ...], model: ModelRecipe) -> None:
        super().__init__()
        h = model.joint_dim
        text, categories = fields_of_kind(fields, "text"), fields_of_kind(fields, "category")
        numbers, vectors = fields_of_kind(fields, "number"), fields_of_kind(fields, "vector")
        category_lists = fields_of_kind(fields, "categories")
        self.text = TextEncoder(max(f.size for f in text), model) if text else None
        self.categories = Categories(categories, h) if categories else None
        self.category_lists = CategoryLists(category_lists, h) if category_lists else None
        self.numbers = Numbers(numbers, h) if numbers else None
        self.vectors = Vectors(vectors, h) if vectors else None
        self.fusion = Fusion(h)

    def forward(self, items: ItemTensors) -> Tensor:
        """Item vectors [n, h] of unit RMS, in float32."""
        text = None if self.text is None else _text_of(items)
        rows = None if self.text is None or text is None else self.text(text)
        looked_up = [table(items.fields) for table in self._tables() if not table.one_hot]
        return self.fuse_fields(rows, text, reduce(add, looked_up) if looked_up else None, items.fields)

    def _tables(self) -> list[Categories]:
        return [table for table in (self.categories, self.category_lists) if table is not None]

    def fuse_fields(
        self, rows: Tensor | None, text: PackedText | None, category_rows: Tensor | None, fields: dict[str, Tensor]
    ) -> Tensor:
        """Item vectors of the text encoder's output rows and of category rows: all that comes after both."""
        parts = [] if self.text is None or rows is None or text is None else [self.text.pool(rows, text)]
        parts += [] if category_rows is None else [category_rows]
        multiplied = [table for table in self._tables() if table.one_hot]
        for encoder in (*multiplied, self.numbers, self.vectors):
            parts += [] if encoder is None else [encoder(fields)]
        total = parts[0].float()
        for part in parts[1:]:
            total = total + part.float()
        vectors: Tensor = self.fusion(total)
        return vectors


class TextEncoder(nn.Module):
    """A bidirectional transformer over each item's tokens, and the mean of its output."""

    def __init__(self, num_tokens: int, model: ModelRecipe) -> None:
        super().__init__()
        h = model.joint_dim
        self.width = h
        self.text_len = model.text_len
        self.tokens = nn.Parameter(torch.empty(num_tokens, h))
        self.positions = nn.Parameter(torch.empty(model.text_len, h))
        self.blocks = nn.ModuleList(Block(h, text_heads(h)) for _ in range(model.text_depth))
        self.norm = RMSNorm(h)
        self.missing = nn.Parameter(torch.empty(h))

    def forward(self, text: PackedText) -> Tensor:
        """The tokens' rows after all layers; `pool` makes them one vector per item."""
        x = self.add_positions(F.embedding(text.tokens, self.tokens), text.places)
        for block in self.blocks:
            x = block(x, text.layout)
        return x

    def add_positions(self, x: Tensor, places: Tensor) -> Tensor:
        """Token rows [P, h] plus those of their positions, padded with zeros where that is faster."""
        # One-hot times table: its gradient is a matrix product, where a lookup's would add millions of rows
        # into two dozen.
        place = torch.arange(self.text_len, device=x.device)
        dtype = compute_dtype(x.device)
        x = x.to(dtype) + (places[:, None] == place).to(dtype) @ self.positions.to(dtype)
        more = padded_width(self.width, x.device) - self.width
        return pad_zeros(x, (0, more)) if more else x

    def pool(self, x: Tensor, text: PackedText) -> Tensor:
        """The mean [n, h] of each item's rows, in float32. An item without text has a learned vector instead."""
        mean = packed_mean(self.norm(x[:, : self.width]), text, self.text_len)
        return torch.where(text.lengths[:, None] > 0, mean, self.missing.float())


class Fusion(nn.Module):
    """A residual MLP over the summed fields, brought to unit RMS."""

    def __init__(self, h: int) -> None:
        super().__init__()
        self.norm = RMSNorm(h)
        self.up = Linear(h, h)
        self.out = Linear(h, h)

    def forward(self, x: Tensor) -> Tensor:
        """[n, h] in float32."""
        x = self.norm(x.to(compute_dtype(x.device)))
        return unit_rms(x + self.out(F.gelu(self.up(x))))


def check_item_fields(fields: Fields) -> None:
    """Refuse a model that would have nothing to embed."""
    if not fields.item:
        raise ModelError(
            "the items have no fields at all, so every item would get the same vector",
            expected="at least one item field: text, category, number or vector",
            next_step="name item fields in schema.toml; the item's id as a category is one way",
        )


def _text_of(items: ItemTensors) -> PackedText:
    if items.text is None:
        raise ModelError(
            "items without tokens were given to a model with a text encoder",
            expected="tokens int32 [n, T]; 0 is padding, and an item without text has only padding",
            next_step="make the features with the dataset (or encoders) that the model was trained on",
        )
    return items.text
