"""Steps on a GPU as captured graphs: the host only says which windows come next and never waits for a loss.

Two graphs take turns. `step` is everything from embedding to the optimizer, one graph per bucket; while it runs, on a
stream of its own, the graph of `Incoming` puts the next batch together and tells how large it is. The host reads the
size of batch t + 1 while the device still works on step t, so that neither waits for the other.
"""

import math
from functools import partial

import numpy as np
import torch
from torch import Tensor

from habitus.data import Dataset
from habitus.model import BehaviorModel, autocast
from habitus.recipe import Recipe
from habitus.softmax import Latch, explain
from habitus.training.compiling import compiler_loading, remember, set_up_compiler, without_collecting
from habitus.training.engine import TAIL, StepResult, tail_means
from habitus.training.objectives import FrozenObjective, JointObjective
from habitus.training.optimizers import build_optimizer, clip_gradients
from habitus.training.prefetch import Incoming, on_side_stream
from habitus.training.resident import ResidentItems, resident_events
from habitus.training.schedule import learning_rate_at
from habitus.training.stages import Work
from habitus.training.windows import WindowOrder

_RING = 512  # steps whose losses the device remembers
_BLOCK = 32  # steps after which they are sent to the host
_LOSS, _NORM = 1 << 8, 1 << 9  # causes beside those of the softmax


