"""SamplingParams: how one request is sampled, in vLLM's names, checked on construction. It samples nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Below it a temperature is greedy, as in vLLM: logits divided by it overflow half precision.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How the completions of one prompt are drawn.

    The processors act in transformers' order: repetition penalty, min_tokens, temperature, top_k, top_p, min_p.
    Every token of the model's vocabulary may be drawn, rows beyond the tokenizer's included, so that a learner that
    normalises over the model's logits has the same distribution.

    Example: `SamplingParams(n=8, temperature=1.0, max_tokens=256, seed=7)`
    """

    n: int = 1
    """Completions per prompt; the prompt is computed once."""
    temperature: float = 1.0
    """Divides the logits; 0 (or below 1e-5) takes the largest."""
    top_p: float = 1.0
    """Nucleus: the most probable tokens that reach this mass; 1 is off."""
    top_k: int = 0
    """The most probable k tokens; 0 and -1 are off, as is anything from the vocabulary's size up."""
    min_p: float = 0.0
    """Drops tokens less probable than this share of the most probable one; 0 is off."""
    repetition_penalty: float = 1.0
    """Applied to tokens of prompt and output; 1 is off."""
    max_tokens: int = 16
    """Most tokens per completion; it then ends with finish_reason "length"."""
    min_tokens: int = 0
    """Until then neither EOS nor a stop token can be drawn."""
    stop_token_ids: tuple[int, ...] = ()
    """End a completion like EOS does; the stop token is part of token_ids."""
    ignore_eos: bool = False
    """EOS is an ordinary token."""
    seed: int | None = None
    """Same numbers whatever the neighbours; None draws from the engine's own seed."""

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _whole("max_tokens", self.max_tokens, 1)
        _whole("min_tokens", self.min_tokens, 0)
        _whole("top_k", self.top_k, -1)
        _number("temperature", self.temperature, 0.0, math.inf, "0 (greedy) or more")
        _number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1", open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0, "from 0 to 1")
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "above 0 (1 is off)", open_low=True)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; min_tokens must not be larger."
            )
        if self.seed is not None:
            _whole("seed", self.seed, 0)
        if isinstance(self.stop_token_ids, str) or not all(_is_whole(t) and t >= 0 for t in self.stop_token_ids):
            raise ValueError(f"stop_token_ids is {self.stop_token_ids!r}; give token ids, e.g. stop_token_ids=(2, 9).")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether anything but the temperature shapes the distribution."""
        return (
            self.top_p < 1.0
            or self.top_k > 0
            or self.min_p > 0.0
            or self.repetition_penalty != 1.0
            or self.min_tokens > 0
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; give a whole number of at least {least}.")


def _number(name: str, value: object, low: float, high: float, allowed: str, *, open_low: bool = False) -> None:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    # NaN fails every comparison, so it is refused here as well.
    if not low <= number <= high or math.isinf(number) or (open_low and number == low):
        raise ValueError(f"{name} is {value!r}; it must be {allowed}.")
