"""Streamed ranks, top-k, loss and entropy against a full sort, ties included, wherever the candidates live."""

import numpy as np
import pytest
import torch

from habitus.errors import ModelError
from habitus.softmax import CandidateScan, catalogue_scores, ranking, ranks, top_k, topk
from habitus.softmax.scan import ScanTile


def draw(M, V, d, case="random", seed=0):
    """Queries, candidates and targets of one of several kinds of catalogue."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(M, d, generator=generator)
    e = torch.randn(V, d, generator=generator)
    y = torch.randint(V, (M,), generator=generator)
    if case == "duplicates":
        e = e[torch.randint(max(1, V // 5), (V,), generator=generator)]
    elif case == "constant":
        e = e[:1].repeat(V, 1)
    elif case == "rising":  # scores grow with the position: every candidate is a new leader
        h, e = h.abs(), e[:1].abs() * torch.arange(1, V + 1)[:, None] / V
    elif case == "zero":  # 0.0 and -0.0 are equal scores
        e = e.sign() * 0.0
    elif case == "far":  # scores far from zero, where exp needs a reference
        h[:, 0], e[:, 0] = 20, torch.arange(V) % 40 - 20.0
    return h, e, y


def sorted_by_hand(h, e, y):
    """Every score as the scan computes it, the stable descending order, and each target's rank."""
    whole = top_k(h, e, len(e))
    z = torch.empty(len(h), len(e)).scatter_(1, whole.items, whole.scores)
    assert torch.allclose(z.double(), h.double() @ e.double().T, rtol=1e-5, atol=1e-4)
    order = torch.sort(z, dim=1, descending=True, stable=True)
    return order, (z >= z.gather(1, y[:, None])).sum(1)


@pytest.mark.parametrize("case", ["random", "duplicates", "constant", "rising", "zero", "far"])
@pytest.mark.parametrize("shape", [(37, 501, 20), (300, 5000, 16), (5, 10, 3), (3, 1, 4)])
@pytest.mark.parametrize("columns", [256, 2048])
def test_all_read_outs_equal_a_full_sort(case, shape, columns, monkeypatch, twin):
    monkeypatch.setattr(ranking, "_TILE", ScanTile(256, columns))
    h, e, y = draw(*shape, case)
    k = min(100, shape[1])
    order, reached = sorted_by_hand(h, e, y)
    result = catalogue_scores(h, e, y, k=k)
    assert torch.equal(result.rank, reached)
    assert torch.equal(result.top_items, order.indices[:, :k])
    assert torch.equal(result.top_scores, order.values[:, :k])
    assert torch.equal(ranks(h, e, y), reached)
    truth = twin(h, e, y)
    slack = 1e-5 + 2.0**-22 * truth.scores.abs().max()
    assert ((result.loss - truth.loss).abs() <= slack * truth.loss.clamp_min(1)).all()
    assert ((result.entropy - truth.entropy).abs() <= 1e-5 * truth.entropy.clamp_min(1) + slack).all()
    if case in ("constant", "zero"):
        assert (result.rank == shape[1]).all()


def test_ranks_and_order_by_hand():
    h = torch.tensor([[1.0]])
    e = torch.tensor([[2.0], [5.0], [2.0], [7.0], [2.0]])
    for target, rank in enumerate([5, 2, 5, 1, 5]):  # the three twos share the last place
        assert ranks(h, e, torch.tensor([target])).tolist() == [rank]
    assert top_k(h, e, 4).items.tolist() == [[3, 1, 0, 2]]
    assert top_k(h, e, 4).scores.tolist() == [[7, 5, 2, 2]]


@pytest.mark.parametrize("place", ["pieces", "numpy", "mapped numpy", "mapped torch"])
def test_candidates_may_live_anywhere(place, tmp_path):
    h, e, y = draw(40, 6000, 16, "duplicates")
    table = e
    if place == "pieces":  # the last one shorter than k
        table = [e[:4096], e[4096:5990], e[5990:]]
    elif place == "numpy":
        table = e.numpy()
    elif place == "mapped numpy":
        e.numpy().tofile(tmp_path / "rows")
        table = np.memmap(tmp_path / "rows", dtype=np.float32, mode="r", shape=tuple(e.shape))
    elif place == "mapped torch":
        e.numpy().tofile(tmp_path / "rows")
        table = torch.from_file(str(tmp_path / "rows"), size=e.numel()).view_as(e)
    whole = catalogue_scores(h, e, y, k=50)
    streamed = catalogue_scores(h, table, y, k=50, memory_bytes=1 << 18)
    assert torch.equal(whole.rank, streamed.rank)
    assert torch.equal(whole.top_items, streamed.top_items)
    assert torch.allclose(whole.loss, streamed.loss, atol=1e-6)
    assert torch.allclose(whole.entropy, streamed.entropy, atol=1e-5)


