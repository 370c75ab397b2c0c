"""What a user may rely on: no leak between users or from the future, items embed alone, missing is not zero."""

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Field, Fields
from habitus.errors import ModelError
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.recipe import ModelRecipe

RECIPE = ModelRecipe(joint_dim=24, text_len=12, text_depth=2, width=32, depth=2, head_dim=8)
N, B, L = 60, 3, 32
Shake = Callable[[BehaviorModel], BehaviorModel]


def queries_of(model: BehaviorModel, features: ItemFeatures, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        vectors = model.embed_items(item_tensors(features, model.recipe))
        windows = batch_tensors(batch)
        return model.queries(windows, vectors[windows.items])


def taken(features: ItemFeatures, rows: np.ndarray) -> ItemFeatures:
    tokens = None if features.tokens is None else features.tokens[rows]
    return ItemFeatures(tokens, {name: values[rows] for name, values in features.fields.items()})


@pytest.mark.parametrize("change", ["item", "event field"])
def test_changing_an_event_changes_no_earlier_query_and_no_other_user(
    samples: SimpleNamespace, shaken: Shake, change: str
) -> None:
    model = shaken(BehaviorModel(samples.fields, RECIPE))
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    before = queries_of(model, features, batch)
    for window, slot in [(0, 0), (0, 13), (1, 7), (2, 20)]:
        if change == "item":
            items = batch.items.copy()
            items[window, slot] = (items[window, slot] + 1) % N
            changed = replace(batch, items=items)
        else:
            paid = batch.fields["paid"].copy()
            paid[window, slot] = 9.75
            changed = replace(batch, fields={**batch.fields, "paid": paid})
        after = queries_of(model, features, changed)
        may_differ = torch.zeros(B, L, dtype=torch.bool)
        same_user = torch.from_numpy(batch.segments[window] == batch.segments[window, slot])
        may_differ[window] = same_user & (torch.arange(L) >= slot)
        assert torch.equal(before[~may_differ], after[~may_differ])  # bit for bit
        assert not torch.equal(before[window, slot], after[window, slot])
        last = int(may_differ[window].nonzero().max())
        assert not torch.equal(before[window, last], after[window, last])


def test_a_user_gets_the_same_queries_alone_and_packed_with_others(samples: SimpleNamespace, shaken: Shake) -> None:
    model = shaken(BehaviorModel(samples.fields, RECIPE))
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    together = queries_of(model, features, batch)
    for segment in range(int(batch.segments[1].max()) + 1):
        slots = np.flatnonzero(batch.segments[1] == segment)
        size = len(slots)
        alone = Batch(
            items=batch.items[1:2, slots],
            targets=batch.targets[1:2, slots],
            positions=np.arange(size, dtype=np.int32)[None],
            segments=np.zeros((1, size), np.int32),
            boundaries=np.array([0, size, size], np.int32),
            users=np.zeros((1, 1), np.int64),
            fields={name: values[1:2, slots] for name, values in batch.fields.items()},
        )
        torch.testing.assert_close(queries_of(model, features, alone)[0], together[1, slots], rtol=1e-4, atol=1e-5)


def test_items_embed_to_the_same_vectors_whatever_their_order_and_company(
    samples: SimpleNamespace, shaken: Shake
) -> None:
    model = shaken(BehaviorModel(samples.fields, RECIPE))
    features = samples.items(samples.fields, N)
    embed = lambda f: model.embed_items(item_tensors(f, RECIPE)).detach()  # noqa: E731
    together = embed(features)
    order = np.random.default_rng(1).permutation(N)
    torch.testing.assert_close(embed(taken(features, order)), together[order], rtol=1e-4, atol=1e-5)
    for row in (0, 17, 59):
        alone = embed(taken(features, np.array([row])))
        torch.testing.assert_close(alone[0], together[row], rtol=1e-4, atol=1e-5)
    assert features.tokens is not None
    wider = ItemFeatures(np.pad(features.tokens, ((0, 0), (0, 5))), features.fields)
    torch.testing.assert_close(embed(wider), together, rtol=1e-4, atol=1e-5)


def test_every_field_of_an_item_reaches_its_vector(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)  # as it starts: nothing may be dead then
    features = samples.items(samples.fields, 8, missing=0.0)
    before = model.embed_items(item_tensors(features, RECIPE))
    assert features.tokens is not None
    tokens = features.tokens.copy()
    tokens[:, 0] = 1 + tokens[:, 0] % 40
    changes = [ItemFeatures(tokens, features.fields)]
    for name, values in features.fields.items():
        changes.append(ItemFeatures(features.tokens, {**features.fields, name: _other(values)}))
    for changed in changes:
        after = model.embed_items(item_tensors(changed, RECIPE))
        assert ((after - before).abs().amax(1) > 1e-4).all()


def _other(values: np.ndarray) -> np.ndarray:
    if values.dtype == np.int32:
        return (values % 6 + 1).astype(np.int32)
    return values * 2 + 1 if values.ndim == 1 else values[:, ::-1].copy()


def test_missing_values_have_representations_of_their_own(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    rows = 2
    here = ItemFeatures(
        np.zeros((rows, 12), np.int32),
        {
            "group": np.zeros(rows, np.int32),
            "brand": np.zeros(rows, np.int32),
            "price": np.array([np.nan, 0.0], np.float32),  # missing, and a price of zero
            "image": np.full((rows, 9), np.nan, np.float32),
        },
    )
    vectors = model.embed_items(item_tensors(here, RECIPE))
    # The first item has nothing at all: it embeds, and it is not the item whose price is zero.
    assert vectors.isfinite().all()
    assert (vectors[0] - vectors[1]).abs().max() > 1e-3
    vectors.sum().backward()
    for name in ("text.missing", "numbers.missing", "vectors.missing"):
        grad = model.embedder.get_parameter(name).grad
        assert grad is not None and grad.abs().max() > 0


def test_numbers_however_large_stay_finite(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    features = samples.items(samples.fields, 4, missing=0.0)
    features.fields["price"][:] = [1e30, -1e30, np.inf, 0.0]
    assert model.embed_items(item_tensors(features, RECIPE)).isfinite().all()


@pytest.mark.parametrize("kind", ["text", "category", "number", "vector"])
def test_any_one_kind_of_field_makes_a_model(samples: SimpleNamespace, kind: str) -> None:
    fields = Fields(item=tuple(f for f in samples.fields.item if f.kind == kind), event=(), text_len=12)
    model = BehaviorModel(fields, RECIPE)
    result = queries_of(model, samples.items(fields, N), samples.batch(fields, B, L, N))
    assert result.shape == (B, L, 24) and result.isfinite().all()


def test_vectors_and_queries_have_the_promised_size(samples: SimpleNamespace, shaken: Shake) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    shaken(model.embedder)
    shaken(model.contextualizer.blocks)
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    vectors = model.embed_items(item_tensors(features, RECIPE))
    torch.testing.assert_close(vectors.square().mean(1), torch.ones(N), rtol=1e-3, atol=0)
    queries = queries_of(model, features, batch)
    torch.testing.assert_close(queries.square().mean(2).sqrt(), torch.full((B, L), 0.1), rtol=1e-3, atol=0)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_the_model_is_its_plain_twin_forwards_and_backwards(
    samples: SimpleNamespace, plain: ModuleType, shaken: Shake, precision: torch.dtype
) -> None:
    model = shaken(BehaviorModel(samples.fields, RECIPE))
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    items, windows = item_tensors(features, RECIPE), batch_tensors(batch)
    weights = torch.randn(B, L, 24, generator=torch.Generator().manual_seed(0))
    assert features.tokens is not None

    with torch.autocast("cpu", dtype=precision, enabled=precision != torch.float32):
        ours = model.queries(windows, model.embed_items(items)[windows.items])
    (ours * weights).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    vectors = plain.plain_embed_items(model, torch.from_numpy(features.tokens), items.fields)
    theirs = plain.plain_queries(model, windows, vectors[windows.items])
    (theirs * weights).sum().backward()

    tolerance = 1e-4 if precision == torch.float32 else 0.06
    assert relative_error(ours, theirs) < tolerance
    for name, parameter in model.named_parameters():
        assert relative_error(gradients[name], parameter.grad) < 4 * tolerance, name


def relative_error(ours: torch.Tensor | None, reference: torch.Tensor | None) -> float:
    assert ours is not None and reference is not None
    return ((ours - reference).norm() / reference.norm()).item()


def test_a_frozen_embedder_gets_no_gradient_and_stays_out_of_the_groups(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE).freeze()
    vectors = model.embed_items(item_tensors(samples.items(samples.fields, N), RECIPE))
    windows = batch_tensors(samples.batch(samples.fields, B, L, N))
    model.queries(windows, vectors[windows.items]).square().mean().backward()
    assert all(p.grad is None for p in model.embedder.parameters())
    assert model.contextualizer.output.weight.grad is not None
    assert all(info.name.startswith("contextualizer.") for info in model.parameter_groups())


def test_a_code_beyond_its_table_counts_as_unknown(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    features = samples.items(samples.fields, 3, missing=0.0)
    features.fields["group"][:] = [0, 7, 1000]  # the table has codes 0..6
    features.fields["brand"][:] = 1
    for name in ("price", "image"):
        features.fields[name][:] = features.fields[name][:1]
    same = ItemFeatures(np.repeat(features.tokens[:1], 3, 0), features.fields)
    vectors = model.embed_items(item_tensors(same, RECIPE))
    torch.testing.assert_close(vectors[1:], vectors[:1].expand(2, -1))


def test_text_beyond_the_limit_is_left_out(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    features = samples.items(samples.fields, 5)
    assert features.tokens is not None
    longer = np.concatenate([np.full((5, 12), 3, np.int32), np.full((5, 4), 9, np.int32)], 1)
    cut = ItemFeatures(longer[:, :12], features.fields)
    vectors = model.embed_items(item_tensors(ItemFeatures(longer, features.fields), RECIPE))
    assert torch.equal(vectors, model.embed_items(item_tensors(cut, RECIPE)))


def test_what_does_not_fit_is_refused_by_name(samples: SimpleNamespace) -> None:
    model = BehaviorModel(samples.fields, RECIPE)
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    windows = batch_tensors(batch)
    with pytest.raises(ModelError, match=r"event embeddings have shape \(3, 32, 23\)"):
        model.queries(windows, torch.zeros(B, L, 23))
    assert features.tokens is not None
    with pytest.raises(ModelError, match="token 50 is not in the vocabulary"):
        model.embed_items(
            item_tensors(ItemFeatures(np.full((2, 12), 50), taken(features, np.arange(2)).fields), RECIPE)
        )
    with pytest.raises(ModelError, match="items without tokens"):
        model.embed_items(item_tensors(ItemFeatures(None, features.fields), RECIPE))
    fewer = {name: values for name, values in features.fields.items() if name != "price"}
    with pytest.raises(ModelError, match="field 'price' is not among the values given: brand, group, image"):
        model.embed_items(item_tensors(ItemFeatures(features.tokens, fewer), RECIPE))
    with pytest.raises(ModelError, match="the items have no fields"):
        BehaviorModel(Fields(item=(), event=()), RECIPE)
    several = (Field(name="tags", kind="categories", size=3, width=2),)
    with pytest.raises(ModelError, match="event field 'tags' holds several categories"):
        BehaviorModel(Fields(item=samples.fields.item, event=several, text_len=12), RECIPE)
    query = (Field(name="query", kind="text", size=9, rows=2),)
    shared = RECIPE.model_copy(update={"event_text": "shared"})
    without_text = tuple(field for field in samples.fields.item if field.kind != "text")
    with pytest.raises(ModelError, match=r"event_text is 'shared', and the items have no text \(event field 'query'\)"):
        BehaviorModel(Fields(item=without_text, event=query, text_len=12), shared)
    with pytest.raises(ModelError, match="tokens do not fit a capacity of 3"):
        item_tensors(features, RECIPE, token_capacity=3)
