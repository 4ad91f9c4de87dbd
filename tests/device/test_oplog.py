"""The operator log and the watch on host allocations."""

from __future__ import annotations

import threading

import pytest
import torch

from rlneuron.device import oplog, ops, register_operators
from rlneuron.device.ops.library import LIBRARY
from rlneuron.device.ops.token_logprobs import token_logprobs


def test_counts_flops_and_bytes_of_products(neuron: torch.device) -> None:
    a, b = torch.randn(3, 5, device=neuron), torch.randn(5, 7, device=neuron)
    oplog.reset()
    a @ b
    assert oplog.by_operator() == {"aten::mm": 1}
    assert oplog.totals() == (1, 2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    torch.addmm(torch.ones(7, device=neuron), a, b)
    torch.baddbmm(torch.ones(1, device=neuron), a.expand(2, 3, 5), b.expand(2, 5, 7))
    assert oplog.details()["aten::addmm"].flops == 2 * 3 * 5 * 7
    assert oplog.details()["aten::baddbmm"].flops == 2 * 2 * 3 * 5 * 7


def test_flops_agree_with_torchs_own_counter(neuron: torch.device) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    conv = torch.nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
    up = torch.nn.ConvTranspose2d(6, 4, 2, stride=2, bias=False)
    linear = torch.nn.Linear(8, 5)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)

    def work(device: str) -> None:
        y = up.to(device)(conv.to(device)(x.detach().to(device).requires_grad_()))
        linear.to(device)(y.flatten(0, 2)).sum().backward()

    with FlopCounterMode(display=False) as counter:
        work("cpu")
    work("neuron")
    assert oplog.totals().flops == counter.get_total_flops()


def test_attention_flops(neuron: torch.device) -> None:
    q, k, v = (torch.randn(2, 4, n, 16, device=neuron, requires_grad=True) for n in (10, 30, 30))
    oplog.reset()
    torch.nn.functional.scaled_dot_product_attention(q, k, v).sum().backward()
    flops = {name: count.flops for name, count in oplog.details().items() if count.flops}
    forward = 4 * 2 * 4 * 10 * 30 * 16
    assert flops == {
        "aten::_scaled_dot_product_flash_attention_for_cpu": forward,
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward": forward * 5 // 2,
    }


def test_flops_of_paged_attention_by_hand(neuron: torch.device) -> None:
    """4 H D for each position that a token sees: a chunk of 3 tokens on 5 positions, and one token on 7."""
    heads, size, block = 4, 8, 16
    query = torch.randn(1, heads, 4, size, device=neuron)
    key = torch.randn(1, 2, 4, size, device=neuron)
    caches = torch.zeros(2, 2, size, block, device=neuron), torch.zeros(2, 2, block, size, device=neuron)
    integers = ([2, 3, 4, 16 + 6], [[0], [1]], [0, 3, 4], [5, 7])
    slots, tables, starts, contexts = (torch.tensor(x, dtype=torch.int32, device=neuron) for x in integers)
    for window, seen in ((0, 3 + 4 + 5 + 7), (4, 3 + 4 + 4 + 4)):
        oplog.reset()
        ops.paged_attention.paged_attention(query, key, key, *caches, slots, tables, starts, contexts, 1.0, window)
        assert oplog.details()["rlneuron::paged_attention"].flops == 4 * heads * size * seen
        assert oplog.totals().flops == 4 * heads * size * seen


def test_flops_of_varlen_attention_by_hand(neuron: torch.device) -> None:
    """Segments of 4 tokens alone and of 3 that also see these 4; the backward has five products for two."""
    heads, size = 4, 8
    query, key, value = (torch.randn(7, n, size, device=neuron, requires_grad=True) for n in (heads, 2, 2))
    segments = torch.tensor([[0, 4, 0, 0], [4, 3, 0, 4]], dtype=torch.int32, device=neuron)
    seen = (1 + 2 + 3 + 4) + (5 + 6 + 7)
    oplog.reset()
    ops.varlen_attention.varlen_attention(query, key, value, segments, 1.0).sum().backward()
    counts = oplog.details()
    assert counts["rlneuron::varlen_attention"].flops == 4 * heads * size * seen
    assert counts["rlneuron::varlen_attention_backward"].flops == 10 * heads * size * seen


