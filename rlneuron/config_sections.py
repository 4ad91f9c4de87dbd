"""The sections of a run file: every key with its type, default and meaning.

A key that also exists in TRL's GRPOConfig has TRL's name and default; `DEVIATIONS` lists every exception. A key that
has no effect does not exist, and a value that is planned but not built is refused (`NOT_YET`). Reading files and the
sentences of errors are in config.py, the arithmetic between keys in batch_arithmetic.py.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """8.0 is accepted as 8 (a spreadsheet or a calculator may have written it); 8.5 is left to be refused."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _no_number(value: Any) -> Any:
    """1 == True in Python; here it is a mistake."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError("a number")
    return value


def _listed(value: Any) -> Any:
    """YAML has lists only; the frozen configuration holds tuples."""
    return tuple(value) if isinstance(value, list) else value


def _reward_call(value: Any) -> Any:
    return {"func": value} if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_whole), Field(ge=1)]
Index = Annotated[int, BeforeValidator(_whole), Field(ge=0)]
Float = Annotated[float, Field()]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """Unknown keys are errors, types are exact, nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class ModelSection(Section):
    """What is trained."""

    path: Text
    """A local folder, a Hugging Face hub id, or rlneuron/quickstart (made and warm-started on first use)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the weights."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more arithmetic."""
    disable_dropout: bool = False
    """Set every dropout of the model to 0, so that rollout and learner are the same function."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class ReasoningGym(Section):
    """A task of the package reasoning-gym."""

    task: Text
    """Its name, such as spell_backward or chain_sum."""
    size: Count = 10_000
    """How many questions are drawn; repeated ones are dropped."""
    seed: Index = 0
    """Seed of the draw."""
    config: dict[str, Any] = Field(default_factory=dict)
    """The task's own settings."""


class EvalData(Section):
    """Held-out prompts; no training prompt equals one of them."""

    size: Index = 0
    """How many distinct prompts are held out of the training data (0: only with `path`)."""
    path: Text | None = None
    """A file, folder or hub id of its own, instead of `size`."""
    name: Text | None = None
    """Configuration name of a hub data set."""
    split: Text = "test"
    """Split of a hub data set or of a data set folder."""


class DataSection(Section):
    """Prompts: either `path` or `reasoning_gym`."""

    path: Text | None = None
    """A .jsonl or .parquet file, a `datasets` folder, or a hub id."""
    name: Text | None = None
    """Configuration name of a hub data set."""
    split: Text = "train"
    """Split of a hub data set or of a data set folder."""
    reasoning_gym: ReasoningGym | None = None
    """A task of reasoning-gym instead of `path`."""
    prompt_column: Text = "prompt"
    """The column with the prompt: text, or a list of {role, content} messages."""
    conversational: bool | None = None
    """true: a text prompt becomes one user message; false: plain text only; null: as the data has it."""
    system_prompt: Text | None = None
    """Put before conversations that have no system message."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Further arguments of the chat template."""
    shuffle_dataset: bool = True
    """A new order in every epoch, from the seed; false: the order of the data."""
    max_prompt_length: Count | None = None
    """Most tokens of a prompt; null: what the model can hold beside max_completion_length."""
    overlong_prompts: Literal["error", "filter", "truncate"] = "error"
    """What happens to longer prompts: stop before training, drop them, or keep their end."""
    eval: EvalData | None = None
    """Held-out prompts for evaluation."""


class RewardCall(Section):
    """A reward function with a name of its own or with arguments."""

    func: Text
    """A built-in name, module:function, or path/to/file.py:function."""
    name: Text | None = None
    """Name in the metrics rewards/<name>/mean; null: the function's own name."""
    args: dict[str, Any] | None = None
    """If given, `func` is called once with these and returns the reward function."""


class RewardSection(Section):
    """How completions are scored."""

    funcs: Annotated[
        tuple[Annotated[RewardCall, BeforeValidator(_reward_call)], ...], BeforeValidator(_listed), Field(min_length=1)
    ]
    """Reward functions: names, or {func, name, args}."""
    reward_weights: Annotated[tuple[Float, ...], BeforeValidator(_listed)] | None = None
    """One weight per function; null: all 1."""
    on_error: Literal["raise", "unscorable"] = "raise"
    """A function that raises or returns no number for a row: end the run, or count the row as not scored."""
    timeout_s: Positive = 60.0
    """Most wall seconds for one call of a function."""
    num_workers: Count = 1
    """Reward actors; they hold no core."""


