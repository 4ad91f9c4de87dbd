"""Packing: every token once, positions and sources right, within the budget."""

from __future__ import annotations

import pytest
import torch

from rlneuron.trainer.batch import TrainBatch, pack, pad_rows, plan_micro_batches, unpack
from tests.trainer import models

PROMPTS = [[5, 6, 7], [5, 6, 7], [8]]
COMPLETIONS = [[1, 2], [3], [4, 5, 6]]


def test_completions_share_one_copy_of_their_prompt() -> None:
    rows = pack(PROMPTS, COMPLETIONS, [0, 2, 1], device=models.DEVICE, share_prompts=True)
    assert rows.input_ids.tolist() == [[5, 6, 7, 1, 8, 4, 5]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert rows.segments.tolist() == [[0, 3, 0, 0], [3, 1, 0, 3], [4, 1, 0, 0], [5, 2, 4, 1]]
    assert rows.sources.tolist() == [2, 3, 4, 5, 6, 2]
    assert rows.targets.tolist() == [1, 2, 4, 5, 6, 3]
    assert rows.lengths == [2, 3, 1] and rows.rows == [0, 2, 1] and rows.longest_row == 4


def test_without_sharing_each_row_is_a_segment() -> None:
    rows = pack(PROMPTS, COMPLETIONS, [0, 1], device=models.DEVICE, share_prompts=False)
    assert rows.input_ids.tolist() == [[5, 6, 7, 1, 5, 6, 7]]
    assert rows.segments.tolist() == [[0, 4, 0, 0], [4, 3, 0, 0]]
    assert rows.sources.tolist() == [2, 3, 6]


@pytest.mark.parametrize("share_prompts", [True, False])
@pytest.mark.parametrize("budget", [1, 13, 25, 10_000])
def test_plans_hold_every_row_once_within_the_budget(budget: int, share_prompts: bool) -> None:
    batch = models.batch(num_prompts=5, group=6, seed=2)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(0)).tolist()
    arguments = (batch.prompt_ids, batch.completion_ids)
    plans = plan_micro_batches(*arguments, order, tokens_per_micro_batch=budget, share_prompts=share_prompts)
    assert sorted(row for plan in plans for row in plan) == list(range(30))
    for plan in plans:
        packed = pack(*arguments, plan, device=models.DEVICE, share_prompts=share_prompts)
        assert packed.num_tokens <= budget or len(plan) == 1
    if budget == 10_000:
        assert len(plans) == 1


def test_unpack_puts_rows_side_by_side_and_keeps_gradients() -> None:
    scored = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], requires_grad=True)
    rows = unpack(scored, [2, 3, 1])
    assert rows.tolist() == [[1, 2, 0], [3, 4, 5], [6, 0, 0]]
    (rows * torch.arange(9.0).view(3, 3)).sum().backward()
    assert scored.grad is not None and scored.grad.tolist() == [0, 1, 3, 4, 5, 6]
    assert pad_rows([[1], [2, 3]], device=models.DEVICE).tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_ids": [[1]]}, "prompt_ids has 1 rows, completion_ids has 3"),
        ({"advantages": torch.zeros(2)}, "advantages has 2 rows"),
        ({"completion_ids": [[1], [], [2]]}, "row 1 has an empty completion"),
        ({"prompt_ids": [[1], [2], []]}, "row 2 has an empty prompt"),
        ({"ref_logprobs": [[0.0], [0.0], [0.0]]}, r"ref_logprobs\[0\] has 1 entries, its completion has 2 tokens"),
    ],
)
def test_batches_that_do_not_fit_are_refused(change: dict[str, object], message: str) -> None:
    settings = {
        "prompt_ids": PROMPTS, "completion_ids": COMPLETIONS, "advantages": torch.zeros(3), "truncated": [False] * 3
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        TrainBatch(**{**settings, **change})  # type: ignore[arg-type]


def test_trained_counts() -> None:
    batch = TrainBatch(
        prompt_ids=PROMPTS,
        completion_ids=COMPLETIONS,
        advantages=torch.zeros(3),
        truncated=[True, False, False],
        loss_mask=[[1, 1], [1], [1, 0, 1]],
    )
    assert batch.trained_counts(mask_truncated=False) == [2, 1, 2]
    assert batch.trained_counts(mask_truncated=True) == [0, 1, 2]
