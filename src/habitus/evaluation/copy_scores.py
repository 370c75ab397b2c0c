"""What a user's own past adds to the scores of a pass over candidates: exact, and without a second pass.

Only the items of a query's past have another score than their plain one (`habitus.model.copying`). So the sums, counts
and best items of the plain scores are taken first, with the target's new score as the one to reach, and are then put
right for the past alone. All in float64.

    B  windows      L  slots      Q  queries      h  joint_dim      k  items wanted per query
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from habitus.evaluation.queries import QueryBatch
from habitus.model import MASKED_COPY_SCORE
from habitus.softmax import Sums, topk

# In float64 two scores of one vector differ by less than this, whatever products they come from.
_SAME = 1e-9
# A target that is raised by less counts as not raised: in float32, where scores are counted, it might not be seen.
_NOTHING = 1e-4
_ROWS = 512  # queries at a time
_PAIRS = 1 << 22  # pairs of slots that are held at a time


@dataclass(frozen=True)
class Past:
    """The past of Q queries: L slots of each one's window, of which those with a place stand for an item."""

    places: Tensor  # int64 [Q, L]: of the item among the candidates; -1 where the slot stands for none
    plain: Tensor  # float64 [Q, L]: the item's score by the query's vector
    scores: Tensor  # float64 [Q, L]: with what the past adds
    is_target: Tensor  # bool [Q, L]
    target: Tensor  # float64 [Q]: the target's plain score
    raised: Tensor  # float64 [Q]: what the past adds to it

    @property
    def target_bias(self) -> Tensor:
        """What a scan adds to the targets' scores before it counts who reaches them: float32 [Q]."""
        return torch.where(self.raised < _NOTHING, 0, self.raised).float()

    def sums(self, found: Sums) -> Sums:
        """The sums over all candidates, given those of the plain scores with the raised targets to reach."""
        rows = [slice(at, at + _ROWS) for at in range(0, len(self.places), _ROWS)]
        parts = [self._rows(chosen)._sums(Sums(*(part[chosen] for part in found))) for chosen in rows]
        return Sums(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def leaders(self, best: Tensor) -> Tensor:
        """The best candidates as keys [Q, k], given those by plain scores."""
        rows = [slice(at, at + _ROWS) for at in range(0, len(best), _ROWS)]
        return torch.cat([self._rows(chosen)._leaders(best[chosen]) for chosen in rows])

    def _rows(self, chosen: slice) -> "Past":
        """The same of some queries: a few at a time keep the memory small."""
        return Past(*(getattr(self, name)[chosen] for name in self.__dataclass_fields__))

    def _sums(self, found: Sums) -> Sums:
        here = self.places >= 0
        before, after = (torch.where(here, part - found.top[:, None], 0) for part in (self.plain, self.scores))
        weight_before, weight = (torch.where(here, part.exp(), 0) for part in (before, after))
        reach = (self.target + self.target_bias)[:, None] - _SAME
        # Counted once already: others by their plain score, and a target that the past has not raised.
        counted = torch.where(self.is_target, self.raised[:, None] < _NOTHING, self.plain >= reach)
        counts = self.is_target | (self.scores >= reach)
        return Sums(
            found.top,
            found.total + (weight - weight_before).sum(1),
            found.dot + (weight * after - weight_before * before).sum(1),
            found.reached + (here & counts).sum(1) - (here & counted).sum(1),
        )

    def _leaders(self, best: Tensor) -> Tensor:
        raised = torch.where(self.scores - self.plain < _NOTHING, -1, self.places)
        keys = topk.encode_keys(self.scores.float(), raised.clamp(min=0))
        keys = torch.where(raised >= 0, keys, topk.EMPTY)
        again = (topk.decode_ids(best)[:, :, None] == raised[:, None]).any(-1)
        return topk.merge_topk(torch.where(again, topk.EMPTY, best), keys)


@torch.no_grad()
def past_of(
    asked: QueryBatch,
    copying: Tensor,
    queries: Tensor,
    events: Tensor,
    target_rows: Tensor,
    candidates: np.ndarray | None,
) -> Past:
    """The past of a batch's queries, of `copying` [B, L, L], queries and vectors of the events [B, L, h].

    Vectors, those of the targets [Q, h] too, come as the scan sees them. `candidates` are sorted catalogue rows, or
    None for the whole catalogue.
    """
    device = queries.device
    window, slot = (torch.from_numpy(part).to(device) for part in (asked.windows, asked.slots))
    items = torch.from_numpy(asked.batch.items).to(device)
    segments = torch.from_numpy(asked.batch.segments.astype(np.int64)).to(device)
    step = max(1, _PAIRS // items.shape[1] ** 2)
    parts = []
    for at in range(0, len(items), step):
        chosen = (window >= at) & (window < at + step)  # queries come window by window
        inputs = (part[at : at + step] for part in (copying, queries, events, items, segments))
        parts.append([found[window[chosen] - at, slot[chosen]] for found in past_scores(*inputs)])
    plain, scores, stands = (torch.cat(column) for column in zip(*parts, strict=True))
    places = _places(items, candidates)[window]
    here = stands & (places >= 0)
    is_target = here & (items[window] == torch.from_numpy(asked.targets).to(device)[:, None])
    return Past(
        places=torch.where(here, places, -1),
        plain=plain,
        scores=scores,
        is_target=is_target,
        target=torch.linalg.vecdot(queries[window, slot].double(), target_rows.double()),
        raised=torch.where(is_target, scores - plain, 0).sum(1),
    )


def past_scores(
    copying: Tensor, queries: Tensor, events: Tensor, items: Tensor, segments: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """By query and slot, [B, L, L] each: plain score, score with the past, and whether the slot stands for its item.

    Of all slots of a user that hold the same item, the first stands for it.
    """
    alike = (items[:, :, None] == items[:, None, :]) & (segments[:, :, None] == segments[:, None, :])
    first = ~alike.tril(-1).any(-1)
    seen = copying > MASKED_COPY_SCORE / 2
    # Scaled by the largest of a query, so that no exponential overflows.
    most = copying.double().amax(-1, keepdim=True)
    added = torch.bmm(torch.where(seen, (copying - most).exp(), 0.0), alike.double())
    plain = torch.bmm(queries.double(), events.double().transpose(1, 2))
    return plain, torch.logaddexp(plain, most + added.log()), seen & first[:, None, :]


def _places(items: Tensor, candidates: np.ndarray | None) -> Tensor:
    """Where catalogue rows stand among the candidates, -1 where they do not."""
    if candidates is None:
        return items
    rows = torch.from_numpy(candidates).to(items.device)
    place = torch.searchsorted(rows, items).clamp(max=len(rows) - 1)
    return torch.where(rows[place] == items, place, -1)
