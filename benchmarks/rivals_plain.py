"""A plain SASRec with full cross-entropy: item ids, learned positions, tied item embeddings, nothing else.

Stands in for RecTools' and RePlay's where they cannot run. The blocks are SASRec's own: queries are normalised, keys
and values are not, and residuals start from what was normalised (pre-norm blocks took twice the passes). A ReLU layer
as wide as the model, dropout, softmax over all trained items; positions count from the end of a sequence, as RecTools
has them.

    b  sequences      L  events      d  width      V  trained items and the empty one, 0
"""

import torch
from rivals_scoring import Course, Setting, TrainingLog, fit_in_passes
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each with its norm and residual."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        width = setting.width
        self.heads, self.dropout = setting.heads, setting.dropout
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = (nn.Linear(width, n * width) for n in (1, 2, 1))
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(setting.dropout), nn.Linear(width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        b, length, width = x.shape
        residual = self.attention_norm(x)
        q = self.query(residual).view(b, length, self.heads, -1).transpose(1, 2)
        k, v = self.key_value(x).view(b, length, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        residual = self.mlp_norm(residual + self.out(y.transpose(1, 2).reshape(b, length, width)))
        return residual + F.dropout(self.mlp(residual), self.dropout, self.training)


class SASRec(nn.Module):
    """Ids [b, L], padded on the left with 0, to vectors [b, L, d]; the item embeddings are the output layer."""

    def __init__(self, num_ids: int, length: int, setting: Setting) -> None:
        super().__init__()
        self.items = nn.Embedding(num_ids, setting.width)
        self.positions = nn.Parameter(torch.zeros(length, setting.width))
        self.blocks = nn.ModuleList(Block(setting) for _ in range(setting.depth))
        self.norm = nn.LayerNorm(setting.width)
        self.dropout = setting.dropout
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        filled = (ids > 0)[..., None]
        x = F.dropout(self.items(ids) + self.positions[-length:], self.dropout, self.training)
        for block in self.blocks:
            # Empty slots are seen as zeros, not masked: a query can attend to nothing there.
            x = block(x * filled)
        return self.norm(x)


class PlainSASRec:
    """The rival."""

    def __init__(self, log: TrainingLog, setting: Setting, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        self.batch = log.batch
        self.ids, self.sequences = log.numbered()
        self.module = SASRec(len(log.items) + 1, log.length, setting).to(device)

    def fit(self, course: Course) -> None:
        fit_in_passes(self, self.sequences, self.sequences, self.batch, course)  # it does not look at times

    def hidden(self, items: Tensor, times: Tensor) -> Tensor:
        del times
        return self.module(items)

    def output_vectors(self) -> Tensor:
        return self.module.items.weight

    def encode(self, items: Tensor, times: Tensor) -> Tensor:
        return self.hidden(items, times)[:, -1]

    def item_vectors(self) -> Tensor:
        return self.module.items.weight.detach()[1:]
