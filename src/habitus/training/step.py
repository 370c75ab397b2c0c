"""One optimizer step in plain operations: on a CPU, across processes, in parts, and on a GPU where it is not captured.

batch (batches) -> losses (loss) -> gradients -> clipped, applied (optimizers) -> a StepResult
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.errors import ModelError
from habitus.model import BehaviorModel, ItemDropout, autocast, drop_entries
from habitus.recipe import Recipe
from habitus.training.batches import HostBatches, HostStep, StepBatch
from habitus.training.items import FrozenVectors, HostItems
from habitus.training.loss import ExtraPool, FrozenPools, GroupedPool, LogQ, Losses, TargetPool, batch_losses
from habitus.training.optimizers import build_optimizer, clip_gradients, learning_rate_at
from habitus.training.parallel import (
    GradientExchange,
    gather_rows,
    is_sharded,
    process_group,
    shard_like,
    sum_over_ranks,
)

_TAIL_STEPS = 100  # over which the training losses of a Record are averaged


@dataclass(frozen=True)
class StepResult:
    """What the host knows of a step once it is done."""

    step: int
    learning_rate: float
    in_batch: float
    extra: float | None
    loss: float
    gradient_norm: float
    problem: str | None = None  # why the run cannot go on

    def to_values(self) -> dict[str, float | int]:
        """The line of the journal."""
        values = {
            "step": self.step,
            "loss": self.loss,
            "in_batch_loss": self.in_batch,
            "extra_loss": self.extra,
            "learning_rate": self.learning_rate,
            "gradient_norm": self.gradient_norm,
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass
class Work:
    """What the steps so far have multiplied, as `sizing` counts it."""

    items: int = 0
    text_tokens: int = 0
    text_pairs: int = 0
    scores: int = 0  # queries times candidates, over both pools


class LossTail:
    """The losses of the last steps, for the means in the Record."""

    def __init__(self) -> None:
        self.values = np.full((_TAIL_STEPS, 3), np.nan)  # in_batch, extra, loss, by step modulo the length

    def add(self, result: StepResult) -> None:
        extra = math.nan if result.extra is None else result.extra
        self.values[result.step % _TAIL_STEPS] = result.in_batch, extra, result.loss

    def means(self) -> tuple[float, float | None, float] | None:
        """Means of the in-batch, the extra and the minimised loss; None before the first step."""
        rows = self.values[np.isfinite(self.values[:, 2])]
        if not len(rows):
            return None
        in_batch, extra, loss = (math.fsum(column) / len(rows) for column in rows.T)
        return in_batch, None if math.isnan(extra) else extra, loss


class EagerEngine:
    """Steps whose result the host knows at once."""

    description = {"engine": "eager", "compiled": False}  # noqa: RUF012

    def __init__(
        self,
        model: BehaviorModel,
        dataset: Dataset,
        recipe: Recipe,
        batches: HostBatches,
        vectors: FrozenVectors | None,
    ) -> None:
        self.recipe = recipe.train
        self.ranks = batches.ranks
        self.stage: EagerStage1 | EagerStage2
        if vectors is None:
            self.stage = EagerStage1(model, dataset, recipe, batches)
        else:
            self.stage = EagerStage2(model, dataset, recipe, batches, vectors)
        self.optimizer = build_optimizer(model, recipe.train)
        self.parameters = [info.parameter for info in self.optimizer.infos]
        replicated = [parameter for parameter in self.parameters if not is_sharded(parameter)]
        self.exchange = None
        if self.ranks.in_group:
            self.exchange = GradientExchange(replicated, overlapped=batches.num_parts == 1)
        self.tail = LossTail()
        self._results: list[StepResult] = []

    def step(self, step: int) -> None:
        """Train on the batch of one step."""
        rate = learning_rate_at(step, self.recipe)
        try:
            losses = self.stage.backward(step)
        except ModelError as error:  # NaN or infinity among the vectors
            self._results.append(StepResult(step, rate, math.nan, None, math.nan, math.nan, error.problem.rstrip(".")))
            return
        if self.exchange is not None:
            self.exchange.finish()
        norm = float(clip_gradients(self.parameters, self.recipe.clip))
        loss, in_batch = float(losses.loss), float(losses.in_batch)
        extra = None if losses.extra is None else float(losses.extra)
        problem = None
        if not math.isfinite(loss):
            problem = f"the loss is {loss}"
        elif not math.isfinite(norm):
            problem = f"the gradient's norm is {norm}"
        result = StepResult(step, rate, in_batch, extra, loss, norm, problem)
        if problem is None:
            self.optimizer.step(rate)
            self.tail.add(result)
        self.optimizer.zero_grad()
        self._results.append(result)

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """The steps that have ended since the last call; `wait` for all that were begun."""
        results, self._results = self._results, []
        return results

    def work(self) -> Work:
        """What all steps so far have multiplied."""
        return self.stage.work

    def close(self) -> None:
        """Nothing outlives a step here."""

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything but the model's weights that the next step depends on, or that the Record will show."""
        return {"tail": torch.from_numpy(self.tail.values.copy()), **self.optimizer.state_tensors()}

    def load_state(self, tensors: dict[str, Tensor], work: Work) -> None:
        """Go on from a checkpoint whose weights the model holds already."""
        tensors = dict(tensors)
        self.tail.values = tensors.pop("tail").numpy().copy()
        self.optimizer.load_state_tensors(shard_like(tensors, self.optimizer.state_tensors()))
        self.stage.work = work


