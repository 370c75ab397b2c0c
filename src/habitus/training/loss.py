"""The loss of a training step. Every engine calls it: eager or captured, in parts or not, on one process or several.

    batch_losses     events to queries, then one mean loss per pool of candidates
    query_losses     the loss of each query: a softmax over a pool, then copying

Stage 1 has one pool, the distinct targets of the batch, or one for every `pool_sequences` windows of it. Stage 2 may
have a second one with extra negatives, and the loss is the mean over both. Which candidates a pool holds, how it is
padded or shared between processes is decided by the batches; here they are rows of vectors.

Letters: B windows, L slots, m queries, h joint_dim, V candidates of this process, I items of the catalogue.
"""

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from habitus.data import Dataset
from habitus.model import BehaviorModel, CopyMass, copy_mass, copying_loss
from habitus.recipe import Recipe
from habitus.softmax import Latch, extras_softmax, fast_softmax, targets_among
from habitus.training.batches import StepBatch

_LEAST_LOG_Q = -80.0  # of an item that no pool can hold: finite
_LEAST_LOSS = 1e-6  # of a target below 0, in nats: its probability stays below 1


class TargetPool(NamedTuple):
    """A pool that holds the target of every query; with several processes, this one's piece of it."""

    vectors: Tensor  # [V, h]
    targets: Tensor  # int64 [m]: the place of each query's target in the full pool
    size: int | Tensor  # candidates of the full pool
    log_q: Tensor | None = None  # [V]
    num_valid: Tensor | None = None  # 0-dim: the rows that count, where the others are padding


class ExtraPool(NamedTuple):
    """A pool of extra negatives, against which each query has its own target and no other; shared like TargetPool."""

    vectors: Tensor  # [V, h]
    target_vectors: Tensor  # [m, h]
    target_is_extra: Tensor  # bool [m]: whether the target was drawn as an extra too
    size: int | Tensor
    log_q: Tensor | None = None  # [V]
    target_log_q: Tensor | None = None  # [m]
    num_valid: Tensor | None = None  # as in TargetPool


class GroupedPool(NamedTuple):
    """Pools of groups of consecutive queries; the targets of other groups are no candidates."""

    pools: tuple[tuple[slice, TargetPool], ...]  # the queries of a group and their pool
    size: int  # candidates of all groups

    @property
    def num_scores(self) -> int:
        return sum((at.stop - at.start) * len(own.vectors) for at, own in self.pools)

    @classmethod
    def split(cls, pool: TargetPool, slots: Tensor, group_slots: int) -> "GroupedPool":
        """The pool of a batch, split into those of every `group_slots` slots; `slots` are those with a query."""
        ends = torch.arange(0, int(slots[-1]) + group_slots + 1, group_slots, device=slots.device)
        bounds = torch.searchsorted(slots, ends).tolist()
        groups = []
        for first, last in pairwise(bounds):
            if first == last:
                continue
            rows, targets = torch.unique(pool.targets[first:last], return_inverse=True)
            log_q = None if pool.log_q is None else pool.log_q[rows]
            groups.append((slice(first, last), TargetPool(pool.vectors[rows], targets, len(rows), log_q)))
        return cls(tuple(groups), sum(len(own.vectors) for _, own in groups))


class Losses(NamedTuple):
    """Weighted means over the queries of the full batch in nats; of a part of the batch, what it adds to them."""

    in_batch: Tensor
    extra: Tensor | None = None  # of stage 2 with extra negatives
    num_candidates: int | Tensor = 0  # of both pools

    @property
    def loss(self) -> Tensor:
        """What is minimised."""
        return self.in_batch if self.extra is None else (self.in_batch + self.extra) / 2


def batch_losses(
    model: BehaviorModel,
    batch: StepBatch,
    event_vectors: Tensor,
    pools: Iterable[TargetPool | ExtraPool | GroupedPool],
    *,
    latch: Latch | None = None,
    group: dist.ProcessGroup | None = None,
    copy_mass: Callable[[Tensor, Tensor, Tensor], CopyMass] = copy_mass,
) -> Losses:
    """The losses of a batch from the vectors of its events [B, L, h], one for each of one or two pools.

    With `latch`, bad values are recorded on the device instead of raised. With `group`, pools are shared by its
    processes. A captured step passes a compiled `copy_mass`.
    """
    output = model.contextualize(batch.inputs, event_vectors)
    queries, mass = output.queries.flatten(0, 1), None
    if output.copy_scores is not None:
        mass = copy_mass(output.copy_scores, batch.inputs.items, batch.inputs.targets)
        mass = CopyMass(mass.total.flatten(), mass.target.flatten())
    if batch.slots is not None:
        queries = queries[batch.slots]
        mass = None if mass is None else CopyMass(mass.total[batch.slots], mass.target[batch.slots])
    means, sizes = [], []
    for pool in pools:
        losses = query_losses(queries, pool, mass, latch=latch, group=group)
        if batch.weights is not None:
            losses = weigh_losses(losses, batch.weights)
        if batch.counted is not None:
            losses = torch.where(batch.counted, losses, 0)
        means.append(losses.sum() / batch.num_queries)
        sizes.append(pool.size)
    if len(means) == 1:
        return Losses(means[0], None, sizes[0])
    return Losses(means[0], means[1], sizes[0] + sizes[1])


