"""Loss, gradients and metrics against TRL 1.16's own GRPOTrainer on the same batch, fp32."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from rlneuron.trainer.batch import TrainBatch
from rlneuron.trainer.config import LearnerConfig
from rlneuron.trainer.learner import Learner
from rlneuron.trainer.losses import CORRECTION_MODES
from tests.trainer import models

ROWS = 12
MAX_COMPLETION = 11


def tokenizer() -> PreTrainedTokenizerFast:
    words = WordLevel({f"w{i}": i for i in range(models.VOCAB)}, unk_token="w3")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="w0", eos_token="w2", unk_token="w3")


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(tmp_path_factory.mktemp("trl")),
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS,
        num_generations=4,
        max_completion_length=MAX_COMPLETION,
        temperature=0.7,
        disable_dropout=True,
    )
    made = GRPOTrainer(
        model=models.llama(),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "w5 w6"}] * 8),
        processing_class=tokenizer(),
    )
    made.current_gradient_accumulation_steps = 1
    return made


def padded(rows: list[list[Any]], *, left: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    fill = lambda row, x: [x] * (width - len(row)) + row if left else row + [x] * (width - len(row))  # noqa: E731
    return torch.tensor([fill(r, 0) for r in rows]).to(dtype), torch.tensor([fill([1] * len(r), 0) for r in rows])


def by_trl(trainer: GRPOTrainer, batch: TrainBatch, config: LearnerConfig, old: list[Tensor] | None) -> dict[str, Any]:
    """Loss, gradients and metrics by TRL. Its attributes are set as its constructor would set them."""
    trainer.loss_type, trainer.beta = config.loss_type, config.beta
    trainer.epsilon_low, trainer.epsilon_high = config.epsilon, config.upper_epsilon
    trainer.importance_sampling_level = config.importance_sampling_level
    trainer.args.delta, trainer.args.use_bias_correction_kl = config.delta, config.use_bias_correction_kl
    trainer.entropy_coef, trainer._entropy_bonus_enabled = config.entropy_coef, config.entropy_coef != 0
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = batch.sampling_logprobs is not None
    trainer._metrics["train"].clear()
    prompt_ids, prompt_mask = padded(batch.prompt_ids, left=True, dtype=torch.long)
    completion_ids, completion_mask = padded(batch.completion_ids, dtype=torch.long)
    if config.mask_truncated_completions:
        completion_mask = completion_mask * ~torch.tensor(batch.truncated)[:, None]
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": batch.advantages,
        "num_items_in_batch": completion_mask.sum(),
    }
    if batch.loss_mask is not None:
        inputs["tool_mask"] = padded(batch.loss_mask, dtype=torch.long)[0]
        inputs["num_items_in_batch"] = (completion_mask * inputs["tool_mask"]).sum()
    if old is not None:
        inputs["old_per_token_logps"] = padded([x.tolist() for x in old])[0]
    if batch.ref_logprobs is not None:
        inputs["ref_per_token_logps"] = padded(batch.ref_logprobs)[0]
    if batch.sampling_logprobs is not None:
        inputs["importance_sampling_ratio"] = correction_by_hand(batch, config, old or [])
    trainer.model.train()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return {
        "loss": loss.item(),
        "grads": {name: p.grad.clone() for name, p in trainer.model.named_parameters()},
        "metrics": {name: values[0] for name, values in trainer._metrics["train"].items()},
    }


def correction_by_hand(batch: TrainBatch, config: LearnerConfig, old: list[Tensor]) -> Tensor:
    """TRL computes this ratio in the middle of its generation; here it is, in plain loops, from its documentation."""
    low = (
        config.vllm_importance_sampling_clip_min if config.vllm_importance_sampling_clip_min is not None else -math.inf
    )
    high = (
        config.vllm_importance_sampling_clip_max if config.vllm_importance_sampling_clip_max is not None else math.inf
    )
    mode = config.vllm_importance_sampling_mode

    def bound(ratio: float) -> float:
        if mode.endswith("truncate"):
            return min(max(ratio, low), high)
        return ratio if low <= ratio <= high else 0.0

    rows = []
    for i, (new, sampled) in enumerate(zip(old, batch.sampling_logprobs or [], strict=True)):
        kept = 0.0 if config.mask_truncated_completions and batch.truncated[i] else 1.0
        difference = [0.0 if math.isnan(s) else kept * (n - s) for n, s in zip(new.tolist(), sampled, strict=True)]
        if mode.startswith("sequence"):
            rows.append([bound(math.exp(sum(difference)))])
        else:
            rows.append([bound(math.exp(d)) for d in difference])
    return padded(rows)[0]


def by_us(batch: TrainBatch, config: LearnerConfig, old: list[Tensor] | None) -> dict[str, Any]:
    learner = Learner(models.llama(), config, models.DEVICE)
    counts = batch.trained_counts(mask_truncated=config.mask_truncated_completions)
    captured: dict[str, Tensor] = {}
    learner.optimizer.step = lambda: captured.update(  # type: ignore[method-assign,assignment]
        {name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None}
    )
    rows = list(range(len(batch)))
    with learner.packed.attention():
        metrics = learner._step(
            batch, rows, learner._plan(batch, rows, counts), counts, None if old is None else dict(enumerate(old))
        )
    return {"loss": metrics["loss"], "grads": captured, "metrics": metrics}


def old_logprobs(batch: TrainBatch, scale: float = 0.3) -> list[Tensor]:
    """Those of other weights, so that ratios are away from 1 on both sides and some are clipped."""
    generator = torch.Generator().manual_seed(7)
    model = models.llama()
    with torch.no_grad():
        rows = [
            models.own_logprobs(model, p, c, 0.7) for p, c in zip(batch.prompt_ids, batch.completion_ids, strict=True)
        ]
    return [row + scale * torch.randn(row.shape, generator=generator) for row in rows]


def config(**overrides: Any) -> LearnerConfig:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": ROWS,
        "max_steps": 10,
        "max_completion_length": MAX_COMPLETION,
        "temperature": 0.7,
        "max_grad_norm": 0.0,
        "tokens_per_micro_batch": 40,
        "vllm_importance_sampling_correction": False,
    }
    return LearnerConfig(**{**settings, **overrides})


METRICS = ("entropy", "kl", "policy_loss", "clip_ratio/low_mean", "clip_ratio/low_min", "clip_ratio/high_mean",
           "clip_ratio/high_max", "clip_ratio/region_mean")  # fmt: skip

CASES: list[dict[str, Any]] = [
    *(
        {"loss_type": loss_type, "beta": beta, "truncated": truncated}
        for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo")
        for beta in (0.0, 0.04)
        for truncated in (False, True)
    ),
    {"epsilon_high": 0.28},
    {"epsilon": 0.1, "epsilon_high": 0.4, "delta": 2.0},
    {"epsilon": 0.1, "delta": 1.3, "beta": 0.1, "loss_type": "grpo"},
    {"importance_sampling_level": "sequence"},
    {"importance_sampling_level": "sequence", "loss_type": "grpo", "beta": 0.04, "epsilon": 0.01, "truncated": True},
    {"importance_sampling_level": "sequence", "loss_type": "dr_grpo", "delta": 1.1, "epsilon": 0.01},
    {"beta": 0.04, "use_bias_correction_kl": False},
    {"entropy_coef": 0.3},
    {"entropy_coef": 0.3, "loss_type": "grpo", "beta": 0.04, "truncated": True},
    {"loss_mask": True},
    {"loss_mask": True, "loss_type": "grpo", "truncated": True, "importance_sampling_level": "sequence"},
    {"old": False},
    {"old": False, "beta": 0.04, "loss_type": "dr_grpo"},
    *({"mode": mode, "clip_max": 1.5, "clip_min": low} for mode in CORRECTION_MODES for low in (None, 0.6)),
    {"mode": "sequence_mask", "clip_max": None, "loss_type": "grpo", "truncated": True, "beta": 0.04},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(f"{k}={v}" for k, v in case.items()))
def test_loss_gradients_and_metrics_equal_trl(trainer: GRPOTrainer, case: dict[str, Any]) -> None:
    case = dict(case)
    mode, truncated = case.pop("mode", None), case.pop("truncated", False)
    batch = models.batch(seed=3, ref=case.get("beta", 0) > 0)
    old = old_logprobs(batch) if case.pop("old", True) else None
    if case.pop("loss_mask", False):
        batch.loss_mask = [[i % 3 != 1 for i in range(len(c))] for c in batch.completion_ids]  # type: ignore[misc]
        batch.loss_mask[2] = [0] * len(batch.completion_ids[2])
    if mode is not None:
        batch.sampling_logprobs = [(row + 0.2 * torch.randn_like(row)).tolist() for row in old_logprobs(batch)]
        batch.sampling_logprobs[0][0] = math.nan
        case |= {
            "vllm_importance_sampling_correction": True,
            "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_max": case.pop("clip_max"),
            "vllm_importance_sampling_clip_min": case.pop("clip_min", None),
        }
    settings = config(**case, mask_truncated_completions=truncated)
    theirs, ours = by_trl(trainer, batch, settings, old), by_us(batch, settings, old)

    assert theirs["loss"] != 0.0 or old is None
    assert math.isclose(ours["loss"], theirs["loss"], rel_tol=1e-5, abs_tol=1e-6)
    assert set(ours["grads"]) == set(theirs["grads"])
    largest = max(g.abs().max().item() for g in theirs["grads"].values())
    assert largest > 0.0
    for name, gradient in theirs["grads"].items():
        torch.testing.assert_close(ours["grads"][name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=name)
    for name in METRICS:
        if name in theirs["metrics"]:
            assert math.isclose(ours["metrics"][name], theirs["metrics"][name], rel_tol=1e-5, abs_tol=1e-6), name


def test_accumulated_steps_equal_trl(trainer: GRPOTrainer) -> None:
    """Three micro steps of four rows: TRL divides by the accumulation steps, the learner by global counts."""
    batch = models.batch(seed=5, ref=True)
    old = old_logprobs(batch)
    for loss_type in ("dapo", "grpo", "dr_grpo", "bnpo"):
        settings = config(loss_type=loss_type, beta=0.04, per_device_train_batch_size=4, gradient_accumulation_steps=3)
        total: dict[str, Tensor] = {}
        num_tokens = sum(map(len, batch.completion_ids))
        trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 3
        try:
            for start in range(0, ROWS, 4):
                part = slice(start, start + 4)
                sub = TrainBatch(
                    prompt_ids=batch.prompt_ids[part],
                    completion_ids=batch.completion_ids[part],
                    advantages=batch.advantages[part],
                    truncated=batch.truncated[part],
                    ref_logprobs=(batch.ref_logprobs or [])[part],
                )
                own_tokens = sum(map(len, sub.completion_ids))
                scale = own_tokens / num_tokens if loss_type == "dapo" else 1.0  # by_trl passes the part's own count
                for name, g in by_trl(trainer, sub, settings, old[part])["grads"].items():
                    total[name] = total.get(name, torch.zeros_like(g)) + g * scale
        finally:
            trainer.current_gradient_accumulation_steps = trainer.args.steps_per_generation = 1
        ours = by_us(batch, settings, old)["grads"]
        largest = max(g.abs().max().item() for g in total.values())
        for name, gradient in total.items():
            torch.testing.assert_close(ours[name], gradient, rtol=1e-5, atol=1e-5 * largest, msg=f"{loss_type} {name}")
