"""Controls of the quickstart on a shortened schedule: without learning, or with rewards that say nothing, reward stays.

The same schedule with true rewards is the positive control: a test that no run could pass would prove nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rlneuron.config import load_config
from rlneuron.controller import Controller, Generated
from rlneuron.run import Run
from rlneuron.trainer.advantages import Advantages

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"
SHORT = ["train.max_steps=40", "train.eval_steps=10", "train.save_steps=40", "logging.report_to=none"]


class ShuffledRewards(Controller):
    """Gives each completion the reward of another one of the batch."""

    def compute_advantages(self, generated: Generated) -> Advantages:
        rewards = generated.rewards
        order = torch.randperm(len(rewards.values), generator=torch.Generator().manual_seed(self.step))
        return super().compute_advantages(replace(generated, rewards=replace(rewards, values=rewards.values[order])))


def start_and_end(
    address: str, folder: Path, name: str, *assignments: str, controller: type[Controller] = Controller
) -> tuple[float, float]:
    """Sampled held-out reward at step 0, and the mean of the last two evaluations."""
    settings = [*SHORT, f"train.output_dir={folder / name}", f"ray.address={address}", *assignments]
    run = Run(load_config([QUICKSTART], settings), command="test", run_id=name, controller=controller)
    assert run.main() == 0
    sampled = [row["eval_reward"] for row in run.evaluations]
    assert len(sampled) == 5
    return sampled[0], (sampled[-1] + sampled[-2]) / 2


@pytest.mark.slow
def test_true_rewards_raise_it(ray_address: str, tmp_path: Path) -> None:
    start, end = start_and_end(ray_address, tmp_path, "true")
    assert end > start + 0.3, (start, end)


@pytest.mark.slow
def test_a_learning_rate_of_zero_changes_nothing(ray_address: str, tmp_path: Path) -> None:
    start, end = start_and_end(ray_address, tmp_path, "still", "train.learning_rate=0.0")
    assert abs(end - start) < 0.08, (start, end)


@pytest.mark.slow
def test_shuffled_rewards_teach_nothing(ray_address: str, tmp_path: Path) -> None:
    start, end = start_and_end(ray_address, tmp_path, "shuffled", controller=ShuffledRewards)
    assert end < start + 0.08, (start, end)
