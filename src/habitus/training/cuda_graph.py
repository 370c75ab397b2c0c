"""Steps on a GPU as captured graphs: the host only says which windows come next and never waits for a loss.

Two graphs take turns. One holds everything from embedding to the optimizer, once per bucket; while it runs, on a
stream of its own, the graph of `Prefetch` puts the next batch together and reports how large it is. The host reads the
size of batch t + 1 while the device still works on step t, so that neither waits for the other.
"""

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from habitus.data import Dataset
from habitus.evaluation import Ranks
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
from habitus.training.device_batches import DeviceBatch, DeviceItems, load_events, text_capacity
from habitus.training.environment import (
    configure_compiler,
    load_compiler,
    mark_kernels_cached,
    pause_garbage_collection,
)
from habitus.training.items import item_dropout_rates
from habitus.training.loss import ExtraPool, FrozenPools, LogQ, Losses, TargetPool, batch_losses
from habitus.training.optimizers import build_optimizer, clip_gradients, learning_rate_at
from habitus.training.parallel import (
    GradientExchange,
    catalogue_places,
    drawn_capacity,
    gather_rows,
    own_drawn,
    owned_counts,
    owned_items,
    places_among,
    process_group,
    sum_over_ranks,
)
from habitus.training.prefetch import Prefetch, capturing, run_on_side_stream
from habitus.training.step import LossTail, StepResult, Work

