"""What copying adds to the scores of a scan over candidates: exact, and without a second scan.

Copying changes the scores of the items in a query's past and of no others (`habitus.model.copying`). So the sums,
counts and best items are taken of the scores without copying first, with the target's score with copying as the one to
reach, and are then corrected for the items of the past alone. All in float64.

    B  windows      L  slots      Q  queries      h  joint_dim      k  items per query
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
# A smaller gain counts as none: in float32, where scores are compared, it might not show.
_NO_GAIN = 1e-4
_ROWS = 512  # queries at a time
_PAIRS = 1 << 22  # pairs of slots that are held at a time


@dataclass(frozen=True)
class PastScores:
    """The scores of the items in each query's past: L slots of its window, of which those with a place hold an item."""

    places: Tensor  # int64 [Q, L]: of the item among the candidates; -1 where the slot does not count
    plain: Tensor  # float64 [Q, L]: the item's score without copying
    scores: Tensor  # float64 [Q, L]: with copying
    is_target: Tensor  # bool [Q, L]
    target: Tensor  # float64 [Q]: the target's score without copying
    target_gain: Tensor  # float64 [Q]: what copying adds to it

    @property
    def target_bias(self) -> Tensor:
        """What a scan adds to the targets' scores before it counts who reaches them: float32 [Q]."""
        return torch.where(self.target_gain < _NO_GAIN, 0, self.target_gain).float()

    def adjust_sums(self, sums: Sums) -> Sums:
        """The sums with copying, given those without it but with the targets' gain in the score to reach."""
        rows = [slice(at, at + _ROWS) for at in range(0, len(self.places), _ROWS)]
        parts = [self._rows(some)._adjust_sums(Sums(*(part[some] for part in sums))) for some in rows]
        return Sums(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def adjust_topk(self, best: Tensor) -> Tensor:
        """The best candidates with copying as keys [Q, k], given those without it."""
        rows = [slice(at, at + _ROWS) for at in range(0, len(best), _ROWS)]
        return torch.cat([self._rows(some)._adjust_topk(best[some]) for some in rows])

    def _rows(self, some: slice) -> "PastScores":
        """The same of some queries: a few at a time keep the memory small."""
        return PastScores(*(getattr(self, name)[some] for name in self.__dataclass_fields__))

    def _adjust_sums(self, sums: Sums) -> Sums:
        counts = self.places >= 0
        before, after = (torch.where(counts, part - sums.top[:, None], 0) for part in (self.plain, self.scores))
        weight_before, weight = (torch.where(counts, part.exp(), 0) for part in (before, after))
        to_reach = (self.target + self.target_bias)[:, None] - _SAME
        # Reached already: others by their score without copying, and a target without gain.
        reached_before = torch.where(self.is_target, self.target_gain[:, None] < _NO_GAIN, self.plain >= to_reach)
        reached = self.is_target | (self.scores >= to_reach)
        return Sums(
            sums.top,
            sums.total + (weight - weight_before).sum(1),
            sums.dot + (weight * after - weight_before * before).sum(1),
            sums.reached + (counts & reached).sum(1) - (counts & reached_before).sum(1),
        )

    def _adjust_topk(self, best: Tensor) -> Tensor:
        with_gain = torch.where(self.scores - self.plain < _NO_GAIN, -1, self.places)
        keys = topk.encode_keys(self.scores.float(), with_gain.clamp(min=0))
        keys = torch.where(with_gain >= 0, keys, topk.EMPTY)
        again = (topk.decode_ids(best)[:, :, None] == with_gain[:, None]).any(-1)
        return topk.merge_topk(torch.where(again, topk.EMPTY, best), keys)


@torch.no_grad()
def score_past(
    batch: QueryBatch,
    copy_scores: Tensor,
    queries: Tensor,
    events: Tensor,
    target_rows: Tensor,
    candidates: np.ndarray | None,
    temperature: float = 1.0,
) -> PastScores:
    """The past scores of a batch's queries, from copy scores [B, L, L], queries and vectors of the events [B, L, h].

    Vectors, those of the targets [Q, h] too, come as the scan takes them: queries divided by `temperature`, by which
    scores with copying are divided here. `candidates` are sorted catalogue rows, or None for the full catalogue.
    """
    device = queries.device
    window, slot = (torch.from_numpy(part).to(device) for part in (batch.windows, batch.slots))
    items = torch.from_numpy(batch.batch.items).to(device)
    segments = torch.from_numpy(batch.batch.segments.astype(np.int64)).to(device)
    step = max(1, _PAIRS // items.shape[1] ** 2)
    parts = []
    for at in range(0, len(items), step):
        chosen = (window >= at) & (window < at + step)  # queries come window by window
        inputs = (part[at : at + step] for part in (copy_scores, queries, events, items, segments))
        scored = _score_windows(*inputs, temperature=temperature)
        parts.append([pairs[window[chosen] - at, slot[chosen]] for pairs in scored])
    plain, scores, counts = (torch.cat(column) for column in zip(*parts, strict=True))
    places = _places(items, candidates)[window]
    counts = counts & (places >= 0)
    is_target = counts & (items[window] == torch.from_numpy(batch.targets).to(device)[:, None])
    return PastScores(
        places=torch.where(counts, places, -1),
        plain=plain,
        scores=scores,
        is_target=is_target,
        target=torch.linalg.vecdot(queries[window, slot].double(), target_rows.double()),
        target_gain=torch.where(is_target, scores - plain, 0).sum(1),
    )


def _score_windows(
    copy_scores: Tensor, queries: Tensor, events: Tensor, items: Tensor, segments: Tensor, *, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """By query and slot, [B, L, L] each: score without and with copying, and whether the slot counts.

    Of all slots of a user that hold the same item, the first counts for it.
    """
    alike = (items[:, :, None] == items[:, None, :]) & (segments[:, :, None] == segments[:, None, :])
    first = ~alike.tril(-1).any(-1)
    visible = copy_scores > MASKED_COPY_SCORE / 2
    # Scaled by the largest of a query, so that no exponential overflows.
    largest = copy_scores.double().amax(-1, keepdim=True)
    mass = torch.bmm(torch.where(visible, (copy_scores - largest).exp(), 0.0), alike.double())
    plain = torch.bmm(queries.double(), events.double().transpose(1, 2))
    scores = torch.logaddexp(plain * temperature, largest + mass.log()) / temperature
    return plain, scores, visible & first[:, None, :]


def _places(items: Tensor, candidates: np.ndarray | None) -> Tensor:
    """Where catalogue rows stand among the candidates, -1 where they do not."""
    if candidates is None:
        return items
    rows = torch.from_numpy(candidates).to(items.device)
    place = torch.searchsorted(rows, items).clamp(max=len(rows) - 1)
    return torch.where(rows[place] == items, place, -1)
