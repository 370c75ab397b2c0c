"""Dropout: masks that are a function of step and place, of the right rate, and of nothing in evaluation."""

from types import SimpleNamespace

import pytest
import torch

from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.dropout import (
    ItemDropout,
    apply_dropout,
    draw_dropout_mask,
    draw_item_dropout,
    drop_entries,
    drop_features,
)
from habitus.recipe import ModelRecipe

CPU = torch.device("cpu")


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_as_many_entries_are_dropped_as_asked_and_the_mean_stays(rate: float) -> None:
    mask = draw_dropout_mask(3, 7, 0, 2000, rate, CPU)
    x = apply_dropout(torch.ones(2000, 96), mask.inputs, rate)
    assert x.unique().tolist() == pytest.approx([0, 1 / (1 - rate)])
    spread = (rate * (1 - rate) / x.numel()) ** 0.5
    assert abs((x == 0).double().mean().item() - rate) < 5 * spread
    # Neither a row nor a column is favoured: five standard deviations over two thousand of them.
    for axis, count in ((0, 2000), (1, 96)):
        off = (x == 0).double().mean(axis) - rate
        assert off.abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5


def test_masks_of_other_steps_rows_layers_and_branches_have_nothing_in_common() -> None:
    mask = draw_dropout_mask(3, 7, 0, 4000, 0.5, CPU)
    layers = [mask.for_layer(number) for number in range(3)]
    drawn = [mask.inputs, *(part for layer in layers for part in (layer.attention, layer.mlp))]
    drawn += [draw_dropout_mask(3, 8, 0, 4000, 0.5, CPU).inputs, draw_dropout_mask(4, 7, 0, 4000, 0.5, CPU).inputs]
    drawn.append(draw_dropout_mask(3, 7, 4000, 4000, 0.5, CPU).inputs)
    masks = (
        torch.stack([apply_dropout(torch.ones(4000, 32), word, 0.5).flatten() > 0 for word in drawn]).double() * 2 - 1
    )
    overlap = masks @ masks.T / masks.shape[1] - torch.eye(len(masks), dtype=torch.float64)
    assert overlap.abs().max() < 5 / masks.shape[1] ** 0.5


def test_a_step_may_be_a_tensor_and_rows_may_be_drawn_apart() -> None:
    whole = draw_dropout_mask(5, 11, 0, 60, 0.2, CPU)
    parts = [draw_dropout_mask(5, torch.tensor(11), first, 20, 0.2, CPU) for first in (0, 20, 40)]
    for name in ("inputs", "attention", "mlp"):
        assert torch.equal(getattr(whole, name), torch.cat([getattr(part, name) for part in parts]))


def test_without_noise_nothing_is_dropped(samples: SimpleNamespace) -> None:
    recipe = ModelRecipe(joint_dim=16, text_len=12, text_depth=1, width=32, depth=2, head_dim=16)
    model = BehaviorModel(samples.fields, recipe)
    batch = batch_tensors(samples.batch(samples.fields, 3, 20, 9))
    vectors = model.embed_items(item_tensors(samples.items(samples.fields, 9), recipe))[batch.items]
    plain = model.queries(batch, vectors)
    assert torch.equal(plain, model.queries(batch, vectors))
    mask = draw_dropout_mask(0, 0, 0, batch.items.numel(), 0.3, CPU)
    noisy = model.queries(type(batch)(**{**vars(batch), "dropout_mask": mask}), vectors)
    assert (noisy - plain).abs().max() > 0.01


def item_dropout(
    rows: torch.Tensor, *, step: int | torch.Tensor = 3, token: float = 0.0, field: float = 0.0, vector: float = 0.0
) -> ItemDropout:
    return draw_item_dropout(7, step, rows, token, field, vector)


