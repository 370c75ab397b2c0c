"""The second way to score: what a user's own past says for itself.

A query is one vector, and one vector can hardly name ten rare items of a user's past above everything popular. So each
visible event j may also speak for its own item x_j. With a query's plain score z_v = <q_t, e_v>:

    s_v  = log(exp(z_v) + sum over j <= t with x_j = v of exp(a_tj))
    a_tj = <ask_t, mark_j> / √d + gate_t + lag(t - j)

Items that the user has not met keep their plain score, so that an index over the catalogue still finds them, and only
the past is scored by itself. `lag` is piecewise linear in the logarithm of the lag.

Letters: B windows, L slots, R = B·L rows, w width, d copy_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from habitus.model.layers import Linear
from habitus.sizing import LAG_KNOTS, copy_dim

UNSEEN = -1.0e4  # the weight, as a logarithm, of an event that a query does not see: finite, so that gradients are
_KNOTS_PER_DOUBLING = 1.5


class Marks(NamedTuple):
    """What a slot asks of the past, what it says once it is past, and how much it wants of copying at all."""

    ask: Tensor  # [R, d]
    mark: Tensor  # [R, d]
    gate: Tensor  # [R]


class Mass(NamedTuple):
    """Per query, as logarithms: what the past adds to all items together, and what it adds to the target."""

    everything: Tensor
    target: Tensor


class Copying(nn.Module):
    """How much each visible event speaks for its own item."""

    def __init__(self, w: int) -> None:
        super().__init__()
        self.ask = Linear(w, copy_dim(w))
        self.mark = Linear(w, copy_dim(w))
        self.gate = Linear(w, 1)
        self.lags = nn.Parameter(torch.empty(LAG_KNOTS))

    def marks(self, hidden: Tensor) -> Marks:
        """Of the contextualizer's last layer [R, w]."""
        return Marks(self.ask(hidden), self.mark(hidden), self.gate(hidden).squeeze(-1))

    def forward(self, marks: Marks, segments: Tensor) -> Tensor:
        """a [B, L, L] in float32: by query and event, UNSEEN where it is another user's or still to come."""
        B, L = segments.shape
        with torch.autocast(segments.device.type, enabled=False):
            ask, mark = (part.float().unflatten(0, (B, L)) for part in marks[:2])
            said = torch.bmm(ask, mark.transpose(1, 2)) * ask.shape[-1] ** -0.5
            said = said + marks.gate.float().view(B, L, 1) + self._of_lags(L)
        lag = _lags(L, segments.device)
        seen = (segments[:, :, None] == segments[:, None, :]) & (lag >= 0)
        return torch.where(seen, said, UNSEEN)

    def _of_lags(self, L: int) -> Tensor:
        """[L, L]: by query and event. A product rather than a lookup: its gradient adds up in a fixed order."""
        knots = torch.arange(LAG_KNOTS, device=self.lags.device)
        place = (_lags(L, self.lags.device).clamp(min=0) + 1.0).log2() * _KNOTS_PER_DOUBLING
        hats = (1 - (place.clamp(max=LAG_KNOTS - 1)[:, :, None] - knots).abs()).clamp(min=0)
        return hats @ self.lags.float()


def mass_of(copying: Tensor, items: Tensor, targets: Tensor) -> Mass:
    """What the past adds for every slot [B, L], of `copying` [B, L, L], items [B, L] and targets [B, L]."""
    same = items[:, None, :] == targets[:, :, None]
    return Mass(copying.logsumexp(-1), torch.where(same, copying, UNSEEN).logsumexp(-1))


def with_copying(loss: Tensor, score: Tensor, log_q: Tensor | None, mass: Mass) -> Tensor:
    """The loss of queries once the past is heard too, given their plain loss, the target's plain score and its log q.

    The sum over the candidates estimates that over the catalogue, and the past adds its weight to it as it is. What is
    said of the target is no estimate, so neither its score nor what the past adds to it is corrected; a constant keeps
    the loss at the level of the plain one.
    """
    if log_q is None:
        return torch.logaddexp(loss + score, mass.everything) - torch.logaddexp(score, mass.target)
    return torch.logaddexp(loss + score - log_q, mass.everything) - torch.logaddexp(score, mass.target) + log_q


def _lags(L: int, device: torch.device) -> Tensor:
    """Query's slot minus event's slot, [L, L]."""
    slot = torch.arange(L, device=device)
    return slot[:, None] - slot
