"""Rewrites of layers: same names, same results to rounding, and left out where they do not apply."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from rlneuron import models
from rlneuron.fused.linear import HostLinear, use_host_linear


def test_a_loaded_model_has_the_layers_and_the_results_of_the_plain_one(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlneuron.fused.linear.SMALLEST", 0)  # every layer, however small
    fused = models.load(str(tiny / "model"), dtype=torch.float32).module
    plain = copy.deepcopy(fused)
    count = sum(isinstance(m, HostLinear) for m in fused.modules())
    assert count == 2 * 7 + 1  # seven projections a layer, and the head
    for module in plain.modules():
        if type(module) is HostLinear:
            module.__class__ = nn.Linear
    assert list(fused.state_dict()) == list(plain.state_dict())
    ids = torch.arange(5, 25)[None]
    outputs = []
    for model in (fused, plain):
        result = model(input_ids=ids, labels=ids)
        result.loss.backward()
        outputs.append((result.logits.detach(), [p.grad for p in model.parameters()]))
    (logits, gradients), (wanted, wanted_gradients) = outputs
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-6)
    for a, b in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_take_torchs_way(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(4, 3)).to(dtype)
    x = torch.randn(2, 4, dtype=dtype)
    expected = layer(x)
    assert use_host_linear(layer) == 1
    assert torch.equal(layer(x), expected)


def test_autocast_still_casts() -> None:
    layer = nn.Sequential(nn.Linear(4, 3))
    use_host_linear(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 4)).dtype == torch.bfloat16


def test_subclasses_are_left_alone() -> None:
    class Adapted(nn.Linear):
        pass

    assert use_host_linear(nn.Sequential(Adapted(2, 2))) == 0
