"""How likely an item was to be among a step's candidates, for the log q correction."""

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.recipe import Recipe

_LEAST = -80.0  # an item that no pool can hold still needs a finite number


class Inclusion:
    """log q of catalogue items: in the batch 1 − (1 − π)^(B·L), among K extras K/I, in their union both."""

    def __init__(self, dataset: Dataset, recipe: Recipe) -> None:
        counts = dataset.item_train_counts.astype(np.float64)
        share = counts / counts.sum()
        slots = recipe.train.batch_sequences * recipe.data.seq_len
        with np.errstate(divide="ignore"):
            absent = slots * np.log1p(-share)  # log of 'in no slot of the batch'
            extra = recipe.train.num_negatives / dataset.num_items
            self._in_batch = np.log(-np.expm1(absent)).clip(_LEAST)
            self._union = np.log(-np.expm1(absent + np.log1p(-extra))).clip(_LEAST)
            self._extra = max(_LEAST, float(np.log(extra))) if extra else _LEAST

    def in_batch(self, rows: np.ndarray, device: torch.device) -> Tensor:
        """log q of being one of the batch's targets."""
        return torch.from_numpy(self._in_batch[rows].astype(np.float32)).to(device)

    def union(self, rows: np.ndarray, device: torch.device) -> Tensor:
        """log q of being a target of the batch or one of the extras."""
        return torch.from_numpy(self._union[rows].astype(np.float32)).to(device)

    def extras(self, rows: np.ndarray, device: torch.device) -> Tensor:
        """log q of being one of the extras."""
        return torch.full((len(rows),), self._extra, device=device)

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """log q of every item: in the batch, in the union, among the extras."""
        every = np.arange(len(self._in_batch))
        return self.in_batch(every, device), self.union(every, device), self.extras(every, device)
