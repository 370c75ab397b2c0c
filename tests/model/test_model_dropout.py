"""Dropout: masks that are a function of step and place, of the right rate, and of nothing in evaluation."""

from types import SimpleNamespace

import pytest
import torch

from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.dropout import apply_dropout, draw_dropout_mask
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
