"""Policy losses of GRPO and its relatives: pure functions on tensors. Names and values are TRL 1.16's.

It holds no configuration object, no optimizer, no logger, and no normalisation over accumulation steps: a loss is the
sum over rows of `row_weight * sum over tokens`, and the row weights are computed once for a whole optimizer step from
its global counts. So the parts of a step can be summed in any division (micro-batches, ranks) and nothing can be
divided twice.

Legend: B rows (completions) · T positions of the longest completion. mask_BT is 1.0 on tokens that are trained and 0.0
elsewhere. logp is the current policy, old the policy at the start of the generation batch, sampling the engine's, ref
the reference's; each x_BT[b, t] is the log-probability of completion token t given the prompt and tokens < t.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOSS_TYPES = ("dapo", "grpo", "dr_grpo", "bnpo")
CORRECTION_MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def log_importance_weights(logp_BT: Tensor, old_BT: Tensor, mask_BT: Tensor, *, level: str) -> Tensor:
    """log(pi / pi_old) per token [B, T], or its mean per row [B, 1] (`level="sequence"`, arXiv 2507.18071)."""
    log_ratio_BT = logp_BT - old_BT
    if level == "token":
        return log_ratio_BT
    assert level == "sequence", level
    return (log_ratio_BT * mask_BT).sum(1, keepdim=True) / mask_BT.sum(1, keepdim=True).clamp(min=1.0)


def clipped_policy_loss(
    ratio: Tensor, advantages_B1: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> Tensor:
    """-min(rho * A, clip(rho, 1 - epsilon, 1 + epsilon_high) * A), PPO (arXiv 1707.06347); shape of `ratio`.

    `delta` bounds rho of the unclipped branch from above (dual clip, arXiv 1912.09729; two-sided, arXiv 2505.07291).
    Example, epsilon 0.2: A=+1: rho 1.5 -> -1.2, rho 0.5 -> -0.5; A=-1: rho 1.5 -> +1.5, rho 0.5 -> +0.8.
    """
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return -torch.minimum(ratio * advantages_B1, clipped * advantages_B1)


def kl_estimate(logp: Tensor, ref: Tensor, *, kind: str = "k3") -> Tensor:
    """Schulman's estimators of KL(pi || ref) from samples of pi (joschu.net/blog/kl-approx.html), elementwise.

    k1 = logp - ref; k2 = k1^2 / 2; k3 = exp(-k1) + k1 - 1, never negative.
    Example: logp -1, ref -2: k1 = 1, k2 = 0.5, k3 = 0.367879.
    """
    k1 = logp - ref
    if kind == "k1":
        return k1
    if kind == "k2":
        return k1.square() / 2
    assert kind == "k3", kind
    return torch.exp(-k1) + k1 - 1


def sampling_correction(
    old_BT: Tensor,
    sampling_BT: Tensor,
    mask_BT: Tensor,
    *,
    mode: str,
    clip_max: float | None,
    clip_min: float | None,
) -> Tensor:
    """Weight pi_old / pi_sampling on the policy loss, for what engine and learner compute differently; no gradient.

    token_*: per token [B, T]; sequence_*: product over the row [B, 1]. *_truncate clamps into [clip_min, clip_max]
    (fengyao.notion.site/off-policy-rl), *_mask sets what lies outside to 0 (arXiv 2510.26788). A token whose sampling
    log-probability is NaN counts as equal (ratio 1).
    Example: 100 tokens, each old - sampling = +0.012: the sequence's ratio is 3.320, sequence_mask with 3.0 drops it.
    """
    difference_BT = ((old_BT - sampling_BT) * mask_BT).nan_to_num(nan=0.0).detach()
    if mode.startswith("sequence"):
        difference_BT = difference_BT.sum(1, keepdim=True)
    ratio = difference_BT.exp()
    low = -torch.inf if clip_min is None else clip_min
    high = torch.inf if clip_max is None else clip_max
    if mode.endswith("truncate"):
        return ratio.clamp(low, high)
    assert mode in CORRECTION_MODES, mode
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


def row_weights(
    loss_type: str,
    token_counts_B: Tensor,
    *,
    num_rows: int,
    num_tokens: float,
    max_completion_length: int,
    micro_step_rows: int | None = None,
) -> Tensor:
    """Weight of each row's summed token losses in the loss of one optimizer step [B].

    `num_rows` and `num_tokens` are global: all rows (masked ones included, as in TRL) and all trained tokens of the
    optimizer step, over all ranks and micro-batches. Per-token weights of lengths 10 and 90: grpo .05/.0056, dapo
    .01/.01, dr_grpo (max 100) .005/.005.

    grpo     mean over rows of the mean over tokens (arXiv 2402.03300).
    dapo     mean over all tokens of the step (arXiv 2503.14476).
    dr_grpo  sum over tokens / (rows * max_completion_length) (arXiv 2503.20783).
    bnpo     mean over rows' micro steps of the mean over that micro step's tokens: `micro_step_rows` consecutive rows
             (TRL's per_device_train_batch_size) share a denominator; None: the whole step is one.
    """
    counts_B = token_counts_B.float()
    if loss_type == "grpo":
        return 1.0 / (num_rows * counts_B.clamp(min=1.0))
    if loss_type == "dapo":
        return torch.full_like(counts_B, 1.0 / max(num_tokens, 1.0))
    if loss_type == "dr_grpo":
        return torch.full_like(counts_B, 1.0 / (num_rows * max_completion_length))
    assert loss_type == "bnpo", loss_type
    if micro_step_rows is None:
        return torch.full_like(counts_B, 1.0 / max(num_tokens, 1.0))
    tokens_S = counts_B.view(-1, micro_step_rows).sum(1).clamp(min=1.0)
    num_micro_steps = num_rows / micro_step_rows
    return (1.0 / (num_micro_steps * tokens_S)).repeat_interleave(micro_step_rows)


def aggregate(per_token: Tensor, mask_BT: Tensor, row_weights_B: Tensor) -> Tensor:
    """Sum over rows of weight * sum over trained tokens; `per_token` is [B, T] or [B, 1]. A part of a step's loss."""
    return ((per_token * mask_BT).sum(1) * row_weights_B).sum()


def row_fraction(flags: Tensor, mask_BT: Tensor) -> Tensor:
    """Share of each row's trained tokens where `flags` ([B, T] or [B, 1]) holds [B]; NaN in rows without tokens."""
    if flags.shape[1] == 1:
        return flags[:, 0].float()
    return (flags * mask_BT).sum(1) / mask_BT.sum(1)


def clip_flags(
    ratio: Tensor, advantages_B1: Tensor, epsilon: float, epsilon_high: float, delta: float | None = None
) -> tuple[Tensor, Tensor]:
    """Where the lower and the upper bound bind (bool, shape of `ratio`), counted as TRL's clip_ratio/*."""
    if delta is not None:
        ratio = ratio.clamp(max=delta)
    return (ratio < 1 - epsilon) & (advantages_B1 < 0), (ratio > 1 + epsilon_high) & (advantages_B1 > 0)
