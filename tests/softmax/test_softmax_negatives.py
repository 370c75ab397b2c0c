"""Negatives are distinct and uniform; a pool holds every target once and knows where."""

import pytest
import torch
from scipy import stats

from habitus.errors import ModelError
from habitus.softmax import candidate_pool, candidate_softmax, negative_keys, sample_negatives


def test_a_million_draws_are_uniform_first_and_last_ids_included():
    items, k = 20_000, 5000
    draws = torch.stack([sample_negatives(items, k, negative_keys(3, step)) for step in range(200)])
    assert (draws.sort(dim=1).values.diff(dim=1) > 0).all()  # distinct in every draw
    counts = torch.bincount(draws.flatten(), minlength=items)
    assert len(counts) == items
    # Draws without replacement have variance n p (1 - p) with p = k / items, less than a multinomial's.
    expected = len(draws) * k / items
    statistic = ((counts - expected) ** 2 / (expected * (1 - k / items))).sum().item()
    assert 1e-4 < stats.chi2.sf(statistic, items - 1) < 1 - 1e-4
    for edge in (0, items - 1):
        assert abs(counts[edge].item() - expected) < 5 * expected**0.5
    # The place in the draw says nothing about the item either.
    for places in (draws[:, :50], draws[:, -50:]):
        assert stats.chisquare(torch.bincount(places.flatten() // 1000, minlength=20).numpy()).pvalue > 1e-4


def test_any_size_up_to_a_billion_items_is_drawn_in_proportion_to_k():
    drawn = sample_negatives(1_000_000_000, 200_000, torch.Generator().manual_seed(0))
    assert drawn.unique().numel() == 200_000
    assert drawn.min() >= 0 and drawn.max() < 1_000_000_000
    assert drawn.max() > 999_900_000  # beyond what float32 or 2^24 could hold
    assert torch.equal(sample_negatives(7, 7, torch.Generator()).sort().values, torch.arange(7))
    assert sample_negatives(7, 0, torch.Generator()).shape == (0,)


def test_a_step_draws_the_same_again_and_another_step_differs():
    first = sample_negatives(10_000, 100, negative_keys(1, 5))
    assert torch.equal(first, sample_negatives(10_000, 100, negative_keys(1, 5)))
    assert not torch.equal(first, sample_negatives(10_000, 100, negative_keys(1, 6)))
    assert not torch.equal(first, sample_negatives(10_000, 100, negative_keys(2, 5)))


@pytest.mark.parametrize("capacity", [None, 20])
def test_the_pool_holds_targets_and_negatives_once(capacity):
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(20, (64,), generator=generator)
    negatives = sample_negatives(100, 60, generator)
    pool = candidate_pool(targets, negatives, capacity=capacity)
    assert len(pool.items) == (64 if capacity is None else capacity) + 60
    valid = pool.items[: pool.num_valid]
    assert set(valid.tolist()) == set(targets.tolist()) | set(negatives.tolist())
    assert len(valid) == valid.unique().numel()
    assert torch.equal(pool.items[pool.targets], targets)
    assert set(valid[: pool.num_targets].tolist()) == set(targets.tolist())


def test_no_negatives_and_all_negatives_colliding():
    targets = torch.tensor([4, 2, 4])
    alone = candidate_pool(targets, torch.empty(0, dtype=torch.int64))
    assert alone.items[: alone.num_valid].tolist() == [2, 4] and alone.num_targets == 2
    same = candidate_pool(targets, torch.tensor([2, 4]))
    assert same.num_valid == same.num_targets == 2


def test_the_pool_feeds_the_softmax(twin):
    torch.manual_seed(0)
    table, h = torch.randn(200, 8), torch.randn(30, 8)
    targets = torch.randint(200, (30,))
    pool = candidate_pool(targets, sample_negatives(200, 50, torch.Generator()))
    loss = candidate_softmax(h, table[pool.items], pool.targets, num_valid=pool.num_valid).loss
    ids = pool.items[: pool.num_valid]
    z = h @ table[ids].T
    expected = z.logsumexp(1) - (h * table[targets]).sum(1)
    assert torch.allclose(loss, expected, atol=1e-5)


def test_ids_of_either_integer_type_form_the_same_pool():
    targets, negatives = torch.tensor([4, 1, 4]), torch.tensor([1, 7])
    for a, b in zip(candidate_pool(targets.int(), negatives.int()), candidate_pool(targets, negatives), strict=True):
        assert torch.equal(a, b)
        assert a.dtype == torch.int64


def test_a_pool_too_small_is_refused_by_the_softmax():
    targets = torch.arange(10)
    pool = candidate_pool(targets, torch.arange(10, 14), capacity=3)
    assert pool.num_valid > len(pool.items)
    with pytest.raises(ModelError, match="num_valid is less than 1 or more"):
        candidate_softmax(torch.ones(10, 2), torch.ones(7, 2), pool.targets.clamp_max(6), num_valid=pool.num_valid)


def test_bad_requests_are_clear_errors():
    with pytest.raises(ModelError, match="11 distinct negatives cannot be drawn from 10 items"):
        sample_negatives(10, 11, torch.Generator())
    with pytest.raises(ModelError, match="eight int64 keys"):
        sample_negatives(10, 1, torch.zeros(3))
    with pytest.raises(ModelError, match="at least one target"):
        candidate_pool(torch.empty(0, dtype=torch.int64), torch.arange(3))
