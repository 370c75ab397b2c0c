"""The attention kernels in Triton's interpreter, where Triton is installed: right without a device."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

CHECK = """
import torch
from habitus.model import attention_kernels
from habitus.model.layouts import PackedRows

def reference(qkv, begin, end):
    query, key, value = qkv.unbind(1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / qkv.shape[-1] ** 0.5
    row = torch.arange(len(qkv))
    seen = (row >= begin[:, None]) & (row < end[:, None])
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)

torch.manual_seed(0)
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
    out, lse = attention_kernels.forward(qkv.detach(), layout.begin, layout.end)
    gradient = attention_kernels.backward(upstream, qkv.detach(), out, lse, layout[:4])
    torch.testing.assert_close(out, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, qkv.grad, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch for CUDA only")
def test_the_kernels_agree_with_every_score_written_out() -> None:
    # The interpreter is chosen when Triton is first imported, so it gets a process of its own.
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", CHECK], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