def test_tokens_are_taken_out_in_order_at_the_rate_and_never_all() -> None:
    lengths = torch.arange(4000) % 13  # 0 to 12 tokens
    place = torch.arange(12)
    tokens = torch.where(place < lengths[:, None], 100 + place, 0).int()
    dropped, _ = drop_features(tokens, {}, item_dropout(torch.arange(4000), token=0.3))
    assert dropped is not None
    assert (dropped.dtype, dropped.shape) == (tokens.dtype, tokens.shape)
    left = (dropped > 0).sum(1)
    assert ((left > 0) == (lengths > 0)).all()
    long = lengths == 12
    assert left[long].double().mean().item() == pytest.approx(0.7 * 12, abs=5 * (12 * 0.21 / int(long.sum())) ** 0.5)
    assert (left[lengths == 1] == 1).all()
    for row, count in zip(dropped.tolist(), left.tolist(), strict=True):
        assert row[:count] == sorted(set(row[:count]))  # in the order they had, each once
        assert row[count:] == [0] * (12 - count)


def test_fields_go_missing_at_the_rate_and_an_item_keeps_one_that_it_has() -> None:
    n = 6000
    tokens = torch.ones(n, 4, dtype=torch.int32)
    fields = {
        "brand": torch.full((n,), 5, dtype=torch.int32),
        "price": torch.full((n,), 2.5),
        "image": torch.full((n, 3), 0.5),
    }
    tokens[:1000] = 0  # these have a price and nothing else
    fields["brand"][:1000] = 0
    fields["image"][:1000, 1] = torch.nan
    out_tokens, out = drop_features(tokens, fields, item_dropout(torch.arange(n), field=0.5))
    assert out_tokens is not None
    assert [values.dtype for values in out.values()] == [values.dtype for values in fields.values()]
    there = torch.stack([out_tokens[:, 0] > 0, out["brand"] == 5, out["price"] == 2.5, (out["image"] == 0.5).all(1)], 1)
    assert there[:1000, 2].all()
    assert there.any(1).all()
    assert (out["brand"][~there[:, 1]] == 0).all()
    assert out["price"][~there[:, 2]].isnan().all()
    assert out["image"][~there[:, 3]].isnan().any(1).all()
    # Four fields at one half: all four would go with probability 1/16, and then one of them, each as often, stays.
    share = 0.5 + 0.5**4 / 4
    assert there[1000:].double().mean(0).tolist() == pytest.approx([share] * 4, abs=5 * (0.25 / 5000) ** 0.5)


def test_what_an_item_loses_depends_on_seed_step_and_item_alone() -> None:
    tokens = torch.arange(1, 13).repeat(50, 1)
    rows = torch.arange(50) * 1_000_003
    whole, _ = drop_features(tokens, {}, item_dropout(rows, token=0.5))
    shuffled = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    part, _ = drop_features(tokens[:20], {}, item_dropout(rows[shuffled[:20]], step=torch.tensor(3), token=0.5))
    assert whole is not None and part is not None
    assert torch.equal(part, whole[shuffled[:20]])
    other, _ = drop_features(tokens, {}, item_dropout(rows, step=4, token=0.5))
    assert other is not None
    assert not torch.equal(other, whole)
    assert not torch.equal(whole[0], whole[1])


def test_entries_of_item_vectors_are_dropped_by_a_mask_for_events_and_one_for_candidates(
    samples: SimpleNamespace,
) -> None:
    recipe = ModelRecipe(joint_dim=16, text_len=12, text_depth=1, width=32, depth=2, head_dim=16)
    model = BehaviorModel(samples.fields, recipe)
    features, rows = samples.items(samples.fields, 9), torch.arange(9)
    plain = model.embed_items(item_tensors(features, recipe))
    assert torch.equal(plain, model.embed_items(item_tensors(features, recipe, dropout=item_dropout(rows, vector=0.5))))
    as_events, as_candidates = drop_entries(plain, item_dropout(rows, vector=0.5))
    for noisy in (as_events, as_candidates):
        kept = noisy != 0
        assert 0.3 < kept.double().mean() < 0.7
        torch.testing.assert_close(noisy[kept], 2 * plain[kept])
    assert not torch.equal(as_events, as_candidates)
    assert drop_entries(plain, None) == (plain, plain)
    fewer = model.embed_items(item_tensors(features, recipe, dropout=item_dropout(rows, token=0.5, field=0.5)))
    assert fewer.isfinite().all()
    assert (fewer - plain).abs().max() > 0.01
