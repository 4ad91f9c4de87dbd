"""Advantages: golden numbers of TRL 1.16 and the right values of known faults."""

from __future__ import annotations

import math

import pytest
import torch
from trl.trainer.utils import nanstd

from rlneuron.trainer import advantages

NAN = math.nan
ONE = torch.ones(1)


def group(rewards: list[float], **options: object) -> list[float]:
    column = torch.tensor(rewards)[:, None]
    settings = {"num_generations": len(rewards), **options}
    return advantages.group_advantages(column, ONE, **settings).advantages_B.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1, 0, 0, 0], [1.4997, -0.4999, -0.4999, -0.4999]),
        ([1, 1, 0, 0], [0.8659, 0.8659, -0.8659, -0.8659]),
        ([1, 0], [0.7070, -0.7070]),
    ],
)
def test_golden_numbers(rewards: list[float], wanted: list[float]) -> None:
    assert group(rewards) == pytest.approx(wanted, abs=1e-4)


def test_scaling_by_group_batch_or_not() -> None:
    rewards = torch.tensor([[1.0], [0.0], [5.0], [1.0]])
    by = {
        scale: advantages.group_advantages(rewards, ONE, num_generations=2, scale_rewards=scale).advantages_B.tolist()
        for scale in ("group", "batch", "none")
    }
    batch_std = math.sqrt(sum((r - 1.75) ** 2 for r in (1, 0, 5, 1)) / 3)
    assert by["none"] == [0.5, -0.5, 2.0, -2.0]
    assert by["batch"] == pytest.approx([a / (batch_std + 1e-4) for a in by["none"]], rel=1e-6)
    assert by["group"] == pytest.approx([0.7070, -0.7070, 0.7071, -0.7071], abs=1e-4)


@pytest.mark.parametrize(
    ("rewards", "weights"),
    [([[0.5]] * 4, [1.0]), ([[0.1, -0.1], [0.7, -0.7], [0.3, -0.3], [0.0, 0.0]], [1.0, 1.0]), ([[0.1]] * 7, [1.0])],
    ids=["constant", "cancelling", "mean is rounded"],
)
def test_groups_that_teach_nothing_give_exactly_zero(rewards: list[list[float]], weights: list[float]) -> None:
    result = advantages.group_advantages(
        torch.tensor(rewards), torch.tensor(weights), num_generations=len(rewards), scale_rewards="group"
    )
    assert result.advantages_B.tolist() == [0.0] * len(rewards)
    names = [f"f{i}" for i in range(len(weights))]
    assert advantages.reward_metrics(torch.tensor(rewards), names, result)["frac_reward_zero_std"] == 1.0


def test_a_row_that_no_function_scored_stays_out_of_the_baseline() -> None:
    rewards = torch.tensor([[1, NAN], [0, 2], [NAN, NAN], [1, 1]])
    result = advantages.group_advantages(rewards, torch.tensor([1, 0.5]), num_generations=4)
    assert result.rewards_B.tolist()[:2] + result.rewards_B.tolist()[3:] == [1.0, 1.0, 1.5]
    assert result.rewards_B[2].isnan()
    assert result.advantages_B.tolist() == pytest.approx([-0.57715, -0.57715, 0.0, 1.15430], abs=1e-5)
    assert result.zero_std_B.tolist() == [False] * 4


@pytest.mark.parametrize("scored", [0, 1])
def test_groups_with_no_or_one_scored_row_are_zero_and_leave_other_groups_alone(scored: int) -> None:
    rewards = torch.tensor([[1.0], [0.0], [2.0 if scored else NAN], [NAN]])
    for scale in ("group", "batch", "none"):
        result = advantages.group_advantages(rewards, ONE, num_generations=2, scale_rewards=scale)
        assert result.advantages_B[2:].tolist() == [0.0, 0.0]
        assert result.advantages_B[0] > 0 > result.advantages_B[1]


def test_metrics_have_trl_names_and_leave_nan_out() -> None:
    rewards = torch.tensor([[1, NAN], [0, 2], [NAN, NAN], [1, 1]])
    result = advantages.group_advantages(rewards, torch.tensor([1, 0.5]), num_generations=4)
    metrics = advantages.reward_metrics(rewards, ["right", "short"], result)
    assert metrics == pytest.approx(
        {
            "rewards/right/mean": 2 / 3,
            "rewards/right/std": nanstd(rewards[:, 0]).item(),
            "rewards/short/mean": 1.5,
            "rewards/short/std": nanstd(rewards[:, 1]).item(),
            "reward": 3.5 / 3,
            "reward_std": nanstd(torch.tensor([1, 1, NAN, 1.5])).item(),
            "frac_reward_zero_std": 0.0,
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(
    ("num_rows", "options", "message"),
    [
        (4, {"num_generations": 1}, "num_generations: 1; a group needs at least 2"),
        (5, {"num_generations": 2}, "5 completions cannot be divided into groups of num_generations: 2"),
        (4, {"num_generations": 2, "scale_rewards": "std"}, "scale_rewards: 'std'; write"),
    ],
)
def test_refusals(num_rows: int, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        advantages.group_advantages(torch.rand(num_rows, 1), ONE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rewards", "wanted"),
    [
        ([1.0, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ([1.0, 1, 0, 0], [2 / 3, 2 / 3, -2 / 3, -2 / 3]),
        ([1.0, 1, 1, 0, 0, 0, 0, 0], [0.714286] * 3 + [-0.428571] * 5),
    ],
)
def test_leave_one_out(rewards: list[float], wanted: list[float]) -> None:
    got = advantages.leave_one_out_advantages(torch.tensor(rewards), num_generations=len(rewards))
    assert got.tolist() == pytest.approx(wanted, abs=1e-6)
