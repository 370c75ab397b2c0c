"""What may be recommended now: the trained catalogue and the items added since, minus those withdrawn.

V  rows of the trained catalogue      n  rows of items added at run time, after them
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from habitus.serving.catalogue import TrainedCatalogue, matches, plain_texts
from habitus.serving.schemas import RequestError
from habitus.serving.values import Key

# Added to the score of a candidate that must not be found: far below every score, above the scans' own masks.
HIDDEN = -1.0e28
# On a CPU the catalogue is held as float32 up to this size; above it, it is read as stored and converted on the way.
_RESIDENT_BYTES = 8 << 30
_COUNTED_ROWS = 1 << 16  # looked at a time: popular items that pass come early


class CandidateItems:
    """Rows 0 to V-1 are the trained catalogue, the next n the items added at run time. Not safe for several threads."""

    def __init__(self, catalogue: TrainedCatalogue, device: torch.device) -> None:
        self.catalogue = catalogue
        self.device = device
        cache = catalogue.cache
        # Scores accumulate in float32 either way; on CUDA the fast kernels take half-precision operands.
        self.dtype = cache.dtype if device.type == "cuda" else torch.float32
        self.trained_vectors = _load_resident(cache.pieces(0, catalogue.num_items), self.dtype, device)
        self.num_trained = catalogue.num_items
        self.num_active = self.num_trained - len(catalogue.context_rows)
        self.added_vectors = torch.empty(0, cache.manifest.joint_dim, dtype=self.dtype, device=device)
        self.num_added = 0
        self.added_keys: list[Key] = []  # by row
        self.added_origins: list[int] = []  # by row: the trained row that it replaces, -1 of a new item
        self.added_categories: list[Mapping[str, Any]] = []  # by row, as texts
        self.added_display: list[dict[str, str]] = []  # by row
        self.added_rows: dict[Key, int] = {}  # of withdrawn items too
        self.hidden: set[int] = set(catalogue.context_rows)  # and rows that are withdrawn or replaced
        self._bias: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.num_trained + self.num_added

    def rows_of(self, keys: Sequence[Key]) -> list[int]:
        """The row of each item's newest vector, withdrawn or not; -1 where the item is unknown."""
        rows = self.catalogue.lookup.rows_of(keys)
        if self.added_rows:
            rows = [self.added_rows.get(key, row) for key, row in zip(keys, rows, strict=True)]
        return rows

    def newest_rows(self) -> dict[int, int]:
        """Catalogue row -> row of its newest vector, for trained items that were changed."""
        keys = list(self.added_rows)
        trained = self.catalogue.lookup.rows_of(keys) if keys else []
        return {row: self.added_rows[key] for key, row in zip(keys, trained, strict=True) if row >= 0}

    def vectors(self, rows: np.ndarray) -> Tensor:
        """The vectors of rows, in the type that scores are computed in."""
        flat = torch.from_numpy(np.ascontiguousarray(rows)).to(self.device)
        result = torch.empty(len(rows), self.added_vectors.shape[1], dtype=self.dtype, device=self.device)
        first = 0
        for piece in (*self.trained_vectors, self.added_vectors[: self.num_added]):
            here = ((flat >= first) & (flat < first + len(piece))).nonzero().flatten()
            if len(here):
                places = (flat[here] - first).to(piece.device)
                result[here] = piece[places].to(self.device, self.dtype)
            first += len(piece)
        return result

    def pieces(self) -> list[Tensor]:
        """All rows, as the parts of one table."""
        added = [self.added_vectors[: self.num_added]] if self.num_added else []
        return [*self.trained_vectors, *added]

    def bias(self) -> Tensor | None:
        """What to add to scores so that hidden rows are not returned; None if there are none."""
        if not self.hidden:
            return None
        if self._bias is None or len(self._bias) != self.num_rows:
            self._bias = torch.zeros(self.num_rows, device=self.device)
            self._bias[torch.tensor(sorted(self.hidden), device=self.device)] = HIDDEN
        return self._bias

    def put(self, key: Key, categories: Mapping[str, Any], display: dict[str, str], vector: Tensor) -> None:
        """Add an item, or give it another vector."""
        row = self.added_rows.get(key, -1)
        if row < 0:
            trained = self.catalogue.lookup.rows_of([key])[0]
            row = self._append(key, trained)
            if trained >= 0:
                self._hide(trained)
            self.num_active += 1
        elif row in self.hidden:
            self.hidden.discard(row)
            self.num_active += 1
            self._bias = None
        place = row - self.num_trained
        # Rounded as the catalogue's vectors are, so that an item's score does not depend on where it stands.
        self.added_vectors[place] = vector.to(self.catalogue.cache.dtype).to(self.device, self.dtype)
        self.added_categories[place] = categories
        self.added_display[place] = display

    def withdraw(self, key: Key) -> bool:
        """Stop recommending an item; False where it was not being recommended."""
        row = self.rows_of([key])[0]
        if row < 0 or row in self.hidden:
            return False
        self._hide(row)
        return True

    def is_active(self, key: Key) -> bool:
        """Whether an item may be recommended now."""
        row = self.rows_of([key])[0]
        return row >= 0 and row not in self.hidden

    def ids_at(self, rows: Iterable[int]) -> list[Any]:
        """The raw ids of rows."""
        rows = list(rows)
        trained = [row for row in rows if row < self.num_trained]
        ids = dict(zip(trained, self.catalogue.ids_at(trained), strict=True)) if trained else {}
        to_id = self.catalogue.id_format.to_id
        return [ids[row] if row < self.num_trained else to_id(self.added_keys[row - self.num_trained]) for row in rows]

    def display_at(self, rows: Iterable[int]) -> list[dict[str, str]]:
        """What people see of rows beside their ids."""
        rows = list(rows)
        trained = [row for row in rows if row < self.num_trained]
        display = dict(zip(trained, self.catalogue.names.at(trained), strict=True))
        return [display[row] if row in display else self.added_display[row - self.num_trained] for row in rows]

    def find(self, words: Sequence[str], limit: int) -> list[int]:
        """Rows that may be recommended and whose names or ids hold the given words; without words popular ones."""
        trained = self.catalogue.names.search(words, limit, self.hidden)
        if not self.num_added:
            return trained
        texts = [" ".join(map(str, (key, *self.added_display[n].values()))) for n, key in enumerate(self.added_keys)]
        places = np.flatnonzero(matches(plain_texts(pa.array(texts)), words))[::-1] + self.num_trained
        added = [row for row in places.tolist() if row not in self.hidden]
        return (added + trained if words else trained + added)[:limit]

    def _append(self, key: Key, origin: int) -> int:
        if self.num_added == len(self.added_vectors):
            grown = self.added_vectors.new_empty(max(64, 2 * len(self.added_vectors)), self.added_vectors.shape[1])
            grown[: self.num_added] = self.added_vectors[: self.num_added]
            self.added_vectors = grown
        row = self.num_trained + self.num_added
        self.num_added += 1
        self.added_keys.append(key)
        self.added_origins.append(origin)
        self.added_categories.append({})
        self.added_display.append({})
        self.added_rows[key] = row
        return row

    def _hide(self, row: int) -> None:
        if row not in self.hidden:
            self.hidden.add(row)
            self.num_active -= 1
            self._bias = None


