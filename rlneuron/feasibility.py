"""Whether a run fits, before any process is started: device memory per core and host memory, demanded and available.

The figures are lower bounds from parameter counts; activations and KV blocks come on top and are enforced by the
device's own limit when the run is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlneuron.config import RunConfig
from rlneuron.device import instances
from rlneuron.workers import roles

GIB = 2**30
PROCESS_BYTES = int(0.35 * GIB)
"""Resident memory of an actor's process before it loads a model (measured 0.34 GiB)."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes that one role needs at least."""

    role: str
    device_bytes: int


def count_parameters(model_path: str, *, trust_remote_code: bool = False) -> int:
    """Parameters of the model in `model_path`, counted without allocating them; ties count once."""
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    module.tie_weights()
    return sum(parameter.numel() for parameter in module.parameters())


def demands(config: RunConfig, num_parameters: int) -> list[Demand]:
    """Weights for every role; for the learner gradients and AdamW's two moments (fp32) as well."""
    element = 2 if config.model.dtype == "bfloat16" else 4
    weights = num_parameters * element
    return [
        Demand(role, weights + (num_parameters * (element + 8) if role == "learner" else 0)) for role in roles(config)
    ]


def check(config: RunConfig, model_path: str) -> None:
    """ValueError naming demanded and available if a role cannot fit its core, or the run this machine."""
    hbm_gib = None
    if config.device.type == "neuron":
        hbm_gib = config.device.hbm_gib or instances.find(config.device.instance).hbm_gib
    num_parameters = count_parameters(model_path, trust_remote_code=config.model.trust_remote_code)
    needed = demands(config, num_parameters)
    if hbm_gib is not None:
        for demand in needed:
            if demand.device_bytes > hbm_gib * GIB:
                raise ValueError(
                    f"{demand.role} needs at least {demand.device_bytes / GIB:.2f} GiB on its core (weights"
                    f"{', gradients, AdamW state' if demand.role == 'learner' else ''} of {Path(model_path).name}) but "
                    f"the core has {hbm_gib:g} GiB; choose a smaller model, model.dtype: bfloat16, or a larger "
                    "device.instance or device.hbm_gib"
                )
    simulated_bytes = sum(demand.device_bytes for demand in needed) if config.device.type != "cuda" else 0
    processes = (len(needed) + config.reward.num_workers) * PROCESS_BYTES
    available = psutil.virtual_memory().available
    if config.ray.address is None and simulated_bytes + processes > available:
        raise ValueError(
            f"the run needs at least {(simulated_bytes + processes) / GIB:.1f} GiB of this machine's memory "
            f"({len(needed)} device processes, {config.reward.num_workers} reward processes) but {available / GIB:.1f} "
            "GiB are available; choose a smaller model or fewer workers, or join a cluster with ray.address"
        )
