"""The batch that a captured step reads, and the next one, put together on the device while the step runs.

Steps come in a few sizes, one graph each: a bucket that nearly every batch fits, and by √2 larger ones for the rest.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from habitus.evaluation import Ranks
from habitus.recipe import TrainRecipe
from habitus.softmax import NUM_KEYS, negative_keys
from habitus.training.batches import WindowOrder
from habitus.training.device_batches import DeviceBatch, DeviceEvents, DeviceItems, share_batch

_PROBED = 8  # batches that are looked at to find the size of the first bucket
_GRAIN = 64  # sizes are multiples of this, and
_STEPS = 32  # of a 32nd of the power of two below: few sizes, so that another run may find them compiled


class Prefetch:
    """The batch in place (`current`, `keys`), the one after it, and how large that one is."""

    def __init__(
        self, events: DeviceEvents, items: DeviceItems, order: WindowOrder, recipe: TrainRecipe, device: torch.device,
        ranks: Ranks,
    ) -> None:  # fmt: skip
        self.events, self.items, self.order, self.recipe, self.device = events, items, order, recipe, device
        self.ranks = ranks
        self.next_step = -1  # the step whose batch lies ready
        size = recipe.batch_sequences + NUM_KEYS
        self._request = torch.zeros(size, dtype=torch.int64, device=device)  # windows, and keys of the extras
        self._host_request = torch.zeros(size, dtype=torch.int64, pin_memory=True)
        self._counts_sent = torch.cuda.Event()
        self.buckets = self._fit_buckets()
        self._next = self._assemble()
        self._host_counts = torch.zeros_like(self._next.counts, device="cpu", pin_memory=True)
        self._next_keys = torch.zeros(NUM_KEYS, dtype=torch.int64, device=device)
        self.current = self._next.clone()
        self.keys = self._next_keys.clone()
        self._copies: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # (to, from) of one type each
        for target, source in zip(
            [*self.current.tensors(), self.keys], [*self._next.tensors(), self._next_keys], strict=True
        ):
            targets, sources = self._copies.setdefault(target.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        self._stream = torch.cuda.Stream(device)
        self._in_place = torch.cuda.Event()
        self._graph = self._capture()

    def begin(self, step: int) -> None:
        """Make the batch of a step ready; waits for the device."""
        self._send_request(step)
        self._make_next()
        self._send_counts()
        self._in_place.record()
        self.next_step = step

    def bucket(self) -> int:
        """The bucket of the batch that lies ready. Its size was sent while the device worked on the step before."""
        self._counts_sent.synchronize()
        return self.buckets.holding(*self._needed(self._host_counts))

    def advance(self, following: int) -> None:
        """Move the ready batch into place; put the following one together while the step runs."""
        self.move_into_place()
        self._stream.wait_event(self._in_place)
        with torch.cuda.stream(self._stream):
            self._send_request(following)
            self._graph.replay()
            self._send_counts()
        self.next_step = following

    def move_into_place(self) -> None:
        """Copy the ready batch into place, once it is ready."""
        torch.cuda.current_stream().wait_event(self._counts_sent)
        for targets, sources in self._copies.values():
            torch._foreach_copy_(targets, sources)
        self._in_place.record()

    def _make_next(self) -> None:
        for tensor, value in zip(self._next.tensors(), self._assemble().tensors(), strict=True):
            tensor.copy_(value)
        self._next_keys.copy_(self._request[-NUM_KEYS:])

    def _capture(self) -> torch.cuda.CUDAGraph:
        """The graph that puts a batch together. It runs beside the steps, so it has memory of its own."""
        run_on_side_stream(self._make_next, self.device)
        graph = torch.cuda.CUDAGraph()
        with capturing(graph, self.ranks):
            self._make_next()
        return graph

    def _assemble(self) -> DeviceBatch:
        batch = self.events.assemble(self._request[:-NUM_KEYS], self.items.lengths)
        if self.ranks.world == 1:
            return batch
        return share_batch(batch, self.items.lengths, self.events.num_items, self.ranks)

    def _send_request(self, step: int) -> None:
        # The copy that read this memory last is over: the host has waited for what came after it.
        self._host_request[:-NUM_KEYS] = torch.from_numpy(self.order.windows(step))
        self._host_request[-NUM_KEYS:] = negative_keys(self.recipe.seed, step)
        self._request.copy_(self._host_request, non_blocking=True)

    def _send_counts(self) -> None:
        self._host_counts.copy_(self._next.counts, non_blocking=True)
        self._counts_sent.record()

    def _fit_buckets(self) -> "Buckets":
        """Buckets for the first batches of the run, whatever step it goes on from: sizes show in the last digits."""
        sizes = []
        for step in range(min(_PROBED, self.recipe.steps)):
            self._send_request(step)
            batch = self._assemble()
            sizes.append(self._needed(batch.counts))
        most = len(batch.rows)
        text_len = 0 if self.items.tokens is None else self.items.tokens.shape[1]
        if self.recipe.stage == 2 and self.ranks.in_group:
            return Buckets.fitted(sizes, most, most)
        return Buckets.fitted(sizes, most, most * text_len)

    def _needed(self, counts: Tensor) -> tuple[int, int]:
        """What must fit: all distinct items and their tokens; in stage 2 the targets alone.

        Of several processes, what the one with the most has. In stage 2 they gather all items too.
        """
        targets, items, tokens = (counts[7:10] if self.ranks.world > 1 else counts[:3]).tolist()
        if self.recipe.stage == 2:
            return (targets, items) if self.ranks.in_group else (targets, 0)
        return items, tokens


def run_on_side_stream(work: Callable[[], None], device: torch.device) -> None:
    """Do the work on a stream of its own, as a trial run before capture must."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream(device).wait_stream(stream)


