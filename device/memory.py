"""torch.neuron.memory: the memory statistics of a core, with TorchNeuron's names and documented keys.

Bytes are those of simulated HBM. An empty tensor has none; every other block is rounded up as the allocator rounds it
(`csrc/allocator.cpp`). reserved >= allocated >= active always holds.
"""

from __future__ import annotations

from typing import Any

from rlneuron.device import runtime
from rlneuron.device.cores import Device, index_of

_STATISTICS = ("allocated_bytes", "reserved_bytes", "active_bytes")


def memory_stats(device: Device = None) -> dict[str, Any]:
    """The documented statistics: three byte counts with current, peak, allocated, freed, and four counters."""
    flat = runtime.backend().memory(index_of(device))
    parts = ("current", "peak", "allocated", "freed")
    grouped: dict[str, Any] = {name: {part: flat.pop(f"{name}.{part}") for part in parts} for name in _STATISTICS}
    return {**grouped, **flat}


def memory_allocated(device: Device = None) -> int:
    """Bytes of HBM in use on a core."""
    return int(memory_stats(device)["allocated_bytes"]["current"])


def max_memory_allocated(device: Device = None) -> int:
    """The most bytes in use since the start or `reset_peak_memory_stats`."""
    return int(memory_stats(device)["allocated_bytes"]["peak"])


def memory_reserved(device: Device = None) -> int:
    """Bytes of HBM that the allocator holds, in use or cached."""
    return int(memory_stats(device)["reserved_bytes"]["current"])


def max_memory_reserved(device: Device = None) -> int:
    """The most bytes held since the start or `reset_peak_memory_stats`."""
    return int(memory_stats(device)["reserved_bytes"]["peak"])


def reset_peak_memory_stats(device: Device = None) -> None:
    """Sets peaks to the current values."""
    runtime.backend().reset_peak(index_of(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the allocated and freed sums to zero."""
    runtime.backend().reset_accumulated(index_of(device))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Free and total bytes of HBM of a core."""
    total = int(runtime.backend().hbm_bytes())
    return total - memory_allocated(device), total


def empty_cache() -> None:
    """Gives cached memory back to the host."""
    runtime.backend().empty_cache()


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """The statistics as a table for people, in MiB."""
    statistics = memory_stats(device)
    heads = f"{'':16}{'current':>12}{'peak':>12}{'allocated':>14}{'freed':>14}"
    lines = [f"neuron:{index_of(device)} memory, MiB", heads]
    for name in _STATISTICS:
        row = statistics[name]
        cells = [f"{row[part] / 2**20:.1f}" for part in ("current", "peak", "allocated", "freed")]
        lines.append(f"{name:16}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}{cells[3]:>14}")
    if not abbreviated:
        lines.extend(f"{name:24}{value}" for name, value in statistics.items() if name not in _STATISTICS)
    return "\n".join(lines)
