"""Loads the compiled CPU kernels of our operators (`csrc/`), once per process."""

from __future__ import annotations

import functools

import torch

from rlneuron.device import build


@functools.cache
def load() -> bool:
    """Loads the compiled library `ops` and returns whether there was one; a second call does nothing."""
    if not build.is_built("ops"):
        return False
    torch.ops.load_library(str(build.library_path("ops")))
    return True
