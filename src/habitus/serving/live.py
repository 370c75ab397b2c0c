"""The items that may be recommended now: the trained catalogue and what was added since, less what was withdrawn.

V  rows of the catalogue      n  rows of run-time items, after them
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from habitus.serving.ids import Key
from habitus.serving.scan import HIDDEN
from habitus.serving.served_catalogue import ServedCatalogue

# A catalogue on the processor is held as float32 up to here; beyond, it is read as stored and converted on the way.
RESIDENT_BYTES = 8 << 30


class LiveItems:
    """Rows 0..V-1 are the catalogue's, V.. those of run-time items. Not for several threads at once."""

    def __init__(self, catalogue: ServedCatalogue, device: torch.device) -> None:
        self.catalogue = catalogue
        self.device = device
        cache = catalogue.cache
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.dtype = cache.dtype if device.type == "cuda" else torch.float32
        self.base = _resident(cache.pieces(0, catalogue.num_items), self.dtype, device)
        self.num_base = catalogue.num_items
        self.num_live = self.num_base
        self.extra = torch.empty(0, cache.manifest.joint_dim, dtype=self.dtype, device=device)
        self.num_extra = 0
        self.keys: list[Key] = []  # of the run-time rows
        self.fields: list[Mapping[str, Any]] = []  # categories of the run-time rows, as texts
        self.row_of: dict[Key, int] = {}  # run-time items, withdrawn ones too
        self.hidden: set[int] = set()  # rows that must not be found
        self._bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.num_base + self.num_extra

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """The row of each item's newest vector, withdrawn or not; -1 where the item is unknown."""
        found = self.catalogue.lookup.rows_of(keys)
        if self.row_of:
            found = [self.row_of.get(key, row) for key, row in zip(keys, found, strict=True)]
        return found

    def newest_rows(self) -> dict[int, int]:
        """Catalogue row -> row of its newest vector, for trained items that were changed."""
        keys = list(self.row_of)
        base = self.catalogue.lookup.rows_of(keys) if keys else []
        return {row: self.row_of[key] for key, row in zip(keys, base, strict=True) if row >= 0}

    def vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of rows in the type of the computation, as they are among the candidates."""
        flat = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        result = torch.empty(len(rows), self.extra.shape[1], dtype=self.dtype, device=self.device)
        first = 0
        for piece in (*self.base, self.extra[: self.num_extra]):
            here = ((flat >= first) & (flat < first + len(piece))).nonzero().flatten()
            if len(here):
                wanted = (flat[here] - first).to(piece.device)
                result[here] = piece[wanted].to(self.device, self.dtype)
            first += len(piece)
        return result

    def pieces(self) -> list[Tensor]:
        """All rows as one table."""
        return [*self.base, self.extra[: self.num_extra]] if self.num_extra else list(self.base)

    def bias(self) -> Tensor | None:
        """What hides withdrawn and replaced rows in a search; None where nothing is hidden."""
        if not self.hidden:
            return None
        if self._bias is None or len(self._bias) != self.num_rows:
            self._bias = torch.zeros(self.num_rows, device=self.device)
            self._bias[torch.tensor(sorted(self.hidden), device=self.device)] = HIDDEN
        return self._bias

    def put(self, key: Key, categories: Mapping[str, Any], vector: Tensor) -> None:
        """Add an item, or give it another vector."""
        row = self.row_of.get(key, -1)
        if row < 0:
            base = self.catalogue.lookup.rows_of([key])[0]
            row = self._append(key)
            if base >= 0:
                self._hide(base)
            self.num_live += 1
        elif row in self.hidden:
            self.hidden.discard(row)
            self.num_live += 1
            self._bias = None
        place = row - self.num_base
        # Rounded as the catalogue's vectors are, so that an item's score does not depend on where it stands.
        self.extra[place] = vector.to(self.catalogue.cache.dtype).to(self.device, self.dtype)
        self.fields[place] = categories

    def withdraw(self, key: Key) -> bool:
        """Stop recommending an item; False where it was not being recommended."""
        row = self.rows_of([key])[0]
        if row < 0 or row in self.hidden:
            return False
        self._hide(row)
        return True

    def is_live(self, key: Key) -> bool:
        """Whether an item may be recommended now."""
        row = self.rows_of([key])[0]
        return row >= 0 and row not in self.hidden

    def ids_at(self, rows: Iterable[int]) -> list[Any]:
        """The raw ids of rows."""
        rows = list(rows)
        base = [row for row in rows if row < self.num_base]
        named = dict(zip(base, self.catalogue.ids_at(base), strict=True)) if base else {}
        kind = self.catalogue.kind
        return [named[row] if row < self.num_base else kind.shown(self.keys[row - self.num_base]) for row in rows]

    def _append(self, key: Key) -> int:
        if self.num_extra == len(self.extra):
            grown = self.extra.new_empty(max(64, 2 * len(self.extra)), self.extra.shape[1])
            grown[: self.num_extra] = self.extra[: self.num_extra]
            self.extra = grown
        row = self.num_base + self.num_extra
        self.num_extra += 1
        self.keys.append(key)
        self.fields.append({})
        self.row_of[key] = row
        return row

    def _hide(self, row: int) -> None:
        if row not in self.hidden:
            self.hidden.add(row)
            self.num_live -= 1
            self._bias = None


def _resident(pieces: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The catalogue where it is searched fastest and still fits: one table on the device, or the files as they are."""
    needed = sum(piece.numel() for piece in pieces) * dtype.itemsize
    if device.type == "cuda":
        fits = needed < torch.cuda.mem_get_info(device)[0] * 0.8
    else:
        fits = needed <= RESIDENT_BYTES
    if not fits:
        return pieces
    whole = torch.empty(sum(map(len, pieces)), pieces[0].shape[1], dtype=dtype, device=device)
    at = 0
    for piece in pieces:
        whole[at : at + len(piece)] = piece
        at += len(piece)
    return [whole]
