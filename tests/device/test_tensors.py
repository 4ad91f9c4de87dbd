"""Operators on neuron tensors give what the CPU gives: values, dtypes, aliasing, errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.testing import assert_close

DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool, torch.complex64,
]  # fmt: skip


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bitwise equal values, on neuron and on cpu."""
    assert actual.device.type == "neuron"
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.cpu(), expected) or torch.isnan(expected).any()
    assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels_unchanged(neuron: torch.device, dtype: torch.dtype) -> None:
    for values in ([-1, 0, 1, 5], [5] * 10):
        host = torch.tensor(values).to(dtype)
        same(host.to(neuron), host)
        same(host.to(neuron)[torch.arange(3, device=neuron)], host[:3])


def test_integers_are_64_bits_wide(neuron: torch.device) -> None:
    assert torch.tensor([2**40 + 1], device=neuron).item() == 1099511627777
    fives = torch.full((10,), 5, device=neuron)
    assert fives[torch.arange(10, device=neuron)].tolist() == [5] * 10


def test_casts_equal_the_cpu(neuron: torch.device) -> None:
    host = torch.tensor([1.5, -2.25, 3e4, 0.1])
    for dtype in (torch.float16, torch.bfloat16, torch.int64):
        same(host.to(neuron).to(dtype), host.to(dtype))


def test_in_place_on_a_transposed_view_reaches_the_base(neuron: torch.device) -> None:
    base = torch.arange(6.0, device=neuron).reshape(2, 3)
    view = base.t()
    ones = torch.ones(3, 2, device=neuron)
    view.addcdiv_(ones, ones * 2)
    assert view.cpu().tolist() == [[0.5, 3.5], [1.5, 4.5], [2.5, 5.5]]
    assert base.cpu().tolist() == [[0.5, 1.5, 2.5], [3.5, 4.5, 5.5]]
    assert view._version == base._version


def test_views_share_storage(neuron: torch.device) -> None:
    base = torch.zeros(4, 6, device=neuron)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.view(6, 4),
        lambda x: x[1:, ::2],
        lambda x: x.unfold(1, 2, 2),
        lambda x: x.diagonal(),
        lambda x: x.split(2)[1],
        lambda x: x.unsqueeze(0).expand(3, 4, 6),
        lambda x: x.view(torch.int32),
        lambda x: torch.as_strided(x, (2, 2), (1, 2), 3),
    ]
    for view in views:
        assert view(base).untyped_storage().data_ptr() == base.untyped_storage().data_ptr()
        assert view(base).device == base.device
    base[1:, ::2].fill_(7)
    expected = torch.zeros(4, 6)
    expected[1:, ::2] = 7
    same(base, expected)


def test_out_is_resized_and_filled(neuron: torch.device) -> None:
    left, right = torch.randn(3, 4, device=neuron), torch.randn(4, 5, device=neuron)
    out = torch.empty(0, device=neuron)
    assert torch.mm(left, right, out=out) is out
    same(out, left.cpu() @ right.cpu())
    out.resize_(2, 2)
    assert out.shape == (2, 2) and out.device == neuron
    values, indices = torch.empty(0, device=neuron), torch.empty(0, dtype=torch.int64, device=neuron)
    torch.sort(left, out=(values, indices))
    same(values, left.cpu().sort().values)
    same(indices, left.cpu().sort().indices)


def test_out_on_a_slice_writes_the_base(neuron: torch.device) -> None:
    base = torch.zeros(4, 3, device=neuron)
    torch.add(torch.ones(3, device=neuron), 1, out=base[2])
    assert base.sum().item() == 6 and base[2].tolist() == [2, 2, 2]


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0)])
def test_empty_tensors(neuron: torch.device, shape: tuple[int, ...]) -> None:
    host = torch.empty(shape)
    device = host.to(neuron)
    same(device, host)
    same(torch.cat([device, device]), torch.cat([host, host]))
    same(device.sum(), host.sum())
    same(device.mean(), host.mean())
    same(device[device > 0], host[host > 0])
    with pytest.raises(RuntimeError):
        device.max()
    with pytest.raises(RuntimeError):
        device.item()
    leaf = device.clone().requires_grad_()
    leaf.sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == shape
    same(torch.zeros(3, 0, device=neuron) @ torch.zeros(0, 4, device=neuron), torch.zeros(3, 4))


