"""The learner: what the update must not depend on, what it must do, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlneuron.trainer import Learner, LearnerConfig, TrainBatch
from rlneuron.trainer.losses import LOSS_TYPES
from tests.trainer import models

ROWS = 12


def config(**overrides: Any) -> LearnerConfig:
    settings = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 10,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_completion_length": 9,
        "max_grad_norm": 0.0,
    }
    return LearnerConfig(**{**settings, **overrides})


def weights(learner: Learner) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in learner.parameters.items()}


def gradients(
    batch: TrainBatch, make: Any = models.llama, **overrides: Any
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Gradients and metrics of the first optimizer step."""
    learner = Learner(make(), config(**overrides), models.DEVICE)
    captured: dict[str, Tensor] = {}
    learner.optimizer.step = lambda: captured.update(  # type: ignore[method-assign,assignment]
        {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}
    )
    return captured, learner.update(batch)[0]


def assert_same(left: Any, right: Any) -> None:
    """Gradients to 1e-6 of the largest, metrics to 1e-5."""
    largest = max(g.abs().max().item() for g in left[0].values())
    assert largest > 0
    for name, gradient in left[0].items():
        torch.testing.assert_close(right[0][name], gradient, rtol=1e-5, atol=1e-6 * largest, msg=name)
    assert right[1] == pytest.approx(left[1], rel=1e-5, abs=1e-6)