def test_flops_of_token_logprobs_are_those_of_its_products(neuron: torch.device) -> None:
    """Logits once forward, and in the backward once more with two gradients: 4 products of 2 N H V."""
    rows, hidden, vocabulary = 5, 8, 11
    states = torch.randn(rows, hidden, device=neuron, requires_grad=True)
    weight = torch.randn(vocabulary, hidden, device=neuron, requires_grad=True)
    targets = torch.zeros(rows, dtype=torch.long, device=neuron)
    oplog.reset()
    logprobs, _ = token_logprobs(states, weight, None, targets)
    assert oplog.totals().flops == 2 * rows * hidden * vocabulary
    logprobs.sum().backward()
    assert oplog.totals().flops == 4 * 2 * rows * hidden * vocabulary


def test_views_are_free_and_disable_stops_counting(neuron: torch.device) -> None:
    x = torch.zeros(4, 4, device=neuron)
    oplog.reset()
    x.view(16)
    x.t()[1:].expand(2, 3, 4)
    assert oplog.totals().ops == 0
    oplog.disable()
    x + 1
    assert oplog.totals().ops == 0
    oplog.enable()
    x + 1
    assert oplog.totals().ops == 1


def test_other_threads_are_counted(neuron: torch.device) -> None:
    x = torch.ones(3, device=neuron)
    oplog.reset()
    threads = [threading.Thread(target=lambda: [x + 1 for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert oplog.by_operator() == {"aten::add": 800}


def test_our_operators_run_their_cpu_kernel_on_the_device(neuron: torch.device) -> None:
    seen: list[tuple[str, int]] = []

    def kernel(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.append((x.device.type, x.data_ptr()))
        out.copy_(x * 2)
        return x + 1

    LIBRARY.define("devicetest_double(Tensor x, Tensor(a!) out) -> Tensor")
    LIBRARY.impl("devicetest_double", lambda x, out: x * 0, "CompositeExplicitAutograd")
    LIBRARY.impl("devicetest_double", kernel, "CPU")
    assert register_operators() >= 1
    assert register_operators() == 0
    x, out = torch.ones(3, device=neuron), torch.zeros(3, device=neuron)
    oplog.reset()
    result = torch.ops.rlneuron.devicetest_double(x, out)
    assert seen == [("cpu", x.data_ptr())], "aliased, not copied"
    assert result.device == out.device == neuron
    assert result.tolist() == out.tolist() == [2, 2, 2]
    assert oplog.details()["rlneuron::devicetest_double"] == (1, 0, 3 * 3 * 4, 0)


def test_third_party_operators_are_counted_as_fallback(neuron: torch.device) -> None:
    @torch.library.custom_op("devicetest::third", mutates_args=(), device_types="cpu")
    def third(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    third.register_autograd(lambda ctx, grad: grad * 3)
    x = torch.ones(2, device=neuron, requires_grad=True)
    third(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [3, 3]
    assert oplog.details()["devicetest::third"].fallbacks == 1


def test_an_operator_without_cpu_kernel_is_named(neuron: torch.device) -> None:
    library = torch.library.Library("devicetest", "FRAGMENT")
    library.define("nowhere(Tensor x) -> Tensor")
    with pytest.raises(NotImplementedError, match="devicetest::nowhere"):
        torch.ops.devicetest.nowhere(torch.ones(1, device=neuron))


def test_watch_finds_a_planted_host_tensor(neuron: torch.device) -> None:
    x = torch.randn(1000, 1000, device=neuron)
    with oplog.watch_host_allocations(1_000_000) as found:
        y = (x @ x).softmax(-1).sum()
        x.sort()
        y.cpu()
    assert found == []
    with oplog.watch_host_allocations(1_000_000) as found:
        torch.zeros(500, 1000)  # planted
        with oplog.host_copy():
            x.cpu()
        x.cpu()
        x[:1].cpu()
    assert [one.bytes for one in found] == [2_000_000, 4_000_000]
    assert all(one.operator.startswith("aten::") for one in found)


def test_watch_sees_other_threads_and_ends(neuron: torch.device) -> None:
    with oplog.watch_host_allocations(1_000_000) as found:
        thread = threading.Thread(target=lambda: torch.zeros(1000, 1000))
        thread.start()
        thread.join()
    assert len(found) == 1
    torch.zeros(1000, 1000)
    assert len(found) == 1


def test_grouped_convolution_flops(neuron: torch.device) -> None:
    """Each output element meets the channels of its group only; torch's counter overlooks that for the weight."""
    x = torch.randn(2, 4, 8, 8, device=neuron, requires_grad=True)
    weight = torch.randn(6, 2, 3, 3, device=neuron, requires_grad=True)
    torch.nn.functional.conv2d(x, weight, groups=2).sum().backward()
    forward = 2 * (2 * 6 * 6 * 6) * 2 * 9
    assert oplog.totals().flops == 3 * forward
