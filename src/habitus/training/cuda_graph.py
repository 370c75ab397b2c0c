"""Steps on a GPU as captured graphs: the host only says which windows come next and never waits for a loss.

Two graphs take turns. One holds everything from embedding to the optimizer, once per bucket; while it runs, on a
stream of its own, the graph of `Prefetch` puts the next batch together and reports how large it is. The host reads the
size of batch t + 1 while the device still works on step t, so that neither waits for the other.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.model import (
    BehaviorModel,
    DropoutMask,
    ItemDropout,
    autocast,
    copy_mass,
    draw_dropout_mask,
    draw_item_dropout,
    drop_entries,
)
from habitus.recipe import Recipe
from habitus.softmax import Latch, candidate_pool, explain_cause, sample_negatives
from habitus.training.batches import StepBatch, WindowOrder
from habitus.training.compile import configure_compiler, load_compiler, mark_kernels_cached, pause_garbage_collection
from habitus.training.device_batches import DeviceBatch, DeviceItems, load_events, text_capacity
from habitus.training.items import item_dropout_rates
from habitus.training.loss import ExtraPool, FrozenPools, LogQ, Losses, TargetPool, batch_losses
from habitus.training.optimizers import build_optimizer, clip_gradients
from habitus.training.prefetch import Prefetch, run_on_side_stream
from habitus.training.schedule import learning_rate_at
from habitus.training.step import LossTail, StepResult, Work

_RING = 512  # steps whose losses the device remembers
_BLOCK = 32  # steps after which they are sent to the host
_LOSS, _NORM = 1 << 8, 1 << 9  # causes beside those of the softmax


class CapturedEngine:
    """Trains like `EagerEngine`, on a GPU that holds the data."""

    def __init__(
        self,
        model: BehaviorModel,
        dataset: Dataset,
        recipe: Recipe,
        device: torch.device,
        table: Tensor | None,
        *,
        compiled: bool = True,
    ) -> None:
        self.description = {"engine": "captured", "compiled": compiled}
        self.recipe, self.device = recipe.train, device
        compiler = load_compiler() if compiled else None
        self.order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
        events = load_events(dataset, device)
        items = DeviceItems.of(dataset, recipe, device, features=table is None)
        self.optimizer = build_optimizer(model, recipe.train)
        self.parameters = [info.parameter for info in self.optimizer.infos]
        twin = model
        if compiler is not None:
            compiler.result()
            configure_compiler()
            twin = model.twin().compile_blocks()  # evaluation comes in other shapes: it keeps the model as it is
            self._mark_kernels_cached = partial(mark_kernels_cached, recipe, dataset, device)
        self.stage: CapturedStage1 | CapturedStage2
        if table is None:
            self.stage = CapturedStage1(twin, dataset, recipe, items, events.names, compiled=compiled)
        else:
            self.stage = CapturedStage2(twin, dataset, recipe, table, events.names, compiled=compiled)
        self.latch = Latch(device)  # its counter is the step
        self.ring = torch.zeros(_RING, 4, device=device)  # in_batch, extra, loss, gradient's norm
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # as in Work
        self.tail = LossTail()
        self.has_extra = table is not None and recipe.train.num_negatives > 0
        self.prefetch = Prefetch(events, items, self.order, recipe.train, device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._num_begun = self._num_read = 0  # steps handed to the device; steps whose result the host has read
        self._sent: tuple[torch.cuda.Event, int, Tensor, Tensor] | None = None
        self._warm = False

    def step(self, step: int) -> None:
        """Hand one step to the device."""
        if self.prefetch.next_step != step:
            self.prefetch.begin(step)
        bucket = self.prefetch.bucket()
        if bucket not in self.graphs:
            self._capture(bucket)
        self.prefetch.advance(min(step + 1, self.recipe.steps - 1))
        self.graphs[bucket].replay()
        self._num_begun = step + 1

    def _run_step(self, bucket: int) -> None:
        """What a graph holds: from the batch in place to the optimizer's step and the notes about it."""
        batch = self.prefetch.current
        with autocast(self.device, self.recipe.precision):
            losses = self.stage.losses(batch, self.prefetch.keys, self.prefetch.buckets.size(bucket), self.latch)
        loss = losses.loss
        loss.backward()
        with torch.no_grad():
            norm = clip_gradients(self.parameters, self.recipe.clip)
            cause = ~torch.isfinite(loss) * _LOSS + ~torch.isfinite(norm) * _NORM
            self.latch.record(cause)
            now = self.latch.state[0]
            self.optimizer.step(learning_rate_at(now, self.recipe))
            extra = losses.in_batch if losses.extra is None else losses.extra
            row = torch.stack((losses.in_batch.float(), extra.float(), loss.float(), norm.float()))
            self.ring.index_copy_(0, (now % _RING)[None], row[None])
            self.totals += torch.stack((*batch.counts[1:4], batch.counts[4] * losses.num_candidates))
            self.latch.advance()

    def _capture(self, bucket: int) -> None:
        """Make the graph of a bucket. The trial run that it needs leaves no trace in weights or counts."""
        self.prefetch.move_into_place()
        tensors = [*self.parameters, *self.optimizer.state_tensors().values(), self.latch.state, self.ring, self.totals]
        before = [tensor.detach().clone() for tensor in tensors]
        self.optimizer.zero_grad()
        with pause_garbage_collection():
            run_on_side_stream(lambda: self._run_step(bucket), self.device)  # compiles what there is to compile
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        others = next(iter(self.graphs.values()), None)
        pool = None if others is None else others.pool()  # one for all steps: they never run at the same time
        with torch.cuda.graph(graph, pool=pool):
            self._run_step(bucket)
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        self.graphs[bucket] = graph
        if self.description["compiled"]:
            self._mark_kernels_cached()

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """Steps whose losses have come back; they come in blocks, unless `wait` asks for all that were begun."""
        if wait or not self._warm:
            self._warm, self._sent = True, None
            return self._read(self.ring.cpu(), self.latch.state.cpu(), self._num_begun)
        results: list[StepResult] = []
        if self._sent is not None and self._sent[0].query():
            _, upto, ring, latch = self._sent
            self._sent = None
            results = self._read(ring, latch, upto)
        if self._sent is None and self._num_begun - self._num_read >= _BLOCK:
            ring = torch.empty_like(self.ring, device="cpu", pin_memory=True).copy_(self.ring, non_blocking=True)
            latch = torch.empty_like(self.latch.state, device="cpu", pin_memory=True)
            latch.copy_(self.latch.state, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent = event, self._num_begun, ring, latch
        elif self._sent is not None and self._num_begun - self._num_read > _RING - _BLOCK:
            self._sent[0].synchronize()  # the ring is about to come round
        return results

    def _read(self, ring: Tensor, latch: Tensor, upto: int) -> list[StepResult]:
        _, first_bad, cause = latch.tolist()
        results = []
        for step in range(self._num_read, upto):
            in_batch, extra, loss, norm = ring[step % _RING].tolist()
            problem = _explain(cause, loss, norm) if step == first_bad else None
            rate = learning_rate_at(step, self.recipe)
            result = StepResult(step, rate, in_batch, extra if self.has_extra else None, loss, norm, problem)
            results.append(result)
            if problem:
                break
            self.tail.add(result)
        self._num_read = upto
        return results

    def work(self) -> Work:
        """What all steps so far have multiplied; waits for the device."""
        items, tokens, pairs, scores = self.totals.tolist()
        frozen = isinstance(self.stage, CapturedStage2)
        return Work(0, 0, 0, scores) if frozen else Work(items, tokens, pairs, scores)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything but the model's weights that the next step depends on, or that the Record will show."""
        return {"tail": torch.from_numpy(self.tail.values.copy()), **self.optimizer.state_tensors()}

    def load_state(self, tensors: dict[str, Tensor], work: Work) -> None:
        """Go on from a checkpoint whose weights the model holds already."""
        tensors = dict(tensors)
        self.tail.values = tensors.pop("tail").numpy().copy()
        self.optimizer.load_state_tensors(tensors)
        self._num_begun = self._num_read = int(self.optimizer.count)
        self.latch.state[0] = self._num_begun
        self.totals.copy_(torch.tensor([work.items, work.text_tokens, work.text_pairs, work.scores]))


class CapturedStage1:
    """Stage 1 in fixed shapes: both parts learn, and the candidates are the distinct targets of the batch."""

    def __init__(
        self,
        model: BehaviorModel,
        dataset: Dataset,
        recipe: Recipe,
        items: DeviceItems,
        names: tuple[str, ...],
        *,
        compiled: bool = False,
    ) -> None:
        self.model, self.items, self.names = model, items, names
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = _StepDropoutMask(recipe, compiled=compiled)
        self.text_capacity = text_capacity(dataset, recipe.train.batch_sequences, recipe.model.text_len)
        self.item_dropout = _StepItemDropout(recipe, compiled=compiled)
        drops = compiled and recipe.train.item_dropout
        self.drop_entries = torch.compile(drop_entries, dynamic=False) if drops else drop_entries
        self.log_q = LogQ.of(dataset, recipe, items.lengths.device).in_batch if recipe.train.log_q else None

    def losses(self, batch: DeviceBatch, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct items fit `size` = (items, tokens)."""
        rows = batch.rows[: size[0]]
        dropout = self.item_dropout(rows, latch)
        vectors = self.model.embed_items(self.items.read(rows, batch.counts[1], size[1], dropout))
        event_vectors, candidate_vectors = self.drop_entries(vectors, dropout)
        part = batch.step_batch(self.names, self.dropout_mask(batch, latch), self.text_capacity)
        events = F.embedding(batch.event_places, event_vectors)
        # Distinct items have their targets first, so the head of the rows is the pool.
        num_targets, log_q = batch.counts[0], None if self.log_q is None else self.log_q[rows]
        candidates = TargetPool(candidate_vectors, part.target_places, num_targets, log_q, num_valid=num_targets)
        return batch_losses(self.model, part, events, [candidates], latch=latch, copy_mass=self.copy_mass)


class CapturedStage2:
    """Stage 2 in fixed shapes: items come from a table; K catalogue items join the candidates in a second pool."""

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
        self.full_catalogue = self.num_negatives == self.num_items and self.extra_pool == "union"
        self.num_candidates, rows = dataset.num_candidates, dataset.candidate_rows
        self.candidates = None if rows is None else torch.from_numpy(rows).to(table.device)
        # Some five hundred small operations on integers: one kernel once compiled.
        self.draw = torch.compile(sample_negatives, dynamic=False) if compiled else sample_negatives
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = _StepDropoutMask(recipe, compiled=compiled)
        self.text_capacity = text_capacity(dataset, recipe.train.batch_sequences, recipe.model.text_len)
        self.log_q = LogQ.of(dataset, recipe, table.device) if recipe.train.log_q else None
        self.pools = FrozenPools(table.__getitem__, self.log_q)

    def losses(self, batch: DeviceBatch, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct targets fit `size[0]`; `keys` draw the extras."""
        part = batch.step_batch(self.names, self.dropout_mask(batch, latch), self.text_capacity)
        pools = self._pools(batch, part, keys, size[0])
        return batch_losses(self.model, part, self.table[batch.items], pools, latch=latch, copy_mass=self.copy_mass)

    def _pools(
        self, batch: DeviceBatch, part: StepBatch, keys: Tensor, capacity: int
    ) -> Iterator[TargetPool | ExtraPool]:
        num_targets = batch.counts[0]
        # Distinct items have their targets first, so the head of the rows is the in-batch pool.
        yield self.pools.in_batch(batch.rows[:capacity], part.target_places, num_targets, num_valid=num_targets)
        if not self.num_negatives:
            return
        if self.full_catalogue:
            log_q = None if self.log_q is None else self.log_q.union
            yield TargetPool(self.table, part.target_rows, self.num_items, log_q)
            return
        drawn = self.draw(self.num_candidates, self.num_negatives, keys)
        if self.candidates is not None:
            drawn = self.candidates[drawn]
        if self.extra_pool == "extras":
            yield self.pools.extras(drawn, part.target_rows, drawn)
            return
        pool = candidate_pool(part.target_rows, drawn, capacity=capacity)
        yield self.pools.union(pool.items, pool.targets, pool.num_valid, num_valid=pool.num_valid)


class _StepDropoutMask:
    """The dropout mask of a captured step, whose number the latch counts."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        self.seed, self.rate = recipe.train.seed, recipe.train.dropout
        self.draw = torch.compile(draw_dropout_mask, dynamic=False) if compiled else draw_dropout_mask

    def __call__(self, batch: DeviceBatch, latch: Latch) -> DropoutMask | None:
        if not self.rate:
            return None
        return self.draw(self.seed, latch.state[0], 0, batch.items.numel(), self.rate, batch.items.device)


class _StepItemDropout:
    """What the embedder drops in a captured step."""

    def __init__(self, recipe: Recipe, *, compiled: bool) -> None:
        self.seed, self.rates = recipe.train.seed, item_dropout_rates(recipe.train)
        self.draw = torch.compile(draw_item_dropout, dynamic=False) if compiled else draw_item_dropout

    def __call__(self, rows: Tensor, latch: Latch) -> ItemDropout | None:
        return self.draw(self.seed, latch.state[0], rows, *self.rates) if any(self.rates) else None


def _explain(cause: int, loss: float, norm: float) -> str:
    parts = [explain_cause(cause)] if explain_cause(cause) else []
    parts += [f"the loss is {loss}"] if cause & _LOSS else []
    parts += [f"the gradient's norm is {norm}"] if cause & _NORM else []
    return "; ".join(parts)
