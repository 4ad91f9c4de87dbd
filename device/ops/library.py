"""The `rlneuron::` operator library: where every custom operator's schema is defined.

An operator lies in one file of this folder: schema, plain-PyTorch form (the default on every device), fake
implementation and autograd. `csrc/` holds the CPU kernels that replace the plain form once `rlneuron build` has
compiled them; on `neuron` the backend runs the CPU kernel on the device's memory and records it.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("rlneuron", "FRAGMENT")
