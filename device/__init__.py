"""device: the neuron backend, a native PyTorch device that runs on host memory where there is no Trainium.

The tour: `select.choose` is the only place that decides between real hardware, the simulation, cuda and cpu.
`runtime` activates the simulation in this process: it loads the C++ backend (`csrc/`), gives PyTorch's PrivateUse1
the name `neuron` and installs `torch.neuron` (`neuron.py`). From then on every operator with a CPU kernel runs on
`neuron` tensors: `csrc/dispatch.cpp` runs the CPU kernel on aliased memory, `csrc/allocator.cpp` counts that memory
against the HBM of one logical core, and `oplog` counts operators, FLOPs and bytes. `ops/` holds our own operators,
`build` compiles both libraries, `autoload` is what `import torch` calls when `RLNEURON_SIM` is set.

This room imports torch and the standard library only. It knows nothing of Ray, models, rollouts or training. Its
names are resolved on first use, so that the autoload entry point costs a program without simulation nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlneuron.device import build, oplog, ops, select
    from rlneuron.device.oplog import OpTotals, host_copy
    from rlneuron.device.runtime import register_operators
    from rlneuron.device.select import Hardware, choose, describe

__all__ = [
    "Hardware",
    "OpTotals",
    "build",
    "choose",
    "describe",
    "host_copy",
    "oplog",
    "ops",
    "register_operators",
    "select",
]

# Where the names above live; the modules themselves are found by their own name.
_HOMES = {
    "Hardware": "select",
    "OpTotals": "oplog",
    "choose": "select",
    "describe": "select",
    "host_copy": "oplog",
    "register_operators": "runtime",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
