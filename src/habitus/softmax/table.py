"""A candidate table that may live on the device, in host memory, or in files larger than either.

    V  candidates      d  width of a vector

Rows come in blocks. Blocks from the host are copied to the device while the one before is being used, through pinned
memory where the device is a GPU; a block from a mapped file is read from disk by that copy and by nothing else.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from habitus.errors import ModelError

Rows = Tensor | np.ndarray
Candidates = Rows | Sequence[Rows]  # several pieces are one table, in order


class CandidateTable:
    """Rows of candidates behind one indexing, wherever they are."""

    def __init__(self, candidates: Candidates, num_valid: int | None = None) -> None:
        pieces = [candidates] if isinstance(candidates, Tensor | np.ndarray) else list(candidates)
        if not pieces or any(piece.ndim != 2 for piece in pieces):
            raise ModelError(
                f"Candidates are {[tuple(piece.shape) for piece in pieces]}.", expected="[V, d], or pieces of it"
            )
        kinds = {(piece.shape[1], _dtype(piece)) for piece in pieces}
        if len(kinds) > 1:
            raise ModelError(f"Pieces of the candidate table differ in width or type: {sorted(map(str, kinds))}.")
        self.pieces = [piece for piece in pieces if len(piece)]
        self.width, self.dtype = kinds.pop()
        rows = sum(len(piece) for piece in self.pieces)
        if rows == 0 or self.width == 0:
            raise ModelError(
                "There are no candidates to score.", next_step="Check that the candidate table was filled."
            )
        if num_valid is not None and not 1 <= num_valid <= rows:
            raise ModelError(f"num_valid is {num_valid}.", expected=f"1 to {rows}, the rows of the candidate table")
        self.num_rows = rows if num_valid is None else num_valid

    def __len__(self) -> int:
        return self.num_rows

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows start..stop as one tensor where they live; a view if one piece holds them all."""
        parts, offset = [], 0
        for piece in self.pieces:
            low, high = max(start - offset, 0), min(stop - offset, len(piece))
            if low < high:
                parts.append(_tensor(piece[low:high]))
            offset += len(piece)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def gather(self, positions: Tensor, device: torch.device) -> Tensor:
        """The rows at some positions, on the device."""
        result = torch.empty(len(positions), self.width, dtype=self.dtype, device=device)
        offset = 0
        for piece in self.pieces:
            here = ((positions >= offset) & (positions < offset + len(piece))).nonzero().flatten()
            if len(here):
                local = positions[here] - offset
                if isinstance(piece, Tensor):
                    rows = piece[local.to(piece.device)]
                else:
                    rows = torch.from_numpy(piece[local.cpu().numpy()])
                result[here.to(device)] = rows.to(device)
            offset += len(piece)
        return result

    def blocks(self, rows: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        """(first position, rows on the device) of consecutive blocks; a table already there is one block."""
        here = all(isinstance(piece, Tensor) and piece.device.type == device.type for piece in self.pieces)
        if here and len(self.pieces) == 1:
            yield 0, self.rows(0, self.num_rows)
        elif here or device.type == "cpu":
            for start in range(0, self.num_rows, rows):
                yield start, self.rows(start, min(start + rows, self.num_rows))
        else:
            yield from self._prefetched(rows, device)

    def _prefetched(self, rows: int, device: torch.device) -> Iterator[tuple[int, Tensor]]:
        starts = range(0, self.num_rows, rows)
        height = min(rows, self.num_rows)
        staging = [torch.empty(height, self.width, dtype=self.dtype, pin_memory=True) for _ in range(2)]
        side = torch.cuda.Stream(device)

        def fetch(number: int) -> tuple[Tensor, torch.cuda.Event]:
            start = starts[number]
            stop = min(start + rows, self.num_rows)
            pinned = staging[number % 2][: stop - start]
            pinned.copy_(self.rows(start, stop))
            with torch.cuda.stream(side):
                block = pinned.to(device, non_blocking=True)
                done = torch.cuda.Event()
                done.record(side)
            return block, done

        with ThreadPoolExecutor(1) as reader:
            pending = reader.submit(fetch, 0)
            for number, start in enumerate(starts):
                block, done = pending.result()
                # The copy must be over before its staging buffer is filled again, two blocks on.
                done.synchronize()
                if number + 1 < len(starts):
                    pending = reader.submit(fetch, number + 1)
                torch.cuda.current_stream(device).wait_event(done)
                block.record_stream(torch.cuda.current_stream(device))
                yield start, block


def _dtype(piece: Rows) -> torch.dtype:
    if isinstance(piece, Tensor):
        return piece.dtype
    try:
        return torch.from_numpy(np.empty(0, piece.dtype)).dtype
    except (TypeError, ValueError):
        raise ModelError(
            f"Candidates of numpy type {piece.dtype} cannot be scored.",
            expected="float16, float32 or float64 in the machine's byte order",
        ) from None


def _tensor(piece: Rows) -> Tensor:
    """A tensor of the piece; arrays that may not be written to or run backwards are copied, since no tensor does."""
    if isinstance(piece, Tensor):
        return piece
    shared = piece.flags.writeable and min(piece.strides) >= 0
    return torch.from_numpy(piece if shared else np.array(piece, order="C"))
