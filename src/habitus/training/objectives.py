"""The two objectives with fixed shapes, for steps that are captured: the same losses as in `stages`.

Letters: B windows, L slots, n rows of the bucket, U distinct targets, K extra negatives, h joint_dim.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.model import BehaviorModel, CopyMass, DropoutMask, copy_mass, copying_loss, draw_dropout_mask
from habitus.recipe import Recipe
from habitus.softmax import (
    Latch,
    SoftmaxResult,
    candidate_pool,
    candidate_softmax,
    extras_softmax,
    sample_negatives,
    targets_among,
)
from habitus.training.log_q import Inclusion
from habitus.training.resident import Assembled, ResidentItems


class Losses(NamedTuple):
    """Means over the queries of the batch, and how many scores were taken."""

    in_batch: Tensor
    extra: Tensor | None
    scores: Tensor

    @property
    def loss(self) -> Tensor:
        return self.in_batch if self.extra is None else (self.in_batch + self.extra) / 2


class JointObjective:
    """Stage 1."""

    def __init__(
        self,
        model: BehaviorModel,
        dataset: Dataset,
        recipe: Recipe,
        items: ResidentItems,
        names: tuple[str, ...],
        *,
        compiled: bool = False,
    ) -> None:
        self.model, self.items, self.names = model, items, names
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = StepDropoutMask(recipe, compiled=compiled)
        self.log_q: Tensor | None = None
        if recipe.train.log_q:
            self.log_q = Inclusion(dataset, recipe).tables(items.lengths.device)[0]

    def __call__(self, batch: Assembled, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct items fit `size` = (items, tokens)."""
        rows = batch.rows[: size[0]]
        vectors = self.model.embed_items(self.items.read(rows, batch.counts[1], size[1]))
        inputs = batch.batch(self.names, self.dropout_mask(batch, latch))
        read = self.model.contextualize(inputs, F.embedding(batch.event_places, vectors))
        found = candidate_softmax(
            read.queries.flatten(0, 1),
            vectors,
            batch.target_places.flatten(),
            log_q=None if self.log_q is None else self.log_q[rows],
            num_valid=batch.counts[0],
            latch=latch,
        )
        mass = None if read.copy_scores is None else self.copy_mass(read.copy_scores, batch.items, batch.wanted)
        return Losses(mean_of_queries(found, mass, batch), None, batch.counts[4] * batch.counts[0])


class FrozenObjective:
    """Stage 2."""

    def __init__(
        self,
        model: BehaviorModel,
        dataset: Dataset,
        recipe: Recipe,
        table: Tensor,
        names: tuple[str, ...],
        *,
        compiled: bool = False,
    ) -> None:
        self.model, self.table, self.names = model, table, names
        self.num_items = dataset.num_items
        self.num_negatives = recipe.train.num_negatives
        self.extra_pool = recipe.train.extra_pool
        self.whole = self.num_negatives == self.num_items and self.extra_pool == "union"
        # Some five hundred small operations on integers: one kernel once compiled.
        self.draw = torch.compile(sample_negatives, dynamic=False) if compiled else sample_negatives
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = StepDropoutMask(recipe, compiled=compiled)
        self.log_q: tuple[Tensor, Tensor, Tensor] | None = None
        if recipe.train.log_q:
            self.log_q = Inclusion(dataset, recipe).tables(table.device)

    def __call__(self, batch: Assembled, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct targets fit `size[0]`; `keys` draw the extras."""
        inputs = batch.batch(self.names, self.dropout_mask(batch, latch))
        read = self.model.contextualize(inputs, self.table[batch.items])
        queries = read.queries.flatten(0, 1)
        mass = None if read.copy_scores is None else self.copy_mass(read.copy_scores, batch.items, batch.wanted)
        targets = batch.wanted.flatten()
        # Distinct items have their targets first, so the head of the rows is the in-batch pool.
        rows = batch.rows[: size[0]]
        in_batch = candidate_softmax(
            queries,
            self.table[rows],
            batch.target_places.flatten(),
            log_q=None if self.log_q is None else self.log_q[0][rows],
            num_valid=batch.counts[0],
            latch=latch,
        )
        first = mean_of_queries(in_batch, mass, batch)
        scores = batch.counts[4] * batch.counts[0]
        if not self.num_negatives:
            return Losses(first, None, scores)
        second, taken = self._second(queries, targets, keys, size[0], latch)
        return Losses(first, mean_of_queries(second, mass, batch), scores + batch.counts[4] * taken)

    def _second(
        self, queries: Tensor, targets: Tensor, keys: Tensor, capacity: int, latch: Latch
    ) -> tuple[SoftmaxResult, Tensor | int]:
        """What the second channel finds per query, and the candidates that it had."""
        if self.whole:
            log_q = None if self.log_q is None else self.log_q[1]
            return candidate_softmax(queries, self.table, targets, log_q=log_q, latch=latch), self.num_items
        drawn = self.draw(self.num_items, self.num_negatives, keys)
        if self.extra_pool == "extras":
            among = targets_among(targets, drawn)
            log_q = own_log_q = None
            if self.log_q is not None:
                log_q, own_log_q = self.log_q[2][drawn], self.log_q[2][targets]
            rows, own = self.table[drawn], self.table[targets]
            found = extras_softmax(queries, rows, own, among, log_q=log_q, target_log_q=own_log_q, latch=latch)
            return found, self.num_negatives
        pool = candidate_pool(targets, drawn, capacity=capacity)
        log_q = None if self.log_q is None else self.log_q[1][pool.items]
        found = candidate_softmax(
            queries, self.table[pool.items], pool.targets, log_q=log_q, num_valid=pool.num_valid, latch=latch
        )
        return found, pool.num_valid


class StepDropoutMask:
    """What dropout draws from in a captured step, whose number the latch counts."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        self.seed, self.rate = recipe.train.seed, recipe.train.dropout
        self.draw = torch.compile(draw_dropout_mask, dynamic=False) if compiled else draw_dropout_mask

    def __call__(self, batch: Assembled, latch: Latch) -> DropoutMask | None:
        if not self.rate:
            return None
        return self.draw(self.seed, latch.state[0], 0, batch.items.numel(), self.rate, batch.items.device)


def mean_of_queries(found: SoftmaxResult, mass: CopyMass | None, batch: Assembled) -> Tensor:
    """The mean loss over the slots that have a query; `mass` is what the past adds, where it is heard."""
    losses = found.loss
    if mass is not None:
        losses = copying_loss(losses, found.score, found.log_q, CopyMass(mass.total.flatten(), mass.target.flatten()))
    return torch.where(batch.has_query.flatten(), losses, 0).sum() / batch.counts[4]
