"""The two objectives: from a feed to gradients, and what the step's loss was.

Letters: n items, m queries, h joint_dim, U distinct targets, K extra negatives.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.evaluation import Ranks
from habitus.model import BehaviorModel, CopyMass, autocast, copy_mass, copying_loss
from habitus.randomness import Stream, permute_index, shuffle_keys
from habitus.recipe import Recipe
from habitus.softmax import SoftmaxResult, candidate_softmax
from habitus.training.feeding import Feed, Feeder, ItemReader, Micro
from habitus.training.gathering import gathered_rows
from habitus.training.log_q import Inclusion
from habitus.training.vectors import FrozenVectors

# Up to so many scores the plain softmax is as fast on a CPU as the other, whose checks take a millisecond
# (docs/decisions/0107).
_FEW_SCORES = 1 << 19


class Channels(NamedTuple):
    """What a step lost, in nats per query over the whole batch; 0-dim and detached."""

    in_batch: Tensor
    extra: Tensor | None  # stage 2 with extra negatives
    loss: Tensor  # what was minimised


class Asked(NamedTuple):
    """The queries of a micro-batch [m, h], and what the past adds to each, where it is heard."""

    queries: Tensor
    mass: CopyMass | None


@dataclass
class Work:
    """What the steps so far have multiplied, as `sizing` counts it."""

    items: int = 0
    text_tokens: int = 0
    text_pairs: int = 0
    scores: int = 0  # queries times candidates, over both channels


class JointStage:
    """Stage 1: both parts learn, and the candidates are the distinct targets of the whole batch."""

    def __init__(self, model: BehaviorModel, dataset: Dataset, recipe: Recipe, feeder: Feeder) -> None:
        self.model = model
        self.recipe = recipe
        self.feeder = feeder
        self.ranks = feeder.ranks
        self.reader = ItemReader(dataset, recipe, feeder.device)
        self.inclusion = Inclusion(dataset, recipe) if recipe.train.log_q else None
        self.work = Work()

    def backward(self, step: int) -> Channels:
        """Add the gradients of one step to the parameters; this process's part of them where there are several."""
        feed = self.feeder.feed(step)
        rows = np.concatenate([feed.items[slice(*feed.own_targets)], feed.items[slice(*feed.own_others)]])
        self._count(feed)
        pieces = np.array_split(rows, self.feeder.accumulate)
        with autocast(self.feeder.device, self.recipe.train.precision):
            if len(pieces) == 1:
                own = self.model.embed_items(self.reader.tensors(rows))
                loss = self._micro_loss(feed, feed.micros[0], own)
                loss.backward()
                return self._channels(loss)
            # The vectors of all items are candidates for every micro-batch, and memory for the graph of a part
            # of them must do: they are made without one, and each part is made again when its gradient is known.
            with torch.no_grad():
                own = torch.cat([self.model.embed_items(self.reader.tensors(piece)) for piece in pieces if len(piece)])
            own.requires_grad_()
            total = own.new_zeros(())
            for micro in feed.micros:
                loss = self._micro_loss(feed, micro, own)
                loss.backward()
                total += loss.detach()
            assert own.grad is not None
            at = 0
            for piece in pieces:
                if len(piece):
                    vectors = self.model.embed_items(self.reader.tensors(piece))
                    vectors.backward(own.grad[at : at + len(piece)])
                    at += len(piece)
        return self._channels(total)

    def _micro_loss(self, feed: Feed, micro: Micro, own: Tensor) -> Tensor:
        table = gathered_rows(own, feed.stride, self.ranks.world)
        asked = micro_queries(self.model, micro, F.embedding(micro.events, table))
        first, last = feed.own_targets
        log_q = None if self.inclusion is None else self.inclusion.in_batch(feed.items[first:last], own.device)
        return summed_loss(asked, own[: last - first], micro, log_q, self.ranks) / feed.num_queries

    def _channels(self, loss: Tensor) -> Channels:
        (loss,) = summed(self.ranks, loss)
        return Channels(loss, None, loss)

    def _count(self, feed: Feed) -> None:
        tokens, pairs = self.reader.text_counts(feed.items)
        self.work.items += len(feed.items)
        self.work.text_tokens += tokens
        self.work.text_pairs += pairs
        self.work.scores += feed.num_queries * feed.num_targets


