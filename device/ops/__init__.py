"""device.ops: the operators of our own, on every device.

Each operator lies in one file: schema, plain-PyTorch form, fake implementation, autograd and its typed wrapper.
Importing this package defines them all and loads their compiled CPU kernels when `rlneuron build` has made them;
without these the plain forms run. It never compiles.
"""

from __future__ import annotations

from rlneuron.device.ops import linear as linear
from rlneuron.device.ops import paged_attention as paged_attention
from rlneuron.device.ops import sampling as sampling
from rlneuron.device.ops import varlen_attention as varlen_attention
from rlneuron.device.ops.kernels import load

load()
