"""Paged attention: the compiled form against the plain one, and the plain one against scaled_dot_product_attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rlneuron.device.ops import kernels
from rlneuron.device.ops import paged_attention as module

DECODE = [(1, n) for n in (5, 40, 41, 80, 16, 17, 1, 33)]
MIXED = [(1, 50), (20, 37), (1, 61), (64, 64), (1, 90), (1, 1)]


def arguments(
    lengths: list[tuple[int, int]],
    *,
    heads: int = 4,
    groups: int = 2,
    size: int = 32,
    block: int = 16,
    shared: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, ...]:
    """Random tensors for sequences of (new tokens, context); all begin with the same `shared` blocks."""
    draw = torch.Generator().manual_seed(0)
    starts, contexts, slots, tables, used = [0], [], [], [], 1 + shared
    for new, context in lengths:
        needed = -(-context // block)
        own = max(0, needed - shared)
        table = [*range(1, 1 + min(shared, needed)), *range(used, used + own)]
        used += own
        starts.append(starts[-1] + new)
        contexts.append(context)
        tables.append(table)
        slots += [table[p // block] * block + p % block for p in range(context - new, context)]
    width = max(map(len, tables))

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    key_cache, value_cache = random(used, groups, size, block), random(used, groups, block, size)
    value_cache[0] = key_cache[0] = float("nan")  # block 0 fills up the tables and must not be read
    qkv = [random(1, starts[-1], n, size).transpose(1, 2) for n in (heads, groups, groups)]
    return (
        *qkv,
        key_cache,
        value_cache,
        *(torch.tensor(x, dtype=torch.int32) for x in (slots, [t + [0] * (width - len(t)) for t in tables])),
        *(torch.tensor(x, dtype=torch.int32) for x in (starts, contexts)),
        size**-0.5,
        window,
        softcap,
    )


def copy(args: tuple[Any, ...], device: str = "cpu") -> tuple[Any, ...]:
    return tuple(x.clone().to(device) if isinstance(x, torch.Tensor) else x for x in args)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": 64, "heads": 6},
        {"heads": 9, "groups": 3, "size": 24},  # not a multiple of the vector
        {"heads": 8, "groups": 1, "size": 80},
        {"heads": 2, "groups": 2, "size": 8},
        {"block": 32},
        {"shared": 2},
        {"shared": 2, "window": 9},
        {"softcap": 3.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_form_equals_plain_form(
    options: dict[str, Any], lengths: list[tuple[int, int]], dtype: torch.dtype
) -> None:
    assert kernels.load(), "the kernels are not compiled; run: rlneuron build"
    args = arguments(lengths, dtype=dtype, **options)
    plain, compiled = copy(args), copy(args)
    expected, got = module._plain(*plain), module.paged_attention(*compiled)
    tolerance = 5e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(compiled[3], plain[3], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(compiled[4], plain[4], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("window", [0, 9])
def test_plain_form_is_causal_attention_over_the_context(window: int) -> None:
    args = arguments(MIXED, window=window)
    out = module._plain(*args)[0]
    starts = args[7].tolist()
    for s, (new, context) in enumerate(MIXED):
        blocks = args[6][s, : -(-context // 16)].long()
        keys = args[3][blocks].permute(1, 0, 3, 2).reshape(2, -1, 32)[:, :context]
        values = args[4][blocks].permute(1, 0, 2, 3).reshape(2, -1, 32)[:, :context]
        position = torch.arange(context)
        row = position[context - new :, None]
        mask = (position <= row) & ((position > row - window) if window else torch.ones(1, dtype=torch.bool))
        query = args[0][:, :, starts[s] : starts[s + 1]]
        expected = scaled_dot_product_attention(query, keys[None], values[None], attn_mask=mask, enable_gqa=True)
        torch.testing.assert_close(out[starts[s] : starts[s + 1]], expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_runs_on_neuron_as_on_the_cpu(neuron: torch.device) -> None:
    args = arguments(MIXED)
    on_cpu, on_neuron = copy(args), copy(args, "neuron")
    expected, got = module.paged_attention(*on_cpu), module.paged_attention(*on_neuron)
    assert got.device.type == "neuron"
    assert torch.equal(got.cpu(), expected)
    assert torch.equal(on_neuron[3].cpu()[1:], on_cpu[3][1:])


def test_fake_form_has_the_right_shape() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        args = [mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments(MIXED)]
        out = torch.ops.rlneuron.paged_attention(*args)
    assert out.shape == (1, sum(new for new, _ in MIXED), 4, 32)