class Popularity:
    """What is answered where there is no history: how often training had each item, plus one event for every item."""

    def __init__(self, candidates: CandidateItems) -> None:
        self.candidates = candidates

    def check(self) -> None:
        """Refuse where it is not known how often items occurred."""
        self._counts()

    def scores(self, rows: np.ndarray) -> np.ndarray:
        """The log-probability of rows, float64; -1 is an item that training did not have, as those added later."""
        counts = self._counts()
        total = float(counts.sum()) + self.candidates.num_active
        origins = np.array([-1, *self.candidates.added_origins], np.int64)  # an item that was changed stays as frequent
        rows = np.where(rows < len(counts), rows, origins[np.maximum(rows - len(counts) + 1, 0)])
        events = np.ones(len(rows))
        events[rows >= 0] += counts[rows[rows >= 0]]
        return np.log(events / total)

    def best(self, k: int, passing: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The k most frequent active rows; `passing` gives the places of the rows that may be listed."""
        chosen = np.empty(0, np.int64)
        for rows in self._by_count():
            active = rows[[row not in self.candidates.hidden for row in rows.tolist()]]
            chosen = np.concatenate([chosen, active[passing(active)]])[:k]
            if len(chosen) == k:
                break
        return chosen

    def _by_count(self) -> Iterator[np.ndarray]:
        self._counts()
        popular, first = self.candidates.catalogue.names.popular_rows, self.candidates.num_trained
        origins = np.array(self.candidates.added_origins, np.int64)
        newest = {int(origins[place]): first + int(place) for place in np.flatnonzero(origins >= 0)}
        for at in range(0, len(popular), _COUNTED_ROWS):
            rows = popular[at : at + _COUNTED_ROWS]
            yield np.array([newest.get(row, row) for row in rows.tolist()], np.int64) if newest else rows
        yield first + np.flatnonzero(origins < 0)

    def _counts(self) -> np.ndarray:
        counts = self.candidates.catalogue.names.counts
        if counts is None:
            raise RequestError(
                "the history is empty, and this run's catalogue was written without counts",
                expected="at least one event",
                next_step="remove RUN/serve/catalogue and serve once with --data DATASET",
            )
        return counts


def _load_resident(pieces: list[Tensor], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """The catalogue as one table on the device if it fits, else the mapped files as they are."""
    needed = sum(piece.numel() for piece in pieces) * dtype.itemsize
    if device.type == "cuda":
        fits = needed < torch.cuda.mem_get_info(device)[0] * 0.8
    else:
        fits = needed <= _RESIDENT_BYTES
    if not fits:
        return pieces
    table = torch.empty(sum(map(len, pieces)), pieces[0].shape[1], dtype=dtype, device=device)
    at = 0
    for piece in pieces:
        table[at : at + len(piece)] = piece
        at += len(piece)
    return [table]
