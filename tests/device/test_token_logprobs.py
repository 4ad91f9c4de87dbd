"""Log-probabilities and entropy by chunks against log_softmax over all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlneuron.device.ops import token_logprobs as module


def by_log_softmax(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, t: float
) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / t, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk_elements", [1 << 20, 16 * 37])
@pytest.mark.parametrize("use", ["logprobs", "entropies", "both"])
def test_equals_log_softmax(with_bias: bool, chunk_elements: int, use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(53, 12), torch.randn(37, 12), torch.randint(0, 37, (53,))
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    bias = torch.randn(37, requires_grad=True) if with_bias else None
    leaves += [bias] if bias is not None else []
    weights = torch.randn(2, 53) * torch.tensor([[use != "entropies"], [use != "logprobs"]])

    ours = module.token_logprobs(hidden, weight, bias, targets, temperature=0.7)
    theirs = by_log_softmax(hidden, weight, bias, targets, 0.7)
    for got, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-6, atol=2e-6)
    picked = [i for i in range(2) if use in ("both", ("logprobs", "entropies")[i])]
    gradients = [
        torch.autograd.grad(sum((values[i] * weights[i]).sum() for i in picked), leaves) for values in (ours, theirs)
    ]
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "wanted"), [(0.5, [-0.142932, -2.142932, -4.142932]), (2.0, [-0.680270, -1.180270, -1.680270])]
)
def test_temperature_divides_the_logits(temperature: float, wanted: list[float]) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, 3)
    got, _ = module.token_logprobs(logits, torch.eye(3), None, torch.arange(3), temperature=temperature)
    torch.testing.assert_close(got, torch.tensor(wanted), rtol=0, atol=1e-6)


def test_logits_of_all_tokens_never_exist_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 16 * 100)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, Tensor):
                    largest = max(largest, tensor.numel())
            return result

    hidden, weight = torch.randn(500, 8, requires_grad=True), torch.randn(100, 8, requires_grad=True)
    with Watch():
        logprobs, _ = module.token_logprobs(hidden, weight, None, torch.randint(0, 100, (500,)))
        logprobs.sum().backward()
    assert largest <= 500 * 8, largest