def weigh_losses(losses: Tensor, weights: Tensor) -> Tensor:
    """The losses of targets of these weights [m]: |w|·(−log p) above 0, |w|·(−log(1 − p)) below.

    A target below 0 says that the item was not the right one, which has probability 1 − p. Its loss has a least value,
    0; −|w|·(−log p) would have none.
    """
    refuted = -torch.log(-torch.expm1(-losses.clamp(min=_LEAST_LOSS)))
    return weights.abs() * torch.where(weights < 0, refuted, losses)


def query_losses(
    queries: Tensor,
    pool: TargetPool | ExtraPool | GroupedPool,
    mass: CopyMass | None,
    *,
    latch: Latch | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The loss of every query [m]: minus the log probability of its target in a pool, copying included."""
    if isinstance(pool, GroupedPool):
        return torch.cat(
            [
                query_losses(queries[at], own, None if mass is None else CopyMass(mass.total[at], mass.target[at]))
                for at, own in pool.pools
            ]
        )
    if isinstance(pool, ExtraPool):
        result = extras_softmax(
            queries,
            pool.vectors,
            pool.target_vectors,
            pool.target_is_extra,
            log_q=pool.log_q,
            target_log_q=pool.target_log_q,
            num_valid=pool.num_valid,
            group=group,
            latch=latch,
        )
    else:
        result = fast_softmax(
            queries, pool.vectors, pool.targets, log_q=pool.log_q, num_valid=pool.num_valid, group=group, latch=latch
        )
    return result.loss if mass is None else copying_loss(result.loss, result.score, result.log_q, mass)


class LogQ(NamedTuple):
    """log q of every catalogue item [I]: how likely it is to be among the candidates of a step."""

    in_batch: Tensor  # as one of the batch's targets: 1 - (1 - π)^(B·L)
    union: Tensor  # as one of the targets or of the extras
    extras: Tensor  # as one of K extras: K over the candidates of the catalogue

    @classmethod
    def of(cls, dataset: Dataset, recipe: Recipe, device: torch.device) -> "LogQ":
        """From how often each item is a target in training, the size of the batch and the number of extras."""
        counts = dataset.item_trained_counts.astype(np.float64)
        share = counts / counts.sum()
        slots = float((recipe.train.pool_sequences or recipe.train.batch_sequences) * recipe.data.seq_len)
        if dataset.target_weight is not None:  # those of them that hold a target, on average
            train = dataset.counts("train")
            slots *= train.queries / (train.windows * dataset.seq_len)
        with np.errstate(divide="ignore"):
            absent = slots * np.log1p(-share)  # log of 'in no slot of the batch'
            extra = recipe.train.num_negatives / dataset.num_candidates
            drawn = np.full(dataset.num_items, extra)
            if dataset.candidate_rows is not None:  # others are never drawn
                drawn = np.where(np.isin(np.arange(dataset.num_items), dataset.candidate_rows), drawn, 0.0)
            in_batch = np.log(-np.expm1(absent)).clip(_LEAST_LOG_Q)
            union = np.log(-np.expm1(absent + np.log1p(-drawn))).clip(_LEAST_LOG_Q)
            extras = max(_LEAST_LOG_Q, float(np.log(extra))) if extra else _LEAST_LOG_Q
        return cls(
            torch.from_numpy(in_batch.astype(np.float32)).to(device),
            torch.from_numpy(union.astype(np.float32)).to(device),
            torch.full((dataset.num_items,), extras, device=device),
        )


class FrozenPools:
    """The pools of stage 2 by catalogue row: vectors and log q are looked up."""

    def __init__(self, vectors: Callable[[Tensor], Tensor], log_q: LogQ | None) -> None:
        self.vectors, self.log_q = vectors, log_q

    def in_batch(
        self, rows: Tensor, targets: Tensor, size: int | Tensor, num_valid: Tensor | None = None
    ) -> TargetPool:
        """The batch's own targets."""
        log_q = None if self.log_q is None else self.log_q.in_batch[rows]
        return TargetPool(self.vectors(rows), targets, size, log_q, num_valid)

    def union(self, rows: Tensor, targets: Tensor, size: int | Tensor, num_valid: Tensor | None = None) -> TargetPool:
        """The batch's targets and the extras."""
        log_q = None if self.log_q is None else self.log_q.union[rows]
        return TargetPool(self.vectors(rows), targets, size, log_q, num_valid)

    def extras(
        self,
        rows: Tensor,
        target_rows: Tensor,
        drawn: Tensor,
        target_vectors: Tensor | None = None,
        num_valid: Tensor | None = None,
    ) -> ExtraPool:
        """The extras alone: `rows` are this process's piece of what was `drawn`.

        `target_vectors` are those of the targets where another process may hold them.
        """
        log_q = target_log_q = None
        if self.log_q is not None:
            log_q, target_log_q = self.log_q.extras[rows], self.log_q.extras[target_rows]
        is_extra = targets_among(target_rows, drawn)
        own = self.vectors(target_rows) if target_vectors is None else target_vectors
        return ExtraPool(self.vectors(rows), own, is_extra, len(drawn), log_q, target_log_q, num_valid)
