"""A subset of PyTorch's own operator samples, forward and backward; tests/bench/opinfo.py runs them all."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SUBSET = [
    "add", "addbmm", "addmm", "amax", "argsort", "as_strided.partial_views", "baddbmm", "bmm", "cat", "clamp", "cumsum",
    "diff",
    "einsum", "expand", "fft.ifft", "fft.hfft", "flip", "gather", "index_add", "index_put", "index_select",
    "layer_norm", "linalg.cholesky", "linalg.svd", "log_softmax", "logsumexp", "masked_fill", "masked_select", "matmul",
    "max.reduction_with_dim", "mean", "nn.functional.conv2d", "nn.functional.cross_entropy",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.group_norm", "nn.functional.interpolate.bilinear",
    "nn.functional.linear", "nn.functional.max_pool2d", "nn.functional.rms_norm",
    "nn.functional.scaled_dot_product_attention", "nn.functional.silu", "nonzero", "norm", "pow", "put", "repeat",
    "resize_", "roll", "scatter_add", "softmax", "sort", "split", "std", "sum", "take_along_dim", "tensor_split",
    "topk",
    "tril", "unique", "var_mean", "view_as_complex", "where",
]  # fmt: skip


def survey() -> ModuleType:
    path = Path(__file__).parents[1] / "bench" / "opinfo.py"
    spec = importlib.util.spec_from_file_location("opinfo", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_samples_agree_with_the_cpu(neuron: torch.device, backward: bool) -> None:
    module = survey()
    warnings.simplefilter("ignore")
    results: dict[str, dict[str, Any]] = {
        module.name_of(op): module.check(op, torch.float32, 4, backward, "neuron")
        for op in module.operators(set(SUBSET))
    }
    assert len(results) > 50
    assert {name: result for name, result in results.items() if result["status"] == "fail"} == {}
    assert sum(result.get("samples", 0) for result in results.values()) > 120


def test_the_survey_finds_a_wrong_operator(neuron: torch.device) -> None:
    module = survey()
    (op,) = module.operators({"mul"})
    wrong = copy.copy(op)
    wrong.op = lambda x, *rest, **named: op.op(x, *rest, **named) + (1 if x.device.type == "neuron" else 0)
    assert module.check(wrong, torch.float32, 2, False, "neuron")["status"] == "fail"
    wrong.op = lambda x, *rest, **named: op.op(x.cpu(), *(moved.cpu() for moved in rest), **named)
    assert "result on cpu" in module.check(wrong, torch.float32, 2, False, "neuron")["reason"]
