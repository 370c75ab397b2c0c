"""Texts and vectors of events: encoded once, the same in fixed shapes, and never seen before their slot."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from habitus.data import Field, Fields
from habitus.model import BatchTensors, BehaviorModel, TextCapacity
from habitus.recipe import ModelRecipe

ITEM = (Field(name="title", kind="text", size=40),)
EVENT = (
    Field(name="query", kind="text", size=40, rows=9),
    Field(name="picture", kind="vector", size=3, rows=9),
)
B, L, T, H = 2, 6, 5, 16


def model_of(event_text: str) -> BehaviorModel:
    recipe = ModelRecipe(
        joint_dim=H,
        text_len=4,
        text_depth=2,
        width=32,
        depth=2,
        head_dim=8,
        event_text=event_text,  # type: ignore[arg-type]
    )
    model = BehaviorModel(Fields(item=ITEM, event=EVENT, text_len=T), recipe)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():  # residual branches begin at zero, and would hide what they read
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    return model


def batch_of() -> tuple[BatchTensors, Tensor]:
    """Two windows: one user, and two users of three events; some texts are empty, and two are equal."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 40, (B, L, T), generator=draw) * (torch.arange(T) < torch.tensor([3, 5])[:, None, None])
    tokens[0, 2] = 0
    tokens[1, 4] = tokens[1, 0] = tokens[0, 1]
    pictures = torch.randn(B, L, 3, generator=draw)
    pictures[1, 1] = torch.nan
    segments = torch.tensor([[0] * 6, [0, 0, 0, 1, 1, 1]], dtype=torch.int32)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2]], dtype=torch.int32)
    boundaries = torch.tensor([0, 6, 9, 12, 12, 12, 12], dtype=torch.int32)
    slots = torch.zeros(B, L, dtype=torch.int64)
    fields = {"query": tokens.int(), "picture": pictures}
    return BatchTensors(slots, slots, positions, segments, boundaries, fields), torch.randn(B, L, H, generator=draw)


def with_values(batch: BatchTensors, name: str, window: int, slot: int, value: float) -> BatchTensors:
    changed = batch.fields[name].clone()
    changed[window, slot] = value
    return replace(batch, fields={**batch.fields, name: changed})


@pytest.mark.parametrize("event_text", ["own", "shared"])
@pytest.mark.parametrize(("name", "value"), [("query", 7), ("picture", 0.5)])
def test_a_slot_reads_its_own_text_and_none_of_what_follows(event_text: str, name: str, value: float) -> None:
    model, (batch, events) = model_of(event_text), batch_of()
    before = model.queries(batch, events)
    change = (model.queries(with_values(batch, name, 1, 3, value), events) - before).abs().amax(-1)
    assert (change[1, 3:] > 1e-4).all()  # the slot itself and what follows it
    assert not change[1, :3].any()  # another user, before it in the window
    assert not change[0].any()
    later = (model.queries(with_values(batch, name, 0, 4, value), events) - before).abs().amax(-1)
    assert not later[0, :4].any()  # the same user's earlier slots: no text predicts its own event


@pytest.mark.parametrize("event_text", ["own", "shared"])
def test_fixed_shapes_give_the_same_queries_and_gradients(event_text: str) -> None:
    batch, events = batch_of()
    results = []
    for capacity in (None, TextCapacity(texts=13, tokens=128)):
        model = model_of(event_text)
        queries = model.queries(replace(batch, text_capacity=capacity), events)
        queries.square().sum().backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((queries.detach(), gradients))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert any("text" in name for name in results[0][1])
    torch.testing.assert_close(results[0][1], results[1][1])


def test_own_texts_are_the_mean_of_their_tokens_and_missing_ones_a_vector() -> None:
    model, (batch, _) = model_of("own"), batch_of()
    (text,) = model.contextualizer.events.texts
    rows = text(batch.fields["query"], None, None)
    tokens = batch.fields["query"][0, 0, :3].long()
    mean = text.tokens[tokens].mean(0)
    torch.testing.assert_close(rows[0, 0], mean / mean.square().mean().sqrt() * text.norm.weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(rows[0, 2], text.missing.detach(), check_dtype=False)
    assert torch.equal(rows[1, 0], rows[1, 4])


def test_shared_texts_are_those_of_the_items_projected() -> None:
    model, (batch, _) = model_of("shared"), batch_of()
    (text,) = model.contextualizer.events.texts
    from habitus.model import pack_text

    packed = pack_text(batch.fields["query"][0, :1, :4].long())
    encoder = model.embedder.text
    assert encoder is not None
    expected = text.project(encoder.pool(encoder(packed), packed))[0]
    torch.testing.assert_close(text(batch.fields["query"], encoder, None)[0, 0], expected)
