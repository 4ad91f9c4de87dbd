"""The arithmetic between batch sizes is TRL's: compared with TRL's own configuration and sampler."""

# ruff: noqa: E501 - golden texts are not wrapped

import pytest

from rlneuron.batch_arithmetic import BatchArithmetic, batch_problems
from rlneuron.config import RunConfig


def config(rollout: dict | None = None, train: dict | None = None, algo: dict | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": "m"},
            "data": {"path": "org/d"},
            "reward": {"funcs": ["f"]},
            "rollout": rollout or {},
            "train": train or {},
            "algo": algo or {},
        }
    )


def test_a_worked_example():
    batch = BatchArithmetic.from_config(
        config(
            {"num_generations": 4, "num_workers": 3, "max_completion_length": 100},
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 6},
            {"num_iterations": 2, "beta": 0.1},
        ),
        num_prompts=100,
    )
    assert batch.generation_batch_size == 48
    assert batch.prompts_per_generation == 12
    assert batch.completions_per_optimizer_step == 16
    assert batch.optimizer_steps_per_generation == 6
    assert batch.max_completion_tokens == 4800
    assert batch.completions_per_rollout_worker == 16
    assert batch.total_cores == 1 + 3 + 1
    assert batch.generations_per_epoch == 8
    assert batch.max_steps == 3 * 8 * 6
    assert batch.num_generation_batches == 24


@pytest.mark.parametrize(
    "train",
    [
        {},
        {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 8},
        {"per_device_train_batch_size": 4, "generation_batch_size": 32},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "generation_batch_size": 64},
    ],
)
def test_batch_sizes_are_those_of_trl(train, tmp_path):
    from trl import GRPOConfig

    theirs = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, **train)
    ours = BatchArithmetic.from_config(config(train=train))
    assert ours.generation_batch_size == theirs.generation_batch_size
    assert ours.steps_per_generation == theirs.steps_per_generation


@pytest.mark.parametrize("num_prompts", [3, 10, 64])
@pytest.mark.parametrize("num_iterations", [1, 2])
def test_epochs_come_to_as_many_steps_as_in_trl(num_prompts, num_iterations):
    from trl.trainer.utils import RepeatSampler

    train = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 6}
    ours = BatchArithmetic.from_config(
        config({"num_generations": 8}, {**train, "num_train_epochs": 2.5}, {"num_iterations": num_iterations}),
        num_prompts,
    )
    sampler = RepeatSampler(
        range(num_prompts),
        mini_repeat_count=8,
        batch_size=ours.prompts_per_generation,
        repeat_count=num_iterations * ours.steps_per_generation,
        shuffle=False,
    )
    # TRL's loader yields whole generation batches, one per micro step; the trainer takes two of them per step.
    micro_steps = len(list(sampler)) // ours.generation_batch_size
    import math

    assert ours.max_steps == math.ceil(2.5 * (micro_steps // 2))


def test_steps_are_unknown_until_the_data_is_read_unless_given():
    assert BatchArithmetic.from_config(config()).max_steps == -1
    assert BatchArithmetic.from_config(config(train={"max_steps": 7})).max_steps == 7
    assert BatchArithmetic.from_config(config(train={"max_steps": 7}), num_prompts=1).max_steps == 7


def test_fewer_prompts_than_a_batch_still_make_a_step():
    batch = BatchArithmetic.from_config(config(train={"per_device_train_batch_size": 32}), num_prompts=3)
    assert batch.max_steps == 3  # 3 epochs; PromptStream then refuses with both numbers


def suggestions(text: str) -> list[int]:
    import re

    return [int(number) for number in re.findall(r"\d+", text.split("; write ")[1].split(" or rollout")[0])]


@pytest.mark.parametrize("size", range(1, 12))
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("group", [2, 3, 8, 16])
def test_suggested_batch_sizes_are_never_empty_and_are_valid(size, steps, group):
    train = {"per_device_train_batch_size": size, "steps_per_generation": steps}
    run = config({"num_generations": group}, train)
    problems = batch_problems(run.rollout, run.train)
    assert bool(problems) == bool(size * steps % group)
    for problem in problems:
        values = suggestions(problem.text)
        assert values
        for value in values:
            again = config({"num_generations": group}, {**train, "per_device_train_batch_size": value})
            assert batch_problems(again.rollout, again.train) == []


@pytest.mark.parametrize("batch", [1, 7, 20, 30, 48, 100])
def test_suggested_generation_batch_sizes_are_valid(batch):
    train = {"per_device_train_batch_size": 6, "gradient_accumulation_steps": 2, "generation_batch_size": batch}
    run = config({"num_generations": 8}, train)
    problems = batch_problems(run.rollout, run.train)
    assert bool(problems) == (batch % 12 != 0 or batch % 8 != 0)
    for problem in problems:
        values = [int(word) for word in problem.text.split("; write ")[1].split(" or ")]
        for value in values:
            again = config({"num_generations": 8}, {**train, "generation_batch_size": value})
            assert batch_problems(again.rollout, again.train) == []


def test_the_printed_arithmetic():
    batch = BatchArithmetic.from_config(
        config({"max_completion_length": 7}, {"per_device_train_batch_size": 128}), 1000
    )
    assert batch.describe().splitlines() == [
        "prompts per generation batch          16                                       verl: train_batch_size",
        "completions per prompt                8                                        TRL: num_generations; verl: rollout.n",
        "completions per generation batch      16 x 8 = 128                             TRL: generation_batch_size",
        "micro steps per generation batch      1 of 128 completions                     TRL: steps_per_generation, per_device_train_batch_size",
        "completions per optimizer step        128 x 1 = 128                            verl: ppo_mini_batch_size x rollout.n",
        "optimizer steps per generation batch  1 x 1 / 1 = 1                            TRL: num_iterations; verl: ppo_epochs",
        "completion tokens, at most            896                                      x max_completion_length",
        "completions per rollout worker        64                                       the busiest",
        "cores                                 1 learner + 2 rollout + 0 reference = 3",
        "training prompts                      1000                                     2.98 epochs",
        "optimizer steps of the run            186                                      TRL: max_steps",
    ]  # fmt: skip
