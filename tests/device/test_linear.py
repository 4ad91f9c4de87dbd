"""`rlneuron::linear` and `mm` against torch's own products: values and gradients, every stride, dtype and device."""

from __future__ import annotations

import pytest
import torch

from rlneuron.device.ops.linear import linear, mm

SHAPES = [(1, 8, 16), (7, 24, 96), (130, 96, 33), (5, 1, 1)]


@pytest.mark.parametrize("device", ["cpu", "neuron"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inner", "outer"), SHAPES)
def test_linear_and_its_gradients(device: str, bias: bool, rows: int, inner: int, outer: int) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, rows, inner), torch.randn(outer, inner), torch.randn(outer) if bias else None]
    upstream = torch.randn(2, rows, outer)
    ours = [None if t is None else t.clone().to(device).requires_grad_() for t in inputs]
    theirs = [None if t is None else t.double().requires_grad_() for t in inputs]
    out = linear(*ours)  # type: ignore[arg-type]
    expected = torch.nn.functional.linear(*theirs)  # type: ignore[arg-type]
    torch.testing.assert_close(out.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    out.backward(upstream.to(device))
    expected.backward(upstream.double())
    for a, b in zip(ours, theirs, strict=True):
        if a is not None and b is not None and a.grad is not None and b.grad is not None:
            torch.testing.assert_close(a.grad.cpu(), b.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_mm_takes_any_strides(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(9, 31).to(dtype).t(), torch.randn(17, 9).to(dtype).t()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    out = mm(a, b)
    assert out.is_contiguous() and out.dtype == dtype
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=tolerance, atol=tolerance)


def test_empty_products() -> None:
    assert linear(torch.zeros(0, 4), torch.zeros(3, 4)).shape == (0, 3)
    assert torch.equal(mm(torch.zeros(2, 0), torch.zeros(0, 3)), torch.zeros(2, 3))
