"""Streaming read-outs of scores with the tile kernels: scores live in registers only.

    M  queries of a batch      C  slots of the leaders' buffer      k  leaders kept per query

A scan writes candidates that beat a query's threshold into its slots. Thresholds are those of the candidates before,
so a stretch three times as long as what was seen brings about 3k newcomers; should one query's slots overflow (scores
that rise with the id), the stretch is scanned again in quarters, and a stretch of C candidates always fits.
"""

import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.merging import SHARD_ROWS
from habitus.softmax.tiles import Leaders, Sums, merge_sums, scan, scan_tile, target_scores

# Below every score and above the kernel's masked ones: while places are free, all real candidates lead.
LOWEST = -5.0e29


def slots_for(k: int) -> int:
    """The slots per query: room for three times k newcomers with a wide margin, in whole tiles."""
    return max(1024, -(-8 * k // 256) * 256)


class TileScan:
    """The read-outs of one batch of queries over candidates that come block by block."""

    def __init__(self, queries: Tensor, target_rows: Tensor | None, target_bias: Tensor | None, k: int) -> None:
        self.queries = queries.contiguous()
        self.k = k
        self.running: Sums | None = None
        self.best = topk.no_leaders(len(queries), max(k, 1), queries.device)
        self.seen = 0
        self.stretch = slots_for(k) if k else SHARD_ROWS
        self.wanted = None
        if target_rows is not None:
            self.wanted = target_scores(self.queries, target_rows.contiguous(), target_bias)

    def see(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Take in the next candidates, whose ids start at `first_id`."""
        block = block.contiguous()
        step = scan_tile(block.shape[1]).columns
        start = 0
        while start < len(block):
            length = min(self.stretch, len(block) - start, SHARD_ROWS)
            if length > step:
                length -= length % step  # whole tiles need no masks; what is left comes last
            stop = start + length
            if self._try(block[start:stop], None if bias is None else bias[start:stop], first_id + start):
                start = stop
                self.seen += length
                self.stretch = max(self.stretch, min(3 * self.seen, SHARD_ROWS)) if self.k else SHARD_ROWS
            else:
                self.stretch = max(slots_for(self.k), length // 4)

    def sums(self) -> Sums:
        """The sums so far."""
        assert self.running is not None
        return self.running

    def leaders(self) -> Tensor | None:
        """The keys [M, k] of the best candidates so far, best first."""
        return self.best if self.k else None

    def target_scores(self) -> Tensor | None:
        """The targets' scores [M]."""
        return self.wanted

    def _try(self, part: Tensor, bias: Tensor | None, first_id: int) -> bool:
        """Scan one stretch; False, with nothing changed, if a query's slots overflowed."""
        aside = None
        if self.k:
            slots = slots_for(self.k)
            aside = Leaders(
                topk.thresholds(self.best).clamp_min(LOWEST),
                self.best.new_empty(len(self.queries), slots),
                torch.zeros(len(self.queries), dtype=torch.int32, device=self.queries.device),
            )
        sums = scan(self.queries, part, bias, target_scores=self.wanted, leaders=aside, first_id=first_id)
        if aside is not None:
            fullest = int(aside.fill.max())
            if fullest > slots:
                return False
            self._merge(aside, fullest)
        if self.running is not None:
            sums = merge_sums(Sums(*(torch.stack(pair) for pair in zip(self.running, sums, strict=True))))
        self.running = sums
        return True

    def _merge(self, aside: Leaders, fullest: int) -> None:
        if fullest == 0:
            return
        keys = aside.buffer[:, :fullest]
        empty = torch.arange(fullest, device=keys.device) >= aside.fill[:, None]
        self.best = topk.merge_leaders(self.best, keys.masked_fill(empty, topk.EMPTY))
