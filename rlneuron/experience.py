"""The only translator between the rooms: rollouts become reward batches and train batches, never the other way."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from rlneuron.config import RunConfig
from rlneuron.prompts import PromptRow
from rlneuron.rollout import RequestOutput, SamplingParams
from rlneuron.trainer import TrainBatch


def request_seed(run_seed: int, kind: str, step: int, index: int) -> int:
    """Seed of the `index`-th prompt of `step`: the same whatever worker generates it and however many there are."""
    digest = hashlib.sha256(f"{run_seed}:{kind}:{step}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def sampling_params(config: RunConfig, *, kind: str, step: int, count: int) -> list[SamplingParams]:
    """One `SamplingParams` per prompt. `kind`: "train" (G samples), "eval" (one sample) or "greedy" (one, T = 0)."""
    rollout = config.rollout
    greedy = kind == "greedy"
    return [
        SamplingParams(
            n=rollout.num_generations if kind == "train" else 1,
            temperature=0.0 if greedy else rollout.temperature,
            top_p=1.0 if greedy else rollout.top_p,
            top_k=0 if greedy else rollout.top_k,
            min_p=0.0 if greedy or rollout.min_p is None else rollout.min_p,
            repetition_penalty=rollout.repetition_penalty,
            max_tokens=rollout.max_completion_length,
            seed=request_seed(config.train.seed, kind, step, index),
        )
        for index in range(count)
    ]


def to_train_batch(outputs: Sequence[RequestOutput], advantages: torch.Tensor) -> TrainBatch:
    """Rows in generation order: prompt 0's G completions, then prompt 1's, ...

    advantages: [B] float32, B = number of completions.
    """
    rows = [(output, completion) for output in outputs for completion in output.outputs]
    assert len(rows) == len(advantages), "one advantage per completion"
    return TrainBatch(
        prompt_ids=[output.prompt_token_ids for output, _ in rows],
        completion_ids=[completion.token_ids for _, completion in rows],
        advantages=advantages,
        sampling_logprobs=[completion.logprobs for _, completion in rows],
        ref_logprobs=None,
        truncated=[completion.finish_reason == "length" for _, completion in rows],
    )


def repeat_rows(rows: Sequence[PromptRow], outputs: Sequence[RequestOutput]) -> list[PromptRow]:
    """The prompt row of each completion, in generation order."""
    return [row for row, output in zip(rows, outputs, strict=True) for _ in output.outputs]
