"""Learning-rate schedules by transformers' names, as a pure function of the step: there is no state to restore."""

from __future__ import annotations

import math

SCHEDULES = ("linear", "cosine", "constant", "constant_with_warmup")


def num_warmup_steps(warmup_steps: float, max_steps: int) -> int:
    """`warmup_steps` below 1 is a fraction of `max_steps`, as in transformers 5."""
    return int(warmup_steps) if warmup_steps >= 1 else math.ceil(max_steps * warmup_steps)


def learning_rate(step: int, *, peak: float, kind: str, warmup_steps: float, max_steps: int) -> float:
    """Rate of optimizer step `step`, counted from 0 (transformers.optimization's formulas).

    Example: linear, warm-up 10, 20 steps, peak 1: step 0 -> 0, step 5 -> 0.5, step 10 -> 1, step 15 -> 0.5.
    """
    warmup = num_warmup_steps(warmup_steps, max_steps)
    if kind == "constant":
        return peak
    if step < warmup:
        return peak * step / max(1, warmup)
    if kind == "constant_with_warmup":
        return peak
    progress = (step - warmup) / max(1, max_steps - warmup)
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    assert kind == "cosine", kind
    return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
