"""Copying: pointer attention over a user's own events, mixed with the scores of the whole catalogue.

A query is one vector, and one vector can hardly rank ten rare items of a user's past above everything popular. So each
visible event j also adds to the score of its own item x_j. With a query's dot product z_v = <q_t, e_v>:

    s_v  = log(exp(z_v) + sum over j <= t with x_j = v of exp(a_tj))
    a_tj = <query_t, key_j> / √d + gate_t + lag(t - j)

a_tj are the copy scores. Items that are not in the user's past keep their dot product, so that an index over the
catalogue still finds them. `lag` is piecewise linear in the logarithm of the lag.

Letters: B windows, L slots, R = B·L rows, w width, d copy_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from habitus.model.layers import Linear
from habitus.sizing import LAG_KNOTS, copy_dim

MASKED_COPY_SCORE = -1.0e4  # of an event that a query may not see: finite, so that gradients are
_KNOTS_PER_DOUBLING = 1.5


class CopyInputs(NamedTuple):
    """What copy scores are made of, per slot: a query, a key, and a gate that raises or lowers all of its scores."""

    query: Tensor  # [R, d]
    key: Tensor  # [R, d]
    gate: Tensor  # [R]


class CopyMass(NamedTuple):
    """Per query, as logarithms: the copy mass on all items together, and on the target."""

    total: Tensor
    target: Tensor


class Copying(nn.Module):
    """Copy scores: how much each visible event adds to its own item.

    `ask` and `mark` project to queries and keys; parameters keep these names because bundles on disk have them.
    """

    def __init__(self, w: int) -> None:
        super().__init__()
        self.ask = Linear(w, copy_dim(w))
        self.mark = Linear(w, copy_dim(w))
        self.gate = Linear(w, 1)
        self.lags = nn.Parameter(torch.empty(LAG_KNOTS))

    def project(self, hidden: Tensor) -> CopyInputs:
        """Queries, keys and gates of the contextualizer's last layer [R, w]."""
        return CopyInputs(self.ask(hidden), self.mark(hidden), self.gate(hidden).squeeze(-1))

    def forward(self, inputs: CopyInputs, segments: Tensor) -> Tensor:
        """Copy scores [B, L, L] in float32 by query and event, masked for events of other users and of the future."""
        B, L = segments.shape
        with torch.autocast(segments.device.type, enabled=False):
            query, key = (part.float().unflatten(0, (B, L)) for part in inputs[:2])
            scores = torch.bmm(query, key.transpose(1, 2)) * query.shape[-1] ** -0.5
            scores = scores + inputs.gate.float().view(B, L, 1) + self._lag_bias(L)
        lag = _lags(L, segments.device)
        visible = (segments[:, :, None] == segments[:, None, :]) & (lag >= 0)
        return torch.where(visible, scores, MASKED_COPY_SCORE)

    def _lag_bias(self, L: int) -> Tensor:
        """[L, L] by query and event. A product rather than a lookup: its gradient adds up in a fixed order."""
        knots = torch.arange(LAG_KNOTS, device=self.lags.device)
        place = (_lags(L, self.lags.device).clamp(min=0) + 1.0).log2() * _KNOTS_PER_DOUBLING
        hats = (1 - (place.clamp(max=LAG_KNOTS - 1)[:, :, None] - knots).abs()).clamp(min=0)
        return hats @ self.lags.float()


def copy_mass(copy_scores: Tensor, items: Tensor, targets: Tensor) -> CopyMass:
    """The copy mass of every slot [B, L], from copy scores [B, L, L], items [B, L] and targets [B, L]."""
    same = items[:, None, :] == targets[:, :, None]
    return CopyMass(copy_scores.logsumexp(-1), torch.where(same, copy_scores, MASKED_COPY_SCORE).logsumexp(-1))


def copying_loss(loss: Tensor, score: Tensor, log_q: Tensor | None, mass: CopyMass) -> Tensor:
    """The loss of queries with copying, given their loss without it, the target's dot product and its log q.

    The sum over the candidates estimates that over the catalogue, and the copy mass is added to it as it is. The
    target's own score and copy mass are no estimates, so neither is corrected; a constant keeps the loss at the level
    of the one without copying.
    """
    if log_q is None:
        return torch.logaddexp(loss + score, mass.total) - torch.logaddexp(score, mass.target)
    return torch.logaddexp(loss + score - log_q, mass.total) - torch.logaddexp(score, mass.target) + log_q


def _lags(L: int, device: torch.device) -> Tensor:
    """Query's slot minus event's slot, [L, L]."""
    slot = torch.arange(L, device=device)
    return slot[:, None] - slot
