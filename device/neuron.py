"""torch.neuron: the module functions of TorchNeuron, over the simulated cores of this process.

Names and memory-statistics keys are those of TorchNeuron 2.33 (pre-release source, neuron.py, memory.py, streams.py).
Work is done when a call returns, so `synchronize`, streams and events order nothing; they exist so that programs
written for the device run. A device argument may be None (the current core), an index, a string or a torch.device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from rlneuron.device import runtime

Stream = torch.Stream
Device = torch.device | str | int | None
_PRIVATE_USE_1 = 20  # c10::DeviceType::PrivateUse1
_STATISTICS = ("allocated_bytes", "reserved_bytes", "active_bytes")


def _index(device: Device = None) -> int:
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
        raise RuntimeError(f"neuron:{device} does not exist: this process sees {device_count()} logical core(s)")
    return int(runtime.backend().check_core(device))


# ---- device ----
def is_available() -> bool:
    """Whether there is at least one core."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether this process may use the device: True unless it was forked from one that had used it."""
    return not _is_in_bad_fork()


def init() -> None:
    """Nothing to set up. Raises RuntimeError in a forked child of a process that had used the device."""
    runtime.backend().check_fork()


def device_count() -> int:
    """Number of logical cores that this process sees."""
    return int(runtime.backend().num_cores())


def current_device() -> int:
    """Index of the calling thread's core."""
    return int(runtime.backend().current_core())


def set_device(device: Device) -> None:
    """Makes `device` the calling thread's core."""
    runtime.backend().set_current_core(_index(device))


def get_device_name(device: Device = None) -> str:
    """ "neuron:i"."""
    return f"neuron:{_index(device)}"


@dataclasses.dataclass(frozen=True)
class DeviceProperties:
    """What `get_device_properties` returns."""

    name: str
    total_memory: int
    """HBM of the logical core, bytes."""


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name and HBM of a core."""
    return DeviceProperties(get_device_name(device), int(runtime.backend().hbm_bytes()))


class device:
    """Context manager: the calling thread's core is `device` inside (None changes nothing)."""

    def __init__(self, device: Device) -> None:
        self._wanted = None if device is None else _index(device)
        self._previous = -1

    def __enter__(self) -> None:
        self._previous = current_device()
        if self._wanted is not None:
            set_device(self._wanted)

    def __exit__(self, *exception: object) -> None:
        set_device(self._previous)


def _exchange_device(index: int) -> int:
    previous = current_device()
    if index >= 0:
        set_device(index)
    return previous


_maybe_exchange_device = _exchange_device


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bf16 is the device's main type."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that `torch.autocast("neuron")` accepts."""
    return [torch.float32, torch.float16, torch.bfloat16]


# ---- synchronisation and streams ----
def synchronize(device: Device = None) -> None:
    """Work is done when its call returns; only checks that the core exists."""
    _index(device)


def current_stream(device: Device = None) -> torch.Stream:
    """The calling thread's stream on a core."""
    return torch.accelerator.current_stream(torch.device("neuron", _index(device)))


def default_stream(device: Device = None) -> torch.Stream:
    """The stream that a core starts with."""
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_PRIVATE_USE_1)


def set_stream(stream: torch.Stream) -> None:
    """Makes `stream` the calling thread's stream on its core."""
    torch.accelerator.set_stream(stream)


@contextlib.contextmanager
def stream(chosen: torch.Stream | None) -> Iterator[None]:
    """Context manager: `chosen` is the current stream inside (None changes nothing)."""
    if chosen is None:
        yield
        return
    core = current_device()
    previous = current_stream(chosen.device)
    set_stream(chosen)
    try:
        yield
    finally:
        set_stream(previous)
        set_device(core)


class Event(torch.Event):
    """An event on a neuron stream; `elapsed_time` raises "no cost model" until operators have prices."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made = super().__new__(cls, device="neuron", enable_timing=enable_timing, blocking=blocking)  # type: ignore[call-arg]
        assert isinstance(made, Event)
        return made

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        pass


def wait_stream(first: torch.Stream, second: torch.Stream) -> None:
    """Later work of `first` waits for what `second` has been given."""
    first.wait_stream(second)


def wait_event(waiting: torch.Stream, event: torch.Event) -> None:
    """Later work of `waiting` waits for `event`."""
    waiting.wait_event(event)


def record_event(recording: torch.Stream, event: torch.Event | None = None) -> torch.Event:
    """Records an event on a stream."""
    return recording.record_event(event)


def query(queried: torch.Stream | None = None) -> bool:
    """Whether all work given to a stream is done."""
    return (queried or current_stream()).query()


# ---- memory ----
def memory_stats(device: Device = None) -> dict[str, Any]:
    """The documented statistics: three byte counts with current, peak, allocated, freed, and four counters."""
    flat = runtime.backend().memory(_index(device))
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
    runtime.backend().reset_peak(_index(device))


def reset_accumulated_memory_stats(device: Device = None) -> None:
    """Sets the allocated and freed sums to zero."""
    runtime.backend().reset_accumulated(_index(device))


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
    lines = [f"{get_device_name(device)} memory, MiB", heads]
    for name in _STATISTICS:
        row = statistics[name]
        cells = [f"{row[part] / 2**20:.1f}" for part in ("current", "peak", "allocated", "freed")]
        lines.append(f"{name:16}{cells[0]:>12}{cells[1]:>12}{cells[2]:>14}{cells[3]:>14}")
    if not abbreviated:
        lines.extend(f"{name:24}{value}" for name, value in statistics.items() if name not in _STATISTICS)
    return "\n".join(lines)


# ---- random numbers ----
def _generator(device: Device = None) -> torch.Generator:
    return default_generators[_index(device)]


class _DefaultGenerators:
    """The default generators by core index, made on first use."""

    def __getitem__(self, index: int) -> torch.Generator:
        generator = runtime.backend().default_generator(index)
        assert isinstance(generator, torch.Generator)
        return generator

    def __len__(self) -> int:
        return device_count()


default_generators = _DefaultGenerators()


def manual_seed(seed: int) -> None:
    """Seeds the current core's generator; the same seed gives the CPU's numbers."""
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seeds the generators of all cores."""
    for index in range(device_count()):
        default_generators[index].manual_seed(int(seed))


def seed() -> int:
    """Seeds the current core's generator at random and returns the seed."""
    return _generator().seed()


def seed_all() -> int:
    """Seeds all cores' generators with one random seed and returns it."""
    chosen = seed()
    manual_seed_all(chosen)
    return chosen


def initial_seed() -> int:
    """The seed of the current core's generator."""
    return _generator().initial_seed()


def get_rng_state(device: Device = None) -> torch.Tensor:
    """State of a core's generator, a CPU byte tensor."""
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Restores a state of `get_rng_state`."""
    _generator(device).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all cores' generators."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Restores states of `get_rng_state_all`."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# ---- what torch and programs in the wild look up ----
# torch.utils.checkpoint saves the device's generator state only where this is True.
_initialized = True


def _is_in_bad_fork() -> bool:
    return bool(runtime.backend().in_bad_fork())


def _sleep(cycles: int) -> None:
    """Does nothing, as on the device."""


def _lazy_init() -> None:
    init()
