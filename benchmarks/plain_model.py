"""The same model written plainly, on the same parameters: what benchmarks and tests compare with.

Every text is padded to its full length, attention is masked, nothing is packed. Letters: n items, T text
tokens, B windows, L slots, h joint_dim, w width, H heads, d head size.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.model import BatchTensors, BehaviorModel
from habitus.model.layers import Block


def plain_embed_items(model: BehaviorModel, tokens: Tensor | None, fields: dict[str, Tensor]) -> Tensor:
    """Item vectors [n, h] from padded tokens [n, T]."""
    embedder = model.embedder
    parts = [encoder(fields) for encoder in (embedder.categories, embedder.numbers, embedder.vectors) if encoder]
    if embedder.text is not None:
        assert tokens is not None
        parts.append(_plain_text(model, tokens))
    x = norm(torch.stack([part.float() for part in parts]).sum(0), embedder.fusion.norm.weight)
    x = x + F.linear(F.gelu(F.linear(x, embedder.fusion.up.weight)), embedder.fusion.out.weight)
    return norm(x, None)


def _plain_text(model: BehaviorModel, tokens: Tensor) -> Tensor:
    text = model.embedder.text
    assert text is not None
    used = tokens != 0
    x = F.embedding(tokens.long(), text.tokens) + text.positions[: tokens.shape[1]]
    # A text without tokens attends to itself, so that nothing is undefined; its result is not used.
    mask = (used | ~used.any(1, keepdim=True))[:, None, None, :]
    for block in text.blocks:
        x = plain_block(block, x, mask)
    x = norm(x, text.norm.weight)
    mean = (x * used[:, :, None]).sum(1) / used.sum(1, keepdim=True).clamp(min=1)
    return torch.where(used.any(1, keepdim=True), mean, text.missing)


def plain_queries(
    model: BehaviorModel, batch: BatchTensors, event_embeddings: Tensor, one_user: bool = False
) -> Tensor:
    """Queries [B, L, h]. Where one user fills every window, causal attention needs no mask."""
    part = model.contextualizer
    x = F.linear(event_embeddings, part.input.weight) + part.events(batch.fields, like=event_embeddings)
    segments, slots = batch.segments, batch.segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    mask = None if one_user else (same & torch.ones(slots, slots, dtype=torch.bool, device=x.device).tril())[:, None]
    exponents = torch.arange(0, part.head_dim, 2, device=x.device) / part.head_dim
    angles = batch.positions[..., None] * 10_000.0**-exponents  # [B, L, d/2]
    for block in part.blocks:
        x = plain_block(block, x, mask, angles)
    return norm(F.linear(norm(x, part.norm.weight), part.output.weight), None) * part.gain * part.query_scale


def plain_block(block: Block, x: Tensor, mask: Tensor | None, angles: Tensor | None = None) -> Tensor:
    """One layer on [batch, length, width]; causal where there is no mask."""
    q, k, v = F.linear(norm(x, block.attention_norm.weight), block.qkv.weight).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (block.heads, -1)).transpose(1, 2) for part in (q, k, v))  # [batch, H, length, d]
    if angles is not None:
        q, k = _apply_rope(q, angles), _apply_rope(k, angles)
    out = F.scaled_dot_product_attention(q, k, v.to(q.dtype), attn_mask=mask, is_causal=mask is None)
    x = x + F.linear(out.transpose(1, 2).flatten(2), block.attention_out.weight)
    return x + F.linear(F.gelu(F.linear(norm(x, block.mlp_norm.weight), block.mlp_up.weight)), block.mlp_out.weight)


def _apply_rope(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    left, right = x.chunk(2, -1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), -1).to(x.dtype)


def norm(x: Tensor, weight: Tensor | None) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)
