"""What sizing counts is what the modules hold, and what PyTorch's own counters see."""

import math
import random
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from habitus.data.fields import Field, Fields
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.recipe import ModelRecipe
from habitus.sizing import Inputs, Workload, breakdown, executed_step_flops
from habitus.sizing.memory import activation_bytes


def random_configuration(seed: int) -> tuple[Fields, ModelRecipe]:
    """A model of any shape over any subset of field kinds."""
    draw = random.Random(seed)
    item = [Field(name=f"c{i}", kind="category", size=draw.randint(1, 30)) for i in range(draw.randint(0, 3))]
    item += [Field(name=f"n{i}", kind="number") for i in range(draw.randint(0, 3))]
    item += [Field(name=f"v{i}", kind="vector", size=draw.randint(1, 40)) for i in range(draw.randint(0, 2))]
    if not item or draw.random() < 0.7:
        item.append(Field(name="text", kind="text", size=draw.randint(2, 200)))
    event = [Field(name=f"e{i}", kind="category", size=draw.randint(1, 9)) for i in range(draw.randint(0, 2))]
    event += [Field(name=f"m{i}", kind="number") for i in range(draw.randint(0, 2))]
    event += [Field(name=f"q{i}", kind="text", size=draw.randint(2, 90), rows=3) for i in range(draw.randint(0, 2))]
    event += [Field(name=f"p{i}", kind="vector", size=draw.randint(1, 9), rows=3) for i in range(draw.randint(0, 2))]
    shares = any(field.kind == "text" for field in item) and draw.random() < 0.5
    head_dim = draw.choice((2, 4, 8, 16))
    recipe = ModelRecipe(
        joint_dim=draw.choice((*range(4, 64, 4), 64, 72, 80)),
        text_len=draw.randint(1, 30),
        text_depth=draw.randint(1, 5),
        width=head_dim * draw.randint(1, 6) * 2,
        depth=draw.randint(1, 5),
        head_dim=head_dim,
        init=draw.choice(("default", "mup_lr", "mup")),
        copying=draw.random() < 0.5,
        event_text="shared" if shares else "own",
    )
    return Fields(item=tuple(item), event=tuple(event), text_len=recipe.text_len), recipe


@pytest.mark.parametrize("first", range(0, 200, 25))
def test_the_breakdown_is_what_the_modules_hold_for_200_random_models(first: int) -> None:
    for seed in range(first, first + 25):
        fields, recipe = random_configuration(seed)
        model = BehaviorModel(fields, recipe)
        parts = breakdown(recipe, Inputs.of(fields))
        named = {**parts.embedder, **parts.contextualizer, **parts.vocabulary}
        held = dict.fromkeys(named, 0)
        for name, parameter in model.named_parameters():
            # The longest part name that begins the parameter's: tokens before text, categories before events.
            part = max((part for part in named if name.startswith(part)), key=len)
            held[part] += parameter.numel()
        assert held == named, f"configuration {seed}"
        assert sum(named.values()) == sum(p.numel() for p in model.parameters())


def counter_with_cpu_attention() -> FlopCounterMode:
    """PyTorch's counter, told that the CPU's fused attention multiplies as the CUDA one does, which it knows."""

    def forward(query: tuple, key: tuple, value: tuple, *_: object, out_shape: object, **__: object) -> int:
        return sdpa_flop_count(query, key, value)

    def backward(
        grad: tuple, query: tuple, key: tuple, value: tuple, *_: object, out_shape: object, **__: object
    ) -> int:
        return sdpa_backward_flop_count(grad, query, key, value)

    aten = torch.ops.aten
    mapping = {
        aten._scaled_dot_product_flash_attention_for_cpu: forward,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: backward,
    }
    return FlopCounterMode(display=False, custom_mapping=mapping)


@pytest.mark.parametrize("with_fields", [True, False], ids=["all-fields", "text-only"])
@pytest.mark.parametrize("frozen", [False, True], ids=["stage-1", "stage-2"])
def test_executed_flops_agree_with_pytorchs_counter_within_two_per_cent(
    samples: SimpleNamespace, with_fields: bool, frozen: bool
) -> None:
    fields = samples.fields if with_fields else Fields(item=samples.fields.item[:1], event=(), text_len=12)
    recipe = ModelRecipe(joint_dim=48, text_len=12, text_depth=3, width=64, depth=3, head_dim=16)
    model = BehaviorModel(fields, recipe)
    n, B, L = 150, 4, 64
    features, batch = samples.items(fields, n), samples.batch(fields, B, L, n)
    lengths = (features.tokens != 0).sum(1)
    items, windows = item_tensors(features, recipe), batch_tensors(batch)
    if frozen:
        model.freeze()
        vectors = model.embed_items(items)
    with counter_with_cpu_attention() as counter:
        if not frozen:
            vectors = model.embed_items(items)
        queries = model.queries(windows, vectors[windows.items])[windows.targets >= 0]
        scores = queries @ vectors.T
        torch.nn.functional.cross_entropy(scores, windows.targets[windows.targets >= 0]).backward()
    work = Workload(
        slots=B * L,
        items=0 if frozen else n,
        text_tokens=int(lengths.sum()),
        text_pairs=int((lengths.astype(int) ** 2).sum()),
        context_pairs=B * L * L,  # under a mask every pair is multiplied
        queries=len(scores),
        candidates=n,
        softmax="logits",
    )
    if frozen:
        work = Workload(**{**vars(work), "text_tokens": 0, "text_pairs": 0})
    ours = sum(executed_step_flops(recipe, Inputs.of(fields), work).values())
    counted = counter.get_flop_counts()["Global"]
    assert any("attention" in str(operator) for operator in counted), "attention went uncounted"
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_activation_bytes_are_what_autograd_keeps_of_the_layers(samples: SimpleNamespace) -> None:
    recipe = ModelRecipe(joint_dim=64, text_len=12, text_depth=4, width=128, depth=6, head_dim=32)
    model = BehaviorModel(samples.fields, recipe)
    n, B, L = 200, 4, 64
    features, batch = samples.items(samples.fields, n), samples.batch(samples.fields, B, L, n)
    items, windows = item_tensors(features, recipe), batch_tensors(batch)
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        # The graph must stay alive, or storages would be freed and their addresses used again.
        graph = model.queries(windows, model.embed_items(items)[windows.items]).sum()
    assert math.isfinite(graph.item())
    lengths = (features.tokens != 0).sum(1)
    work = Workload(
        slots=B * L,
        items=n,
        text_tokens=int(lengths.sum()),
        text_pairs=0,
        context_pairs=0,
        queries=0,
        candidates=0,
    )
    ours = activation_bytes(recipe, Inputs.of(samples.fields), work, "fp32")
    assert ours == pytest.approx(sum(kept.values()), rel=0.15)