def test_working_memory_follows_the_argument():
    h, e, y = draw(300, 5000, 16)
    scan = CandidateScan(h, 10, target_rows=e[y], tile=ranking._TILE, memory_bytes=1 << 20)
    assert all(2 * batch.scores.nbytes + batch.tile.nbytes <= 1 << 20 for batch in scan.batches)


def test_bias_and_valid_rows_count_in_every_read_out(twin):
    h, e, y = draw(30, 700, 8)
    log_q = torch.randn(700)
    y = y % 500
    result = catalogue_scores(h, e, y, k=20, log_q=log_q, num_valid=500)
    truth = twin(h, e[:500], y, log_q=log_q[:500])
    z = truth.scores
    assert torch.allclose(result.loss.double(), truth.loss, atol=1e-5)
    assert torch.allclose(result.entropy.double(), truth.entropy, atol=1e-5)
    assert torch.equal(result.rank, (z >= z.gather(1, y[:, None])).sum(1))
    assert torch.equal(result.top_items, z.topk(20, dim=1).indices)


@pytest.mark.parametrize("d", [16, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ties_survive_any_tile_and_any_layout(d, dtype):
    h, e, y = draw(300, 5000, d, "duplicates")
    h, e = h.to(dtype), e.to(dtype)
    expected = catalogue_scores(h, e, y, k=20)
    for candidates in (e, e.T.contiguous().T, e.repeat_interleave(2, dim=0)[::2], [e[:333], e[333:]]):
        for memory_bytes in (1 << 29, 1 << 20):
            result = catalogue_scores(h, candidates, y, k=20, memory_bytes=memory_bytes)
            assert torch.equal(result.rank, expected.rank)
            assert torch.equal(result.top_items, expected.top_items)


def test_an_array_that_runs_backwards_is_a_table():
    h, e, y = draw(9, 40, 3)
    backwards = np.ascontiguousarray(e.numpy()[::-1])[::-1]
    assert torch.equal(ranks(h, backwards, y), ranks(h, e, y))


def test_bfloat16_scores_are_compared_in_float32():
    # Both rows score 1 in bfloat16; the exact scores differ by 2^-10.
    h = torch.tensor([[1.0, 2.0**-10]], dtype=torch.bfloat16)
    e = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16)
    assert ranks(h, e, torch.tensor([1])).tolist() == [1]
    assert ranks(h, e, torch.tensor([0])).tolist() == [2]


def test_keys_sort_like_score_then_position():
    scores = torch.tensor([-torch.inf, -2.0, -1e-40, -0.0, 0.0, 1e-40, 3.0, 3.0, torch.inf])
    ids = torch.tensor([5, 5, 5, 2, 9, 5, 9, 2, 1])
    keys = topk.encode_keys(scores, ids)
    assert keys.argsort().tolist() == [0, 1, 2, 4, 3, 5, 6, 7, 8]
    assert torch.equal(topk.decode_scores(keys), scores.abs() * scores.sign())
    assert torch.equal(topk.decode_ids(keys), ids)
    assert topk.decode_scores(topk.empty_topk(1, 1, torch.device("cpu"))).item() == -torch.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda h, e, y: top_k(h, e, 11), "k is 11 and there are 10 candidates"),
        (lambda h, e, y: top_k(h, e, 0), "k is 0"),
        (lambda h, e, y: catalogue_scores(h, e, y, k=0), "k is 0"),
        (lambda h, e, y: ranks(h, e, y + 9), "Targets run from"),
        (lambda h, e, y: ranks(h, e[:0], y), "no candidates"),
        (lambda h, e, y: ranks(h, [], y), "Candidates are"),
        (lambda h, e, y: ranks(h, e.double(), y), "Queries are torch.float32"),
        (lambda h, e, y: ranks(h[:, :2], e, y), "do not fit"),
        (lambda h, e, y: ranks(h, [e, e.double()], y), "differ in width or type"),
        (lambda h, e, y: ranks(h, e.numpy().astype("int64").astype("S1"), y), "numpy type"),
        (lambda h, e, y: ranks(h * torch.nan, e, y), "queries hold NaN"),
        (lambda h, e, y: ranks(h, e.index_fill(0, torch.tensor([9]), torch.inf), y), "between rows 0 and 10"),
        (lambda h, e, y: ranks(h, e, y, num_valid=11), "num_valid is 11"),
        (lambda h, e, y: ranks(h, e, y, log_q=torch.zeros(3)), "log_q has 3 entries"),
        (lambda h, e, y: ranks(h, e, y, log_q=torch.zeros(10, 1)), "log_q has shape"),
        (lambda h, e, y: ranks(h, e.numpy().astype(">f4"), y), "machine's byte order"),
        (lambda h, e, y: ranks(h * 1e20, e * 1e20, y), "Scores could overflow"),
        (lambda h, e, y: ranks(h * 1e15, e * 1e16, y), "Scores could overflow"),  # finite, but below a masked score
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ModelError, match=message):
        call(*draw(4, 10, 3))
