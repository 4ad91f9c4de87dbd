"""Rules between the keys of a run, and warnings about settings that silently do something else than they seem to.

`rule_problems` refuse a run; `warnings` are printed with --dry-run and at the start.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rlneuron.batch_arithmetic import batch_problems
from rlneuron.config_errors import Problem
from rlneuron.config_sections import NOT_YET

if TYPE_CHECKING:
    from rlneuron.config import RunConfig


def rule_problems(config: "RunConfig") -> list[Problem]:
    """Everything that each key alone allows and that the keys together do not."""
    return [
        *_not_yet(config),
        *batch_problems(config.rollout, config.train),
        *_data_rules(config),
        *_reward_rules(config),
        *_train_rules(config),
        *_other_rules(config),
    ]


def _not_yet(config: "RunConfig") -> Iterator[Problem]:
    for (section, key), working in NOT_YET.items():
        value = getattr(getattr(config, section), key)
        if value not in working:
            shown = _word(value) if not isinstance(value, dict) else "this"
            choices = " or ".join(_word(choice) for choice in working)
            yield Problem((section, key), f"{shown} is not available yet; write {choices}")


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _data_rules(config: "RunConfig") -> Iterator[Problem]:
    data = config.data
    if (data.path is None) == (data.reasoning_gym is None):
        text = "given together with data.reasoning_gym; keep one" if data.path else "missing; write it or reasoning_gym"
        yield Problem(("data", "path"), text)
    fixed = data.reasoning_gym is not None or (data.path or "").endswith((".jsonl", ".parquet"))
    for key in ("name", "split"):
        if fixed and getattr(data, key) != type(data).model_fields[key].default:
            yield Problem(("data", key), "has no effect on a file or a reasoning_gym task; remove it")
    if data.reasoning_gym is not None and data.prompt_column != "prompt":
        yield Problem(("data", "prompt_column"), "has no effect on a reasoning_gym task; remove it")
    if data.conversational is False and data.system_prompt is not None:
        yield Problem(("data", "system_prompt"), "needs conversations, and data.conversational is false; remove one")
    if data.eval is not None and (data.eval.size > 0) == (data.eval.path is not None):
        text = (
            "size and path are given together; keep one" if data.eval.path else "size and path are missing; write one"
        )
        yield Problem(("data", "eval"), text)
    for key in ("eval_steps", "eval_on_start"):
        if getattr(config.train, key) and data.eval is None:
            yield Problem(("train", key), "there are no held-out prompts; write data.eval.size or data.eval.path")


def _reward_rules(config: "RunConfig") -> Iterator[Problem]:
    reward = config.reward
    if reward.reward_weights is not None and len(reward.reward_weights) != len(reward.funcs):
        text = f"{len(reward.reward_weights)} weights for {len(reward.funcs)} functions in reward.funcs; write one each"
        yield Problem(("reward", "reward_weights"), text)


def _train_rules(config: "RunConfig") -> Iterator[Problem]:
    train = config.train
    if train.max_steps == 0:
        yield Problem(("train", "max_steps"), "0 is given; allowed: -1 (num_train_epochs decides) or >= 1")
    if train.save_total_limit == 0:
        yield Problem(("train", "save_total_limit"), "0 is given; allowed: -1 or null (all are kept) or >= 1")
    if train.warmup_steps > 1 and not float(train.warmup_steps).is_integer():
        yield Problem(
            ("train", "warmup_steps"), f"{train.warmup_steps} is given; allowed: a share below 1 or whole steps"
        )
    if train.lr_scheduler_type == "constant" and train.warmup_steps > 0:
        text = f"{train.warmup_steps:g} has no effect with lr_scheduler_type constant; write constant_with_warmup there"
        yield Problem(("train", "warmup_steps"), text)


def _other_rules(config: "RunConfig") -> Iterator[Problem]:
    low, high = config.rollout.vllm_importance_sampling_clip_min, config.rollout.vllm_importance_sampling_clip_max
    if low is not None and high is not None and low > high:
        text = f"{low} is above vllm_importance_sampling_clip_max {high}; allowed: at most that"
        yield Problem(("rollout", "vllm_importance_sampling_clip_min"), text)
    if config.device.simulate is True and config.device.type != "neuron":
        text = f"true has no effect with device.type {config.device.type}; write auto, or device.type: neuron"
        yield Problem(("device", "simulate"), text)


# ---- silent traps -------------------------------------------------------------------------------------------------
def warnings(config: "RunConfig") -> list[str]:
    """Sentences about settings of this run that are allowed and often not meant."""
    return [*_loss_warnings(config), *_sampling_warnings(config), *_run_warnings(config)]


def _loss_warnings(config: "RunConfig") -> Iterator[str]:
    algo, batch = config.algo, config.batch
    if algo.importance_sampling_level == "sequence" and algo.loss_type != "grpo":
        yield (
            f"algo.importance_sampling_level: sequence under loss_type {algo.loss_type} weights sequences by their "
            "length; GSPO as published is loss_type: grpo"
        )
    if algo.loss_type == "dr_grpo" and algo.scale_rewards != "none":
        yield f"algo.loss_type: dr_grpo with scale_rewards: {algo.scale_rewards}; Dr. GRPO as published is none"
    clipped = {"epsilon", "epsilon_high", "delta"} & algo.model_fields_set
    if clipped and batch.optimizer_steps_per_generation == 1:
        yield "one optimizer step per generation batch: the ratio is 1, so epsilon, epsilon_high and delta never act"
    if algo.epsilon_high is not None and algo.epsilon_high < algo.epsilon:
        yield f"algo.epsilon_high {algo.epsilon_high} is below epsilon {algo.epsilon}; clip-higher is above it"
    if algo.scale_rewards == "group" and config.rollout.num_generations == 2:
        yield "groups of 2 with scale_rewards: group: every advantage is 0 or +-0.707, whatever the rewards"
    if algo.beta > 0:
        yield f"algo.beta {algo.beta}: a reference actor holds one more core and scores every completion"


def _sampling_warnings(config: "RunConfig") -> Iterator[str]:
    rollout = config.rollout
    if rollout.top_k == -1:
        yield "rollout.top_k: -1 means off here, as 0 does in TRL"
    changed = [
        f"{key} {value}"
        for key, value, off in (
            ("top_p", rollout.top_p, (1.0,)),
            ("top_k", rollout.top_k, (0, -1)),
            ("min_p", rollout.min_p, (None, 0.0)),
            ("repetition_penalty", rollout.repetition_penalty, (1.0,)),
        )
        if value not in off
    ]
    if changed:
        yield (
            f"rollout samples with {', '.join(changed)}, the learner's log-probabilities are of the whole "
            "distribution: their difference shows up in sampling/* and may be masked by vllm_importance_sampling_*"
        )
    if rollout.num_workers > config.batch.prompts_per_generation:
        yield (
            f"{rollout.num_workers} rollout workers for {config.batch.prompts_per_generation} prompts per generation "
            "batch: some have nothing to do"
        )


def _run_warnings(config: "RunConfig") -> Iterator[str]:
    train, device = config.train, config.device
    if train.learning_rate == 0:
        yield "train.learning_rate: 0, nothing is learned (a control run)"
    if 0 < train.max_steps <= train.warmup_steps and train.warmup_steps >= 1:
        yield f"train.warmup_steps {train.warmup_steps:g} of {train.max_steps} steps: the learning rate never gets up"
    if config.data.eval is not None and train.eval_steps is None and not train.eval_on_start:
        yield "data.eval is set but train.eval_steps is null: nothing is evaluated"
    if device.type != "neuron" and device.hbm_gib is not None:
        yield f"device.hbm_gib has no effect with device.type: {device.type}"
