"""On CUDA: packed attention against float64, the same numbers as on CPU, and a step that can be captured."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from habitus.data.batch import Batch, ItemFeatures
from habitus.data.fields import Fields
from habitus.model import BehaviorModel, batch_tensors, item_tensors
from habitus.model.attention import PackedRows, apply_rope, attend, rope_table
from habitus.model.packing import pack_text
from habitus.recipe import ModelRecipe

pytestmark = pytest.mark.gpu

RECIPE = ModelRecipe(joint_dim=44, text_len=12, text_depth=2, width=96, depth=3, head_dim=32)
N, B, L = 500, 8, 128
Shake = Callable[[BehaviorModel], BehaviorModel]


def reference_attention(qkv: Tensor, begin: Tensor, end: Tensor, rope: Tensor | None) -> Tensor:
    """Every score written out, in float64."""
    query, key, value = (qkv if rope is None else apply_rope(qkv, rope)).double().unbind(1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / qkv.shape[-1] ** 0.5
    row = torch.arange(len(qkv), device=qkv.device)
    seen = (row >= begin[:, None]) & (row < end[:, None])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return ((ours.double() - reference.double()).norm() / reference.double().norm()).item()


# Every pair of size and type is three kernels to compile, the dearest part of this file: not all combinations.
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize(
    ("heads", "size", "dtype"),
    [(1, 44, torch.float32), (1, 44, torch.bfloat16), (3, 32, torch.bfloat16), (1, 130, torch.bfloat16)],
    ids=str,
)
def test_packed_attention_is_attention(heads: int, size: int, causal: bool, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(size)
    lengths = rng.integers(1, 257 if causal else 25, 40 if causal else 200)
    edges = np.concatenate([[0], np.cumsum(lengths), [lengths.sum()] * 3]).astype(np.int32)
    rows = int(edges[-1])
    layout = PackedRows.causal(torch.from_numpy(edges).cuda(), rows)
    if causal:
        places = torch.arange(rows, device="cuda").int() - layout.begin
        layout = layout._replace(rope=rope_table(places, size))
    else:
        layout = PackedRows.bidirectional(layout.begin, layout.last)
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(rows, 3, heads, size, device="cuda", generator=generator).to(dtype).requires_grad_()
    upstream = torch.randn(rows, heads, size, device="cuda", generator=generator).to(dtype)
    out = attend(qkv, layout)
    (gradient,) = torch.autograd.grad(out, qkv, upstream)
    exact = qkv.detach().double().requires_grad_()
    expected = reference_attention(exact, layout.begin, layout.end, layout.rope)
    (expected_gradient,) = torch.autograd.grad(expected, exact, upstream.double())
    bound = 1e-5 if dtype == torch.float32 else 1e-2
    assert relative_error(out, expected) < bound
    assert relative_error(gradient, expected_gradient) < bound
    (again,) = torch.autograd.grad(attend(qkv, layout), qkv, upstream)
    assert torch.equal(gradient, again)  # no atomics: the same bits every time


def test_packing_on_the_device_is_packing_on_the_host(samples: SimpleNamespace) -> None:
    tokens = torch.from_numpy(samples.items(samples.fields, N).tokens)
    ours, exact = pack_text(tokens.cuda(), capacity=N * 12), pack_text(tokens.cuda())
    count = int((tokens != 0).sum())
    assert len(ours.tokens) == N * 12 and len(exact.tokens) == count
    assert torch.equal(ours.tokens[:count].cpu(), tokens[tokens != 0].long())
    assert (ours.items[count:] == N).all() and (ours.tokens[count:] == 0).all()
    for row in (0, count // 2, count - 1):
        item = int(ours.items[row])
        begin, end = int(ours.layout.begin[row]), int(ours.layout.end[row])
        assert (ours.items[begin:end] == item).all() and end - begin == int((tokens[item] != 0).sum())


def forward(model: BehaviorModel, features: ItemFeatures, batch: Batch, device: str) -> Tensor:
    windows = batch_tensors(batch, device)
    vectors = model.embed_items(item_tensors(features, model.recipe, device))
    return model.queries(windows, vectors[windows.items])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cuda_and_cpu_give_the_same_queries_and_gradients(
    samples: SimpleNamespace, shaken: Shake, precision: str
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    model = shaken(BehaviorModel(samples.fields, RECIPE))
    on_cpu = forward(model, features, batch, "cpu")
    weights = torch.randn(on_cpu.shape, generator=torch.Generator().manual_seed(1))
    (on_cpu * weights).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16"):
        on_cuda = forward(model, features, batch, "cuda")
    (on_cuda * weights.cuda()).sum().backward()
    bound = 1e-4 if precision == "fp32" else 0.06
    assert relative_error(on_cuda.cpu(), on_cpu) < bound
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad.cpu(), expected[name]) < 4 * bound, name


def test_no_leak_between_users_or_from_the_future_on_cuda(samples: SimpleNamespace, shaken: Shake) -> None:
    features, batch = samples.items(samples.fields, N), samples.batch(samples.fields, B, L, N)
    model = shaken(BehaviorModel(samples.fields, RECIPE)).cuda()
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        before = forward(model, features, batch, "cuda")
        items = batch.items.copy()
        items[3, 40] = (items[3, 40] + 1) % N
        after = forward(model, features, replace(batch, items=items), "cuda")
    may_differ = torch.zeros(B, L, dtype=torch.bool)
    same_user = torch.from_numpy(batch.segments[3] == batch.segments[3, 40])
    may_differ[3] = same_user & (torch.arange(L) >= 40)
    assert torch.equal(before[~may_differ.cuda()], after[~may_differ.cuda()])
    assert not torch.equal(before[3, 40], after[3, 40])


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_captured_step_replays_on_other_texts_and_other_users(
    samples: SimpleNamespace, shaken: Shake, compiled: bool
) -> None:
    # Each kind of field is a graph of its own to compile: text and one event field show all that capture could break.
    fields = Fields(item=samples.fields.item[:1], event=samples.fields.event[1:2], text_len=samples.fields.text_len)
    model = shaken(BehaviorModel(fields, RECIPE)).cuda()
    steps = [(samples.items(fields, N, seed), samples.batch(fields, B, L, N, seed)) for seed in (1, 2)]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        expected = [step_gradients(model, *step) for step in steps]
    if compiled:
        model.compile_blocks()
    tokens, windows = torch.from_numpy(steps[0][0].tokens).cuda(), batch_tensors(steps[0][1], "cuda")
    values = item_tensors(steps[0][0], RECIPE, "cuda").fields

    def one_step() -> Tensor:
        items = SimpleNamespace(text=pack_text(tokens, capacity=N * 12), fields=values)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            vectors = model.embed_items(items)
            queries = model.queries(windows, vectors[windows.items])
        queries.pow(3).sum().backward()
        return queries

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            one_step()
    torch.cuda.synchronize()
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        queries = one_step()
    for (features, batch), (wanted, gradients) in zip(steps, expected, strict=True):
        tokens.copy_(torch.from_numpy(features.tokens))
        for name, column in features.fields.items():
            values[name].copy_(torch.from_numpy(column))
        fresh = batch_tensors(batch, "cuda")
        for name in ("items", "positions", "segments", "boundaries"):
            getattr(windows, name).copy_(getattr(fresh, name))
        for name, column in fresh.fields.items():
            windows.fields[name].copy_(column)
        graph.replay()
        assert relative_error(queries, wanted) < 0.03
        for name, parameter in model.named_parameters():
            assert relative_error(parameter.grad, gradients[name]) < 0.15, name


def step_gradients(model: BehaviorModel, features: ItemFeatures, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    queries = forward(model, features, batch, "cuda")
    queries.pow(3).sum().backward()
    return queries.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def test_a_model_starts_the_same_on_either_device(samples: SimpleNamespace) -> None:
    on_cpu = BehaviorModel(samples.fields, RECIPE, seed=3)
    with torch.device("cuda"):
        on_cuda = BehaviorModel(samples.fields, RECIPE, seed=3)
    for ours, theirs in zip(on_cpu.parameters(), on_cuda.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-5, atol=1e-7)
