"""The instances that can be simulated, as data: what the runtime must enforce."""

from __future__ import annotations

import dataclasses
import difflib

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instance:
    """One EC2 instance type."""

    name: str
    num_cores: int
    """Logical NeuronCores at the default LNC (2 on trn2, 1 on trn1): one `neuron:i` each."""
    hbm_gib: float
    """HBM of one logical core, GiB."""
    source: str


_SDK = "AWS Neuron SDK documentation (aws-neuron-sdk, 2026-08-21)"

INSTANCES = {
    instance.name: instance
    for instance in (
        # 24 GiB is what a trn2 core reports as total HBM at LNC=2 (25,769,803,776 bytes): 96 GiB of a chip in four.
        Instance(
            name="trn2.3xlarge",
            num_cores=4,
            hbm_gib=24.0,
            source="TorchNeuron quickstart, docs for Neuron 2.33 (logical-neuroncore-config 2); xpu-perf README",
        ),
        Instance(name="trn2.48xlarge", num_cores=64, hbm_gib=24.0, source=f"{_SDK}: trn2-arch.rst"),
        # A chip has 32 GiB and two cores at LNC=1.
        Instance(name="trn1.2xlarge", num_cores=2, hbm_gib=16.0, source=f"{_SDK}: trn1-arch.rst"),
        Instance(name="trn1.32xlarge", num_cores=32, hbm_gib=16.0, source=f"{_SDK}: trn1-arch.rst"),
    )
}


def find(name: str) -> Instance:
    """The instance of that name. Raises ValueError with the nearest name for an unknown one."""
    if name in INSTANCES:
        return INSTANCES[name]
    near = difflib.get_close_matches(name, INSTANCES, n=1, cutoff=0.0)
    raise ValueError(f"instance: unknown instance {name!r}; known are {', '.join(INSTANCES)}; write {near[0]!r}?")


def visible_cores(text: str | None, num_cores: int) -> list[int]:
    """The physical core ids that `NEURON_RT_VISIBLE_CORES` names: "0,1", "0-3" or both; all when absent or empty.

    Raises ValueError for text that is no such list, for a repeated id and for an id that the instance lacks.
    """
    if text is None or not text.strip():
        return list(range(num_cores))
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(
                f"NEURON_RT_VISIBLE_CORES: {text!r} is no list of core ids; write for instance '0,1' or '0-3'."
            )
        cores.extend(range(int(first), int(last or first) + 1))
    if len(set(cores)) != len(cores):
        raise ValueError(f"NEURON_RT_VISIBLE_CORES: {text!r} names a core twice.")
    if max(cores) >= num_cores:
        raise ValueError(
            f"NEURON_RT_VISIBLE_CORES: {text!r} names core {max(cores)}; the instance has cores 0 to {num_cores - 1}."
        )
    return cores
