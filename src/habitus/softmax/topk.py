"""Top-k with ties decided: one integer per (score, id) that sorts by score first and by lower id second.

    M  queries      k  candidates kept per query      n  new candidates

Such keys are totally ordered, so the result is that of a full stable sort, whatever the shards and whatever the order
in which candidates arrive.
"""

import torch
from torch import Tensor

MAX_ITEMS = 1 << 32  # ids take the lower half of a key
EMPTY = -(1 << 63)  # sorts below every real key


def encode_keys(scores: Tensor, ids: Tensor) -> Tensor:
    """The int64 keys of float32 scores and ids below 2^32."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal scores
    # Flipping the lower bits of negative floats makes their order as integers the order of the numbers.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) | (MAX_ITEMS - 1 - ids)


def decode_scores(keys: Tensor) -> Tensor:
    """The float32 scores; -inf for EMPTY."""
    ordered = (keys >> 32).to(torch.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(keys == EMPTY, -torch.inf, scores)


def decode_ids(keys: Tensor) -> Tensor:
    """The ids, int64."""
    return MAX_ITEMS - 1 - (keys & (MAX_ITEMS - 1))


def empty_topk(num_queries: int, k: int, device: torch.device) -> Tensor:
    """Keys [M, k] before any candidate has come."""
    return torch.full((num_queries, k), EMPTY, dtype=torch.int64, device=device)


def merge_topk(best: Tensor, keys: Tensor) -> Tensor:
    """The k best keys [M, k] of those so far and of new ones [M, n], best first."""
    return torch.cat((best, keys), dim=1).topk(best.shape[1], dim=1).values


def merge_topk_pairs(best: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The same for new keys as pairs: each with the row of `best` that it belongs to."""
    order = rows.argsort(stable=True)
    rows, keys = rows[order], keys[order]
    counts = torch.bincount(rows, minlength=len(best))
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(rows), device=rows.device) - starts[rows]
    table = empty_topk(len(best), int(counts.max()), best.device)
    table[rows, place] = keys
    return merge_topk(best, table)


def thresholds(best: Tensor) -> Tensor:
    """The score that a later id must exceed to get among the k best [M]; -inf while there are fewer than k."""
    return decode_scores(best[:, -1])
