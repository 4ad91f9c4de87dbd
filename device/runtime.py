"""Activates the simulated neuron device in this process: once, and for good.

It loads the compiled backend, gives PrivateUse1 the name `neuron`, installs `torch.neuron`, and puts the stand-in
`torch_neuronx` on `sys.path` when the vendor's package is absent. Nothing is compiled here.
"""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

from rlneuron.device import build, instances

STANDIN_FOLDER = Path(__file__).resolve().parent / "standin"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What this process simulates."""

    instance: str
    hbm_bytes: int
    """HBM of one logical core."""
    visible_cores: tuple[int, ...]
    """Core ids of the instance that are `neuron:0`, `neuron:1`, ... here."""


_settings: Settings | None = None
_backend: ModuleType | None = None


def is_active() -> bool:
    """Whether the simulated device is active in this process."""
    return _settings is not None


def settings() -> Settings:
    """What this process simulates; the device must be active."""
    assert _settings is not None, "the simulated neuron device is not active in this process"
    return _settings


def backend() -> ModuleType:
    """The compiled module (`csrc/module.cpp`); the device must be active."""
    assert _backend is not None, "the simulated neuron device is not active in this process"
    return _backend


def activate(instance: str = "trn2.3xlarge", *, hbm_gib: float | None = None) -> int:
    """Activates the simulation of `instance` and returns the number of logical cores that this process sees.

    A second call with the same settings changes nothing. Raises ValueError when another instance or limit is already
    active, when another PrivateUse1 backend is, or when the backend is not compiled.
    """
    global _settings, _backend
    chosen = instances.find(instance)
    cores = instances.visible_cores(os.environ.get("NEURON_RT_VISIBLE_CORES"), chosen.num_cores)
    wanted = Settings(
        instance=instance,
        hbm_bytes=int((hbm_gib or chosen.hbm_gib) * instances.GIB),
        visible_cores=tuple(cores),
    )
    if _settings is not None:
        if (wanted.instance, wanted.hbm_bytes) != (_settings.instance, _settings.hbm_bytes):
            raise ValueError(
                f"device: this process already simulates {_settings.instance} with {_settings.hbm_bytes} bytes of HBM "
                f"per core and cannot change to {wanted.instance} with {wanted.hbm_bytes}; use another process."
            )
        return len(_settings.visible_cores)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise ValueError(f"device: another PrivateUse1 backend, {name!r}, is already active in this process.")
    module = _load()
    module.activate(len(cores), wanted.hbm_bytes)
    _backend, _settings = module, wanted
    _install_face()
    _install_standin()
    register_operators()
    return len(cores)


def _load() -> ModuleType:
    if not build.is_built("neuron"):
        raise ValueError("the neuron backend is not compiled on this machine; run: rlneuron build")
    path = str(build.library_path("neuron"))
    loader = importlib.machinery.ExtensionFileLoader("rlneuron_neuron", path)
    spec = importlib.util.spec_from_file_location("rlneuron_neuron", path, loader=loader)
    assert spec is not None, f"{path} is no extension module"
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _install_face() -> None:
    torch.utils.rename_privateuse1_backend("neuron")
    from rlneuron.device import neuron

    torch._register_device_module("neuron", neuron)
    # `import torch.neuron` finds the module too.
    sys.modules["torch.neuron"] = neuron
    torch.utils.generate_methods_for_privateuse1_backend()
    torch.set_autocast_dtype("neuron", torch.bfloat16)


def _install_standin() -> None:
    if importlib.util.find_spec("torch_neuronx") is None:
        sys.path.append(str(STANDIN_FOLDER))


def register_operators() -> int:
    """Registers every `rlneuron::` operator that has a CPU kernel on the simulated device; returns how many were new.

    An operator with a plain form only needs nothing: its composite form runs operator by operator. Call it again
    after defining operators; activation does so for those of `device.ops`.
    """
    from rlneuron.device import ops

    ops.load()
    return int(backend().register_namespace("rlneuron"))
