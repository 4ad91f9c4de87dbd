"""The learner's weights into a shared segment, in the dtype that the engines hold.

It does not tell the engines: the manifest that `publish` gives is the message.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlneuron.device.shm import Manifest, SharedTensors, TensorSpec, spec_of


def specs(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> dict[str, TensorSpec]:
    """What a segment for `weights` must hold; `dtype` replaces that of floating-point tensors."""
    return {
        name: spec_of(x.to(dtype) if dtype is not None and x.is_floating_point() else x)
        for name, x in ((name, torch.empty_like(x, device="meta")) for name, x in weights.items())
    }


def publish(weights: Mapping[str, Tensor], segment: SharedTensors, version: int) -> Manifest:
    """Writes `weights` as `version`, cast to the segment's dtypes on their own device.

    Rounding float32 to bfloat16 here is the only place where engine and learner can part: an update below half a unit
    in the last place of bfloat16 is invisible to the engine until it has accumulated.
    """
    cast = {}
    for name, x in weights.items():
        spec = segment.specs.get(name)
        cast[name] = x.to(getattr(torch, spec.dtype)) if spec is not None and x.is_floating_point() else x
    return segment.write(version, cast)
