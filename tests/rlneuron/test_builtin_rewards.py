"""Built-in rewards: right values, plain and conversational, and run time that grows linearly with the text."""

import pytest

from rlneuron import builtin_rewards
from rlneuron.builtin_rewards import BUILTIN_REWARDS, final_answer
from rlneuron.config_sections import RewardCall
from rlneuron.data import reasoning_gym_rows
from rlneuron.rewards import RewardBatch, RewardScorer, load_reward


def messages(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def entry(question: str, answer: str) -> dict:
    return {
        "question": [question],
        "answer": [answer],
        "metadata": [{"source_dataset": "spell_backward", "word": answer[::-1]}],
    }


@pytest.mark.parametrize(
    ("text", "partial", "exact"),
    [
        ("nus", 1.0, 1.0),
        (" NUS\n", 1.0, 1.0),
        ("thinking ... <answer> nus </answer>", 1.0, 1.0),
        ("nux", None, 0.0),
        # The task's own score is nearly 1 for an answer with more behind it.
        ("nusss", None, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_exact_score_counts_only_right_answers(text, partial, exact):
    columns = entry("Spell this word backward (example: sun -> nus): sun", "nus")
    assert builtin_rewards.reasoning_gym_exact([text], **columns) == [exact]
    assert builtin_rewards.reasoning_gym_exact(messages(text), **columns) == [exact]
    score = builtin_rewards.reasoning_gym([text], **columns)[0]
    assert score == partial if partial is not None else 0 < score < 1


def test_gold_answers_of_many_tasks_score_one():
    for task in (
        "chain_sum",
        "gsm_symbolic",
        "letter_counting",
        "gcd",
        "countdown",
        "basic_arithmetic",
        "caesar_cipher",
    ):
        rows = reasoning_gym_rows(task, 3, 0)
        texts = [str(row.columns["answer"]) for row in rows]
        batch = RewardBatch.from_completions(rows, texts, [[0]] * len(rows), group_size=1)
        scorer = RewardScorer([load_reward("reasoning_gym"), load_reward("reasoning_gym_exact")])
        assert scorer.score(batch).values.tolist() == [[1.0, 1.0]] * len(rows), task


def test_a_scorer_that_raises_on_unreadable_text_gives_zero():
    row = reasoning_gym_rows("prime_factorization", 1, 0)[0]
    columns = {name: [value] for name, value in row.columns.items()}
    assert builtin_rewards.reasoning_gym(["not a number"], **columns) == [0.0]


def test_the_last_number_is_compared_as_a_number():
    texts = ["7 + 5 = 12", "12.0", "it is 1,200.", "none", "12 or 13", "-12", "5"]
    answers = ["12", "12", "1200", "12", "12", "12", "five"]
    assert builtin_rewards.last_number(messages(*texts), answer=answers) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, None]


def test_math_verify_takes_plain_expressions_and_skips_what_is_no_mathematics():
    texts = ["0.5", "<answer>2/4</answer>", "1/3"]
    assert builtin_rewards.math_verify(messages(*texts), solution=["1/2"] * 3) == [1.0, 1.0, 0.0]
    assert builtin_rewards.math_verify(["1"], solution=["no mathematics"]) == [None]


def test_trls_rewards_take_text_and_conversations():
    import trl.rewards

    texts = [r"so \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "nothing"]
    solutions = [r"$\frac{1}{3}$"] * 3
    expected = trl.rewards.accuracy_reward(messages(*texts), solutions)
    assert expected == [1.0, 0.0, 0.0]
    assert builtin_rewards.accuracy_reward(texts, solution=solutions) == expected
    assert builtin_rewards.accuracy_reward(messages(*texts), solution=solutions) == expected
    thought = [f"<think>\nhm\n</think> {text}" for text in texts]
    assert builtin_rewards.reasoning_accuracy_reward(thought, solution=solutions) == [1.0, 0.0, 0.0]
    assert builtin_rewards.think_format_reward(thought) == [1.0, 1.0, 1.0]
    assert builtin_rewards.think_format_reward(texts) == [0.0, 0.0, 0.0]


def test_factories_make_trls_length_rewards():
    overlong = load_reward(
        RewardCall(func="get_soft_overlong_punishment", args={"max_completion_len": 100, "soft_punish_cache": 20})
    )
    assert overlong.name == "soft_overlong_punishment_reward"
    assert overlong.call(completion_ids=[[1] * 80, [1] * 90, [1] * 101]) == [0.0, -0.5, -1.0]
    repetition = load_reward(RewardCall(func="get_repetition_penalty_reward", args={"ngram_size": 2}))
    assert repetition.call(completion_ids=[[1, 2, 3, 4], [5] * 5]) == [0.0, -0.75]


def test_the_format_reward_accepts_lines_within_its_tags():
    assert builtin_rewards.think_format_reward(["<think>\nfirst\n\nsecond\n</think>\nanswer\nmore"]) == [1.0]


def test_the_last_answer_pair_counts():
    assert final_answer("<answer>1</answer> no, <answer>\n2\n</answer>.") == "2"
    assert final_answer(" <answer>open ") == "<answer>open"
    assert final_answer("</answer><answer>") == "</answer><answer>"


HOSTILE = {
    "openings": "<answer>" * 12_500,
    "thoughts": "<think>" * 14_000,
    "ones": "10" * 50_000 + "&",
    "digits": "1," * 50_000,
    "dashes": "-" * 100_000,
    "lines": "<think>" + "\n" * 100_000,
}


@pytest.mark.parametrize("kind", HOSTILE)
@pytest.mark.parametrize("name", ["think_format_reward", "last_number", "reasoning_gym", "reasoning_gym_exact"])
def test_built_in_rewards_end_on_hostile_text(kind, name):
    scorer = RewardScorer([load_reward(name)], timeout_s=5)  # 100 KB each; a deadline that is missed raises
    rows = reasoning_gym_rows("chain_sum", 2, 0)
    batch = RewardBatch.from_completions(rows, [HOSTILE[kind]] * len(rows), [[0]] * len(rows), group_size=1)
    scores = scorer.score(batch).values
    assert ((scores >= 0) & (scores < 0.1)).all()


def test_every_built_in_is_found_by_its_name():
    for name in BUILTIN_REWARDS:
        assert load_reward(name).name == name