def reordered(batch: TrainBatch, order: list[int]) -> TrainBatch:
    def pick(values: Any) -> Any:
        return None if values is None else values[order] if isinstance(values, Tensor) else [values[i] for i in order]

    fields = {field.name: pick(getattr(batch, field.name)) for field in dataclasses.fields(batch)}
    return TrainBatch(**fields)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_packing_accumulation_and_row_order_do_not_matter(loss_type: str) -> None:
    batch = models.batch(noise=0.2, ref=True)
    # bnpo is defined by its micro steps, so that dividing into other micro steps is another loss.
    options = {"loss_type": loss_type, "beta": 0.04}
    whole = gradients(batch, **options, tokens_per_micro_batch=10_000)
    assert_same(whole, gradients(batch, **options, tokens_per_micro_batch=17))
    assert_same(whole, gradients(batch, **options, tokens_per_micro_batch=1))
    assert_same(whole, gradients(batch, **options, share_prompts=False, tokens_per_micro_batch=33))
    assert_same(whole, gradients(reordered(batch, list(range(ROWS))[::-1]), **options))
    if loss_type != "bnpo":
        for size in (1, 3, 6):
            split = {"per_device_train_batch_size": size, "gradient_accumulation_steps": ROWS // size}
            assert_same(whole, gradients(batch, **options, **split))


@pytest.mark.parametrize("make", [models.qwen3, models.gpt2])
def test_other_models_do_not_feel_the_packing_either(make: Any) -> None:
    batch = models.batch()
    assert_same(gradients(batch, make), gradients(batch, make, share_prompts=False, tokens_per_micro_batch=1))


def test_parts_of_a_step_sum_to_it_whatever_rank_computes_them() -> None:
    """Two ranks with half of the rows each, and the step's global row weights: gradients add up to the whole's."""
    batch = models.batch(noise=0.2)
    whole, _ = gradients(batch, loss_type="grpo", vllm_importance_sampling_mode="token_truncate")
    rows = list(range(ROWS))
    total: dict[str, Tensor] = {}
    for part in (rows[:5], rows[5:]):
        learner = Learner(
            models.llama(), config(loss_type="grpo", vllm_importance_sampling_mode="token_truncate"), models.DEVICE
        )
        policy, _ = learner._row_weights(rows, batch.trained_counts(mask_truncated=False))
        with learner.packed.attention():
            learner._forward_backward(batch, part, None, torch.tensor([policy[row] for row in part]), None)
        for name, parameter in learner.parameters.items():
            assert parameter.grad is not None
            total[name] = total.get(name, torch.zeros_like(parameter)) + parameter.grad
    assert_same((whole, {}), (total, {}))


def test_several_steps_from_one_generation_batch_use_each_steps_own_counts() -> None:
    """Four optimizer steps of one generation batch equal four generation batches of a quarter each."""
    batch = models.batch(num_prompts=4, group=3)
    settings = {"per_device_train_batch_size": 3, "steps_per_generation": 4, "learning_rate": 1e-3}
    learner = Learner(models.llama(), config(**settings), models.DEVICE)
    steps = learner._divide(12)
    results = learner.update(batch)
    assert len(results) == 4 and learner.global_step == 4
    assert results[0]["clip_ratio/region_mean"] == 0.0
    first = Learner(models.llama(), config(per_device_train_batch_size=3, learning_rate=1e-3), models.DEVICE)
    alone = first.update(reordered(batch, steps[0]))[0]
    assert {k: alone[k] for k in ("loss", "grad_norm", "num_trained_tokens")} == pytest.approx(
        {k: results[0][k] for k in ("loss", "grad_norm", "num_trained_tokens")}, rel=1e-5
    )


def test_the_last_generation_batch_is_used_up_to_max_steps() -> None:
    settings = {"per_device_train_batch_size": 3, "steps_per_generation": 4, "num_iterations": 2, "max_steps": 5}
    learner = Learner(models.llama(), config(**settings), models.DEVICE)
    assert len(learner.update(models.batch(num_prompts=4, group=3))) == 5
    before = weights(learner)
    assert learner.update(models.batch(num_prompts=4, group=3)) == []
    assert learner.global_step == 5
    assert all(torch.equal(before[name], new) for name, new in weights(learner).items())


def test_second_iteration_keeps_the_old_logprobs() -> None:
    batch = models.batch()
    learner = Learner(models.llama(), config(num_iterations=2, learning_rate=3e-2), models.DEVICE)
    results = learner.update(batch)
    assert results[0]["clip_ratio/region_mean"] == 0.0 < results[1]["clip_ratio/region_mean"]
    still = Learner(models.llama(), config(num_iterations=2, learning_rate=0.0), models.DEVICE).update(batch)
    assert still[0] == still[1]


def test_ratio_is_exactly_one_while_the_weights_are_unchanged() -> None:
    """With learning rate 0, clipping at 0 would act on any ratio but 1, in every step and pass."""
    batch = models.batch(num_prompts=4, group=3, longest=20)
    settings = {
        "epsilon": 0.0, "learning_rate": 0.0, "num_iterations": 2, "per_device_train_batch_size": 3,
        "steps_per_generation": 4, "tokens_per_micro_batch": 30,
    }  # fmt: skip
    results = Learner(models.llama(), config(**settings), models.DEVICE).update(batch)
    assert len(results) == 8
    assert [r["clip_ratio/region_mean"] for r in results] == [0.0] * 8


def test_groups_without_spread_change_nothing_but_are_counted() -> None:
    batch = models.batch()
    batch.advantages = torch.zeros(ROWS)
    learner = Learner(models.llama(), config(), models.DEVICE)
    before = weights(learner)
    result = learner.update(batch)[0]
    assert result["loss"] == 0.0 and result["grad_norm"] == 0.0 and learner.global_step == 1
    assert result["entropy"] > 0.0 and result["num_trained_tokens"] == sum(map(len, batch.completion_ids))
    assert all(torch.equal(before[name], p) for name, p in learner.parameters.items())


def test_rows_without_gradient_are_not_missed() -> None:
    """Skipping the backward of rows with advantage 0 gives the gradient of doing it, and all metrics count them."""
    batch = models.batch(noise=0.2)
    batch.advantages[::2] = 0.0
    skipped = gradients(batch)
    Learner._needs_gradient, kept = (lambda self, batch, row: True), Learner._needs_gradient  # type: ignore[method-assign,assignment]
    try:
        assert_same(gradients(batch), skipped)
    finally:
        Learner._needs_gradient = kept  # type: ignore[method-assign]


def test_all_truncated_and_masked_leaves_weights_and_moments_alone() -> None:
    batch = models.batch()
    learner = Learner(models.llama(), config(mask_truncated_completions=True, weight_decay=0.1), models.DEVICE)
    batch.truncated = [False] * ROWS
    learner.update(batch)
    before, moments = weights(learner), {k: v["exp_avg"].clone() for k, v in learner.optimizer.state.items()}
    batch.truncated = [True] * ROWS
    result = learner.update(batch)[0]
    assert result["loss"] == 0.0 and result["skipped_update"] == 1.0 and result["completions/masked_ratio"] == 1.0
    assert learner.global_step == 2 and all(math.isfinite(value) for value in result.values())
    assert all(torch.equal(before[name], p) for name, p in learner.parameters.items())
    assert all(torch.equal(moments[p], state["exp_avg"]) for p, state in learner.optimizer.state.items())


def test_the_final_eos_is_trained_and_pad_valued_prompt_tokens_are_attended() -> None:
    batch = models.batch(num_prompts=1, group=2)
    batch.prompt_ids = [[0, 5, 0], [0, 5, 0]]
    batch.completion_ids = [[5, 7, 2], [5, 7, 9]]
    batch.advantages = torch.tensor([1.0, 0.0])
    # Without a padding_idx, whose embedding is a zero vector that the first norm makes unstable.
    model = models.llama(pad_token_id=None)
    learner = Learner(model, config(per_device_train_batch_size=2, learning_rate=1e-4), models.DEVICE)
    before = learner.logprobs(batch)[0]
    wanted = models.own_logprobs(learner.model, [0, 5, 0], [5, 7, 2])
    torch.testing.assert_close(before, wanted.detach(), rtol=1e-5, atol=1e-5)
    assert learner.update(batch)[0]["num_trained_tokens"] == 6.0
    assert (learner.logprobs(batch)[0] > before).all(), "the last token has no gradient"


def test_training_raises_what_is_rewarded() -> None:
    batch = models.batch()
    batch.advantages = torch.tensor([1.0 if i % 4 == 0 else -1 / 3 for i in range(ROWS)])
    learner = Learner(models.llama(), config(learning_rate=5e-3, max_grad_norm=1.0), models.DEVICE)

    def margin() -> float:
        rows = [row.mean().item() for row in learner.logprobs(batch)]
        return sum(rows[i] for i in range(0, ROWS, 4)) / 3 - sum(rows[i] for i in range(ROWS) if i % 4) / 9

    before = margin()
    for _ in range(8):
        learner.update(batch)
    assert margin() > before + 0.5


def test_raising_beta_keeps_the_policy_near_the_reference() -> None:
    distances = []
    for beta in (0.0, 1.0):
        batch = models.batch(num_prompts=3)
        learner = Learner(models.llama(), config(beta=beta, learning_rate=1e-2, max_grad_norm=1.0), models.DEVICE)
        start = learner.logprobs(batch)
        batch.ref_logprobs = [row.tolist() for row in start]
        for _ in range(6):
            last = learner.update(batch)[0]
        assert ("kl" in last) == (beta > 0)
        distances.append(sum(((a - b) ** 2).sum().item() for a, b in zip(learner.logprobs(batch), start, strict=True)))
    assert distances[1] < 0.5 * distances[0]


def test_a_loss_that_is_not_finite_changes_nothing_and_training_goes_on() -> None:
    batch = models.batch(noise=0.1)
    assert batch.sampling_logprobs is not None
    batch.sampling_logprobs[3][0] = -math.inf
    learner = Learner(
        models.llama(),
        config(vllm_importance_sampling_mode="token_mask", vllm_importance_sampling_clip_max=None),
        models.DEVICE,
    )
    before = weights(learner)
    with pytest.raises(FloatingPointError, match=r"optimizer step 0: the loss is .*; the weights were left as they"):
        learner.update(batch)
    assert all(torch.equal(before[name], p) for name, p in learner.parameters.items())
    assert learner.global_step == 0 and not learner.optimizer.state
    batch.sampling_logprobs[3][0] = -3.0
    assert math.isfinite(learner.update(batch)[0]["loss"])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"advantages": torch.tensor([0.0] * 5 + [math.nan] + [0.0] * 6)}, {}, "advantage of row 5 is nan"),
        ({}, {"beta": 0.1}, "beta: 0.1 needs the reference's log-probabilities"),
        (
            {},
            {"per_device_train_batch_size": 8},
            "has 12 completions; per_device_train_batch_size: 8 .* = 8 are",
        ),
    ],
)
def test_batches_that_do_not_fit_are_refused(change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    batch = models.batch()
    for name, value in change.items():
        setattr(batch, name, value)
    with pytest.raises(ValueError, match=message):
        Learner(models.llama(), config(**options), models.DEVICE).update(batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "gspo"}, "loss_type: 'gspo'; write one of 'dapo', 'grpo', 'dr_grpo', 'bnpo'"),
        ({"lr_scheduler_type": "cosine_decay"}, "lr_scheduler_type: 'cosine_decay'; write one of"),
        ({"temperature": 0.0}, "temperature: 0.0; the learner needs a number above 0"),
        ({"learning_rate": -1.0}, "learning_rate: -1.0; write a number of at least 0"),
        ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, "steps_per_generation: 3 is no multiple of"),
    ],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(**options)


