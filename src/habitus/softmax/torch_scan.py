"""A scan over candidates in plain PyTorch: for devices and types that the Triton kernels do not take.

    R  queries of a batch, padded to a multiple of 16      T  candidates of a tile      d  width      g = 64  a group

All tiles have one shape, the targets' own tile too. Matrix products choose their inner kernel by shape, and equal
rows in products of different shapes can differ in the last bit: a tie would then be lost or a rank flipped. For the
same reason tiles have one layout, and products in float64, which differ by place within a tile, are rounded.
"""

import torch
from torch import Tensor

from habitus.softmax import topk
from habitus.softmax.inputs import MASKED
from habitus.softmax.tiles import Sums

SCAN_GROUP = 64  # scores whose maximum is compared with a threshold at once
_REACH = 60.0  # exp of a score within this distance of its reference neither overflows nor vanishes in float32


class TorchScan:
    """Sums, ranks and top-k of one batch of queries over candidates that come block by block."""

    collects_by_group = True  # whether top-k candidates are collected by way of the groups' maxima

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
        """Ranks where there are target rows, top-k where k is not 0, and the sums of exponentials for losses."""
        self.num_queries = len(queries)
        self.losses = losses
        self.needs_group_max = losses or (k > 0 and self.collects_by_group)
        self.dtype = torch.promote_types(queries.dtype, torch.float32)
        height = -(-len(queries) // 16) * 16
        self.queries = queries.new_zeros(height, queries.shape[1], dtype=self.dtype)
        self.queries[: len(queries)] = queries
        self.columns = columns
        self.scores = self.queries.new_empty(height, columns)
        self.scratch = torch.empty_like(self.scores)
        self.tile = self.queries.new_empty(columns, queries.shape[1])
        self.reference = self.queries.new_zeros(height)  # what is subtracted before exp
        self.started = False
        self.total = self.queries.new_zeros(height, dtype=torch.float64)
        self.dot = torch.zeros_like(self.total)
        self.reached = torch.zeros_like(self.total)
        self.best = topk.empty_topk(height, k, queries.device) if k else None
        self.threshold = self.queries.new_full((height,), -torch.inf)
        self.pending: list[tuple[Tensor, Tensor]] = []
        self.num_pending = 0
        self.target = None if target_rows is None else self._target_scores(target_rows, target_bias)

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the next candidates, whose ids start at `first_id`."""
        for start in range(0, len(block), self.columns):
            rows = block[start : start + self.columns]
            z = self._scores(rows, None if bias is None else bias[start : start + self.columns])
            group_max = z.view(len(z), -1, SCAN_GROUP).amax(-1) if self.needs_group_max else z[:, :0]
            if self.target is not None:
                # Comparisons are written as numbers: adding those up is a fast sum, counting bools is not.
                self.reached += torch.ge(z, self.target[:, None], out=self.scratch).sum(1)
            if self.best is not None:
                self._collect(z, group_max, first_id + start)
            if self.losses:
                self._add_exponentials(z, group_max.amax(1))
            self.started = True

    def sums(self) -> Sums:
        """The sums so far, float64; those of exponentials are zero without losses."""
        M = self.num_queries
        return Sums(self.reference[:M].double(), self.total[:M], self.dot[:M], self.reached[:M].long())

    def topk_keys(self) -> Tensor | None:
        """The keys [M, k] of the best candidates so far, best first."""
        self._merge_pending()
        return None if self.best is None else self.best[: self.num_queries]

    def target_scores(self) -> Tensor | None:
        """The targets' scores [M]."""
        return None if self.target is None else self.target[: self.num_queries]

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
        scores = self.queries.new_full((len(self.queries),), torch.inf)
        for start in range(0, len(rows), self.columns):
            stop = min(start + self.columns, len(rows))
            z = self._scores(rows[start:stop], None if bias is None else bias[start:stop])
            scores[start:stop] = z[start:stop, : stop - start].diagonal()
        return scores

    def _add_exponentials(self, z: Tensor, top: Tensor) -> None:
        """Add a tile to the sums. The reference is 0 while scores are moderate, which saves a pass over the tile."""
        if not self.started:
            self.reference = torch.where(top.abs() > _REACH, top, 0)
        moved = torch.where(top - self.reference > _REACH, top, self.reference)
        fall = (self.reference - moved).double()
        if bool(fall.any()):
            self.dot = (self.dot + self.total * fall) * fall.exp()
            self.total = self.total * fall.exp()
            self.reference = moved
        if bool(self.reference.any()):
            z.sub_(self.reference[:, None])
        p = torch.exp(z, out=self.scratch)
        self.total += p.sum(1)
        self.dot += torch.linalg.vecdot(p, z)

    def _collect(self, z: Tensor, group_max: Tensor, first_id: int) -> None:
        """Collect the scores above their query's threshold."""
        assert self.best is not None
        row, group = (group_max > self.threshold[:, None]).nonzero(as_tuple=True)
        scores = z.view(len(z), -1, SCAN_GROUP)[row, group]
        pair, column = (scores > self.threshold[row, None]).nonzero(as_tuple=True)
        if len(pair) > z.numel() // 4:  # nearly everything does: at the start, or when scores rise with the id
            self._merge_tile(z, first_id)
            return
        ids = first_id + group[pair] * SCAN_GROUP + column
        self.pending.append((row[pair], topk.encode_keys(scores[pair, column].float(), ids)))
        self.num_pending += len(pair)
        if self.num_pending > self.best.numel() // 2:
            self._merge_pending()

    def _merge_tile(self, z: Tensor, first_id: int) -> None:
        """Merge all scores of a tile."""
        self._merge_pending()
        assert self.best is not None
        keys = topk.encode_keys(z.float(), torch.arange(first_id, first_id + z.shape[1], device=z.device))
        self.best = topk.merge_topk(self.best, keys.masked_fill_(z == MASKED, topk.EMPTY))
        self.threshold = topk.thresholds(self.best).to(self.dtype)

    def _merge_pending(self) -> None:
        """Merge what was collected and raise the thresholds."""
        if self.best is None or not self.num_pending:
            return
        rows, keys = (torch.cat(column) for column in zip(*self.pending, strict=True))
        self.best = topk.merge_topk_pairs(self.best, rows, keys)
        self.threshold = topk.thresholds(self.best).to(self.dtype)
        self.pending, self.num_pending = [], 0
