"""The operator log of this process: what ran on the simulated device, and what was allocated beside it.

Counts come from the C++ dispatcher (`csrc/oplog.cpp`): one per operator that ran on a `neuron` tensor, views excepted.
FLOPs are those of matrix products, attention and convolution (a multiply-add is two), so sampling has none. PyTorch's
attention counts masked positions too, as `torch.utils.flop_counter` does; our own counts what each token sees. Bytes
are those of the inputs and outputs. Nothing here is a time: operators have no price yet.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from rlneuron.device import runtime


class OpTotals(NamedTuple):
    """Sums over all operators since the last `reset`."""

    ops: int
    flops: int
    bytes: int


class OpCount(NamedTuple):
    """What one operator (overloads together) did since the last `reset`."""

    ops: int
    flops: int
    bytes: int
    fallbacks: int
    """Calls that reached the CPU kernel through the backend's fallback: operators of third parties."""


@dataclasses.dataclass(frozen=True)
class HostAllocation:
    """One CPU allocation over the watch's threshold."""

    bytes: int
    operator: str
    """The innermost ATen operator of the allocating thread; empty outside any."""


def enable() -> None:
    """Counts operators from now on (the default once the device is active)."""
    runtime.backend().log_enable(True)


def disable() -> None:
    """Stops counting; the counts stay."""
    runtime.backend().log_enable(False)


def reset() -> None:
    """Sets all counts to zero."""
    runtime.backend().log_reset()


def totals() -> OpTotals:
    """The sums over all operators; zeros where the simulated device is not active (cpu, cuda, real hardware)."""
    if not runtime.is_active():
        return OpTotals(0, 0, 0)
    return OpTotals(*runtime.backend().log_totals())


def details() -> dict[str, OpCount]:
    """Counts, FLOPs, bytes and fallbacks by operator name ("aten::mm"); empty where the device is not active."""
    if not runtime.is_active():
        return {}
    return {name: OpCount(*rest) for name, *rest in runtime.backend().log_by_operator()}


def by_operator() -> dict[str, int]:
    """How often each operator ran, by its name without overload."""
    return {name: count.ops for name, count in details().items()}


@contextlib.contextmanager
def watch_host_allocations(threshold_bytes: int) -> Iterator[list[HostAllocation]]:
    """Records CPU allocations of more than `threshold_bytes` by any thread, except inside `host_copy`.

    The list is filled when the block ends. Memory that an operator takes while it runs on the device belongs to the
    core and is not recorded. One watch at a time; the device must be active.
    """
    found: list[HostAllocation] = []
    runtime.backend().watch_start(threshold_bytes)
    try:
        yield found
    finally:
        found.extend(HostAllocation(*one) for one in runtime.backend().watch_stop())


@contextlib.contextmanager
def host_copy() -> Iterator[None]:
    """Declares that this thread allocates host memory on purpose (weights for another process, a checkpoint)."""
    if not runtime.is_active():
        yield
        return
    runtime.backend().host_copy_enter()
    try:
        yield
    finally:
        runtime.backend().host_copy_exit()
