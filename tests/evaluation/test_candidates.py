"""Streamed candidates against dense float64 scores and a full sort."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from habitus.errors import ModelError
from habitus.evaluation.candidates import Candidates, _own_sums, candidate_scores
from habitus.evaluation.ranks import Ranks
from habitus.evaluation.scores import dense_scores
from habitus.softmax import CandidateScan, topk
from habitus.softmax.cpu_scan import CpuScan
from habitus.softmax.tiles import Sums, merge_sums


@given(
    seed=st.integers(0, 10**6),
    num_queries=st.integers(1, 40),
    num_candidates=st.integers(1, 900),
    k=st.integers(1, 130),
    order=st.sampled_from(["random", "rising", "falling", "constant"]),
    memory_bytes=st.sampled_from([1 << 12, 1 << 20, 1 << 29]),
)
@settings(deadline=None, max_examples=60)
def test_scores_equal_a_full_sort(
    seed: int, num_queries: int, num_candidates: int, k: int, order: str, memory_bytes: int
) -> None:
    draw = np.random.default_rng(seed)
    # Small whole numbers: scores are exact in float32, and there are many ties.
    table = torch.from_numpy(draw.integers(-3, 4, (num_candidates, 4)).astype(np.float32))
    queries = torch.from_numpy(draw.integers(-3, 4, (num_queries, 4)).astype(np.float32)) / 2
    if order == "constant":
        table[:] = table[:1]
    elif order != "random":
        queries[:] = queries[:1]
        table = table[torch.argsort(table @ queries[0], descending=order == "falling")]
    targets = draw.integers(0, num_candidates, num_queries)
    cut = int(draw.integers(0, num_candidates + 1))
    pieces = [piece.bfloat16() for piece in (table[:cut], table[cut:])]
    rows = table[torch.from_numpy(targets)]
    result = candidate_scores(
        queries, Candidates(pieces, 0, num_candidates), rows, k, ranks=Ranks(), memory_bytes=memory_bytes
    )
    expected = dense_scores((queries.double() @ table.double().T).numpy(), targets, k, None)
    assert np.array_equal(result.rank, expected.rank)
    assert np.array_equal(result.top, expected.top)
    np.testing.assert_allclose(result.loss, expected.loss, atol=1e-6)
    # A difference of sums in which scores of up to 20 were float32.
    np.testing.assert_allclose(result.entropy, expected.entropy, atol=2e-5)
    for width in (0, k):
        fewer = candidate_scores(
            queries,
            Candidates(pieces, 0, num_candidates),
            rows,
            width,
            ranks=Ranks(),
            memory_bytes=memory_bytes,
            losses=False,
        )
        assert fewer.loss is None and fewer.entropy is None
        assert np.array_equal(fewer.rank, expected.rank)
        assert np.array_equal(fewer.top, expected.top[:, :width])


def test_many_tiles_and_large_scores_equal_a_full_sort() -> None:
    draw = torch.Generator().manual_seed(0)
    table = torch.randn(20_000, 16, generator=draw)
    queries = 30 * torch.randn(300, 16, generator=draw)  # scores of a few hundred
    targets = np.random.default_rng(0).integers(0, 20_000, 300)
    rows = table[torch.from_numpy(targets)]
    result = candidate_scores(queries, Candidates([table], 0, 20_000), rows, 100, ranks=Ranks())
    expected = dense_scores((queries.double() @ table.double().T).numpy(), targets, 100, None)
    assert (result.rank == expected.rank).mean() > 0.99  # float32 against float64: neighbours may swap
    assert (result.top == expected.top).mean() > 0.99
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5, atol=1e-4)
    ranked = candidate_scores(queries, Candidates([table], 0, 20_000), rows, 0, ranks=Ranks(), losses=False)
    assert np.array_equal(ranked.rank, result.rank)  # the same kernel and tiles: to the last tie
    listed = candidate_scores(queries, Candidates([table], 0, 20_000), rows, 100, ranks=Ranks(), losses=False)
    assert np.array_equal(listed.rank, result.rank) and np.array_equal(listed.top, result.top)


@pytest.mark.parametrize(
    "order", ["random", "rising", "falling", "constant", "ties", "sample high", "sample low", "few"]
)
@pytest.mark.parametrize("k", [1, 10, 100])
def test_a_sample_of_the_first_block_never_shows_in_the_lists(order: str, k: int) -> None:
    """4,500 candidates in tiles of 256: one tile is sampled, every 17th row; scores are exact in float32."""
    draw = np.random.default_rng(k)
    scores = draw.integers(-1000, 1000, (4500, 1)).astype(np.float32)
    if order in ("rising", "falling"):
        scores = np.sort(scores, axis=0)[:: 1 if order == "rising" else -1].copy()
    elif order == "constant":
        scores[:] = 3
    elif order == "ties":
        scores = draw.integers(0, 3, (4500, 1)).astype(np.float32)
    elif order == "sample high":  # the sample promises far too much: queries are short and the block is seen again
        scores[::17] += 5000
        scores[17 * 256 :] -= 5000
    elif order == "sample low":
        scores[::17] -= 5000
    elif order == "few":  # hardly any score differs from the lowest
        scores = np.full((4500, 1), -7.0, np.float32)
        scores[[5, 1000, 4499]] = [[1], [2], [1]]
    signs = np.array([1, -1, 1, 0.5, 0, -2], np.float32)[:, None]
    targets = draw.integers(0, 4500, len(signs))
    table, queries = torch.from_numpy(scores), torch.from_numpy(signs)
    for pieces in ([table], [table[:4400], table[4400:]]):
        result = candidate_scores(
            queries,
            Candidates(pieces, 0, 4500),
            table[torch.from_numpy(targets)],
            k,
            ranks=Ranks(),
            memory_bytes=1 << 12,
            losses=False,
        )
        expected = dense_scores(signs.astype(np.float64) @ scores.T.astype(np.float64), targets, k, None)
        assert np.array_equal(result.rank, expected.rank)
        assert np.array_equal(result.top, expected.top)


def test_a_sample_that_promised_too_much_is_made_up_for() -> None:
    def scan() -> CpuScan:
        return CpuScan(torch.tensor([[1.0], [-1.0]]), None, None, 100, 256)

    table = torch.arange(4500, dtype=torch.float32)[:, None]
    table[: 17 * 80 : 17] += 1e6  # eighty of those that are sampled are above all else
    first = scan()
    first._set_thresholds(table, None)
    assert first.sampled and (table[:, 0] > first.threshold[0]).sum() < 100  # the first query would be short
    assert (-table[:, 0] > first.threshold[1]).sum() >= 100
    whole = scan()
    whole.update(table, None, 0)
    keys = whole.topk_keys()
    assert keys is not None
    order = torch.sort(table[:, 0], descending=True, stable=True).indices
    assert torch.equal(topk.decode_ids(keys[0]), order[:100])
    assert torch.equal(topk.decode_ids(keys[1]), order.flip(0)[:100])


def test_what_is_not_finite_is_named() -> None:
    table, queries = torch.randn(50, 4), torch.randn(3, 4)
    bad = table.clone()
    bad[17, 2] = torch.nan
    with pytest.raises(ModelError, match="candidates hold NaN"):
        candidate_scores(queries, Candidates([bad], 0, 50), table[:3], 5, ranks=Ranks())
    queries[1, 1] = torch.inf
    with pytest.raises(ModelError, match="queries hold NaN"):
        candidate_scores(queries, Candidates([table], 0, 50), table[:3], 5, ranks=Ranks())
    with pytest.raises(ModelError, match="one vector per query"):
        candidate_scores(queries, Candidates([table], 0, 50), table[:2], 5, ranks=Ranks())


def test_scores_that_float32_cannot_hold_are_refused() -> None:
    table, queries = torch.randn(50, 4), torch.randn(3, 4)
    with pytest.raises(ModelError, match="Scores could overflow"):
        candidate_scores(queries * 1e20, Candidates([table * 1e19], 0, 50), table[:3] * 1e19, 5, ranks=Ranks())


def test_a_process_without_rows_adds_nothing_however_low_the_scores() -> None:
    queries, table = torch.full((3, 1), 100.0), torch.tensor([[-10.0], [-11.0], [-12.0]])
    full, empty = (CandidateScan(queries, 2, target_rows=table) for _ in range(2))
    full.update(table, None, 0)
    parts = [_own_sums(scan) for scan in (full, empty)]
    merged = merge_sums(Sums(*(torch.stack(column) for column in zip(*parts, strict=True))))
    assert torch.allclose(merged.top + merged.total.log(), torch.full((3,), -1000.0, dtype=torch.float64))