@contextmanager
def capturing(graph: torch.cuda.CUDAGraph, ranks: Ranks, pool: Any = None) -> Iterator[None]:
    """What the block does becomes the graph."""
    mode = "global"
    if ranks.in_group:
        torch.cuda.synchronize()
        mode = "thread_local"  # NCCL's own thread asks its events how far they are meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
        yield


@dataclass(frozen=True)
class Buckets:
    """Bucket k holds up to base·√2^k items and tokens; nothing is ever cut to fit, the next bucket takes it.

    In stage 2 these are targets and, where processes gather them, items.
    """

    items: int  # of bucket 0
    tokens: int
    most_items: int  # no batch can hold more
    most_tokens: int

    @classmethod
    def fitted(cls, sizes: list[tuple[int, int]], most_items: int, most_tokens: int) -> "Buckets":
        """Buckets whose first one holds batches of such sizes: (items, tokens) each."""
        items, tokens = ([size[axis] for size in sizes] for axis in (0, 1))
        return cls(_padded(items, most_items), _padded(tokens, most_tokens), most_items, most_tokens)

    def size(self, number: int) -> tuple[int, int]:
        """(items, tokens) of a bucket."""
        growth = 2 ** (number / 2)
        return (
            min(_rounded(self.items * growth), self.most_items),
            min(_rounded(self.tokens * growth), max(1, self.most_tokens)),
        )

    def holding(self, items: int, tokens: int) -> int:
        """The first bucket that holds so many."""
        number = 0
        while True:
            item_capacity, token_capacity = self.size(number)
            if items <= item_capacity and tokens <= token_capacity:
                return number
            number += 1


def _padded(counts: list[int], most: int) -> int:
    """More than the largest count by the range of all of them, and by one in a hundred."""
    return min(_rounded(1.01 * max(counts) + (max(counts) - min(counts))), max(1, most))


def _rounded(count: float) -> int:
    nearest = int(count + 0.5)
    grain = max(_GRAIN, 2 ** (nearest.bit_length() - 1) // _STEPS)
    return max(grain, -(-nearest // grain) * grain)
