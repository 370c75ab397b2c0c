"""Queries, targets and vectors for benchmarks of evaluation: no dataset, no model, any size."""

from collections.abc import Iterator

import numpy as np
import torch

from habitus.data.batch import Batch
from habitus.evaluation.queries import QueryBatch

SEQ_LEN = 256
BATCH_SEQUENCES = 64
SIGNAL = 0.52  # of the target in its query: ranks spread from 1 over hundreds, as real ones do
GAIN = 0.25  # brings scores to a deviation of about two nats at d = 64


def query_batches(num_queries: int, num_items: int, seed: int = 0) -> Iterator[QueryBatch]:
    """Evaluation batches of 64 windows of 256 events, one user each, until there are enough queries."""
    draw = np.random.default_rng(seed)
    left, number, user = num_queries, 0, 0
    while left:
        items = draw.integers(0, num_items, (BATCH_SEQUENCES, SEQ_LEN))
        repeats = draw.random(items.shape) < 0.2  # some targets repeat the item four events before
        items[:, 5:][repeats[:, 5:]] = items[:, 1:-4][repeats[:, 5:]]
        targets = np.full_like(items, -1)
        targets[:, :-1] = items[:, 1:]
        window, slot = (places[:left] for places in np.nonzero(targets >= 0))
        users = np.arange(user, user + BATCH_SEQUENCES)
        batch = Batch(
            items=items,
            targets=targets,
            positions=np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), items.shape),
            segments=np.zeros(items.shape, np.int32),
            boundaries=np.arange(0, items.size + 1, SEQ_LEN, dtype=np.int32),
            users=users[:, None],
            fields={},
        )
        yield QueryBatch(
            number=number,
            batch=batch,
            windows=window,
            slots=slot,
            targets=targets[window, slot],
            events=user * SEQ_LEN + window * SEQ_LEN + slot,
            users=users[window],
            histories=slot + 1,
            pool=np.unique(targets[targets >= 0]),
        )
        left -= len(window)
        number, user = number + 1, user + BATCH_SEQUENCES


def query_vectors(target_rows: torch.Tensor, seed: int) -> torch.Tensor:
    """Vectors that point a little towards their targets, in the targets' type."""
    generator = torch.Generator(target_rows.device).manual_seed(seed)
    noise = torch.randn(target_rows.shape, generator=generator, device=target_rows.device)
    return (GAIN * (SIGNAL * target_rows.float() + noise)).to(target_rows.dtype)
