"""One scan over candidates: sums of exponentials, ranks of the targets and the top-k, on any device.

    M  queries      V  candidates      d  width of a vector      k  candidates kept per query

Evaluation, serving and `habitus.softmax.ranking` all scan this way. Queries come in batches small enough for the memory
allowed, each scanned by what is fastest where they are; the candidates are read once.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from habitus.errors import ModelError
from habitus.softmax.backend import SoftmaxBackend, refusal_reason
from habitus.softmax.cpu_scan import FEW_QUERIES, CpuScan, FewQueriesScan
from habitus.softmax.inputs import check_scale, max_abs
from habitus.softmax.table import CandidateTable
from habitus.softmax.tiles import Sums
from habitus.softmax.torch_scan import SCAN_GROUP, TorchScan
from habitus.softmax.triton_scan import TritonScan, buffer_slots

MEMORY_BYTES = 512 << 20


class ScanTile(NamedTuple):
    """Queries and candidates of one matrix product, where the Triton kernels are not used."""

    rows: int
    columns: int


# benchmarks/evaluate.py on one core of an EPYC: 1.33 s with this tile, 1.49 s with 256 by 2,048.
_TILE = ScanTile(1024, 1024)


class CandidateScan:
    """Sums, ranks and top-k of queries over candidates that come block by block."""

    def __init__(
        self,
        queries: Tensor,
        k: int,
        *,
        target_rows: Tensor | None = None,
        target_bias: Tensor | None = None,
        losses: bool = True,
        tile: ScanTile = _TILE,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Ranks where there are target rows [M, d], top-k where k is not 0, and the sums of exponentials for losses.

        `target_bias` [M] is added to the targets' scores. Working memory stays near `memory_bytes`.
        """
        self.queries = queries
        self.k = k
        self.memory_bytes = memory_bytes
        self.started = False
        with torch.autocast(queries.device.type, enabled=False):
            self.batches = _start_batches(queries, k, target_rows, target_bias, losses, tile, memory_bytes)

    @classmethod
    def for_search(cls, queries: Tensor, k: int) -> "CandidateScan":
        """A scan for the top-k and the log-sum-exp of few queries at a time, without targets."""
        on_cpu = queries.device.type == "cpu"
        columns = 1 << 14 if len(queries) <= 64 or not on_cpu else 1 << 12
        return cls(queries, k, tile=ScanTile(max(1, len(queries)), columns))

    def scan_table(
        self,
        table: CandidateTable,
        *,
        bias: Tensor | None = None,
        first_id: int = 0,
        block_rows: int | None = None,
        check: bool = True,
    ) -> None:
        """Scan all rows of a table of any type, whose ids start at `first_id`; `bias` [V] is added to the scores.

        `check` refuses rows that are not finite or could overflow, which takes one more pass over them. `block_rows`
        limits the rows that are scanned at a time; by default it follows from the memory allowed.
        """
        rows = block_rows or max(4096, self.memory_bytes // 4 // (table.width * self.queries.element_size()))
        max_query = max_abs(self.queries) if check else 0.0
        max_bias = max_abs(bias) if check and bias is not None else 0.0
        with torch.autocast(self.queries.device.type, enabled=False):
            for start, block in table.blocks(rows, self.queries.device):
                if check:
                    max_candidate = max_abs(block)
                    _check_finite(max_candidate, first_id + start, first_id + start + len(block))
                    check_scale(max_query, max_candidate, table.width, max_bias)
                # A table on the device comes as one block; converting it piece by piece keeps the memory bounded.
                step = len(block) if block_rows is None and block.dtype == self.queries.dtype else rows
                for at in range(0, len(block), step):
                    part = block[at : at + step].to(self.queries.dtype)
                    part_bias = None if bias is None else bias[start + at : start + at + len(part)]
                    self.update(part, part_bias, first_id + start + at)

    def update(self, block: Tensor, bias: Tensor | None, first_id: int) -> None:
        """Scan the next candidates, of the queries' type and device, whose ids start at `first_id`."""
        self.started = True
        for batch in self.batches:
            batch.update(block, bias, first_id)

    def sums(self) -> Sums:
        """The sums so far; those that were not requested are zero."""
        parts = [batch.sums() for batch in self.batches]
        return Sums(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def lse(self) -> Tensor:
        """The log-sum-exp of the scores so far [M], float64."""
        sums = self.sums()
        return sums.top.double() + sums.total.double().log()

    def target_scores(self) -> Tensor:
        """The targets' scores [M]."""
        parts = [batch.target_scores() for batch in self.batches]
        return torch.cat([part for part in parts if part is not None])

    def topk_keys(self) -> Tensor:
        """The keys [M, k] of the best candidates so far, best first."""
        parts = [batch.topk_keys() for batch in self.batches]
        if self.k == 0:
            return torch.empty(len(self.queries), 0, dtype=torch.int64, device=self.queries.device)
        return torch.cat([part for part in parts if part is not None])


def _start_batches(
    queries: Tensor,
    k: int,
    target_rows: Tensor | None,
    target_bias: Tensor | None,
    losses: bool,
    tile: ScanTile,
    memory_bytes: int,
) -> list[TorchScan | TritonScan | FewQueriesScan]:
    """A fresh scan per batch of queries. All batches but the last have one size, which depends on no block."""
    on_cpu = queries.device.type == "cpu"
    if on_cpu and len(queries) <= tile.rows <= FEW_QUERIES and target_rows is None and queries.dtype == torch.float32:
        return [FewQueriesScan(queries, k)]
    triton = not refusal_reason(SoftmaxBackend.TRITON, queries.device, queries.dtype, queries.shape[1], False)
    rows = _triton_rows(len(queries), k, memory_bytes) if triton else tile.rows
    columns = _columns(queries, tile, memory_bytes)
    batches: list[TorchScan | TritonScan | FewQueriesScan] = []
    first_on_cpu: CpuScan | None = None
    for at in range(0, len(queries), rows):
        part = queries[at : at + rows]
        part_rows = None if target_rows is None else target_rows[at : at + rows]
        part_bias = None if target_bias is None else target_bias[at : at + rows]
        if triton:
            batches.append(TritonScan(part, part_rows, part_bias, k))
        elif on_cpu:
            scan = CpuScan(part, part_rows, part_bias, k, columns, losses=losses)
            if first_on_cpu is None:
                first_on_cpu = scan
            else:
                scan.share_scratch(first_on_cpu)
            batches.append(scan)
        else:
            batches.append(TorchScan(part, part_rows, part_bias, k, columns, losses=losses))
    return batches


def _triton_rows(num_queries: int, k: int, memory_bytes: int) -> int:
    """Queries per batch: as many as the memory of their top-k allows, in batches of about one size."""
    most = max(128, memory_bytes // 2 // (8 * (2 * buffer_slots(k) + 2 * k)) // 128 * 128) if k else num_queries
    rows = -(-num_queries // -(-num_queries // most))
    return -(-rows // 128) * 128


def _columns(queries: Tensor, tile: ScanTile, memory_bytes: int) -> int:
    """Candidates per tile: those of `tile`, or fewer where memory is scarce."""
    column_bytes = 3 * tile.rows * torch.promote_types(queries.dtype, torch.float32).itemsize
    return max(4 * SCAN_GROUP, min(tile.columns, memory_bytes // column_bytes) // SCAN_GROUP * SCAN_GROUP)


def _check_finite(max_candidate: float, first: int, last: int) -> None:
    if not math.isfinite(max_candidate):
        raise ModelError(
            f"The candidates hold NaN or infinity between rows {first} and {last}.",
            next_step="Check the run that embedded them, or the embedding cache; habitus embed makes it again.",
        )
