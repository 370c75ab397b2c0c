"""GELU by its series against PyTorch's, values and gradients."""

import pytest
import torch
from torch.nn import functional as F

from habitus.model.activation import gelu, gelu_by_series


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_series_is_gelu(dtype: torch.dtype, device: str) -> None:
    spread = torch.cat([torch.linspace(-12, 12, 40_001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 80.0, -80.0])])
    spread = spread.to(device)
    ours, exact = spread.to(dtype).requires_grad_(), spread.to(dtype).double().requires_grad_()
    upstream = torch.randn(spread.shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out, expected = gelu_by_series(ours), F.gelu(exact)
    assert out.dtype == dtype
    (slope,) = torch.autograd.grad(out, ours, upstream)
    (true_slope,) = torch.autograd.grad(expected, exact, upstream.double())
    unit = 0.0 if dtype == torch.float32 else 2.0**-8  # of rounding the result
    assert ((out.double() - expected).abs() <= 3e-7 * exact.abs() + unit * expected.abs()).all()
    assert (
        (slope.double() - true_slope).abs() <= (1e-6 + unit * true_slope.abs()) * upstream.double().abs().clamp_min(1)
    ).all()


def test_the_series_can_be_traced_with_its_gradient() -> None:
    x = torch.randn(50, 8, requires_grad=True)
    traced = torch.compile(gelu_by_series, backend="aot_eager", fullgraph=True)(x)
    (slope,) = torch.autograd.grad(traced.sum(), x)
    (expected,) = torch.autograd.grad(F.gelu(x).sum(), x)
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-6)


def test_elsewhere_gelu_is_the_library_s() -> None:
    x = torch.randn(100)
    assert torch.equal(gelu(x), F.gelu(x))
