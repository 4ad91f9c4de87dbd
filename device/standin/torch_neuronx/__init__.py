"""Stands in for the vendor's package of this name while the neuron device is simulated.

accelerate and transformers look for it before they use `torch.neuron`. It is put on `sys.path` at activation only when
the real package is absent, and it is never installed as a top-level module.
"""

from __future__ import annotations

from rlneuron.device import oplog, runtime

__version__ = "0.0.0+rlneuron.simulated"
__all__ = ["clear_op_tracking", "get_executed_ops", "get_fallback_ops", "is_neuron_runtime_initialized"]


def get_executed_ops() -> set[str]:
    """Names of the operators that ran on the device since the last `clear_op_tracking`."""
    return set(oplog.by_operator())


def get_fallback_ops() -> set[str]:
    """Names of the operators that ran through the backend's fallback."""
    return {name for name, count in oplog.details().items() if count.fallbacks > 0}


def clear_op_tracking() -> None:
    """Forgets the operators seen so far."""
    oplog.reset()


def is_neuron_runtime_initialized() -> bool:
    """Whether the simulated device is active in this process."""
    return runtime.is_active()