class RolloutSection(Section):
    """How completions are generated."""

    num_generations: Annotated[int, BeforeValidator(_whole), Field(ge=2)] = 8
    """Completions per prompt (the group)."""
    max_completion_length: Count = 512
    """Most tokens of a completion."""
    temperature: Positive = 1.0
    """Divides the logits, in generation and in learning."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keep the most probable tokens that hold this probability; 1: all."""
    top_k: Annotated[int, BeforeValidator(_whole), Field(ge=-1)] = 0
    """Keep the k most probable tokens; 0 (and -1): all."""
    min_p: Fraction | None = None
    """Drop tokens below this share of the most probable token's probability."""
    repetition_penalty: Positive = 1.0
    """Divides positive and multiplies negative logits of tokens that were seen; 1: off."""
    num_workers: Count = 2
    """Rollout actors, one core each."""
    max_num_seqs: Count = 128
    """Most sequences that one actor decodes at the same time."""
    max_num_batched_tokens: Count = 2048
    """Most tokens of one engine step."""
    kv_cache_tokens: Count | None = None
    """Size of one actor's KV cache; null: from the free memory of its core."""
    enable_prefix_caching: bool = True
    """Keep the KV blocks of shared prompt beginnings."""
    batch_invariant: bool = False
    """Results that do not depend on the neighbours in a batch, bit for bit."""
    parity: Literal["logged", "bitwise"] = "logged"
    """Rollout and learner log-probabilities: difference logged, or equal bit for bit."""
    vllm_importance_sampling_correction: bool = True
    """Correct the loss for the difference between rollout and learner log-probabilities (our engine, TRL's name)."""
    vllm_importance_sampling_mode: Literal["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"] = (
        "sequence_mask"
    )
    """Ratio per token or per sequence; beyond the cap it is masked or cut."""
    vllm_importance_sampling_clip_max: Positive | None = 3.0
    """Upper cap of the ratio."""
    vllm_importance_sampling_clip_min: Positive | None = None
    """Lower cap of the ratio."""


class AlgoSection(Section):
    """The loss, in TRL's terms."""

    preset: Text | None = None
    """A named set of values for this section."""
    loss_type: Literal["dapo", "grpo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo"] = "dapo"
    """How per-token losses are summed up."""
    epsilon: NonNegative = 0.2
    """Lower clip of the ratio: 1 - epsilon."""
    epsilon_high: NonNegative | None = None
    """Upper clip of the ratio: 1 + epsilon_high; null: epsilon."""
    delta: Positive | None = None
    """Upper clip for negative advantages (two-sided clipping)."""
    beta: NonNegative = 0.0
    """Weight of the KL term; above 0 a reference actor holds one more core."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the importance ratio, which makes its gradient unbiased."""
    importance_sampling_level: Literal["token", "sequence"] = "token"
    """Ratio per token (GRPO) or per sequence (GSPO)."""
    scale_rewards: Literal["group", "batch", "none"] = "group"
    """Divide advantages by the standard deviation of the group, of the batch, or not."""
    multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize"
    """Order of weighting and normalising several rewards."""
    num_iterations: Count = 1
    """Passes over one generation batch."""
    mask_truncated_completions: bool = False
    """Leave completions out of the loss that were cut at max_completion_length."""
    entropy_coef: NonNegative = 0.0
    """Weight of an entropy bonus."""


class DeviceSection(Section):
    """Where it runs."""

    type: Literal["neuron", "cpu", "cuda"] = "neuron"
    """neuron: a Trainium core, or its simulation."""
    instance: Text = "trn2.3xlarge"
    """Instance type: cores and memory."""
    simulate: Annotated[Literal["auto", True, False], BeforeValidator(_no_number)] = "auto"
    """auto: the hardware where it is present, otherwise the simulation."""
    numerics: Literal["exact", "strict"] = "exact"
    """Numbers of the CPU, or rounded as the hardware rounds."""
    hbm_gib: Positive | None = None
    """Device memory per core in GiB; null: the instance's."""
    price_per_hour: NonNegative | None = None
    """USD per instance and hour."""
    budget_usd: Positive | None = None
    """Stop when this is spent."""
    max_graphs: Count | None = None
    """Stop when more graphs would be compiled."""
    faults: dict[str, Any] | None = None
    """Faults to inject."""


