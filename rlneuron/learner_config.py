"""The learner's settings, gathered from the sections of a run file."""

from __future__ import annotations

from rlneuron.batch_arithmetic import BatchArithmetic
from rlneuron.config import RunConfig
from rlneuron.trainer import LearnerConfig


def learner_config(config: RunConfig, arithmetic: BatchArithmetic) -> LearnerConfig:
    """Keys keep their names; batch sizes and `max_steps` are the resolved ones."""
    train, algo, rollout = config.train, config.algo, config.rollout
    loss_type = algo.loss_type
    assert loss_type in ("dapo", "grpo", "dr_grpo", "bnpo"), "config_sections.NOT_YET refuses the others"
    return LearnerConfig(
        learning_rate=train.learning_rate,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_steps=train.warmup_steps,
        max_steps=arithmetic.max_steps,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_epsilon=train.adam_epsilon,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        per_device_train_batch_size=train.per_device_train_batch_size,
        gradient_accumulation_steps=train.gradient_accumulation_steps,
        steps_per_generation=arithmetic.steps_per_generation,
        tokens_per_micro_batch=train.tokens_per_micro_batch,
        bf16=train.bf16,
        gradient_checkpointing=config.model.gradient_checkpointing,
        disable_dropout=config.model.disable_dropout,
        seed=train.seed,
        loss_type=loss_type,
        epsilon=algo.epsilon,
        epsilon_high=algo.epsilon_high,
        delta=algo.delta,
        beta=algo.beta,
        use_bias_correction_kl=algo.use_bias_correction_kl,
        importance_sampling_level=algo.importance_sampling_level,
        num_iterations=algo.num_iterations,
        mask_truncated_completions=algo.mask_truncated_completions,
        entropy_coef=algo.entropy_coef,
        temperature=rollout.temperature,
        max_completion_length=rollout.max_completion_length,
        vllm_importance_sampling_correction=rollout.vllm_importance_sampling_correction,
        vllm_importance_sampling_mode=rollout.vllm_importance_sampling_mode,
        vllm_importance_sampling_clip_max=rollout.vllm_importance_sampling_clip_max,
        vllm_importance_sampling_clip_min=rollout.vllm_importance_sampling_clip_min,
    )
