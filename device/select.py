"""The choice of hardware: simulated or real neuron, cuda, or cpu. The only place that decides."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Literal

import torch

from rlneuron.device import instances

DeviceType = Literal["neuron", "cpu", "cuda"]
Simulate = Literal["auto", True, False]

DEVICE_TYPES = ("neuron", "cpu", "cuda")
# What a machine with Trainium has: the driver's device file, the runtime's folder.
HARDWARE_SIGNS = (Path("/dev/neuron0"), Path("/opt/aws/neuron"))


@dataclasses.dataclass(frozen=True)
class Hardware:
    """What was chosen. Example: `Hardware(torch.device("neuron", 0), True, "trn2.3xlarge", 4, "SIMULATED ...")`."""

    device: torch.device
    """Where tensors go; for neuron and cuda the first device that this process sees."""
    simulated: bool
    instance: str
    """The instance's name for neuron, "" otherwise."""
    num_cores: int
    """Devices that a run may use: logical cores of the instance (`describe`) or visible to this process (`choose`)."""
    description: str
    """One line for people; begins with SIMULATED when it is."""


def real_torch_neuronx() -> bool:
    """Whether the vendor's `torch_neuronx` is installed (our stand-in does not count). Imports nothing."""
    try:
        spec = importlib.util.find_spec("torch_neuronx")
    except (ImportError, ValueError):
        return False
    if spec is None or spec.origin is None:
        return False
    return Path(__file__).resolve().parent not in Path(spec.origin).resolve().parents


def hardware_present() -> bool:
    """Whether this machine has Trainium and the vendor's PyTorch backend."""
    return any(sign.exists() for sign in HARDWARE_SIGNS) and real_torch_neuronx()


def describe(
    type: DeviceType,
    instance: str = "trn2.3xlarge",
    simulate: Simulate = "auto",
    *,
    hbm_gib: float | None = None,
) -> Hardware:
    """What `choose` would choose, without activating or claiming anything; `num_cores` counts the whole instance.

    Raises ValueError as `choose` does.
    """
    if type not in DEVICE_TYPES:
        raise ValueError(f"device.type: {type!r} is none of {', '.join(DEVICE_TYPES)}.")
    if type == "cpu":
        return Hardware(torch.device("cpu"), False, "", os.cpu_count() or 1, "cpu")
    if type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device.type: 'cuda', but torch.cuda.is_available() is False; write 'cpu' or 'neuron'.")
        count = torch.cuda.device_count()
        return Hardware(torch.device("cuda", 0), False, "", count, f"cuda: {count} x {torch.cuda.get_device_name(0)}")
    return _describe_neuron(instance, simulate, hbm_gib)


def _describe_neuron(instance: str, simulate: Simulate, hbm_gib: float | None) -> Hardware:
    chosen = instances.find(instance)
    if simulate not in ("auto", True, False):
        raise ValueError(f"device.simulate: {simulate!r} is none of auto, true, false.")
    if simulate is False and not hardware_present():
        raise ValueError(
            "device.simulate: false asks for real Trainium, but this machine lacks it (/dev/neuron0 or "
            "/opt/aws/neuron, and the package torch_neuronx); write auto or true."
        )
    if hbm_gib is not None and not 0 < hbm_gib <= chosen.hbm_gib:
        raise ValueError(
            f"device.hbm_gib: {hbm_gib} is not above 0 and at most {chosen.hbm_gib:g}, the HBM of a core of {instance}."
        )
    device = torch.device("neuron", 0) if _neuron_name_known() else torch.device("privateuseone", 0)
    if simulate is not True and hardware_present():
        return Hardware(device, False, instance, chosen.num_cores, f"{instance}: {chosen.num_cores} logical cores")
    text = f"SIMULATED {instance}: {chosen.num_cores} logical cores with {hbm_gib or chosen.hbm_gib:g} GiB HBM each"
    return Hardware(device, True, instance, chosen.num_cores, text)


def _neuron_name_known() -> bool:
    return bool(torch._C._get_privateuse1_backend_name() == "neuron")


def choose(
    type: DeviceType,
    instance: str = "trn2.3xlarge",
    simulate: Simulate = "auto",
    *,
    hbm_gib: float | None = None,
    numerics: str = "exact",
) -> Hardware:
    """Chooses the hardware and makes it usable in this process.

    For a simulated neuron this activates the backend; call it before the first backward of the process, since autograd
    makes its queues then, for the devices that exist, and never again. `num_cores` counts the cores that this process
    sees (`NEURON_RT_VISIBLE_CORES`). Raises ValueError, in one sentence, for a device that is not there, an unknown
    instance, a limit above the core's HBM, or a backend that is not compiled ("run: rlneuron build").
    """
    if numerics != "exact":
        raise ValueError(f"device.numerics: {numerics!r} is not available; write 'exact', which keeps every dtype.")
    plan = describe(type, instance, simulate, hbm_gib=hbm_gib)
    if type != "neuron":
        return plan
    if not plan.simulated:
        importlib.import_module("torch_neuronx")
        return dataclasses.replace(plan, device=torch.device("neuron", 0), num_cores=torch.accelerator.device_count())
    from rlneuron.device import runtime

    num_cores = runtime.activate(instance, hbm_gib=hbm_gib)
    return dataclasses.replace(plan, device=torch.device("neuron", 0), num_cores=num_cores)
