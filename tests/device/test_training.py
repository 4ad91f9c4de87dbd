"""Autograd, optimizers, autocast, random numbers and layers on neuron equal the CPU."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint


def small_net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(20, 16),
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 32),
        torch.nn.GELU(),
        torch.nn.Linear(32, 20),
    )


def train(device: str, optimizer_class: Any, steps: int = 3, **settings: Any) -> list[torch.Tensor]:
    """Parameters after some steps on `device`, on the CPU."""
    net = small_net().to(device)
    optimizer = optimizer_class(net.parameters(), lr=1e-2, **settings)
    tokens = torch.arange(20).reshape(2, 10).to(device)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = net(tokens)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach().cpu() for parameter in net.parameters()]


@pytest.mark.parametrize("settings", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
def test_adamw_equals_the_cpu(neuron: torch.device, settings: dict[str, bool]) -> None:
    reference = train("cpu", torch.optim.AdamW, **settings)
    assert_close(train("neuron", torch.optim.AdamW, **settings), reference, rtol=1e-5, atol=1e-7)


def test_fused_adamw_is_bitwise_the_cpus(neuron: torch.device) -> None:
    assert_close(
        train("neuron", torch.optim.AdamW, fused=True), train("cpu", torch.optim.AdamW, fused=True), rtol=0, atol=0
    )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_other_optimizers(neuron: torch.device, optimizer: Any) -> None:
    assert_close(train("neuron", optimizer), train("cpu", optimizer), rtol=1e-5, atol=1e-7)


def test_module_to_keeps_ties_and_the_optimizer(neuron: torch.device) -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    second.weight = first.weight
    both = torch.nn.Sequential(first, second)
    optimizer = torch.optim.SGD(both.parameters(), lr=1.0)
    both.to(neuron)
    assert both[0].weight is both[1].weight and both[0].weight.device == neuron
    before = both[0].weight.detach().clone()
    both(torch.ones(1, 4, device=neuron)).sum().backward()
    optimizer.step()
    assert not torch.equal(before, both[0].weight)
    assert both.cpu()[1].weight.device.type == "cpu"
    assert both.neuron()[0].weight is both[1].weight


def test_hooks_checkpoint_and_double_backward(neuron: torch.device) -> None:
    x = torch.randn(3, 3, dtype=torch.float64, device=neuron, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: (t.tanh() @ t).sum(), x)
    seen: list[torch.device] = []
    x.register_hook(lambda gradient: seen.append(gradient.device))
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).double().to(neuron)
    checkpoint(net, x, use_reentrant=False).sum().backward()
    assert seen == [neuron]
    (gradient,) = torch.autograd.grad((x**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), x)
    assert_close(second.cpu(), 6 * x.detach().cpu())


def test_checkpointed_dropout_recomputes_its_mask(neuron: torch.device) -> None:
    x = torch.ones(1000, device=neuron, requires_grad=True)
    y = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5) * t, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad == 0, y == 0)


def test_same_seed_same_numbers(neuron: torch.device) -> None:
    def draw(device: str) -> list[torch.Tensor]:
        torch.manual_seed(7)
        x = torch.ones(50, device=device)
        return [
            torch.randn(9, device=device).cpu(),
            torch.rand(5, device=device, dtype=torch.bfloat16).cpu(),
            torch.randperm(20, device=device).cpu(),
            torch.randint(0, 100, (7,), device=device).cpu(),
            torch.multinomial(x, 5).cpu(),
            torch.bernoulli(x * 0.3).cpu(),
            torch.empty(6, device=device).exponential_().cpu(),
            torch.nn.functional.dropout(x, 0.3).cpu(),
            torch.nn.init.trunc_normal_(torch.empty(10, device=device)).cpu(),
        ]

    for ours, theirs in zip(draw("neuron"), draw("cpu"), strict=True):
        assert torch.equal(ours, theirs)


def test_generators_and_rng_state(neuron: torch.device) -> None:
    cpu_state = torch.get_rng_state()
    generator = torch.Generator(device=neuron).manual_seed(3)
    first = torch.rand(4, generator=generator, device=neuron)
    state = torch.neuron.get_rng_state()
    a = torch.rand(4, device=neuron)
    torch.neuron.set_rng_state(state)
    assert torch.equal(a, torch.rand(4, device=neuron))
    assert torch.equal(first, torch.rand(4, generator=generator.manual_seed(3), device=neuron))
    assert torch.equal(cpu_state, torch.get_rng_state()), "the CPU's stream must not move"
    other = torch.neuron.get_rng_state(1)
    state = torch.neuron.get_rng_state()

    def fail_after_drawing() -> None:
        with torch.random.fork_rng(devices=[0], device_type="neuron"):
            torch.rand(4, device=neuron)
            raise KeyError

    with pytest.raises(KeyError):
        fail_after_drawing()
    assert torch.equal(torch.neuron.get_rng_state(), state)
    assert torch.equal(torch.neuron.get_rng_state(1), other)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(4, generator=torch.Generator(), device=neuron)


def test_autocast_follows_the_reference_policy(neuron: torch.device) -> None:
    x = torch.randn(4, 4, device=neuron)
    with torch.autocast("neuron"):
        assert (x @ x).dtype == torch.bfloat16
        assert torch.softmax((x @ x), -1).dtype == torch.float32
        assert (x + x).dtype == torch.float32
        assert torch.nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]).dtype == torch.bfloat16
        with torch.autocast("neuron", enabled=False):
            assert (x @ x).dtype == torch.float32
    with torch.autocast("neuron", dtype=torch.float16):
        assert torch.nn.functional.linear(x, x).dtype == torch.float16


def test_grad_scaler(neuron: torch.device) -> None:
    net = torch.nn.Linear(4, 1).to(neuron)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("neuron", init_scale=2.0)
    scaler.scale(net(torch.ones(2, 4, device=neuron)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    net.weight.grad.fill_(float("inf"))  # type: ignore[union-attr]
    before = net.weight.detach().clone()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    assert torch.equal(before, net.weight)


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "lstm": (lambda: torch.nn.LSTM(6, 5, num_layers=2), (7, 2, 6)),
    "gru": (lambda: torch.nn.GRU(6, 5, bias=False), (7, 2, 6)),
    "conv": (lambda: torch.nn.Conv2d(3, 4, 3, stride=2, padding=1), (2, 3, 8, 8)),
    "transposed conv": (lambda: torch.nn.ConvTranspose1d(3, 4, 3), (2, 3, 8)),
    "batch norm": (lambda: torch.nn.BatchNorm1d(6), (7, 6)),
    "attention": (lambda: torch.nn.MultiheadAttention(8, 2, batch_first=True), (2, 5, 8)),
    "encoder": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0), (5, 2, 8)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_forward_and_backward(neuron: torch.device, name: str) -> None:
    make, shape = LAYERS[name]
    torch.manual_seed(0)
    host = make()
    device = copy.deepcopy(host).to(neuron)
    x = torch.randn(shape)
    results = []
    for layer, given in ((host, x), (device, x.to(neuron))):
        leaf = given.detach().clone().requires_grad_()
        out = layer(leaf, leaf, leaf)[0] if name == "attention" else layer(leaf)
        out = out[0] if isinstance(out, tuple) else out
        (out * out).sum().backward()
        results.append([out.detach().cpu(), leaf.grad.cpu()] + [p.grad.cpu() for p in layer.parameters()])
    assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kwargs", [{"is_causal": True}, {}, {"enable_gqa": True}, {"mask": True}])
def test_attention_takes_the_cpus_kernel(neuron: torch.device, kwargs: dict[str, Any]) -> None:
    torch.manual_seed(0)
    heads = 2 if kwargs.get("enable_gqa") else 4
    host = [torch.randn(2, n, 9, 8) for n in (4, heads, heads)]
    options = dict(kwargs)
    mask = torch.rand(2, 1, 9, 9) > 0.2 if options.pop("mask", False) else None
    results = []
    for device in ("cpu", "neuron"):
        tensors = [t.detach().to(device).requires_grad_() for t in host]
        attn_mask = None if mask is None else mask.to(device)
        out = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=attn_mask, **options)
        out.square().sum().backward()
        results.append([out.detach().cpu()] + [t.grad.cpu() for t in tensors if t.grad is not None])
    assert_close(results[1], results[0], rtol=0, atol=0, equal_nan=True)


def test_functional_transforms(neuron: torch.device) -> None:
    x = torch.randn(4, 3, device=neuron)
    jacobian = torch.func.vmap(torch.func.jacrev(lambda t: t.sin() * t.sum()))(x)
    expected = torch.func.vmap(torch.func.jacrev(lambda t: t.sin() * t.sum()))(x.cpu())
    assert jacobian.device == neuron
    assert_close(jacobian.cpu(), expected)


def test_data_loader_forks_after_the_device_was_used(neuron: torch.device) -> None:
    torch.ones(1, device=neuron)
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    loader = torch.utils.data.DataLoader(
        data, batch_size=4, num_workers=1, pin_memory=True, multiprocessing_context="fork"
    )
    total = sum(batch[0].to(neuron, non_blocking=True).sum() for batch in loader)
    assert isinstance(total, torch.Tensor) and total.item() == 28
    assert torch.ones(1, device=neuron).item() == 1


def test_threads_train_at_once(neuron: torch.device) -> None:
    weight = torch.eye(32, device=neuron).requires_grad_()

    def work() -> None:
        for _ in range(20):
            (weight @ weight).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert weight.grad is not None
    assert_close(weight.grad.cpu(), torch.full((32, 32), 60 * 2.0))


def test_default_device_meta_and_fake_tensors(neuron: torch.device) -> None:
    with torch.device(neuron):
        assert torch.nn.Linear(2, 2).weight.device == neuron
    module = torch.nn.Linear(3, 3, device="meta").to_empty(device=neuron)
    assert module.weight.device == neuron
    with FakeTensorMode():
        x = torch.empty(2, 4, 8, 8, device=neuron)
        assert torch.nn.functional.scaled_dot_product_attention(x, x, x).device == neuron
