"""The slow twin of the candidate softmax: float64 scores, all of them, in plain sight."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor


class Twin(NamedTuple):
    """What the softmax should have said, in float64."""

    scores: Tensor  # [M, V]
    loss: Tensor  # [M]
    entropy: Tensor  # [M]
    to_queries: Tensor  # [M, d], gradient of (loss * weights).sum()
    to_candidates: Tensor  # [V, d]


def compute_twin(
    queries: Tensor,
    candidates: Tensor,
    targets: Tensor,
    *,
    log_q: Tensor | None = None,
    num_valid: int | None = None,
    weights: Tensor | None = None,
) -> Twin:
    """Scores, loss, entropy and both gradients from the definition."""
    h = queries.detach().double().requires_grad_()
    e = candidates.detach().double().requires_grad_()
    z = h @ e.T
    if log_q is not None:
        z = z - log_q.double()
    if num_valid is not None:
        z = z.masked_fill(torch.arange(len(e), device=e.device) >= num_valid, -torch.inf)
    log_p = torch.log_softmax(z, dim=1)
    p = log_p.exp()
    loss = -log_p.gather(1, targets[:, None].long())[:, 0]
    weights = torch.ones_like(loss) if weights is None else weights.double()
    (loss * weights).sum().backward()
    entropy = -torch.where(p > 0, p * log_p, 0).sum(1)
    assert h.grad is not None and e.grad is not None
    return Twin(z.detach(), loss.detach(), entropy.detach(), h.grad, e.grad)


@pytest.fixture
def twin():
    """The function that computes the twin."""
    return compute_twin
