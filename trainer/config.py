"""What the learner can be told: TRL's key names and defaults, checked when the object is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlneuron.trainer.losses import CORRECTION_MODES, LOSS_TYPES
from rlneuron.trainer.schedules import SCHEDULES


def _one_of(key: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{key}: {value!r}; write one of {', '.join(map(repr, allowed))}.")


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerConfig:
    """Settings of one learner. Where TRL's GRPOConfig has the key, name and default are TRL 1.16's.

    A generation batch is `per_device_train_batch_size * steps_per_generation` completions; an optimizer step takes
    `per_device_train_batch_size * gradient_accumulation_steps` of them. Example: 8, 16 and 16: 128 completions, one
    optimizer step.
    """

    per_device_train_batch_size: int = 8
    """Completions per micro step; how they are really packed is up to `tokens_per_micro_batch`."""
    gradient_accumulation_steps: int = 1
    """Micro steps per optimizer step."""
    steps_per_generation: int | None = None
    """Micro steps per generation batch; None: gradient_accumulation_steps."""
    num_iterations: int = 1
    """How often a generation batch is trained on (mu)."""
    max_steps: int
    """Optimizer steps of the whole run; the schedules end there."""
    learning_rate: float = 1e-6
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    warmup_steps: float = 0
    """Optimizer steps; below 1 a fraction of max_steps."""
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only, not to biases and norm weights, as transformers' Trainer does."""
    max_grad_norm: float = 1.0
    """0: gradients are not clipped."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    """None: epsilon."""
    delta: float | None = None
    """Upper bound of the ratio in the unclipped branch; it must exceed 1 + epsilon_high to act on A < 0 alone."""
    beta: float = 0.0
    """Weight of the KL to the reference; above 0 every batch must bring ref_logprobs."""
    use_bias_correction_kl: bool = True
    importance_sampling_level: Literal["token", "sequence"] = "token"
    entropy_coef: float = 0.0
    mask_truncated_completions: bool = False
    vllm_importance_sampling_correction: bool = True
    """Named after TRL's; here it acts on our engine's log-probabilities, when the batch brings them."""
    vllm_importance_sampling_mode: Literal["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"] = (
        "sequence_mask"
    )
    vllm_importance_sampling_clip_max: float | None = 3.0
    vllm_importance_sampling_clip_min: float | None = None
    temperature: float = 1.0
    """Divides the logits, exactly as in the engine."""
    max_completion_length: int = 512
    """Tokens; dr_grpo divides by it."""
    bf16: bool = False
    """Autocast to bfloat16; parameters, gradients and optimizer state stay float32. TRL's default is true."""
    gradient_checkpointing: bool = False
    """Recompute each layer in the backward instead of keeping its activations. TRL's default is true."""
    disable_dropout: bool = False
    """Sets every dropout of the model to 0."""
    tokens_per_micro_batch: int = 2048
    """Tokens packed into one forward and backward; no effect on the result, only on memory and speed. Not in TRL."""
    share_prompts: bool = True
    """Compute a prompt once for all its completions in a micro-batch; no effect on the result. Not in TRL."""
    seed: int = 42
    """Of the shuffling of a generation batch."""

    def __post_init__(self) -> None:
        _one_of("loss_type", self.loss_type, LOSS_TYPES)
        _one_of("lr_scheduler_type", self.lr_scheduler_type, SCHEDULES)
        _one_of("importance_sampling_level", self.importance_sampling_level, ("token", "sequence"))
        _one_of("vllm_importance_sampling_mode", self.vllm_importance_sampling_mode, CORRECTION_MODES)
        for key in ("per_device_train_batch_size", "gradient_accumulation_steps", "num_iterations", "max_steps"):
            self._at_least(key, 1)
        for key in ("tokens_per_micro_batch", "max_completion_length"):
            self._at_least(key, 1)
        for key in ("learning_rate", "weight_decay", "max_grad_norm", "beta", "warmup_steps", "epsilon"):
            self._at_least(key, 0)
        if self.temperature <= 0:
            raise ValueError(f"temperature: {self.temperature}; the learner needs a number above 0.")
        if self.micro_steps_per_generation % self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation: {self.steps_per_generation} is no multiple of gradient_accumulation_steps: "
                f"{self.gradient_accumulation_steps}; a generation batch must feed whole optimizer steps."
            )

    def _at_least(self, key: str, minimum: int) -> None:
        value = getattr(self, key)
        if not value >= minimum:
            raise ValueError(f"{key}: {value}; write a number of at least {minimum}.")

    @property
    def micro_steps_per_generation(self) -> int:
        return self.steps_per_generation or self.gradient_accumulation_steps

    @property
    def rows_per_step(self) -> int:
        """Completions of one optimizer step."""
        return self.per_device_train_batch_size * self.gradient_accumulation_steps

    @property
    def rows_per_generation(self) -> int:
        """Completions of one generation batch."""
        return self.per_device_train_batch_size * self.micro_steps_per_generation

    @property
    def steps_per_batch(self) -> int:
        """Optimizer steps that one generation batch feeds."""
        return self.micro_steps_per_generation // self.gradient_accumulation_steps * self.num_iterations

    @property
    def upper_epsilon(self) -> float:
        return self.epsilon if self.epsilon_high is None else self.epsilon_high
