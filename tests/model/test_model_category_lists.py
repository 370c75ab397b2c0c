"""The encoder of several categories: the mean of their rows, whatever the padding, looked up or multiplied."""

import pytest
import torch
from torch import Tensor

from habitus.data.batch import ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.model import BehaviorModel, item_tensors
from habitus.model.dropout import draw_item_dropout, drop_features
from habitus.model.features import CategoryLists
from habitus.recipe import ModelRecipe
from habitus.sizing import Inputs, breakdown

RECIPE = ModelRecipe(joint_dim=8, text_len=4, text_depth=1, width=16, depth=1, head_dim=8)
GENRES = Field(name="genres", kind="categories", size=5, width=3)
CODES = torch.tensor([[3, 1, 0], [2, 0, 0], [0, 0, 0], [4, 9, 1], [9, 0, 0]], dtype=torch.int32)


def lists_of(*fields: Field) -> CategoryLists:
    encoder = CategoryLists(fields, 2)
    with torch.no_grad():
        rows = torch.arange(float(encoder.weight.shape[0]))
        encoder.weight.copy_(torch.stack((10 ** (rows % 5), rows), 1))
    return encoder


@pytest.mark.parametrize("one_hot", [True, False], ids=["multiplied", "looked-up"])
def test_an_item_is_the_mean_of_its_categories(one_hot: bool) -> None:
    encoder = lists_of(GENRES)
    assert encoder.one_hot
    encoder.one_hot = one_hot
    # Rows are (10^code, code). No category, and none that is known, is row 0; a code beyond the table does not count.
    expected = torch.tensor([[505.0, 2.0], [100.0, 2.0], [1.0, 0.0], [5005.0, 2.5], [1.0, 0.0]])
    torch.testing.assert_close(encoder({"genres": CODES}), expected)


@pytest.mark.parametrize("one_hot", [True, False], ids=["multiplied", "looked-up"])
def test_fields_are_summed_and_room_for_more_changes_nothing(one_hot: bool) -> None:
    encoder = lists_of(GENRES, Field(name="tags", kind="categories", size=3, width=2))
    encoder.one_hot = one_hot
    tags = torch.tensor([[1, 2], [0, 0], [2, 0], [1, 0], [0, 0]])
    values = encoder({"genres": CODES, "tags": tags})
    # Tags lie below genres: rows 5, 6, 7 are (1, 5), (10, 6), (100, 7).
    torch.testing.assert_close(values[:3], torch.tensor([[505 + 55.0, 2 + 6.5], [101.0, 7.0], [101.0, 7.0]]))
    wider = encoder({"genres": torch.nn.functional.pad(CODES, (0, 4)), "tags": tags})
    torch.testing.assert_close(wider, values)


def model_over(size: int) -> tuple[BehaviorModel, Fields]:
    fields = Fields(
        item=(
            Field(name="brand", kind="category", size=7),
            Field(name="genres", kind="categories", size=size, width=3),
        ),
        event=(),
    )
    return BehaviorModel(fields, RECIPE, seed=1), fields


@pytest.mark.parametrize("size", [5, 400], ids=["multiplied", "looked-up"])
def test_parameters_are_counted_and_their_table_learns(size: int) -> None:
    model, fields = model_over(size)
    parts = breakdown(RECIPE, Inputs.of(fields))
    assert parts.vocabulary["embedder.category_lists"] == size * 8
    assert parts.params + parts.vocabulary_params == sum(p.numel() for p in model.parameters())
    info = {one.name: one for one in model.parameter_groups()}["embedder.category_lists.weight"]
    assert (info.role, info.vocabulary, info.weight_decay, info.muon) == ("embedding", True, False, False)
    items = ItemFeatures(None, {"brand": CODES[:, 0].numpy() * 0, "genres": CODES.numpy()})
    model.embed_items(item_tensors(items, RECIPE))[:3, 0].sum().backward()
    gradient = model.embedder.category_lists.weight.grad  # type: ignore[union-attr]
    assert isinstance(gradient, Tensor)
    assert [bool(row.any()) for row in gradient[:5]] == [True, True, True, True, False]


def test_a_grown_table_begins_as_unknown() -> None:
    (old, _), (new, _) = model_over(5), model_over(6)
    new.begin_with(old)
    rows, before = (model.embedder.category_lists.weight for model in (new, old))  # type: ignore[union-attr]
    assert torch.equal(rows[:5], before)
    assert torch.equal(rows[5], before[0])


def test_field_dropout_takes_all_categories_or_none() -> None:
    items = torch.arange(200)
    codes = torch.tensor([[3, 1, 0]]).repeat(200, 1)
    dropout = draw_item_dropout(0, 0, items, 0.0, 0.5, 0.0)
    _, fields = drop_features(None, {"brand": torch.ones(200, dtype=torch.int32), "genres": codes}, dropout)
    kept = fields["genres"].any(1)
    assert torch.equal(fields["genres"][kept], codes[kept])
    assert 30 < int((~kept).sum()) < 120
    assert bool((kept | (fields["brand"] > 0)).all())  # an item never loses all that it has
