"""Which core a device argument of torch.neuron means."""

from __future__ import annotations

import torch

from rlneuron.device import runtime

Device = torch.device | str | int | None
"""None (the calling thread's core), an index, "neuron", "neuron:1" or a torch.device."""


def count() -> int:
    """Number of logical cores that this process sees."""
    return int(runtime.backend().num_cores())


def index_of(device: Device = None) -> int:
    """The index of a core that exists. Raises RuntimeError naming index and count, ValueError for another device."""
    if device is None:
        return int(runtime.backend().current_core())
    if not isinstance(device, int):
        given = torch.device(device)
        if given.type != "neuron":
            raise ValueError(f"Expected a neuron device, but got: {given}")
        device = -1 if given.index is None else given.index
        return int(runtime.backend().check_core(device))
    if device < 0:
        raise RuntimeError(f"neuron:{device} does not exist: this process sees {count()} logical core(s)")
    return int(runtime.backend().check_core(device))