class FrozenStage:
    """Stage 2: items come from the cache; K catalogue items join the candidates in a second channel."""

    def __init__(
        self, model: BehaviorModel, dataset: Dataset, recipe: Recipe, feeder: Feeder, vectors: FrozenVectors
    ) -> None:
        self.model = model
        self.recipe = recipe
        self.feeder = feeder
        self.ranks = feeder.ranks
        self.vectors = vectors
        self.num_items = dataset.num_items
        self.inclusion = Inclusion(dataset, recipe) if recipe.train.log_q else None
        self.work = Work()

    def backward(self, step: int) -> Channels:
        """Add the gradients of one step to the contextualizer; both channels count half each."""
        feed = self.feeder.feed(step)
        extras = self._extras(feed, step)
        totals = [torch.zeros((), device=self.feeder.device) for _ in range(1 if extras is None else 2)]
        with autocast(self.feeder.device, self.recipe.train.precision):
            for micro in feed.micros:
                asked = micro_queries(self.model, micro, self.vectors.rows(micro.batch.items))
                losses = [self._in_batch(feed, micro, asked)]
                if extras is not None:
                    losses.append(self._second(feed, micro, asked, extras))
                (sum(losses) / len(losses)).backward()  # type: ignore[union-attr]
                for total, loss in zip(totals, losses, strict=True):
                    total += loss.detach()
        values = summed(self.ranks, *totals)
        return Channels(values[0], values[1] if len(values) > 1 else None, sum(values) / len(values))  # type: ignore[arg-type]

    def _extras(self, feed: Feed, step: int) -> np.ndarray | None:
        """The extra negatives of a step; those that are targets too are left out where both share a pool."""
        K = self.recipe.train.num_negatives  # noqa: N806
        self.work.scores += feed.num_queries * feed.num_targets
        if not K:
            return None
        keys = shuffle_keys(self.recipe.train.seed, Stream.NEGATIVES, step)
        drawn = permute_index(np.arange(K), self.num_items, keys)
        if self.recipe.train.extra_pool == "union":
            present = np.zeros(self.num_items, bool)
            present[feed.items[: feed.num_targets]] = True
            drawn = drawn[~present[drawn]]
            self.work.scores += feed.num_queries * feed.num_targets
        self.work.scores += feed.num_queries * len(drawn)
        return drawn

    def _in_batch(self, feed: Feed, micro: Micro, asked: Asked) -> Tensor:
        rows = feed.items[slice(*feed.own_targets)]
        log_q = None if self.inclusion is None else self.inclusion.in_batch(rows, self.feeder.device)
        return summed_loss(asked, self._candidates(rows), micro, log_q, self.ranks) / feed.num_queries

    def _second(self, feed: Feed, micro: Micro, asked: Asked, extras: np.ndarray) -> Tensor:
        if self.recipe.train.extra_pool == "extras":
            return self._extras_alone(feed, micro, asked, extras)
        pool = np.concatenate([feed.items[: feed.num_targets], extras])
        rows = pool[slice(*self.ranks.stretch(len(pool)))]
        log_q = None if self.inclusion is None else self.inclusion.union(rows, self.feeder.device)
        return summed_loss(asked, self._candidates(rows), micro, log_q, self.ranks) / feed.num_queries

    def _extras_alone(self, feed: Feed, micro: Micro, asked: Asked, extras: np.ndarray) -> Tensor:
        """The second channel read as 'the positive and the extras': no other target is a candidate."""
        from habitus.softmax import extras_softmax

        targets = feed.items[micro.targets.cpu().numpy()]
        present = np.zeros(self.num_items, bool)
        present[extras] = True
        rows = extras[slice(*self.ranks.stretch(len(extras)))]
        log_q = own_log_q = None
        if self.inclusion is not None:
            log_q = self.inclusion.extras(rows, self.feeder.device)
            own_log_q = self.inclusion.extras(targets, self.feeder.device)
        found = extras_softmax(
            asked.queries,
            self._candidates(rows),
            self._candidates(targets),
            torch.from_numpy(present[targets]).to(self.feeder.device),
            log_q=log_q,
            target_log_q=own_log_q,
            group=group_of(self.ranks),
        )
        return weighted(heard(found, asked), micro) / feed.num_queries

    def _candidates(self, rows: np.ndarray) -> Tensor:
        return self.vectors.rows(torch.from_numpy(rows).to(self.feeder.device))


def micro_queries(model: BehaviorModel, micro: Micro, events: Tensor) -> Asked:
    """What a micro-batch asks, from the vectors of its events [B, L, h]."""
    read = model.contextualize(micro.batch, events)
    queries = read.queries.flatten(0, 1)[micro.slots]
    if read.copy_scores is None:
        return Asked(queries, None)
    mass = copy_mass(read.copy_scores, micro.batch.items, micro.batch.targets)
    return Asked(queries, CopyMass(*(part.flatten()[micro.slots] for part in mass)))


def heard(found: SoftmaxResult, asked: Asked) -> Tensor:
    """The losses [m] once the past has been heard too."""
    return found.loss if asked.mass is None else copying_loss(found.loss, found.score, found.log_q, asked.mass)


def summed_loss(asked: Asked, candidates: Tensor, micro: Micro, log_q: Tensor | None, ranks: Ranks) -> Tensor:
    """The summed cross-entropy of a micro-batch's queries; `candidates` are this process's piece of them."""
    queries = asked.queries
    if queries.device.type == "cpu" and ranks.world == 1 and len(queries) * len(candidates) <= _FEW_SCORES:
        plain = queries @ candidates.T
        losses = F.cross_entropy(plain if log_q is None else plain - log_q, micro.targets, reduction="none")
        score = plain.gather(1, micro.targets[:, None])[:, 0]
        found = SoftmaxResult(losses, None, score, None if log_q is None else log_q[micro.targets])
        return weighted(heard(found, asked), micro)
    found = candidate_softmax(queries, candidates, micro.targets, log_q=log_q, group=group_of(ranks))
    return weighted(heard(found, asked), micro)


def weighted(losses: Tensor, micro: Micro) -> Tensor:
    """The sum of the losses that count."""
    return losses.sum() if micro.weights is None else (losses * micro.weights).sum()


def group_of(ranks: Ranks) -> dist.ProcessGroup | None:
    return dist.group.WORLD if ranks.world > 1 else None


def summed(ranks: Ranks, *values: Tensor) -> list[Tensor]:
    """The values summed over the processes, detached."""
    stacked = torch.stack([value.detach() for value in values])
    if ranks.world > 1:
        dist.all_reduce(stacked)
    return list(stacked.unbind())