class EagerStage1:
    """Stage 1: both parts learn, and the candidates are the distinct targets of the full batch."""

    def __init__(self, model: BehaviorModel, dataset: Dataset, recipe: Recipe, batches: HostBatches) -> None:
        self.model, self.batches, self.precision = model, batches, recipe.train.precision
        self.pool_slots = (recipe.train.pool_sequences or 0) * recipe.data.seq_len
        self.group = process_group(batches.ranks)
        self.items = HostItems(dataset, recipe, batches.device, batches.ranks)
        self.log_q = LogQ.of(dataset, recipe, batches.device).in_batch if recipe.train.log_q else None
        self.work = Work()

    def backward(self, step: int) -> Losses:
        """Add the gradients of one step to the parameters; this process's share of them where there are several."""
        host_step = self.batches.read(step)
        self._count(host_step)
        # As many pieces on every process: where weights are sharded, all of them embed together.
        pieces = np.array_split(host_step.own_items, min(self.batches.num_parts, host_step.least_own))
        dropout = self.items.dropout(host_step.own_items, step)
        with autocast(self.batches.device, self.precision):
            if self.batches.num_parts == 1:
                losses = self._part_losses(host_step, host_step.parts[0], self._embed(pieces[0], step), dropout)
                return _full_batch([_backward(losses)], self.batches)
            # The vectors of all items are candidates for every part, and memory for the graph of a piece of them must
            # do: they are made without one, and each piece is made again when its gradient is known.
            with torch.no_grad():
                vectors = torch.cat([self._embed(piece, step) for piece in pieces])
            vectors.requires_grad_()
            parts = [_backward(self._part_losses(host_step, part, vectors, dropout)) for part in host_step.parts]
            assert vectors.grad is not None
            first = 0
            for piece in pieces:
                self._embed(piece, step).backward(vectors.grad[first : first + len(piece)])
                first += len(piece)
        return _full_batch(parts, self.batches)

    def _embed(self, rows: np.ndarray, step: int) -> Tensor:
        return self.model.embed_items(self.items.tensors(rows, step))

    def _part_losses(
        self, host_step: HostStep, part: StepBatch, own_vectors: Tensor, dropout: ItemDropout | None
    ) -> Losses:
        own_targets = host_step.own_targets
        event_vectors, candidate_vectors = drop_entries(own_vectors, dropout)
        table = gather_rows(event_vectors, host_step.stride, self.batches.ranks)
        log_q = None if self.log_q is None else self.log_q[own_targets]
        own_candidates, num_valid = candidate_vectors[: len(own_targets)], host_step.valid_targets
        candidates = TargetPool(own_candidates, part.target_places, host_step.num_targets, log_q, num_valid)
        events = F.embedding(part.event_places, table)
        if self.pool_slots and part.slots is not None:
            grouped = GroupedPool.split(candidates, part.slots, self.pool_slots)
            self.work.scores += grouped.num_scores
            return batch_losses(self.model, part, events, [grouped])
        return batch_losses(self.model, part, events, [candidates], group=self.group)

    def _count(self, host_step: HostStep) -> None:
        tokens, pairs = self.items.text_counts(host_step.items)
        self.work.items += len(host_step.items)
        self.work.text_tokens += tokens
        self.work.text_pairs += pairs
        if not self.pool_slots:
            self.work.scores += host_step.num_queries * host_step.num_targets


