"""The loss of one micro-batch as a part of its optimizer step's loss, and what is to be logged of it.

It puts the pure pieces of `losses` together by the configuration. It does not run the model. Everything it returns
adds up (or takes the extreme) over micro-batches, so the metrics of a step do not depend on how it was divided.

Legend: as in `losses`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlneuron.trainer import losses
from rlneuron.trainer.config import LearnerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What the loss of some rows needs; all on the device, [B, T] unless said."""

    logp: Tensor
    entropy: Tensor
    mask: Tensor
    old: Tensor
    advantages_B1: Tensor
    row_weights_B: Tensor
    entropy_weights_B: Tensor | None = None
    """Per row, so that the weighted sum over tokens is the step's mean entropy; None without entropy_coef."""
    sampling: Tensor | None = None
    ref: Tensor | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """0-dimensional tensors by name: to be summed, or to take the minimum or maximum of (NaN entries left out)."""

    sums: dict[str, Tensor]
    minima: dict[str, Tensor]
    maxima: dict[str, Tensor]


def objective(config: LearnerConfig, batch: MicroBatch) -> tuple[Tensor, Parts]:
    """This micro-batch's part of the step's loss (a sum, already normalised), and its parts of the metrics."""
    mask = batch.mask
    bounds = (config.epsilon, config.upper_epsilon, config.delta)
    log_ratio = losses.log_importance_weights(batch.logp, batch.old, mask, level=config.importance_sampling_level)
    ratio = log_ratio.exp()
    per_token = losses.clipped_policy_loss(ratio, batch.advantages_B1, *bounds)
    parts = Parts(sums={"tokens": mask.sum(), "entropy": (batch.entropy.detach() * mask).sum()}, minima={}, maxima={})
    if config.vllm_importance_sampling_correction and batch.sampling is not None:
        correction = losses.sampling_correction(
            batch.old,
            batch.sampling,
            mask,
            mode=config.vllm_importance_sampling_mode,
            clip_max=config.vllm_importance_sampling_clip_max,
            clip_min=config.vllm_importance_sampling_clip_min,
        )
        per_token = per_token * correction
        _add_correction_parts(parts, correction, mask)
    if batch.sampling is not None:
        _add_difference_parts(parts, batch.old - batch.sampling, mask)
    if config.beta > 0:
        assert batch.ref is not None, "beta > 0 without reference log-probabilities"
        kl = losses.kl_estimate(batch.logp, batch.ref)
        if config.use_bias_correction_kl:
            kl = kl * ratio
        per_token = per_token + config.beta * kl
        parts.sums["kl"] = (kl.detach() * mask).sum()
    loss = losses.aggregate(per_token, mask, batch.row_weights_B)
    if batch.entropy_weights_B is not None:
        parts.sums["policy_loss"] = loss.detach()
        loss = loss - config.entropy_coef * losses.aggregate(batch.entropy, mask, batch.entropy_weights_B)
    parts.sums["loss"] = loss.detach()
    _add_clip_parts(parts, losses.clip_flags(ratio.detach(), batch.advantages_B1, *bounds), mask)
    return loss, parts


def _count(values: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens, or over rows when there is one value per row."""
    return values.float().sum() if values.shape[1] == 1 else (values * mask).sum()


def _nan_min(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=torch.inf).min()


def _nan_max(values: Tensor) -> Tensor:
    return values.nan_to_num(nan=-torch.inf).max()


def _add_clip_parts(parts: Parts, flags: tuple[Tensor, Tensor], mask: Tensor) -> None:
    low, high = flags
    parts.sums["low"], parts.sums["high"] = _count(low, mask), _count(high, mask)
    parts.minima["low"] = _nan_min(losses.row_fraction(low, mask))
    parts.maxima["high"] = _nan_max(losses.row_fraction(high, mask))


def _add_correction_parts(parts: Parts, correction: Tensor, mask: Tensor) -> None:
    parts.sums["correction"] = _count(correction, mask)
    if correction.shape[1] == 1:
        parts.sums["correction_count"] = torch.ones_like(correction).sum()
        shown = correction
    else:
        parts.sums["correction_count"] = mask.sum()
        shown = correction.masked_fill(mask == 0, torch.nan)
    parts.minima["correction"], parts.maxima["correction"] = _nan_min(shown), _nan_max(shown)


def _add_difference_parts(parts: Parts, difference: Tensor, mask: Tensor) -> None:
    known = (mask > 0) & ~difference.isnan()
    size = difference.abs().masked_fill(~known, 0.0)
    parts.sums["difference"], parts.sums["difference_count"] = size.sum(), known.float().sum()
    parts.maxima["difference"] = size.max()


def combine(parts: Sequence[Parts]) -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
    """Sums, minima and maxima over all micro-batches of a step, fetched from the device at once."""
    if not parts:
        return {}, {}, {}
    kinds = [[getattr(part, kind) for part in parts] for kind in ("sums", "minima", "maxima")]
    stacked = [[torch.stack([p.float() for p in part.values()]) for part in kind if part] for kind in kinds]
    reduce = (lambda x: x.sum(0), lambda x: x.amin(0), lambda x: x.amax(0))
    reduced = [how(torch.stack(kind)) for how, kind in zip(reduce, stacked, strict=True) if kind]
    values = torch.cat(reduced).tolist()
    result: list[dict[str, float]] = []
    for kind in kinds:
        names = list(kind[0])
        result.append(dict(zip(names, values[: len(names)], strict=True)))
        values = values[len(names) :]
    return result[0], result[1], result[2]


def metrics(config: LearnerConfig, parts: Sequence[Parts], num_rows: int) -> dict[str, float]:
    """TRL's metrics of one optimizer step of `num_rows` completions (masked ones included).

    Means over tokens are over all tokens of the step and extremes over all its rows; TRL averages both over micro
    steps, which is the same when there is one.
    """
    sums, minima, maxima = combine(parts)
    tokens = max(sums.get("tokens", 0.0), 1.0)
    per_row = config.importance_sampling_level == "sequence"
    clipped = max(num_rows, 1) if per_row else tokens
    low, high = sums.get("low", 0.0) / clipped, sums.get("high", 0.0) / clipped
    result = {
        "loss": sums.get("loss", 0.0),
        "entropy": sums.get("entropy", 0.0) / tokens,
        "clip_ratio/low_mean": low,
        "clip_ratio/low_min": minima.get("low", 0.0),
        "clip_ratio/high_mean": high,
        "clip_ratio/high_max": maxima.get("high", 0.0),
        "clip_ratio/region_mean": low + high,
    }
    if config.beta > 0:
        result["kl"] = sums.get("kl", 0.0) / tokens
    if config.entropy_coef:
        result["policy_loss"] = sums.get("policy_loss", 0.0)
        result["entropy_coef"] = config.entropy_coef
    result |= _sampling_metrics(sums, minima, maxima)
    return result


def _sampling_metrics(
    sums: Mapping[str, float], minima: Mapping[str, float], maxima: Mapping[str, float]
) -> dict[str, float]:
    result: dict[str, float] = {}
    if "difference" in sums:
        result["sampling/sampling_logp_difference/mean"] = sums["difference"] / max(sums["difference_count"], 1.0)
        result["sampling/sampling_logp_difference/max"] = maxima["difference"]
    if "correction" in sums:
        result["sampling/importance_sampling_ratio/min"] = minima["correction"]
        result["sampling/importance_sampling_ratio/mean"] = sums["correction"] / max(sums["correction_count"], 1.0)
        result["sampling/importance_sampling_ratio/max"] = maxima["correction"]
    return result