class CapturedEngine:
    """Trains like `Engine`, on a GPU that holds the data."""

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
        loading = compiler_loading() if compiled else None
        self.order = WindowOrder(dataset, recipe.train.batch_sequences, recipe.train.seed)
        self.events = resident_events(dataset, device)
        self.items = ResidentItems.of(dataset, recipe, device, features=table is None)
        self.optimizer = build_optimizer(model, recipe.train)
        self.parameters = [info.parameter for info in self.optimizer.infos]
        twin = model
        if loading is not None:
            loading.result()
            set_up_compiler()
            twin = model.twin().compile_blocks()  # evaluation comes in other shapes: it keeps the model as it is
            self._remember = partial(remember, recipe, dataset, device)
        names = self.events.names
        self.objective: JointObjective | FrozenObjective
        if table is None:
            self.objective = JointObjective(twin, dataset, recipe, self.items, names, compiled=compiled)
        else:
            self.objective = FrozenObjective(twin, dataset, recipe, table, names, compiled=compiled)
        self.latch = Latch(device)  # its counter is the step
        self.ring = torch.zeros(_RING, 4, device=device)  # in_batch, extra, loss, gradient's norm
        self.totals = torch.zeros(4, dtype=torch.int64, device=device)  # as in Work
        self.tail = np.full((TAIL, 3), np.nan)
        self.has_extra = table is not None and recipe.train.num_negatives > 0
        self.incoming = Incoming(self, recipe.train.batch_sequences)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.begun = self.known = 0  # steps handed to the device; steps whose result the host has read
        self._sent: tuple[torch.cuda.Event, int, Tensor, Tensor] | None = None
        self._warm = False

    def step(self, step: int) -> None:
        """Hand one step to the device."""
        if self.incoming.holds != step:
            self.incoming.begin(step)
        bucket = self.incoming.bucket()
        if bucket not in self.graphs:
            self._capture_step(bucket)
        self.incoming.move_on(min(step + 1, self.recipe.steps - 1))
        self.graphs[bucket].replay()
        self.begun = step + 1

    def _one_step(self, bucket: int) -> None:
        """What a graph holds: from the batch in place to the optimizer's step and the notes about it."""
        with autocast(self.device, self.recipe.precision):
            found = self.objective(
                self.incoming.current, self.incoming.keys, self.incoming.buckets.size(bucket), self.latch
            )
        loss = found.loss
        loss.backward()
        with torch.no_grad():
            norm = clip_gradients(self.parameters, self.recipe.clip)
            cause = ~torch.isfinite(loss) * _LOSS + ~torch.isfinite(norm) * _NORM
            self.latch.record(cause)
            now = self.latch.state[0]
            self.optimizer.step(learning_rate_at(now, self.recipe))
            extra = found.in_batch if found.extra is None else found.extra
            row = torch.stack((found.in_batch.float(), extra.float(), loss.float(), norm.float()))
            self.ring.index_copy_(0, (now % _RING)[None], row[None])
            self.totals += torch.stack((*self.incoming.current.counts[1:4], found.scores))
            self.latch.advance()

    def _capture_step(self, bucket: int) -> None:
        """Make the graph of a bucket. The trial run that it needs leaves no trace in weights or counts."""
        self.incoming.settle_into_place()
        held = [*self.parameters, *self.optimizer.state_tensors().values(), self.latch.state, self.ring, self.totals]
        before = [tensor.detach().clone() for tensor in held]
        self.optimizer.zero_grad()
        with without_collecting():
            on_side_stream(lambda: self._one_step(bucket), self.device)  # compiles what there is to compile
        self.optimizer.zero_grad()
        graph = torch.cuda.CUDAGraph()
        others = next(iter(self.graphs.values()), None)
        pool = None if others is None else others.pool()  # one for all steps: they never run at the same time
        with torch.cuda.graph(graph, pool=pool):
            self._one_step(bucket)
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
        self.graphs[bucket] = graph
        if self.description["compiled"]:
            self._remember()

    def results(self, *, wait: bool = False) -> list[StepResult]:
        """Steps whose losses have come back; they come in blocks, unless `wait` asks for all that were begun."""
        if wait or not self._warm:
            self._warm, self._sent = True, None
            return self._read(self.ring.cpu(), self.latch.state.cpu(), self.begun)
        found: list[StepResult] = []
        if self._sent is not None and self._sent[0].query():
            _, upto, ring, latch = self._sent
            self._sent = None
            found = self._read(ring, latch, upto)
        if self._sent is None and self.begun - self.known >= _BLOCK:
            ring = torch.empty_like(self.ring, device="cpu", pin_memory=True).copy_(self.ring, non_blocking=True)
            latch = torch.empty_like(self.latch.state, device="cpu", pin_memory=True)
            latch.copy_(self.latch.state, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._sent = event, self.begun, ring, latch
        elif self._sent is not None and self.begun - self.known > _RING - _BLOCK:
            self._sent[0].synchronize()  # the ring is about to come round
        return found

    def _read(self, ring: Tensor, latch: Tensor, upto: int) -> list[StepResult]:
        _, first_bad, cause = latch.tolist()
        found = []
        for step in range(self.known, upto):
            in_batch, extra, loss, norm = ring[step % _RING].tolist()
            problem = _in_words(cause, loss, norm) if step == first_bad else None
            shown = extra if self.has_extra else None
            found.append(StepResult(step, learning_rate_at(step, self.recipe), in_batch, shown, loss, norm, problem))
            if problem:
                break
            self.tail[step % TAIL] = in_batch, math.nan if shown is None else shown, loss
        self.known = upto
        return found

    def work(self) -> Work:
        """What all steps so far have multiplied; waits for the device."""
        items, tokens, pairs, scores = self.totals.tolist()
        frozen = isinstance(self.objective, FrozenObjective)
        return Work(0, 0, 0, scores) if frozen else Work(items, tokens, pairs, scores)

    def state_tensors(self) -> dict[str, Tensor]:
        """Everything but the model's weights that the next step depends on, or that the Record will show."""
        return {"tail": torch.from_numpy(self.tail.copy()), **self.optimizer.state_tensors()}

    def load_state(self, tensors: dict[str, Tensor], work: Work) -> None:
        """Go on from a checkpoint whose weights the model holds already."""
        tensors = dict(tensors)
        self.tail = tensors.pop("tail").numpy().copy()
        self.optimizer.load_state_tensors(tensors)
        self.begun = self.known = int(self.optimizer.count)
        self.latch.state[0] = self.begun
        self.totals.copy_(torch.tensor([work.items, work.text_tokens, work.text_pairs, work.scores]))

    def tail_means(self) -> tuple[float, float | None, float] | None:
        """Means over the last steps of the in-batch, extra and whole loss; None before the first step."""
        return tail_means(self.tail)


def _in_words(cause: int, loss: float, norm: float) -> str:
    parts = [explain(cause)] if explain(cause) else []
    parts += [f"the loss is {loss}"] if cause & _LOSS else []
    parts += [f"the gradient's norm is {norm}"] if cause & _NORM else []
    return "; ".join(parts)