class EagerStage2:
    """Stage 2: items come from the cache; K catalogue items join the candidates in a second pool."""

    def __init__(
        self, model: BehaviorModel, dataset: Dataset, recipe: Recipe, batches: HostBatches, vectors: FrozenVectors
    ) -> None:
        self.model, self.batches, self.recipe, self.vectors = model, batches, recipe.train, vectors
        self.group = process_group(batches.ranks)
        self.pools = FrozenPools(vectors.rows, LogQ.of(dataset, recipe, batches.device) if recipe.train.log_q else None)
        self.work = Work()

    def backward(self, step: int) -> Losses:
        """Add the gradients of one step to the contextualizer; both pools count half each."""
        host_step = self.batches.read(step)
        self.work.scores += host_step.num_queries * (host_step.num_targets + host_step.num_extras)
        table = None
        if host_step.to_table is not None:
            own = torch.from_numpy(host_step.own_items).to(self.batches.device)
            table = gather_rows(self.vectors.rows(own), host_step.stride, self.batches.ranks)
        with autocast(self.batches.device, self.recipe.precision):
            parts = [_backward(self._part_losses(host_step, part, table)) for part in host_step.parts]
        return _full_batch(parts, self.batches)

    def _part_losses(self, host_step: HostStep, part: StepBatch, table: Tensor | None) -> Losses:
        events = self.vectors.rows(part.inputs.items) if table is None else table[part.event_places]
        pools = self._pools(host_step, part, table)
        return batch_losses(self.model, part, events, pools, group=self.group)

    def _pools(self, host_step: HostStep, part: StepBatch, table: Tensor | None) -> Iterator[TargetPool | ExtraPool]:
        places, num_valid = part.target_places, host_step.valid_targets
        yield self.pools.in_batch(host_step.own_targets, places, host_step.num_targets, num_valid)
        if host_step.own_extras is None or host_step.drawn is None:
            return
        owner, num_valid = part.target_rows % self.batches.ranks.world, host_step.valid_extras
        if self.recipe.extra_pool == "extras":
            shifts = host_step.to_table
            targets = None if table is None or shifts is None else table[places + shifts[owner]]
            yield self.pools.extras(host_step.own_extras, part.target_rows, host_step.drawn, targets, num_valid)
        else:
            places = places if host_step.to_extras is None else places + host_step.to_extras[owner]
            yield self.pools.union(host_step.own_extras, places, host_step.num_extras, num_valid)


def _backward(losses: Losses) -> Losses:
    """The losses of a part, detached, once their gradients are in the parameters."""
    losses.loss.backward()
    return Losses(losses.in_batch.detach(), None if losses.extra is None else losses.extra.detach())


def _full_batch(parts: list[Losses], batches: HostBatches) -> Losses:
    """The losses of the full batch from those of this process's parts."""
    totals = [reduce(add, (part.in_batch for part in parts))]
    extras = [part.extra for part in parts if part.extra is not None]
    if extras:
        totals.append(reduce(add, extras))
    return Losses(*sum_over_ranks(torch.stack(totals), batches.ranks).unbind())
