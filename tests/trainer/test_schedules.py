"""Learning rates against transformers' own schedulers, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import get_scheduler

from rlneuron.trainer import schedules


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("kind", schedules.SCHEDULES)
def test_equals_transformers(kind: Any, warmup: int) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.3)
    theirs = get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=20)
    for step in range(23):
        ours = schedules.learning_rate(step, peak=0.3, kind=kind, warmup_steps=warmup, max_steps=20)
        assert ours == pytest.approx(optimizer.param_groups[0]["lr"], abs=1e-12), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize(("warmup_steps", "wanted"), [(0, 0), (0.1, 10), (0.101, 11), (1, 1), (7, 7)])
def test_warmup_below_one_is_a_fraction(warmup_steps: float, wanted: int) -> None:
    assert schedules.num_warmup_steps(warmup_steps, 100) == wanted


def test_a_run_of_warmup_only_does_not_divide_by_zero() -> None:
    for kind in schedules.SCHEDULES:
        assert schedules.learning_rate(5, peak=1.0, kind=kind, warmup_steps=5, max_steps=5) >= 0.0
