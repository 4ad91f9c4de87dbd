"""Scored sequences -> packed micro-batches without padding.

It does not run the model and does not know the loss. A micro-batch is one row of T tokens in which segments lie side
by side; each segment attends to itself causally and, before that, to at most one other segment in full: a completion
to its prompt. So the completions of one prompt share a single copy of it, in forward and backward alike.

Legend: T packed tokens · S segments · N scored tokens (completion tokens whose log-probability is wanted).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(kw_only=True, slots=True)
class TrainBatch:
    """One generation batch, row i of every field being the same completion, in generation order.

    Example: two completions of the prompt [5, 6]: prompt_ids [[5, 6], [5, 6]], completion_ids [[7, 2], [8]],
    advantages tensor([0.7, -0.7]), truncated [False, True].
    """

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    advantages: Tensor
    """[B] float32, on the CPU."""
    truncated: list[bool]
    """Whether the completion ended by its length limit."""
    sampling_logprobs: list[list[float]] | None = None
    """The engine's log-probability of each completion token under the distribution it sampled from; NaN: unknown."""
    ref_logprobs: list[list[float]] | None = None
    """The reference's, at the learner's temperature."""
    loss_mask: list[list[int]] | None = None
    """1: the token is trained, 0: it is context only (a tool's answer); None: all are trained."""

    def __post_init__(self) -> None:
        num_rows = len(self.completion_ids)
        for key in ("prompt_ids", "advantages", "truncated", "sampling_logprobs", "ref_logprobs", "loss_mask"):
            value = getattr(self, key)
            if value is not None and len(value) != num_rows:
                raise ValueError(f"TrainBatch: {key} has {len(value)} rows, completion_ids has {num_rows}.")
        for row, (prompt, completion) in enumerate(zip(self.prompt_ids, self.completion_ids, strict=True)):
            if not prompt or not completion:
                raise ValueError(f"TrainBatch: row {row} has an empty {'completion' if prompt else 'prompt'}.")
        for key in ("sampling_logprobs", "ref_logprobs", "loss_mask"):
            for row, values in enumerate(getattr(self, key) or []):
                if len(values) != len(self.completion_ids[row]):
                    raise ValueError(
                        f"TrainBatch: {key}[{row}] has {len(values)} entries, its completion has "
                        f"{len(self.completion_ids[row])} tokens."
                    )

    def __len__(self) -> int:
        return len(self.completion_ids)

    def trained_counts(self, *, mask_truncated: bool) -> list[int]:
        """Trained tokens per row: 0 for a truncated row when those are masked."""
        return [
            0 if mask_truncated and truncated else sum(self.loss_mask[row]) if self.loss_mask else len(completion)
            for row, (completion, truncated) in enumerate(zip(self.completion_ids, self.truncated, strict=True))
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedRows:
    """One micro-batch on the device. `rows` are indices into the TrainBatch, in the order of the scored tokens."""

    rows: list[int]
    lengths: list[int]
    """Completion tokens per entry of `rows`; they sum to N."""
    input_ids: Tensor
    """[1, T] int64."""
    position_ids: Tensor
    """[1, T] int64: restart at 0 with each prompt; a completion continues its prompt's."""
    segments: Tensor
    """[S, 4] int32: start, length, start of the prefix, length of the prefix (0: none)."""
    sources: Tensor
    """[N] int64: packed position whose hidden state predicts the scored token."""
    targets: Tensor
    """[N] int64: the scored token."""
    longest_row: int
    """Tokens of the longest prompt with its completion."""

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]


def plan_micro_batches(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    tokens_per_micro_batch: int,
    share_prompts: bool,
) -> list[list[int]]:
    """Divides `rows` so that each part packs into at most `tokens_per_micro_batch` tokens, or is a single row.

    Rows of one prompt are kept together. First fit in order of length would pack tighter; the order here keeps the
    result independent of lengths and the last part alone unfilled.
    """
    order = {tuple(prompts[row]): None for row in rows}
    by_prompt: dict[tuple[int, ...], list[int]] = {prompt: [] for prompt in order}
    for row in rows:
        by_prompt[tuple(prompts[row])].append(row)
    plans: list[list[int]] = [[]]
    used = 0
    for prompt, members in by_prompt.items():
        prompt_in_plan = False
        for row in members:
            own = len(completions[row]) - 1
            cost = own + (0 if share_prompts and prompt_in_plan else len(prompt))
            if plans[-1] and used + cost > tokens_per_micro_batch:
                plans.append([])
                used, cost = 0, own + len(prompt)
            plans[-1].append(row)
            used += cost
            prompt_in_plan = True
    return [plan for plan in plans if plan]


def pack(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    rows: Sequence[int],
    *,
    device: torch.device,
    share_prompts: bool,
) -> PackedRows:
    """Lays `rows` side by side. A completion's last token predicts nothing and is left out."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[tuple[int, int, int, int]] = []
    sources: list[int] = []
    targets: list[int] = []
    prompt_start: dict[tuple[int, ...], int] = {}
    for row in rows:
        prompt, completion = tuple(prompts[row]), completions[row]
        inputs = completion[:-1]
        if not share_prompts:
            start = len(ids)
            ids += [*prompt, *inputs]
            positions += range(len(prompt) + len(inputs))
            segments.append((start, len(prompt) + len(inputs), 0, 0))
            sources += range(start + len(prompt) - 1, len(ids))
        else:
            if prompt not in prompt_start:
                prompt_start[prompt] = len(ids)
                segments.append((len(ids), len(prompt), 0, 0))
                ids += prompt
                positions += range(len(prompt))
            start = len(ids)
            ids += inputs
            positions += range(len(prompt), len(prompt) + len(inputs))
            if inputs:
                segments.append((start, len(inputs), prompt_start[prompt], len(prompt)))
            sources += [prompt_start[prompt] + len(prompt) - 1, *range(start, len(ids))]
        targets += completion
    return PackedRows(
        rows=list(rows),
        lengths=[len(completions[row]) for row in rows],
        input_ids=torch.tensor([ids], device=device),
        position_ids=torch.tensor([positions], device=device),
        segments=torch.tensor(segments, dtype=torch.int32, device=device),
        sources=torch.tensor(sources, device=device),
        targets=torch.tensor(targets, device=device),
        longest_row=max(positions) + 1,
    )


def pad_rows(values: Sequence[Sequence[float]], *, device: torch.device) -> Tensor:
    """Ragged rows -> [B, longest] float32 on `device`, filled up with 0."""
    width = max((len(row) for row in values), default=0)
    return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in values], dtype=torch.float32, device=device)


def unpack(scored_N: Tensor, lengths: Sequence[int]) -> Tensor:
    """Scored tokens in a row -> [B, longest], filled up with 0; differentiable."""
    width = max(lengths)
    index = [row * width + column for row, length in enumerate(lengths) for column in range(length)]
    flat = scored_N.new_zeros(len(lengths) * width)
    return flat.index_copy(0, torch.tensor(index, device=scored_N.device), scored_N).view(len(lengths), width)
