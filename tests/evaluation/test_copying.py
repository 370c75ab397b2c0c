"""Scores that the past adds to: put right after a pass, and written out in full."""

import numpy as np
import pytest
import torch

from habitus.data.batch import Batch
from habitus.evaluation.candidates import Candidates, candidate_scores
from habitus.evaluation.copy_scores import score_past
from habitus.evaluation.queries import QueryBatch
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import dense_scores
from habitus.model.copying import MASKED_COPY_SCORE

ITEMS, WIDTH, WINDOWS, SLOTS = 40, 8, 5, 12


def drawn(seed: int, strength: float) -> tuple[QueryBatch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch with two users per window and an empty slot, many repeats, and vectors of which some are equal."""
    random = np.random.default_rng(seed)
    items = random.integers(0, 12, (WINDOWS, SLOTS))
    segments = np.repeat([[0] * 5 + [1] * 6 + [-1]], WINDOWS, axis=0)
    positions = np.repeat([[*range(5), *range(6), 0]], WINDOWS, axis=0)
    targets = np.where(segments >= 0, random.integers(0, 16, (WINDOWS, SLOTS)), -1)
    windows, slots = np.nonzero(targets >= 0)
    batch = Batch(
        items,
        targets,
        positions.astype(np.int32),
        segments.astype(np.int32),
        np.zeros(1, np.int32),
        np.zeros((WINDOWS, 2), np.int64),
        {},
    )
    target_rows = targets[windows, slots]
    nothing = np.zeros(len(windows), np.int64)
    query_batch = QueryBatch(
        0, batch, windows, slots, target_rows, nothing, nothing, positions[windows, slots] + 1, np.unique(target_rows)
    )
    table = torch.from_numpy(random.normal(size=(ITEMS, WIDTH)).astype(np.float32))
    table[9] = table[3]  # equal items, in the past and out of it
    table[30] = table[3]
    queries = torch.from_numpy(random.normal(size=(WINDOWS, SLOTS, WIDTH)).astype(np.float32))
    past_weights = torch.from_numpy(random.normal(size=(WINDOWS, SLOTS, SLOTS)).astype(np.float32)) + strength
    same = segments[:, :, None] == segments[:, None, :]
    is_visible = torch.from_numpy(same) & torch.ones(SLOTS, SLOTS, dtype=torch.bool).tril()
    return query_batch, table, queries, torch.where(is_visible, past_weights, MASKED_COPY_SCORE)


def in_full(
    query_batch: QueryBatch, table: torch.Tensor, queries: torch.Tensor, past_weights: torch.Tensor
) -> np.ndarray:
    """log(exp<q, e_v> + sum over the visible events of v of exp(a)), one query and event after another."""
    rows = []
    for window, slot, history in zip(query_batch.windows, query_batch.slots, query_batch.histories, strict=True):
        scores = (table.double() @ queries[window, slot].double()).exp()
        for event in range(slot + 1 - history, slot + 1):
            scores[query_batch.batch.items[window, event]] += past_weights[window, slot, event].double().exp()
        rows.append(scores.log().numpy())
    return np.stack(rows)


@pytest.mark.parametrize("strength", [-30.0, -2.0, 1.0, 8.0])
@pytest.mark.parametrize("pool", ["catalogue", "batch"])
def test_the_past_is_heard_as_if_every_score_had_been_written_out(strength: float, pool: str) -> None:
    query_batch, table, queries, past_weights = drawn(3, strength)
    chosen = None if pool == "catalogue" else query_batch.pool
    rows = np.arange(ITEMS) if chosen is None else chosen
    places = np.searchsorted(rows, query_batch.targets)
    # What is too small to be is_visible in float32 changes no rank: twins stay tied.
    visible_scores = past_weights if strength > -20 else torch.full_like(past_weights, -torch.inf)
    expected = dense_scores(in_full(query_batch, table, queries, visible_scores)[:, rows], places, 6, None)
    target_rows = table[torch.from_numpy(query_batch.targets)]
    past = score_past(
        query_batch, past_weights, queries, table[torch.from_numpy(query_batch.batch.items)], target_rows, chosen
    )
    vectors = queries[torch.from_numpy(query_batch.windows), torch.from_numpy(query_batch.slots)]
    result = candidate_scores(
        vectors, Candidates([table[torch.from_numpy(rows)]], 0, len(rows)), target_rows, 6, ranks=Ranks(), past=past
    )
    assert result.loss is not None and result.entropy is not None
    np.testing.assert_allclose(result.loss, expected.loss, atol=2e-6)
    np.testing.assert_allclose(result.entropy, expected.entropy, atol=1e-5)
    np.testing.assert_array_equal(result.rank, expected.rank)
    np.testing.assert_array_equal(result.top, expected.top)


def test_ranks_move_by_hand() -> None:
    """One user saw items 0, 1, 0 and meets 1: the plain scores of items 0, 1, 2 are 0, 0, 1."""
    batch = Batch(
        np.array([[0, 1, 0]]), np.array([[-1, -1, 1]]), np.arange(3, dtype=np.int32)[None],
        np.zeros((1, 3), np.int32), np.zeros(1, np.int32), np.zeros((1, 1), np.int64), {},
    )  # fmt: skip
    one = np.zeros(1, np.int64)
    query_batch = QueryBatch(0, batch, one, one + 2, np.array([1]), one, one, one + 3, np.arange(3))
    table = torch.tensor([[0.0], [0.0], [1.0]])
    queries = torch.ones(1, 3, 1)
    past_weights = torch.full((1, 3, 3), MASKED_COPY_SCORE)
    past_weights[0, 2] = torch.tensor([0.0, np.log(4.0), 0.0])  # item 0: 1 + 1 + 1 = 3; item 1: 1 + 4 = 5; item 2: e
    past = score_past(query_batch, past_weights, queries, table[torch.tensor([[0, 1, 0]])], table[[1]], None)
    result = candidate_scores(queries[0, 2:], Candidates([table], 0, 3), table[[1]], 3, ranks=Ranks(), past=past)
    assert result.rank.tolist() == [1]
    assert result.top.tolist() == [[1, 0, 2]]
    assert result.loss is not None
    assert result.loss[0] == pytest.approx(np.log((3 + 5 + np.e) / 5), abs=1e-6)
