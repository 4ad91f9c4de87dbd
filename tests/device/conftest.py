"""The simulated device, active for every test of this room. Not built means failed, never skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rlneuron.device import build, oplog, runtime, select


@pytest.fixture(scope="session", autouse=True)
def _active() -> None:
    assert build.is_built("neuron"), "the neuron backend is not compiled; run: rlneuron build"
    select.choose("neuron", simulate=True)


@pytest.fixture
def neuron(_active: None) -> torch.device:
    """neuron:0, with empty operator counts."""
    oplog.enable()
    oplog.reset()
    return torch.device("neuron", 0)


@pytest.fixture
def small_hbm(neuron: torch.device) -> Iterator[int]:
    """Lowers the HBM of a core to 256 MB for one test; yields that number of bytes."""
    limit = 256 * 10**6
    backend = runtime.backend()
    before = backend.hbm_bytes()
    torch.neuron.empty_cache()
    backend.set_hbm_bytes(limit)
    yield limit
    backend.set_hbm_bytes(before)
    torch.neuron.empty_cache()
