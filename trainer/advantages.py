"""Rewards -> advantages: pure functions on tensors, no configuration, no logging.

It does not call reward functions, and it does not know of tokens: one number per completion comes in and goes out.

Legend: B completions in generation order · R reward functions · P prompts · G completions per prompt, B = P * G, the
G completions of a prompt being adjacent. NaN stands for "this function could not score this completion" (None).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# TRL 1.16 adds this to the standard deviation (verl 1e-6, OpenRLHF 1e-9).
EPS = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """What `group_advantages` gives."""

    advantages_B: Tensor
    """Float32; exactly 0 where no function scored the completion, and in groups whose rewards are all equal."""
    rewards_B: Tensor
    """Weighted sum over the functions that scored the completion; NaN where none did."""
    zero_std_B: Tensor
    """Bool: the standard deviation that scales this completion is zero, so that it cannot teach anything."""


def nan_std(values: Tensor, dim: int) -> Tensor:
    """Sample standard deviation (n - 1) along `dim`, NaN entries left out; NaN with fewer than two entries.

    Example: [1, nan, 0] -> 0.70711.
    """
    count = (~values.isnan()).sum(dim, keepdim=True)
    deviation = values - values.nanmean(dim, keepdim=True)
    variance = deviation.square().nansum(dim, keepdim=True) / (count - 1)
    return variance.where(count > 1, torch.nan).sqrt().squeeze(dim)


def total_rewards(rewards_BR: Tensor, weights_R: Tensor) -> Tensor:
    """Weighted sum per completion, over the functions that scored it; NaN where none did.

    Example: weights [1, 0.5]: [[1, nan], [0, 2], [nan, nan]] -> [1, 1, nan].
    """
    total_B = (rewards_BR * weights_R).nansum(1)
    return total_B.masked_fill(rewards_BR.isnan().all(1), torch.nan)


def group_advantages(
    rewards_BR: Tensor,
    weights_R: Tensor,
    *,
    num_generations: int,
    scale_rewards: str = "group",
    eps: float = EPS,
) -> Advantages:
    """A = (r - mean of its group) / (std + eps), GRPO (arXiv 2402.03300) as TRL 1.16 computes it.

    `scale_rewards`: "group" takes the group's std, "batch" the whole batch's (arXiv 2508.08221), "none" does not
    divide (Dr. GRPO, arXiv 2503.20783). Std is the sample std (n - 1). Deviation from TRL: in a group where a single
    completion was scored its deviation is 0 and so is its advantage, and the group counts as one without spread.

    Example: rewards [1, 0, 0, 0] in one group -> [1.4997, -0.4999, -0.4999, -0.4999].
    """
    num_rows, num_functions = rewards_BR.shape
    if num_generations < 2:
        raise ValueError(
            f"num_generations: {num_generations}; a group needs at least 2 completions, since its mean is the baseline."
        )
    if num_rows % num_generations:
        raise ValueError(f"{num_rows} completions cannot be divided into groups of num_generations: {num_generations}.")
    assert weights_R.shape == (num_functions,), (weights_R.shape, num_functions)
    rewards_B = total_rewards(rewards_BR.float(), weights_R.to(rewards_BR.device, torch.float32))
    rewards_PG = rewards_B.view(-1, num_generations)
    deviation_PG = rewards_PG - rewards_PG.nanmean(1, keepdim=True)
    if scale_rewards == "batch":
        std_PG = nan_std(rewards_B, 0).nan_to_num(0.0).expand_as(rewards_PG)
    elif scale_rewards in ("group", "none"):
        std_PG = nan_std(rewards_PG, 1).nan_to_num(0.0)[:, None].expand_as(rewards_PG)
    else:
        raise ValueError(f'scale_rewards: {scale_rewards!r}; write "group", "batch" or "none".')
    advantages_PG = deviation_PG if scale_rewards == "none" else deviation_PG / (std_PG + eps)
    # Rounding of the mean must not turn a constant group into a signal: max == min is exact where std is not.
    largest_P1 = rewards_PG.nan_to_num(-torch.inf).amax(1, keepdim=True)
    smallest_P1 = rewards_PG.nan_to_num(torch.inf).amin(1, keepdim=True)
    return Advantages(
        advantages_B=advantages_PG.masked_fill(largest_P1 == smallest_P1, 0.0).nan_to_num(0.0).flatten(),
        rewards_B=rewards_B,
        zero_std_B=torch.isclose(std_PG, torch.zeros_like(std_PG)).flatten(),
    )


def leave_one_out_advantages(rewards_B: Tensor, *, num_generations: int) -> Tensor:
    """A_i = r_i - mean of the other completions of its prompt: RLOO, arXiv 2402.14740. It is never divided by a std.

    Example: [1, 0, 0, 0] -> [1, -1/3, -1/3, -1/3].
    """
    assert num_generations >= 2, "the baseline is the mean of the others"
    rewards_PG = rewards_B.view(-1, num_generations)
    baseline_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (num_generations - 1)
    return (rewards_PG - baseline_PG).flatten()


def reward_metrics(rewards_BR: Tensor, names: list[str], result: Advantages) -> dict[str, float]:
    """TRL's reward metrics of a generation batch: rewards/<name>/{mean,std}, reward{,_std}, frac_reward_zero_std."""
    metrics: dict[str, float] = {}
    means_R, stds_R = rewards_BR.float().nanmean(0), nan_std(rewards_BR.float(), 0)
    for name, mean, std in zip(names, means_R.tolist(), stds_R.tolist(), strict=True):
        metrics[f"rewards/{name}/mean"] = mean
        metrics[f"rewards/{name}/std"] = std
    metrics["reward"] = result.rewards_B.nanmean().item()
    metrics["reward_std"] = nan_std(result.rewards_B, 0).item()
    metrics["frac_reward_zero_std"] = result.zero_std_B.float().mean().item()
    return metrics