_RING = 512  # steps whose losses the device remembers
_BLOCK = 32  # steps after which they are sent to the host
_LOSS, _NORM, _DRAWN = 1 << 8, 1 << 9, 1 << 10  # causes beside those of the softmax


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
        ranks: Ranks | None = None,
    ) -> None:
        self.description = {"engine": "captured", "compiled": compiled}
        self.recipe, self.device, self.ranks = recipe.train, device, ranks or Ranks()
        compiler = load_compiler() if compiled else None
        self.order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
        events = load_events(dataset, device)
        items = DeviceItems.of(dataset, recipe, device, features=table is None, ranks=self.ranks)
        self.optimizer = build_optimizer(model, recipe.train)
        self.parameters = [info.parameter for info in self.optimizer.infos]
        self.exchange = GradientExchange(self.parameters, overlapped=True) if self.ranks.in_group else None
        twin = model
        if compiler is not None:
            compiler.result()
            configure_compiler()
            twin = model.twin().compile_blocks()  # evaluation comes in other shapes: it keeps the model as it is
            self._mark_kernels_cached = partial(mark_kernels_cached, recipe, dataset, device)
        self.stage: CapturedStage1 | CapturedStage2
        if table is None:
            self.stage = CapturedStage1(twin, dataset, recipe, items, events.names, compiled=compiled, ranks=self.ranks)
        else:
            self.stage = CapturedStage2(twin, dataset, recipe, table, events.names, compiled=compiled, ranks=self.ranks)
        self.latch = Latch(device)  # its counter is the step
        self.ring = torch.zeros(_RING, 4, device=device)  # in_batch, extra, loss, gradient's norm
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # as in Work
        self.tail = LossTail()
        self.has_extra = table is not None and recipe.train.num_negatives > 0
        self.prefetch = Prefetch(events, items, self.order, recipe.train, device, self.ranks)
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
        losses.loss.backward()
        with torch.no_grad():
            losses = self._exchange(losses)
            loss = losses.loss
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

    def _exchange(self, losses: Losses) -> Losses:
        """The losses of the full batch, once gradients and what went wrong are those of all processes."""
        if self.exchange is None:
            return losses
        self.exchange.finish()
        dist.all_reduce(self.latch.state[1:], dist.ReduceOp.MAX)
        means = [losses.in_batch] if losses.extra is None else [losses.in_batch, losses.extra]
        means = list(sum_over_ranks(torch.stack(means), self.ranks).unbind())
        return Losses(means[0], means[1] if len(means) > 1 else None, losses.num_candidates)

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
        with capturing(graph, self.ranks, pool):
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
        if self.ranks.in_group and self._num_begun % _BLOCK:
            return results  # all processes must hear of a problem after the same step
        if self._sent is not None and (self.ranks.in_group or self._sent[0].query()):
            self._sent[0].synchronize()
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

    def close(self) -> None:
        """Give the graphs up: those that hold messages must not outlive the process group."""
        self.graphs.clear()

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
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.items, self.names, self.ranks = model, items, names, ranks or Ranks()
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = _StepDropoutMask(recipe, self.ranks, compiled=compiled)
        self.text_capacity = text_capacity(dataset, recipe.train.batch_sequences, recipe.model.text_len)
        self.item_dropout = _StepItemDropout(recipe, compiled=compiled)
        drops = compiled and recipe.train.item_dropout
        self.drop_entries = torch.compile(drop_entries, dynamic=False) if drops else drop_entries
        self.log_q = LogQ.of(dataset, recipe, items.lengths.device).in_batch if recipe.train.log_q else None

    def losses(self, batch: DeviceBatch, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct items fit `size` = (items, tokens), those of each process."""
        rows, (num_targets, num_items) = batch.rows[: size[0]], batch.own_counts
        dropout = self.item_dropout(rows, latch)
        vectors = self.model.embed_items(self.items.read(rows, num_items, size[1], dropout))
        event_vectors, candidate_vectors = self.drop_entries(vectors, dropout)
        part = batch.step_batch(self.names, self.dropout_mask(batch, latch), self.text_capacity)
        table = gather_rows(event_vectors, len(rows), self.ranks)
        events = F.embedding(places_among(batch.event_places, batch.items, len(rows), self.ranks), table)
        # Distinct items have their targets first, so the head of the rows is the pool.
        places = places_among(part.target_places, part.target_rows, len(rows), self.ranks)
        log_q = None if self.log_q is None else self.log_q[rows]
        candidates = TargetPool(candidate_vectors, places, batch.counts[0], log_q, num_valid=num_targets)
        group = process_group(self.ranks)
        return batch_losses(self.model, part, events, [candidates], latch=latch, group=group, copy_mass=self.copy_mass)


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
        ranks: Ranks | None = None,
    ) -> None:
        self.model, self.table, self.names, self.ranks = model, table, names, ranks or Ranks()
        self.num_items = dataset.num_items
        self.num_negatives = recipe.train.num_negatives
        self.extra_pool = recipe.train.extra_pool
        self.full_catalogue = self.num_negatives == self.num_items and self.extra_pool == "union"
        self.num_candidates, rows = dataset.num_candidates, dataset.candidate_rows
        self.candidates = None if rows is None else torch.from_numpy(rows).to(table.device)
        self.owned = owned_counts(self.num_items, rows, self.ranks)
        # Some five hundred small operations on integers: one kernel once compiled.
        self.draw = torch.compile(sample_negatives, dynamic=False) if compiled else sample_negatives
        self.copy_mass = torch.compile(copy_mass, dynamic=False) if compiled else copy_mass
        self.dropout_mask = _StepDropoutMask(recipe, self.ranks, compiled=compiled)
        self.text_capacity = text_capacity(dataset, recipe.train.batch_sequences, recipe.model.text_len)
        self.log_q = LogQ.of(dataset, recipe, table.device) if recipe.train.log_q else None
        # Not by a method of its own: that would be a cycle, and the table would outlive the run for a while.
        self.pools = FrozenPools(partial(_own_vectors, table, self.ranks.world), self.log_q)

    def losses(self, batch: DeviceBatch, keys: Tensor, size: tuple[int, int], latch: Latch) -> Losses:
        """The losses of a batch whose distinct targets fit `size[0]`; `keys` draw the extras.

        Of several processes, each holds every world-th row of the table, and those of the batch, up to `size[1]` of
        each process, are gathered.
        """
        part, group = batch.step_batch(self.names, self.dropout_mask(batch, latch), self.text_capacity), None
        pools = self._pools(batch, part, keys, size[0])
        if self.ranks.in_group:
            group, table = process_group(self.ranks), self.pools.vectors(batch.rows[: size[1]])
            table = gather_rows(table, size[1], self.ranks)
            events = table[places_among(batch.event_places, batch.items, size[1], self.ranks)]
            if self.ranks.world > 1:
                pools = self._shared_pools(batch, part, keys, size, table, latch)
        else:
            events = self.table[batch.items]
        return batch_losses(self.model, part, events, pools, latch=latch, group=group, copy_mass=self.copy_mass)

    def _draw(self, keys: Tensor) -> Tensor:
        drawn = self.draw(self.num_candidates, self.num_negatives, keys)
        return drawn if self.candidates is None else self.candidates[drawn]

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
        drawn = self._draw(keys)
        if self.extra_pool == "extras":
            yield self.pools.extras(drawn, part.target_rows, drawn)
            return
        pool = candidate_pool(part.target_rows, drawn, capacity=capacity)
        yield self.pools.union(pool.items, pool.targets, pool.num_valid, num_valid=pool.num_valid)

    def _shared_pools(
        self, batch: DeviceBatch, part: StepBatch, keys: Tensor, size: tuple[int, int], table: Tensor, latch: Latch
    ) -> Iterator[TargetPool | ExtraPool]:
        """This process's pieces of the pools; `table` holds the vectors of all items of the batch."""
        ranks, capacity, (num_targets, _) = self.ranks, size[0], batch.own_counts
        rows, owned = batch.rows[:capacity], (part.target_places, part.target_rows)
        yield self.pools.in_batch(rows, places_among(*owned, capacity, ranks), batch.counts[0], num_targets)
        if not self.num_negatives:
            return
        if self.full_catalogue:
            log_q = None if self.log_q is None else self.log_q.union[owned_items(self.num_items, ranks)]
            yield TargetPool(
                self.table, catalogue_places(part.target_rows, self.num_items, ranks), self.num_items, log_q
            )
            return
        drawn = self._draw(keys)
        own, count = own_drawn(drawn, drawn_capacity(self.num_negatives, self.owned), ranks)
        latch.record((count > len(own)) * _DRAWN)
        if self.extra_pool == "extras":
            targets = table[places_among(*owned, size[1], ranks)]
            yield self.pools.extras(own, part.target_rows, drawn, targets, count)
            return
        # What does not count repeats something that does, and a pool holds nothing twice.
        spare = torch.where(num_targets > 0, rows[0], own[0])
        targets = torch.where(torch.arange(capacity, device=rows.device) < num_targets, rows, spare)
        extras = torch.where(torch.arange(len(own), device=own.device) < count, own, spare)
        pool = candidate_pool(targets, extras, capacity=capacity)
        num_valid = torch.where(num_targets + count > 0, pool.num_valid, 0)
        size_of_all = sum_over_ranks(num_valid.clone(), ranks)
        yield self.pools.union(pool.items, places_among(*owned, len(pool.items), ranks), size_of_all, num_valid)


def _own_vectors(table: Tensor, world: int, rows: Tensor) -> Tensor:
    """The vectors of catalogue rows that this process holds, every world-th of all."""
    return table[rows if world == 1 else rows // world]


class _StepDropoutMask:
    """The dropout mask of a captured step, whose number the latch counts: by the slots' places in the full batch."""

    def __init__(self, recipe: Recipe, ranks: Ranks, *, compiled: bool) -> None:
        self.seed, self.rate = recipe.train.seed, recipe.train.dropout
        self.first = ranks.rank * recipe.train.batch_sequences // ranks.world * recipe.data.seq_len
        self.draw = torch.compile(draw_dropout_mask, dynamic=False) if compiled else draw_dropout_mask

    def __call__(self, batch: DeviceBatch, latch: Latch) -> DropoutMask | None:
        if not self.rate:
            return None
        return self.draw(self.seed, latch.state[0], self.first, batch.items.numel(), self.rate, batch.items.device)


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
    parts += ["a process drew more negatives than it has room for"] if cause & _DRAWN else []
    return "; ".join(parts)
