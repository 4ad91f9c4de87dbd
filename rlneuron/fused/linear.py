"""`nn.Linear` whose float32 products run through oneDNN on the host: about twice as fast where torch's BLAS is slow.

It keeps the parameters and their names, so that checkpoints, optimizers and weight sync do not notice. Other dtypes,
autocast and other devices take torch's own way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlneuron.device.ops.kernels import load
from rlneuron.device.ops.linear import linear

HOST_DEVICES = ("cpu", "neuron")
"""Where the operator has a kernel of its own: the host, and the neuron device that is simulated on it."""


SMALLEST = 1_500_000
"""Multiply-adds below which oneDNN's fixed cost of about 10 us (measured, AMD EPYC) eats its gain."""


class HostLinear(nn.Linear):
    """x W^T + b -> [..., O] for x [..., I], in the same precision as `nn.Linear`, rounded differently."""

    def forward(self, input: Tensor) -> Tensor:
        kind = input.device.type
        small = input.numel() * self.out_features < SMALLEST
        if small or input.dtype != torch.float32 or kind not in HOST_DEVICES or torch.is_autocast_enabled(kind):
            return super().forward(input)
        return linear(input, self.weight, self.bias)


def use_host_linear(model: nn.Module) -> int:
    """Turns every plain `nn.Linear` of `model` into a `HostLinear`, in place; returns how many.

    Subclasses (quantised or adapted layers) are left alone, and everything is where the kernels are not compiled.
    """
    if not load():
        return 0
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        layer.__class__ = HostLinear
    return len(layers)
