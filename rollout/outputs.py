"""What the engine gives out: completions and their request. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled continuation.

    Example: `Completion(index=0, token_ids=[5, 2], logprobs=[-0.7, -0.1], model_logprobs=[-0.9, -0.1],
    finish_reason="stop", weight_versions=[3, 3], text="yes")`
    """

    index: int
    """Which of the request's n samples."""
    token_ids: list[int]
    """The drawn tokens; the EOS or stop token that ended it is the last of them."""
    logprobs: list[float]
    """Per token, under the distribution it was drawn from (penalty, temperature and cuts applied); for greedy
    requests under the penalised model at temperature 1."""
    model_logprobs: list[float]
    """Per token, under softmax(logits) of the model alone."""
    finish_reason: FinishReason
    """"stop": EOS or a stop token; "length": max_tokens; "abort": aborted, tokens so far."""
    weight_versions: list[int]
    """Per token, the version of the weights that produced it."""
    text: str
    """`token_ids` decoded without special tokens; "" where the front has no tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A finished request: its prompt and its completions in the order of their index."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[Completion]
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine was made; `num_` fields at the end are the present state."""

    steps: int = 0
    prefill_tokens: int = 0
    """Tokens computed in prefill chunks, recomputed ones included."""
    decode_tokens: int = 0
    """Tokens computed one per sequence and step."""
    sampled_tokens: int = 0
    prefix_hit_tokens: int = 0
    """Prompt tokens not computed because the prefix cache had them."""
    preemptions: int = 0
    copied_blocks: int = 0
    """Blocks copied because a sample would have written into a shared one."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_running: int = 0
    num_waiting: int = 0
