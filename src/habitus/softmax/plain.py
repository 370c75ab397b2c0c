"""The softmax over candidates in the fastest way for a training step: few scores on a CPU are a plain cross-entropy.

M  queries      V  candidates      d  width of a vector
"""

import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from habitus.softmax.latch import Latch
from habitus.softmax.loss import SoftmaxResult, candidate_softmax

# Up to so many scores a plain cross-entropy is no slower on a CPU than `candidate_softmax`, whose checks take a
# millisecond (docs/decisions/0107).
_FEW_SCORES = 1 << 19


def fast_softmax(
    queries: Tensor,
    candidates: Tensor,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    num_valid: int | Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    latch: Latch | None = None,
) -> SoftmaxResult:
    """The result of `candidate_softmax`; few scores on a CPU are not checked, and what is bad shows in the loss."""
    if num_valid is None and group is None and latch is None and _has_few_scores(queries, candidates):
        return _plain_softmax(queries, candidates, targets, log_q)
    return candidate_softmax(queries, candidates, targets, log_q=log_q, num_valid=num_valid, group=group, latch=latch)


def _has_few_scores(queries: Tensor, candidates: Tensor) -> bool:
    return queries.device.type == "cpu" and len(queries) * len(candidates) <= _FEW_SCORES


def _plain_softmax(queries: Tensor, candidates: Tensor, targets: Tensor, log_q: Tensor | None) -> SoftmaxResult:
    """All scores [M, V] in memory."""
    scores = queries @ candidates.T
    logits = scores if log_q is None else scores - log_q
    losses = F.cross_entropy(logits, targets, reduction="none")
    target_scores = scores.gather(1, targets[:, None])[:, 0]
    return SoftmaxResult(losses, None, target_scores, None if log_q is None else log_q[targets])