def test_zero_dim_and_cpu_scalars_mix(neuron: torch.device) -> None:
    x = torch.arange(3.0, device=neuron)
    same(x * torch.tensor(2.0), torch.arange(3.0) * 2)
    same(x.sum() + 1, torch.tensor(4.0))
    assert (x[0] + 1).item() == 1.0
    same(x[torch.tensor([2, 0])], torch.tensor([2.0, 0.0]))  # host indices, as on CUDA
    same(x.int() * torch.tensor(1.5), torch.arange(3) * torch.tensor(1.5))


def test_mixed_devices_are_refused(neuron: torch.device) -> None:
    x = torch.ones(3, device=neuron)
    with pytest.raises(RuntimeError, match=r"same device.*neuron:0 and cpu"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match=r"same device.*neuron:0 and neuron:1"):
        x + torch.ones(3, device="neuron:1")
    with pytest.raises(RuntimeError, match=r"same device"):
        torch.ones(3, 3) @ torch.ones(3, 3, device=neuron)


def test_copies_between_cores(neuron: torch.device) -> None:
    x = torch.randn(5, device=neuron)
    other = x.to("neuron:3")
    assert other.device == torch.device("neuron", 3)
    assert torch.equal(other.cpu(), x.cpu())
    assert (other + 1).device.index == 3


def test_bad_devices_raise_and_the_process_lives(neuron: torch.device) -> None:
    with pytest.raises(RuntimeError, match=r"neuron:99.*4"):
        torch.empty(1, device="neuron:99")
    with pytest.raises(RuntimeError, match=r"-1.*4|4.*-1|neuron:-1"):
        torch.neuron.set_device(-1)
    with pytest.raises(RuntimeError, match=r"99"):
        torch.neuron.set_device(99)
    assert torch.ones(1).to(0).device == neuron
    assert torch.ones(1, device=neuron).item() == 1


def test_non_blocking_copies_are_right_at_once(neuron: torch.device) -> None:
    for i in range(100):
        source = torch.full((50_000,), float(i))
        device = source.to(neuron, non_blocking=True)
        source.fill_(-1)
        del source
        assert device.to("cpu", non_blocking=True)[-1].item() == i


def test_pinned_memory(neuron: torch.device) -> None:
    pinned = torch.randn(1000).pin_memory()
    assert pinned.is_pinned() and pinned[10:].is_pinned()
    assert not torch.randn(1000).is_pinned()
    assert torch.equal(pinned.to(neuron, non_blocking=True).cpu(), pinned)
    with pytest.raises(RuntimeError, match="pin"):
        torch.empty(3, device=neuron, pin_memory=True)


def test_conjugate_and_fft(neuron: torch.device) -> None:
    host = torch.randn(8, dtype=torch.complex64)
    device = host.to(neuron)
    same(device.conj().resolve_conj(), host.conj().resolve_conj())
    same(torch.fft.ifft(device.conj()), torch.fft.ifft(host.conj()))
    same(torch.fft.hfft(device), torch.fft.hfft(host))
    same(torch.view_as_real(device), torch.view_as_real(host))


def test_set_and_storage_resize(neuron: torch.device) -> None:
    x = torch.arange(6.0, device=neuron)
    y = torch.empty(0, device=neuron).set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert y.tolist() == [[2, 3], [4, 5]]
    y.set_()
    assert y.numel() == 0 and y.device == neuron
    x.untyped_storage().resize_(32)
    assert x.untyped_storage().nbytes() == 32 and x[5].item() == 5
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0


def test_unsupported_layouts_name_layout_and_device(neuron: torch.device) -> None:
    with pytest.raises(
        (NotImplementedError, RuntimeError), match=r"(?i)sparse.*neuron|neuron.*sparse|SparsePrivateUse1"
    ):
        torch.eye(3).to_sparse().to(neuron)


def test_a_kept_alias_outlives_its_tensor(neuron: torch.device) -> None:
    """A third party's Python operator may keep the CPU tensor it was given; its memory must then not be reused."""
    kept: list[torch.Tensor] = []

    @torch.library.custom_op("devicetest::keeps", mutates_args=(), device_types="cpu")
    def keeps(x: torch.Tensor) -> torch.Tensor:
        kept.append(x)
        return x + 1

    x = torch.full((1000,), 3.0, device=neuron)
    assert keeps(x).device == neuron
    del x
    for _ in range(3):
        torch.full((1000,), 9.0, device=neuron)
    assert kept[0].device.type == "cpu" and kept[0].unique().tolist() == [3.0]
