"""What compiling piece by piece promises, with a compiler that only looks: nothing is generated, so it is fast."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from habitus.data.fields import Fields
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.attention import LengthGroups
from habitus.model.layers import Block
from habitus.recipe import ModelRecipe


@pytest.mark.slow
def test_every_contextualizer_of_a_process_is_compiled_for_its_own_sizes(
    samples: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[tuple[bool, list[Any]]] = []
    in_contextualizer = False

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append((in_contextualizer, inputs))
        return graph.forward

    usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **options: usual(*given, **options, backend=look))
    torch._dynamo.reset()
    fields = Fields(item=samples.fields.item[1:2], event=(), text_len=12)
    for width, B, items in ((32, 2, 30), (64, 3, 40), (96, 4, 50)):
        recipe = ModelRecipe(joint_dim=16, width=width, depth=2, text_len=12, head_dim=32)
        model = BehaviorModel(fields, recipe)
        plain, windows = BehaviorModel(fields, recipe), batch_tensors(samples.batch(fields, B, 16, items))
        features = item_tensors(samples.items(fields, items), recipe)
        model.compile_blocks()
        in_contextualizer = False
        vectors = model.embed_items(features)
        in_contextualizer = True
        queries = model.queries(windows, vectors[windows.items])
        torch.testing.assert_close(queries, plain.queries(windows, plain.embed_items(features)[windows.items]))
    contextualizers = [inputs for inside, inputs in graphs if inside]
    # What is before the layers, what is after them, and the layer: each once per model, whatever the depth.
    assert len(contextualizers) == 3 * 3
    assert not any(isinstance(value, torch.SymInt) for inputs in contextualizers for value in inputs)
    assert torch._dynamo.config.recompile_limit >= 64


def test_what_comes_after_the_text_s_layers_is_one_piece_for_every_kind_of_field(
    samples: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    usual = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *given, **options: usual(*given, **options, backend=look))
    torch._dynamo.reset()
    recipe = ModelRecipe(joint_dim=16, width=32, depth=1, text_len=12, text_depth=2, head_dim=32)
    plain = BehaviorModel(samples.fields, recipe)
    assert {field.kind for field in samples.fields.item} == {"text", "category", "number", "vector"}
    features = item_tensors(samples.items(samples.fields, 20), recipe)
    compiled = plain.twin().compile_blocks()
    torch.testing.assert_close(compiled.embed_items(features), plain.embed_items(features))
    # The tokens' places, a layer, and the rest: nothing of it is left to be run an operation at a time.
    assert len(graphs) == 3


def test_a_twin_has_the_same_parameters_and_is_compiled_alone(samples: SimpleNamespace) -> None:
    recipe = ModelRecipe(joint_dim=16, width=32, depth=2, text_len=12, head_dim=32, copying=True)
    model = BehaviorModel(samples.fields, recipe)
    twin = model.twin()
    pairs = list(zip(model.named_parameters(), twin.named_parameters(), strict=True))
    assert all(name == other and tensor is same for (name, tensor), (other, same) in pairs)
    twin.compile_blocks()
    assert twin.contextualizer.blocks[0]._compiled_call_impl is not None
    assert "prepare_inputs" in vars(twin.contextualizer)
    for part in model.modules():
        assert part._compiled_call_impl is None
        assert not {"prepare_inputs", "project_out", "fuse_fields", "add_positions"} & set(vars(part))


@pytest.mark.parametrize("width, heads, room", [(12, 1, 16), (28, 1, 32), (12, 2, 16), (36, 3, 48)])
def test_rows_with_room_at_their_end_pass_a_layer_as_others_do(
    width: int, heads: int, room: int, shaken: Callable[[torch.nn.Module], torch.nn.Module]
) -> None:
    block = Block(width, heads)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.zero_()
        block.attention_norm.weight.fill_(1)
        block.mlp_norm.weight.fill_(1)
    shaken(block)
    layout = LengthGroups(((3, 4), (2, 5)))
    x = torch.randn(22, width, generator=torch.Generator().manual_seed(2), requires_grad=True)
    weights = torch.randn(22, width, generator=torch.Generator().manual_seed(3))
    plain = block(x, layout)
    expected = torch.autograd.grad((plain * weights).sum(), [x, *block.parameters()])
    wide = block(torch.nn.functional.pad(x, (0, room - width)), layout)
    assert wide.shape == (22, room)
    assert not wide[:, width:].any()
    torch.testing.assert_close(wide[:, :width], plain, atol=1e-5, rtol=1e-5)
    result = torch.autograd.grad((wide[:, :width] * weights).sum(), [x, *block.parameters()])
    for got, truth in zip(result, expected, strict=True):
        torch.testing.assert_close(got, truth, atol=1e-4, rtol=1e-4)
