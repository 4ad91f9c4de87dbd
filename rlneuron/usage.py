"""What a process of the run has used."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process has used since it started. Measured, except the operator counts, which are exact."""

    cpu_s: float
    """CPU seconds of the process, all threads."""
    operators: int
    flops: int
    moved_bytes: int
    hbm_peak_bytes: int
    """Peak of allocated device memory; 0 where the device is the host."""
    engine: dict[str, float] = field(default_factory=dict)
    """Counters of a rollout worker's engine (`rollout.EngineStats`)."""