class TrainSection(Section):
    """Optimisation, batches, checkpoints."""

    output_dir: Text | None = None
    """Run folder, relative to the working directory; null: runs/run."""
    max_steps: Annotated[int, BeforeValidator(_whole), Field(ge=-1)] = -1
    """Optimizer steps in all; -1: num_train_epochs decides."""
    num_train_epochs: Positive = 3.0
    """Passes over the data if max_steps is -1."""
    learning_rate: NonNegative = 1e-6
    """AdamW's learning rate after warm-up."""
    lr_scheduler_type: Literal["linear", "cosine", "constant", "constant_with_warmup"] = "linear"
    """Shape of the learning rate after warm-up."""
    warmup_steps: NonNegative = 0
    """Optimizer steps of linear warm-up; below 1: this share of all steps."""
    weight_decay: NonNegative = 0.0
    """AdamW's weight decay."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """AdamW's beta1."""
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """AdamW's beta2."""
    adam_epsilon: Positive = 1e-8
    """AdamW's epsilon."""
    max_grad_norm: NonNegative = 1.0
    """Gradients are scaled down to this norm; 0: never."""
    per_device_train_batch_size: Count = 8
    """Completions per learner core and micro step."""
    gradient_accumulation_steps: Count = 1
    """Micro steps per optimizer step."""
    steps_per_generation: Count | None = None
    """Micro steps per generation batch; null: gradient_accumulation_steps."""
    generation_batch_size: Count | None = None
    """Completions generated at once, instead of steps_per_generation."""
    bf16: bool = False
    """Compute in bfloat16 with float32 weights and optimizer state."""
    tokens_per_micro_batch: Count = 2048
    """Most tokens of one packed forward pass; changes memory and speed, not the result."""
    seed: Index = 42
    """Seed of sampling and of the data order."""
    data_seed: Index | None = None
    """Seed of the data order alone; null: seed."""
    seeds: Count | None = None
    """Number of seeds to run one after another."""
    resume: Text = "never"
    """never; auto: from the newest checkpoint of output_dir if there is one; or a checkpoint folder."""
    save_steps: Count = 500
    """Optimizer steps between checkpoints; the last step is always saved."""
    save_total_limit: Annotated[int, BeforeValidator(_whole), Field(ge=-1)] | None = None
    """Newest checkpoints that are kept; null or -1: all."""
    max_staleness: Index = 0
    """Weight versions by which a rollout may lag; 0: synchronous."""
    eval_steps: Count | None = None
    """Optimizer steps between evaluations on data.eval; null: none."""
    eval_on_start: bool = False
    """Evaluate before the first step too."""


class LoggingSection(Section):
    """What is written and shown."""

    logging_steps: Count = 10
    """Optimizer steps between lines of metrics.jsonl and of the table."""
    report_to: Literal["tensorboard", "none", "wandb", "mlflow", "trackio"] = "tensorboard"
    """Further place for the metrics."""
    log_completions: bool = False
    """Write prompts, completions, rewards and advantages as parquet files."""


class RaySection(Section):
    """The cluster."""

    address: Text | None = None
    """Cluster to join; null: one is started in this process."""
    keep_alive: bool = False
    """Leave the started cluster and its dashboard running at the end."""
    placement: Literal["disaggregated", "colocated"] = "disaggregated"
    """Roles on cores of their own, or sharing them."""
    dashboard: bool = True
    """Start the Ray dashboard."""
    start_timeout_s: Positive = 120.0
    """Most wall seconds until all actors are placed and ready."""
    phase_timeout_s: Positive = 1800.0
    """Most wall seconds for one phase of a step."""


# Default of ours, and why it is not TRL's. Read by the README's table and by a test.
DEVIATIONS: dict[str, str] = {
    "report_to": "a run can be looked at without an account or a server",
    "bf16": "TRL turns it on; off, the numbers are the same on cpu and neuron and equal to TRL's in float32",
    "gradient_checkpointing": "TRL turns it on; packed micro-batches of tokens_per_micro_batch already bound memory",
}

# (section, key): the values that work today. Any other allowed value is refused with one sentence.
NOT_YET: dict[tuple[str, str], tuple[Any, ...]] = {
    ("rollout", "batch_invariant"): (False,),
    ("rollout", "parity"): ("logged",),
    ("algo", "preset"): (None,),
    ("algo", "loss_type"): ("dapo", "grpo", "dr_grpo", "bnpo"),
    ("algo", "multi_objective_aggregation"): ("sum_then_normalize",),
    ("device", "numerics"): ("exact",),
    ("device", "price_per_hour"): (None,),
    ("device", "budget_usd"): (None,),
    ("device", "max_graphs"): (None,),
    ("device", "faults"): (None,),
    ("train", "seeds"): (None, 1),
    ("train", "max_staleness"): (0,),
    ("logging", "report_to"): ("tensorboard", "none"),
    ("ray", "placement"): ("disaggregated",),
}
