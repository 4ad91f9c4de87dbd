"""Packed attention: the compiled form against the plain one and against scaled_dot_product_attention row by row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlneuron.device.ops import varlen_attention as module
from rlneuron.device.ops.kernels import load

# A prompt of 37 tokens with three completions (one longer than a block of the kernel), then a row of its own.
SEGMENTS = torch.tensor(
    [[0, 37, 0, 0], [37, 5, 0, 37], [42, 150, 0, 37], [192, 1, 0, 37], [193, 70, 0, 0]], dtype=torch.int32
)
NUM_TOKENS = 270  # the last 7 lie in no segment


def inputs(num_heads: int, num_kv: int, dim: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(NUM_TOKENS, num_heads, dim), (NUM_TOKENS, num_kv, dim), (NUM_TOKENS, num_kv, dim)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    rows = []
    for start, length, prefix_start, prefix_length in SEGMENTS.tolist():
        keys, values = (
            torch.cat([x[prefix_start : prefix_start + prefix_length], x[start : start + length]]) for x in (k, v)
        )
        mask = torch.ones(length, prefix_length + length, dtype=torch.bool).tril(prefix_length)
        heads = [x.transpose(0, 1)[None] for x in (q[start : start + length], keys, values)]
        out = scaled_dot_product_attention(*heads, attn_mask=mask, scale=scale, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat([*rows, torch.zeros_like(q[263:])])


def run(form: str, tensors: list[Tensor], scale: float) -> list[Tensor]:
    """Output and the three gradients by one form."""
    weights = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(1)).to(tensors[0].dtype)
    if form == "reference":
        out = reference(*tensors, scale)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]
    if form == "plain":
        detached = [x.detach() for x in tensors]
        out, lse = module._forward_plain(*detached, SEGMENTS, scale)
        return [out, *module._backward_plain(weights, *detached, out, lse, SEGMENTS, scale)]
    out = module.varlen_attention(*tensors, SEGMENTS, scale)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), tensors)]


@pytest.mark.parametrize("form", ["plain", "registered"])
@pytest.mark.parametrize("heads", [(4, 4, 16), (6, 2, 32), (3, 1, 20)])
def test_equals_attention_row_by_row(form: str, heads: tuple[int, int, int]) -> None:
    assert load() or form == "plain", "run `rlneuron build` first"
    tensors = inputs(*heads)
    for got, wanted in zip(run(form, tensors, 0.3), run("reference", tensors, 0.3), strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_compiled_equals_plain_in_bfloat16() -> None:
    assert load(), "run `rlneuron build` first"
    tensors = inputs(4, 2, 16, torch.bfloat16)
    for got, wanted in zip(run("registered", tensors, 0.25), run("plain", tensors, 0.25), strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


def test_segments_outside_the_tokens_are_refused() -> None:
    assert load(), "run `rlneuron build` first"
    q, k, v = inputs(2, 2, 8)
    with pytest.raises(RuntimeError, match="segment 0 lies outside the 270 packed tokens"):
        module.varlen_attention(q, k, v, torch.tensor([[200, 100, 0, 0]], dtype=torch.int32), 1.0)


def test_fake_form_has_the_shapes() -> None:
    with torch.device("meta"):
        q, k = torch.empty(9, 4, 8), torch.empty(9, 2, 8)
        out = module.varlen_attention(q, k, k, torch.empty(3, 4, dtype=torch.int32), 1.0)
    assert out.shape == (9, 4, 8)
