"""Learner -> shared memory -> another copy of the model: equal logits after every sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlneuron.device.shm import SharedTensors
from rlneuron.trainer import Learner, LearnerConfig, weights
from tests.trainer import models


def make_learner(make: Any) -> Learner:
    return Learner(
        make(), LearnerConfig(per_device_train_batch_size=12, max_steps=9, learning_rate=1e-2), models.DEVICE
    )


@pytest.mark.parametrize("make", [models.llama, models.qwen3, models.gpt2])
def test_a_receiver_gives_the_learners_logits_after_every_sync(make: Any, tmp_path: Path) -> None:
    learner, receiver = make_learner(make), make(9)
    segment = SharedTensors.create(tmp_path / "weights", learner.state_dict_for_sync())
    ids = torch.tensor([[4, 5, 6, 7]])
    for version in (1, 2, 3):
        learner.update(models.batch(seed=version))
        manifest = weights.publish(learner.state_dict_for_sync(), segment, version)
        receiver.load_state_dict(SharedTensors.open(manifest.path).read(manifest), strict=False)
        learner.model.eval(), receiver.eval()
        assert torch.equal(learner.model(ids).logits, receiver(ids).logits)


def test_tied_weights_travel_once_and_untied_ones_twice() -> None:
    assert "lm_head.weight" not in make_learner(models.llama).state_dict_for_sync()
    assert "lm_head.weight" in make_learner(models.qwen3).state_dict_for_sync()
    for make in (models.llama, models.qwen3, models.gpt2):
        learner = make_learner(make)
        names = set(learner.state_dict_for_sync())
        missing = set(learner.model.state_dict()) - names
        assert names <= set(learner.model.state_dict()) and missing <= {"lm_head.weight"}


def test_bfloat16_engines_get_rounded_weights(tmp_path: Path) -> None:
    learner = make_learner(models.llama)
    tensors = learner.state_dict_for_sync()
    segment = SharedTensors.create(tmp_path / "weights", weights.specs(tensors, torch.bfloat16))
    read = segment.read(weights.publish(tensors, segment, 1))
    assert all(torch.equal(read[name], x.bfloat16()) for name, x in tensors.items())
    with pytest.raises(ValueError, match="missing"):
        weights.publish({name: x for name, x in tensors.items() if "norm" not in name}, segment, 2)
