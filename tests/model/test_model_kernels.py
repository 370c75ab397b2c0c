"""The model's kernels in Triton's interpreter, where Triton is installed: right without a device."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECK = """
import torch
from habitus.model import attention, kernels
from habitus.model.attention import PackedRows, rope_table, apply_rope

def reference(qkv, begin, end):
    query, key, value = qkv.unbind(1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / qkv.shape[-1] ** 0.5
    row = torch.arange(len(qkv))
    seen = (row >= begin[:, None]) & (row < end[:, None])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

torch.manual_seed(0)
x, upstream = (3 * torch.randn(37, 61)).requires_grad_(), torch.randn(37, 61)
expected = torch.nn.functional.gelu(x)
torch.testing.assert_close(kernels.gelu_forward(x.detach()), expected.detach(), rtol=1e-5, atol=1e-6)
(wanted,) = torch.autograd.grad(expected, x, upstream)
torch.testing.assert_close(kernels.gelu_backward(upstream, x.detach()), wanted, rtol=1e-5, atol=1e-6)

texts, users = [3, 24, 1, 7, 24, 13, 24, 5], [100, 30, 1, 70]
cases = ((texts, 2, 22, False), (texts, 1, 44, False), (users, 2, 32, True), (users, 1, 130, True))
for lengths, heads, size, causal in cases:
    rows = sum(lengths)
    edges = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), rows, rows], dtype=torch.int32)
    layout = PackedRows.causal(edges, rows)
    if not causal:
        layout = PackedRows.bidirectional(layout.begin, layout.last)
    qkv = torch.randn(rows, 3, heads, size, requires_grad=True)
    upstream = torch.randn(rows, heads, size)
    expected = reference(qkv, layout.begin, layout.end)
    expected.backward(upstream)
    given, scale = qkv.detach(), size**-0.5
    # Queries and keys beside the values, as they come out of the layer, and on their own, as they come out of rope.
    for qk in (given, given[:, :2].contiguous()):
        out, lse = kernels.attention_forward(qk, given, layout.begin, layout.end, scale)
        gradient = kernels.attention_backward(upstream, qk, given, out, lse, layout[:4], scale)
        torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(gradient, qkv.grad, rtol=1e-4, atol=1e-5)

for rows, heads, size in ((1, 1, 2), (70, 3, 32), (33, 2, 44)):
    qkv = torch.randn(rows, 3, heads, size, requires_grad=True)
    rope = rope_table(torch.randint(0, 256, (rows,)), size)
    upstream = torch.randn_like(qkv)
    expected = apply_rope(qkv, rope)
    expected.backward(upstream)
    rotated = kernels.rotate(qkv.detach(), rope)
    torch.testing.assert_close(rotated, expected[:, :2].detach(), rtol=1e-5, atol=1e-6)
    kernels.rotate_gradient_back(upstream, rope)
    torch.testing.assert_close(upstream, qkv.grad, rtol=1e-5, atol=1e-6)

# The operator as a whole, with its gradient, plain and traced.
edges = torch.tensor([0, 40, 41, 90, 90], dtype=torch.int32)
rope = rope_table(torch.arange(90) % 40, 16)
layout = PackedRows.causal(edges, 90, rope)
qkv = torch.randn(90, 3, 2, 16, requires_grad=True)
upstream = torch.randn(90, 2, 16)
expected = reference(apply_rope(qkv, rope), layout.begin, layout.end)
(wanted,) = torch.autograd.grad(expected, qkv, upstream)

def operator(qkv, rope):
    return attention._forward(qkv * 1, *layout[:4], rope, qkv.shape[-1] ** -0.5)[0]

for call in (operator, torch.compile(operator, backend="aot_eager", fullgraph=True)):
    out = call(qkv, rope)
    (gradient,) = torch.autograd.grad(out, qkv, upstream)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)
    plain = call(qkv, None)
    (gradient,) = torch.autograd.grad(plain, qkv, upstream)
    without_rope = reference(qkv, layout.begin, layout.end)
    torch.testing.assert_close(plain, without_rope, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(without_rope, qkv, upstream)[0], rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA only")
def test_the_kernels_agree_with_every_score_written_out() -> None:
    # The interpreter is chosen when Triton is first imported, so it gets a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
