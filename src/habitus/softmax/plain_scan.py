"""Streaming read-outs of scores in plain PyTorch: the way on CPUs, and for types that the tile kernels do not take.

    R  queries of a batch, padded to a multiple of 16      T  candidates of a tile      d  width      g = 64  a group

All tiles have one shape, the targets' own tile too. Matrix products choose their inner kernel by shape, and equal
rows in products of different shapes can differ in the last bit: a tie would then be lost or a rank flipped. For the
same reason tiles have one layout, and products in float64, which differ by place within a tile, are rounded.
"""

import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.tiles import Sums

SCAN_GROUP = 64  # scores whose maximum is compared with a threshold at once
REACH = 60.0  # exp of a score within this distance of its reference neither overflows nor vanishes in float32
MASKED = -1.0e30


class PlainScan:
    """The read-outs of one batch of queries over candidates that come block by block."""

    reads_tops = True  # whether leaders are found by way of the groups' maxima

    def __init__(
        self,
        queries: Tensor,
        target_rows: Tensor | None,
        target_bias: Tensor | None,
        k: int,
        columns: int,
        *,
        losses: bool = True,
    ) -> None:
        """Ranks where there are target rows, leaders where k is not 0, and the sums of exponentials for losses."""
        self.num_queries = len(queries)
        self.losses = losses
        self.needs_tops = losses or (k > 0 and self.reads_tops)
        self.dtype = torch.promote_types(queries.dtype, torch.float32)
        height = -(-len(queries) // 16) * 16
        self.queries = queries.new_zeros(height, queries.shape[1], dtype=self.dtype)
        self.queries[: len(queries)] = queries
        self.columns = columns
        self.scores = self.queries.new_empty(height, columns)
        self.spare = torch.empty_like(self.scores)
        self.tile = self.queries.new_empty(columns, queries.shape[1])
        self.reference = self.queries.new_zeros(height)  # what is subtracted before exp
        self.started = False
        self.total = self.queries.new_zeros(height, dtype=torch.float64)
        self.dot = torch.zeros_like(self.total)
        self.reached = torch.zeros_like(self.total)
        self.best = topk.no_leaders(height, k, queries.device) if k else None
        self.threshold = self.queries.new_full((height,), -torch.inf)
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.num_pending = 0
        self.wanted = None if target_rows is None else self._target_scores(target_rows, target_bias)

    def see(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Take in the next candidates, whose ids start at `first_id`."""
        for start in range(0, len(block), self.columns):
            rows = block[start : start + self.columns]
            z = self._scores(rows, None if bias is None else bias[start : start + self.columns])
            tops = z.view(len(z), -1, SCAN_GROUP).amax(-1) if self.needs_tops else z[:, :0]
            if self.wanted is not None:
                # Comparisons are written as numbers: adding those up is a fast sum, counting bools is not.
                self.reached += torch.ge(z, self.wanted[:, None], out=self.spare).sum(1)
            if self.best is not None:
                self._find_leaders(z, tops, first_id + start)
            if self.losses:
                self._add_exponentials(z, tops.amax(1))
            self.started = True

    def sums(self) -> Sums:
        """The sums so far, float64; those of exponentials are zero where no losses were wanted."""
        M = self.num_queries
        return Sums(self.reference[:M].double(), self.total[:M], self.dot[:M], self.reached[:M].long())

    def leaders(self) -> Tensor | None:
        """The keys [M, k] of the best candidates so far, best first."""
        self._settle()
        return None if self.best is None else self.best[: self.num_queries]

    def target_scores(self) -> Tensor | None:
        """The targets' scores [M]."""
        return None if self.wanted is None else self.wanted[: self.num_queries]

    def _scores(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The tile of scores with these candidates, masked where the tile is wider than they are many."""
        count = len(rows)
        if count < self.columns or rows.dtype != self.dtype or rows.stride(1) != 1:
            self.tile[:count] = rows
            self.tile[count:] = 0
            rows = self.tile
        z = torch.mm(self.queries, rows.T, out=self.scores)
        if bias is not None:
            z[:, :count] += bias
        if z.dtype == torch.float64:
            z.copy_(z.float())
        z[:, count:] = MASKED
        return z

    def _target_scores(self, rows: Tensor, bias: Tensor | None) -> Tensor:
        """The scores of each query with its own row: diagonals of tiles of the usual shape."""
        wanted = self.queries.new_full((len(self.queries),), torch.inf)
        for start in range(0, len(rows), self.columns):
            stop = min(start + self.columns, len(rows))
            z = self._scores(rows[start:stop], None if bias is None else bias[start:stop])
            wanted[start:stop] = z[start:stop, : stop - start].diagonal()
        return wanted

    def _add_exponentials(self, z: Tensor, top: Tensor) -> None:
        """Add a tile to the sums. The reference is 0 while scores are moderate, which saves a pass over the tile."""
        if not self.started:
            self.reference = torch.where(top.abs() > REACH, top, 0)
        moved = torch.where(top - self.reference > REACH, top, self.reference)
        fall = (self.reference - moved).double()
        if bool(fall.any()):
            self.dot = (self.dot + self.total * fall) * fall.exp()
            self.total = self.total * fall.exp()
            self.reference = moved
        if bool(self.reference.any()):
            z.sub_(self.reference[:, None])
        p = torch.exp(z, out=self.spare)
        self.total += p.sum(1)
        self.dot += torch.linalg.vecdot(p, z)

    def _find_leaders(self, z: Tensor, tops: Tensor, first_id: int) -> None:
        """Put aside the scores above their query's threshold."""
        assert self.best is not None
        row, group = (tops > self.threshold[:, None]).nonzero(as_tuple=True)
        scores = z.view(len(z), -1, SCAN_GROUP)[row, group]
        pair, column = (scores > self.threshold[row, None]).nonzero(as_tuple=True)
        if len(pair) > z.numel() // 4:  # nearly everything leads: at the start, or when scores rise with the id
            self._take_all(z, first_id)
            return
        ids = first_id + group[pair] * SCAN_GROUP + column
        self.pending.append((row[pair], topk.keys_of(scores[pair, column].float(), ids)))
        self.num_pending += len(pair)
        if self.num_pending > self.best.numel() // 2:
            self._settle()

    def _take_all(self, z: Tensor, first_id: int) -> None:
        """Merge a whole tile."""
        self._settle()
        assert self.best is not None
        keys = topk.keys_of(z.float(), torch.arange(first_id, first_id + z.shape[1], device=z.device))
        self.best = topk.merge_leaders(self.best, keys.masked_fill_(z == MASKED, topk.EMPTY))
        self.threshold = topk.thresholds(self.best).to(self.dtype)

    def _settle(self) -> None:
        """Merge what was put aside and raise the thresholds."""
        if self.best is None or not self.num_pending:
            return
        rows, keys = (torch.cat(column) for column in zip(*self.pending, strict=True))
        self.best = topk.merge_loose(self.best, rows, keys)
        self.threshold = topk.thresholds(self.best).to(self.dtype)
        self.pending, self.num_pending = [], 0
