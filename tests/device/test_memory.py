"""HBM: limit, statistics, recovery, and that nothing leaks."""

from __future__ import annotations

import re

import pytest
import torch

from rlneuron.device import runtime

MB = 10**6


def test_statistics_have_the_documented_keys(neuron: torch.device) -> None:
    statistics = torch.neuron.memory_stats()
    for name in ("allocated_bytes", "reserved_bytes", "active_bytes"):
        assert set(statistics[name]) == {"current", "peak", "allocated", "freed"}
    assert {"num_alloc_retries", "num_ooms", "num_tensor_frees", "allocation_requests"} <= set(statistics)
    assert (
        statistics["reserved_bytes"]["current"]
        >= statistics["allocated_bytes"]["current"]
        >= statistics["active_bytes"]["current"]
    )
    assert "allocated_bytes" in torch.neuron.memory_summary()


def test_allocation_is_counted_and_returned(neuron: torch.device) -> None:
    before = torch.neuron.memory_allocated()
    torch.neuron.reset_peak_memory_stats()
    x = torch.empty(1000, 1000, device=neuron)
    assert torch.neuron.memory_allocated() == torch.accelerator.memory_allocated() == before + 4 * MB
    small = torch.empty(1, device=neuron)
    assert torch.neuron.memory_allocated() == before + 4 * MB + 256
    view = x[10:]
    assert torch.neuron.memory_allocated() == before + 4 * MB + 256
    del x, small
    assert torch.neuron.memory_allocated() == before + 4 * MB
    del view
    assert torch.neuron.memory_allocated() == before
    assert torch.neuron.max_memory_allocated() == before + 4 * MB + 256
    assert torch.neuron.memory_allocated(1) == 0


def test_limit_holds_in_factories_and_operators(neuron: torch.device, small_hbm: int) -> None:
    before = torch.neuron.memory_allocated()
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(300 * MB, dtype=torch.uint8, device=neuron)
    numbers = re.search(
        r"requested .*allocated .*reserved .*limit .*\((\d+) / (\d+) / (\d+) / (\d+) bytes", str(caught.value)
    )
    assert numbers is not None and numbers[1] == str(300 * MB) and numbers[4] == str(small_hbm)
    x = torch.zeros(100 * MB, dtype=torch.uint8, device=neuron)
    ooms = torch.neuron.memory_stats()["num_ooms"]
    with pytest.raises(torch.OutOfMemoryError, match="neuron:0"):
        x.to(torch.int16)
    assert torch.neuron.memory_stats()["num_ooms"] == ooms + 1
    assert (x + 1)[-1].item() == 1, "usable afterwards"
    del x
    assert torch.neuron.memory_allocated() == before


def test_temporaries_of_a_kernel_count(neuron: torch.device) -> None:
    x = torch.randn(1000, 1000, device=neuron)
    torch.neuron.reset_peak_memory_stats()
    base = torch.neuron.memory_allocated()
    x.t().contiguous().sort(dim=0)
    values_and_indices = 12 * MB
    assert torch.neuron.max_memory_allocated() - base >= 4 * MB + values_and_indices


def test_cached_memory_never_causes_out_of_memory(neuron: torch.device, small_hbm: int) -> None:
    before = torch.neuron.memory_allocated()
    for i in range(500):
        big = torch.empty(100 * MB, dtype=torch.uint8, device=neuron)
        odd = [torch.empty(1 + (i * 7919 + j * 104729) % (9 * MB), dtype=torch.uint8, device=neuron) for j in range(8)]
        del big, odd
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(300 * MB, dtype=torch.uint8, device=neuron)
    torch.empty(250 * MB, dtype=torch.uint8, device=neuron)
    assert torch.neuron.memory_allocated() == before
    torch.neuron.empty_cache()
    assert torch.neuron.memory_reserved() < 64 * MB


def test_training_does_not_leak(neuron: torch.device) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64)).to(neuron)
    optimizer = torch.optim.AdamW(net.parameters())
    seen = []
    for _ in range(6):
        net(torch.ones(8, 64, device=neuron)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.neuron.memory_allocated())
    assert seen[1] == seen[-1]


def test_out_of_memory_inside_backward_recovers(neuron: torch.device, small_hbm: int) -> None:
    before = torch.neuron.memory_allocated()

    def run(rows: int) -> None:
        x = torch.ones(rows, 1 * MB, device=neuron, requires_grad=True)
        (x.exp() * x).sum().backward()

    with pytest.raises(torch.OutOfMemoryError):
        run(25)
    run(2)
    assert torch.neuron.memory_allocated() == before


def test_foreign_memory_is_adopted_and_counted(neuron: torch.device) -> None:
    """An operator whose CPU kernel returns memory of another allocator: still a neuron tensor, still counted."""
    library = torch.library.Library("devicetest", "FRAGMENT")
    library.define("foreign(Tensor x) -> Tensor")
    memory = bytearray(8 * MB)
    library.impl("foreign", lambda x: torch.frombuffer(memory, dtype=torch.uint8), "CPU")
    before = torch.neuron.memory_allocated()
    out = torch.ops.devicetest.foreign(torch.ones(1, device=neuron))
    assert out.device == neuron
    assert torch.neuron.memory_allocated() >= before + 8 * MB
    out[0] = 5
    assert memory[0] == 5
    del out
    assert torch.neuron.memory_allocated() <= before + 256


def test_memory_info(neuron: torch.device) -> None:
    free, total = torch.neuron.mem_get_info()
    assert total == runtime.settings().hbm_bytes == torch.neuron.get_device_properties().total_memory
    assert free == total - torch.neuron.memory_allocated()


def test_the_cache_stays_near_the_peak_of_use(neuron: torch.device) -> None:
    """Many different large sizes, one at a time: what is kept is bounded by the peak, not by the HBM."""
    torch.neuron.empty_cache()
    for i in range(60):
        torch.empty(2 * MB + i * 400_000, dtype=torch.uint8, device="neuron:2")
    statistics = torch.neuron.memory_stats(2)
    assert statistics["reserved_bytes"]["current"] <= 1.25 * statistics["allocated_bytes"]["peak"] + 64 * 2**20
    assert statistics["num_alloc_retries"] == 0
