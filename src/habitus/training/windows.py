"""Which windows a step trains on, and what they hold: a function of (seed, step), known without any history."""

from functools import lru_cache

import numpy as np

from habitus.data import Dataset
from habitus.randomness import Stream, permute_index, shuffle_keys

_BLOCK = 4096  # windows whose order is drawn at once


class WindowOrder:
    """The endless line of training windows, epoch after epoch, as `Dataset.batch` orders them."""

    def __init__(self, dataset: Dataset, batch_sequences: int, seed: int) -> None:
        self.num_windows = dataset.counts("train").windows
        self.batch_sequences = batch_sequences
        self.seed = seed
        segments, offsets = dataset.windows("train")
        lengths = segments["length"].astype(np.int64)
        self.events = np.add.reduceat(lengths, offsets[:-1])  # per window
        self.queries = np.add.reduceat(lengths - segments["first_target"], offsets[:-1])
        self.pairs = np.add.reduceat(lengths * (lengths + 1) // 2, offsets[:-1])  # scored by causal attention

    def of_step(self, step: int) -> np.ndarray:
        """The windows of one step's batch, int64 [B]."""
        return self.between(step * self.batch_sequences, (step + 1) * self.batch_sequences)

    def between(self, start: int, stop: int) -> np.ndarray:
        """Places start..stop of the line."""
        found = [np.empty(0, np.int64)] if start == stop else []
        while start < stop:
            epoch, place = divmod(start, self.num_windows)
            block, offset = divmod(place, _BLOCK)
            found.append(_order(self.num_windows, self.seed, epoch, block)[offset : offset + stop - start])
            start += len(found[-1])
        return found[0] if len(found) == 1 else np.concatenate(found)

    def totals(self, first: int, steps: int) -> dict[str, int]:
        """Events, queries and attended pairs of steps first..first + steps - 1, in whole numbers."""
        counts = {"events": 0, "queries": 0, "pairs": 0}
        size = self.batch_sequences
        start, stop = first * size, (first + steps) * size
        while start < stop:
            epoch = start // self.num_windows
            whole = min(stop, (epoch + 1) * self.num_windows) - start
            windows = slice(None) if whole == self.num_windows else self.between(start, start + whole)
            counts["events"] += int(self.events[windows].sum())
            counts["queries"] += int(self.queries[windows].sum())
            counts["pairs"] += int(self.pairs[windows].sum())
            start += whole
        return counts

    def unique_events(self, steps: int) -> int:
        """Distinct events among those of the first steps: windows are disjoint, an epoch holds each once."""
        seen = min(steps * self.batch_sequences, self.num_windows)
        return int(self.events.sum()) if seen == self.num_windows else int(self.events[self.between(0, seen)].sum())


@lru_cache(maxsize=16)
def _order(num_windows: int, seed: int, epoch: int, block: int) -> np.ndarray:
    places = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, num_windows))
    return permute_index(places, num_windows, shuffle_keys(seed, Stream.WINDOWS, epoch))
