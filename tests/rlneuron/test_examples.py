"""The files in examples/: they load, their data is what they say, their own reward function scores as documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlneuron import quickstart
from rlneuron.config import RunConfig, load_config
from rlneuron.data import DataSplit, held_out_key, reasoning_gym_rows, split_by_hash
from rlneuron.reward_functions import load_reward

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name: str) -> RunConfig:
    return load_config([EXAMPLES / name])


def split(config: RunConfig) -> DataSplit:
    gym = config.data.reasoning_gym
    assert gym is not None and config.data.eval is not None
    return split_by_hash(reasoning_gym_rows(gym.task, gym.size, gym.seed, gym.config), config.data.eval.size, 0)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_run_file_is_accepted(path: Path) -> None:
    config = load_config([path])
    assert config.train.max_steps > 0
    for call in config.reward.funcs:
        load_reward(call)


def test_the_quickstart_learns_and_is_measured_on_words_that_the_warm_start_kept_apart() -> None:
    config = example("quickstart.yaml")
    parts = split(config)
    shown = {
        held_out_key([{"role": "user", "content": quickstart.INSTRUCTION + word}])
        for word in quickstart.word_split().train
    }
    held_out = {held_out_key(row.prompt) for row in parts.eval}
    trained = {held_out_key(row.prompt) for row in parts.train}
    assert config.model.path == "rlneuron/quickstart"
    assert len(held_out) == 256 and len(trained) >= 10_000
    assert not held_out & shown
    assert not held_out & trained
    longest = max(len(str(row.columns["answer"])) for row in [*parts.train, *parts.eval])
    assert config.rollout.max_completion_length == longest + 1, "the answer's letters and <|end|>"


def test_smollm2_adds_two_numbers_of_0_to_10() -> None:
    parts = split(example("smollm2.yaml"))
    rows = [*parts.train, *parts.eval]
    assert len(rows) == 121 and len(parts.eval) == 16
    answers = sorted({int(str(row.columns["answer"])) for row in rows})
    assert answers == list(range(21)), "the task counts 10 as one digit"


@pytest.mark.parametrize(
    ("text", "reward"),
    [("6", 1.0), (" 6.\n", 1.0), ("1 + 5 = 6", 0.5), ("6 is the answer", 0.5), ("6 or 7", 0.0), ("16", 0.0), ("", 0.0)],
)
def test_last_number_gives_half_for_an_answer_with_words_around_it(text: str, reward: float) -> None:
    function = load_reward(example("smollm2.yaml").reward.funcs[0])
    assert function.name == "last_number"
    conversation = [{"role": "assistant", "content": text}]
    assert function.call(completions=[conversation, text], answer=["6", 6], prompts=["p", "p"]) == [reward, reward]
