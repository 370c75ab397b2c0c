"""Top-k with ties decided: one integer per (score, id) that sorts by score first and by lower id second.

    M  queries      k  leaders kept per query      n  newcomers

Selection by such keys is a total order, so the result is the full stable sort's, whatever the shards and whatever the
order in which newcomers arrive.
"""

import torch
from torch import Tensor

MAX_ITEMS = 1 << 32  # ids take the lower half of a key
EMPTY = -(1 << 63)  # sorts below every real key


def keys_of(scores: Tensor, ids: Tensor) -> Tensor:
    """The int64 keys of float32 scores and ids below 2^32."""
    bits = (scores + 0.0).view(torch.int32)  # -0.0 and 0.0 are equal scores
    # Flipping the lower bits of negative floats makes their order as integers the order of the numbers.
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(torch.int64)
    return (ordered << 32) | (MAX_ITEMS - 1 - ids)


def scores_of(keys: Tensor) -> Tensor:
    """The float32 scores; -inf for EMPTY."""
    ordered = (keys >> 32).to(torch.int32)
    scores = (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)
    return torch.where(keys == EMPTY, -torch.inf, scores)


def ids_of(keys: Tensor) -> Tensor:
    """The ids, int64."""
    return MAX_ITEMS - 1 - (keys & (MAX_ITEMS - 1))


def no_leaders(num_queries: int, k: int, device: torch.device) -> Tensor:
    """Keys [M, k] of nobody yet."""
    return torch.full((num_queries, k), EMPTY, dtype=torch.int64, device=device)


def merge_leaders(best: Tensor, newcomers: Tensor) -> Tensor:
    """The k best keys [M, k] of the old ones and of newcomers [M, n], best first."""
    return torch.cat((best, newcomers), dim=1).topk(best.shape[1], dim=1).values


def merge_loose(best: Tensor, rows: Tensor, keys: Tensor) -> Tensor:
    """The same for newcomers given one by one, each with the row it belongs to."""
    order = rows.argsort(stable=True)
    rows, keys = rows[order], keys[order]
    counts = torch.bincount(rows, minlength=len(best))
    starts = counts.cumsum(0) - counts
    place = torch.arange(len(rows), device=rows.device) - starts[rows]
    table = no_leaders(len(best), int(counts.max()), best.device)
    table[rows, place] = keys
    return merge_leaders(best, table)


def thresholds(best: Tensor) -> Tensor:
    """The score that a later id must exceed to get among the k best [M]; -inf while places are free."""
    return scores_of(best[:, -1])
