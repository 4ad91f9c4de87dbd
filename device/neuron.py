"""torch.neuron: the module functions of TorchNeuron, over the simulated cores of this process.

Names and memory-statistics keys are those of TorchNeuron 2.33 (pre-release source, neuron.py, memory.py, streams.py).
Work is done when a call returns, so `synchronize`, streams and events order nothing; they exist so that programs
written for the device run. A device argument may be None (the current core), an index, a string or a torch.device.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch

from rlneuron.device import memory as memory
from rlneuron.device import runtime
from rlneuron.device.cores import Device, index_of
from rlneuron.device.memory import (
    empty_cache as empty_cache,
)
from rlneuron.device.memory import (
    max_memory_allocated as max_memory_allocated,
)
from rlneuron.device.memory import (
    max_memory_reserved as max_memory_reserved,
)
from rlneuron.device.memory import (
    mem_get_info as mem_get_info,
)
from rlneuron.device.memory import (
    memory_allocated as memory_allocated,
)
from rlneuron.device.memory import (
    memory_reserved as memory_reserved,
)
from rlneuron.device.memory import (
    memory_stats as memory_stats,
)
from rlneuron.device.memory import (
    memory_summary as memory_summary,
)
from rlneuron.device.memory import (
    reset_accumulated_memory_stats as reset_accumulated_memory_stats,
)
from rlneuron.device.memory import (
    reset_peak_memory_stats as reset_peak_memory_stats,
)

Stream = torch.Stream
_PRIVATE_USE_1 = 20  # c10::DeviceType::PrivateUse1


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
    runtime.backend().set_current_core(index_of(device))


def get_device_name(device: Device = None) -> str:
    """ "neuron:i"."""
    return f"neuron:{index_of(device)}"


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
        self._wanted = None if device is None else index_of(device)
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
    index_of(device)


def current_stream(device: Device = None) -> torch.Stream:
    """The calling thread's stream on a core."""
    return torch.accelerator.current_stream(torch.device("neuron", index_of(device)))


def default_stream(device: Device = None) -> torch.Stream:
    """The stream that a core starts with."""
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=_PRIVATE_USE_1)


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


# ---- random numbers ----
def _generator(device: Device = None) -> torch.Generator:
    return default_generators[index_of(device)]


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
