"""Random numbers and the tokens a penalty has seen. The drawing itself is `rlneuron.device.ops.sampling`.

Numbers are counter based: the number of a draw is a hash of (stream, position), so it does not depend on what else
is in the batch, on preemption or on how many numbers were drawn before.
"""

from __future__ import annotations

import numpy as np
import torch

_STEP = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def mix64(x: int) -> int:
    """SplitMix64's finaliser (Steele, Lea and Flood 2014, figure 17) of a 64-bit number."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_keys(seed: int, count: int) -> list[int]:
    """Streams of samples 0 .. count - 1 of a request with this seed; sample i's depends on (seed, i) alone."""
    base = mix64(seed + _STEP)
    return [mix64(base + (i + 1) * _STEP) for i in range(count)]


def uniforms(keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Number of each (stream [R] uint64, position [R]): [R] float32 in [0, 1), 24 random bits each."""
    x = keys + (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return (x >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


class SeenTokens:
    """Which tokens each slot has seen, [slots, V] bool on the device; made when the first penalty needs it."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (num_slots, vocab_size)
        self._device = device
        self.table: torch.Tensor | None = None

    def load(self, slot: int, token_ids: np.ndarray) -> torch.Tensor:
        """Sets a slot's row to the tokens of its prompt and output so far; returns the table."""
        if self.table is None:
            self.table = torch.zeros(self._shape, dtype=torch.bool, device=self._device)
        self.table[slot] = False
        self.table[slot].index_fill_(0, torch.from_numpy(token_ids.astype(np.int64)).to(self._device), True)
        return self.table
