"""The batch that a captured step reads, and the next one, put together on the device while the step runs."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from habitus.randomness import Stream, shuffle_keys
from habitus.softmax import NUM_KEYS
from habitus.training.buckets import Buckets
from habitus.training.objectives import FrozenObjective
from habitus.training.resident import Assembled

if TYPE_CHECKING:
    from habitus.training.cuda_graph import CapturedEngine

_PROBED = 8  # batches that are looked at to find the size of the first bucket


class Incoming:
    """The batch in place, the one after it, and how large that one is."""

    def __init__(self, engine: "CapturedEngine", batch_sequences: int) -> None:
        self.engine = engine
        self.holds = -1  # the step whose batch lies ready
        device = engine.device
        size = batch_sequences + NUM_KEYS
        self.sent = torch.zeros(size, dtype=torch.int64, device=device)  # windows, and keys of the extras
        self.sending = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self.counts = torch.zeros(5, dtype=torch.int64, pin_memory=True)
        self.known = torch.cuda.Event()
        self.buckets = self._fitted()
        self.ready = self._assembled()
        self.ready_keys = torch.zeros(NUM_KEYS, dtype=torch.int64, device=device)
        self.current = self.ready.cloned()
        self.keys = self.ready_keys.clone()
        self.pairs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # (place, ready) of one type each
        for place, ready in zip([*self.current.flat(), self.keys], [*self.ready.flat(), self.ready_keys], strict=True):
            places, readies = self.pairs.setdefault(place.dtype, ([], []))
            places.append(place)
            readies.append(ready)
        self.stream = torch.cuda.Stream(device)
        self.settled = torch.cuda.Event()
        self.graph = self._captured()

    def begin(self, step: int) -> None:
        """Put the batch of a step in readiness; waits for the device."""
        self._send(step)
        self._renew()
        self._tell()
        self.settled.record()
        self.holds = step

    def bucket(self) -> int:
        """The bucket of the batch that lies ready. Its size was sent while the device worked on the step before."""
        self.known.synchronize()
        targets, items, tokens = self.counts[:3].tolist()
        return self.buckets.holding(*self._size(targets, items, tokens))

    def move_on(self, following: int) -> None:
        """Move the ready batch into place; put the following one together while the step runs."""
        self.settle_into_place()
        self.stream.wait_event(self.settled)
        with torch.cuda.stream(self.stream):
            self._send(following)
            self.graph.replay()
            self._tell()
        self.holds = following

    def settle_into_place(self) -> None:
        """Copy the ready batch into place, once it is ready."""
        torch.cuda.current_stream().wait_event(self.known)
        for places, readies in self.pairs.values():
            torch._foreach_copy_(places, readies)
        self.settled.record()

    def _renew(self) -> None:
        for ready, made in zip(self.ready.flat(), self._assembled().flat(), strict=True):
            ready.copy_(made)
        self.ready_keys.copy_(self.sent[-NUM_KEYS:])

    def _captured(self) -> torch.cuda.CUDAGraph:
        """The graph that puts a batch together. It runs beside the steps, so it has memory of its own."""
        on_side_stream(self._renew, self.engine.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._renew()
        return graph

    def _assembled(self) -> Assembled:
        return self.engine.events.assemble(self.sent[:-NUM_KEYS], self.engine.items.lengths)

    def _send(self, step: int) -> None:
        # The copy that read this memory last is over: the host has waited for what came after it.
        recipe = self.engine.recipe
        self.sending[:-NUM_KEYS] = torch.from_numpy(self.engine.order.of_step(step))
        self.sending[-NUM_KEYS:] = torch.from_numpy(shuffle_keys(recipe.seed, Stream.NEGATIVES, step))
        self.sent.copy_(self.sending, non_blocking=True)

    def _tell(self) -> None:
        self.counts.copy_(self.ready.counts, non_blocking=True)
        self.known.record()

    def _fitted(self) -> Buckets:
        """Buckets for the first batches of the run, whatever step it goes on from: sizes show in the last digits."""
        seen = []
        for step in range(min(_PROBED, self.engine.recipe.steps)):
            self._send(step)
            made = self._assembled()
            targets, items, tokens = made.counts[:3].tolist()
            seen.append(self._size(targets, items, tokens))
        most = len(made.rows)
        text_len = 0 if self.engine.items.tokens is None else self.engine.items.tokens.shape[1]
        return Buckets.fitted(seen, most, most * text_len)

    def _size(self, targets: int, items: int, tokens: int) -> tuple[int, int]:
        """What must fit: all distinct items and their tokens, or in stage 2 the targets alone."""
        return (targets, 0) if isinstance(self.engine.objective, FrozenObjective) else (items, tokens)


def on_side_stream(work: Callable[[], None], device: torch.device) -> None:
    """Do the work on a stream of its own, as a trial run before capture must."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)