def test_gradient_checkpointing_gives_the_same_step() -> None:
    batch = models.batch()
    assert_same(gradients(batch), gradients(batch, gradient_checkpointing=True))


def test_bf16_is_near_fp32_and_keeps_fp32_weights() -> None:
    batch = models.batch()
    exact, rough = gradients(batch), gradients(batch, bf16=True)
    assert all(g.dtype == torch.float32 for g in rough[0].values())
    norm = math.sqrt(sum(((rough[0][n] - g) ** 2).sum().item() for n, g in exact[0].items()))
    assert 0.0 < norm < 0.05 * exact[1]["grad_norm"]
    assert rough[1]["loss"] == pytest.approx(exact[1]["loss"], abs=0.02)


def test_learning_rate_clipping_and_decay_reach_the_optimizer() -> None:
    batch = models.batch()
    settings = {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 4, "weight_decay": 0.1}
    learner = Learner(models.llama(), config(**settings, learning_rate=1.0, max_grad_norm=1e-9), models.DEVICE)
    before = weights(learner)
    assert learner.update(batch)[0]["learning_rate"] == 0.0
    assert all(torch.equal(before[name], p) for name, p in learner.parameters.items())
    result = learner.update(batch)[0]
    assert result["learning_rate"] == 0.5 and result["grad_norm"] > 1e-3
    # The clipped gradient is far below adam_epsilon, so matrices show weight decay alone: w * (1 - 0.5 * 0.1).
    for name, parameter in learner.parameters.items():
        wanted = before[name] * (0.95 if parameter.ndim >= 2 else 1.0)
        torch.testing.assert_close(parameter.detach(), wanted, rtol=0, atol=0.1, msg=name)
    assert [learner.update(batch)[0]["learning_rate"] for _ in range(2)] == [1.0, 0.5]


def test_the_same_seed_gives_the_same_weights_bit_for_bit() -> None:
    runs = []
    for seed in (1, 1, 2):
        learner = Learner(
            models.llama(), config(per_device_train_batch_size=6, steps_per_generation=2, seed=seed), models.DEVICE
        )
        learner.update(models.batch())
        runs.append(weights(learner))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])
