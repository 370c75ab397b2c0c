"""A scan over candidates with the Triton kernels: scores live in registers only.

    M  queries of a batch      C  slots of the top-k buffer      k  candidates kept per query

A scan writes candidates that beat a query's threshold into its slots. Thresholds are those of the candidates before,
so a range three times as long as all before it brings about 3k candidates; should one query's slots overflow (scores
that rise with the id), the range is scanned again in quarters, and a range of C candidates always fits.
"""

import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.merging import SHARD_ROWS
from habitus.softmax.tiles import Sums, TopKBuffer, merge_sums, scan, scan_tile, target_scores

# Below every score and above the kernel's masked ones: with fewer than k so far, every real candidate counts.
_LOWEST = -5.0e29


def buffer_slots(k: int) -> int:
    """The slots per query: room for three times k candidates with a wide margin, in full tiles."""
    return max(1024, -(-8 * k // 256) * 256)


class TritonScan:
    """Sums, ranks and top-k of one batch of queries over candidates that come block by block."""

    def __init__(self, queries: Tensor, target_rows: Tensor | None, target_bias: Tensor | None, k: int) -> None:
        self.queries = queries.contiguous()
        self.k = k
        self.running: Sums | None = None
        self.best = topk.empty_topk(len(queries), max(k, 1), queries.device)
        self.num_scanned = 0
        self.range_rows = buffer_slots(k) if k else SHARD_ROWS
        self.target = None
        if target_rows is not None:
            self.target = target_scores(self.queries, target_rows.contiguous(), target_bias)

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the next candidates, whose ids start at `first_id`."""
        block = block.contiguous()
        step = scan_tile(block.shape[1]).columns
        start = 0
        while start < len(block):
            length = min(self.range_rows, len(block) - start, SHARD_ROWS)
            if length > step:
                length -= length % step  # full tiles need no masks; what is left comes last
            stop = start + length
            if self._scan_range(block[start:stop], None if bias is None else bias[start:stop], first_id + start):
                start = stop
                self.num_scanned += length
                self.range_rows = max(self.range_rows, min(3 * self.num_scanned, SHARD_ROWS)) if self.k else SHARD_ROWS
            else:
                self.range_rows = max(buffer_slots(self.k), length // 4)

    def sums(self) -> Sums:
        """The sums so far."""
        assert self.running is not None
        return self.running

    def topk_keys(self) -> Tensor | None:
        """The keys [M, k] of the best candidates so far, best first."""
        return self.best if self.k else None

    def target_scores(self) -> Tensor | None:
        """The targets' scores [M]."""
        return self.target

    def _scan_range(self, part: Tensor, bias: Tensor | None, first_id: int) -> bool:
        """Scan one range; False, with nothing changed, if a query's slots overflowed."""
        buffer = None
        if self.k:
            slots = buffer_slots(self.k)
            buffer = TopKBuffer(
                topk.thresholds(self.best).clamp_min(_LOWEST),
                self.best.new_empty(len(self.queries), slots),
                torch.zeros(len(self.queries), dtype=torch.int32, device=self.queries.device),
            )
        sums = scan(self.queries, part, bias, target_scores=self.target, topk_buffer=buffer, first_id=first_id)
        if buffer is not None:
            fullest = int(buffer.fill.max())
            if fullest > slots:
                return False
            self._merge(buffer, fullest)
        if self.running is not None:
            sums = merge_sums(Sums(*(torch.stack(pair) for pair in zip(self.running, sums, strict=True))))
        self.running = sums
        return True

    def _merge(self, buffer: TopKBuffer, fullest: int) -> None:
        if fullest == 0:
            return
        keys = buffer.keys[:, :fullest]
        empty = torch.arange(fullest, device=keys.device) >= buffer.fill[:, None]
        self.best = topk.merge_topk(self.best, keys.masked_fill(empty, topk.EMPTY))
