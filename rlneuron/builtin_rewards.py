"""Reward functions that a run file can name without a module: TRL's own, reasoning-gym's scorers, mathematics.

Each follows TRL's contract: `f(completions, **columns and more) -> list[float | None]`. TRL's functions want
conversations; here they also take plain text.
"""

import difflib
import functools
import math
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

RewardCallable = Callable[..., Any]

_ANSWER_OPEN, _ANSWER_CLOSE = "<answer>", "</answer>"
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """The text of a completion: itself, or the content of its last message."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def final_answer(text: str) -> str:
    """What stands in the last <answer>...</answer> pair, or the whole text; without white space around it."""
    end = text.rfind(_ANSWER_CLOSE)
    begin = text.rfind(_ANSWER_OPEN, 0, end) if end >= 0 else -1
    return (text[begin + len(_ANSWER_OPEN) : end] if begin >= 0 else text).strip()


# ---- reasoning-gym ------------------------------------------------------------------------------------------------
@functools.cache
def _scorer(task: str) -> Callable[..., float]:
    from reasoning_gym.factory import get_score_answer_fn

    score: Callable[..., float] = get_score_answer_fn(task)
    return score


def reasoning_gym(
    completions: Sequence[Any],
    question: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """The task's own score, 0 to 1; many tasks give part of it for a wrong answer that can be read.

    A scorer that fails on text it cannot read (some of reasoning-gym's do) scores 0.
    """
    scores = []
    for completion, q, a, m in zip(completions, question, answer, metadata, strict=True):
        entry = {"question": q, "answer": a, "metadata": m}
        score = _scorer(m["source_dataset"])
        try:
            scores.append(float(score(answer=final_answer(completion_text(completion)), entry=entry)))
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, SyntaxError):
            scores.append(0.0)
    return scores


def reasoning_gym_exact(
    completions: Sequence[Any],
    question: Sequence[str],
    answer: Sequence[Any],
    metadata: Sequence[dict[str, Any]],
    **_: Any,
) -> list[float]:
    """1 where the task's own score is exactly 1.0, else 0.

    Several scorers give 0.8 or 0.9999 for an answer with something more behind it: nearly 1 is not right.
    """
    scores = reasoning_gym(completions, question, answer, metadata)
    return [1.0 if score == 1.0 else 0.0 for score in scores]


def last_number(completions: Sequence[Any], answer: Sequence[Any], **_: Any) -> list[float | None]:
    """1 where the last number of the completion is the answer, else 0; None where the answer is no number."""
    rewards: list[float | None] = []
    for completion, wanted in zip(completions, answer, strict=True):
        target = _as_number(str(wanted))
        found = _NUMBER.findall(completion_text(completion))
        got = _as_number(found[-1]) if found else None
        rewards.append(None if target is None else float(got is not None and math.isclose(got, target)))
    return rewards


def _as_number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# ---- mathematics --------------------------------------------------------------------------------------------------
def math_verify(completions: Sequence[Any], solution: Sequence[str], **_: Any) -> list[float | None]:
    """1 where math-verify finds the final answer equal to `solution`, else 0; None where `solution` has no maths.

    Unlike accuracy_reward it takes plain expressions too, not only LaTeX.
    """
    return _outside_main_thread(lambda: [_verified(c, s) for c, s in zip(completions, solution, strict=True)])


def _verified(completion: Any, solution: str) -> float | None:
    from math_verify import parse, verify

    gold = parse(solution, parsing_timeout=None)
    if not gold:
        return None
    answer = parse(final_answer(completion_text(completion)), parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))


def _outside_main_thread(work: Callable[[], Any]) -> Any:
    """Runs `work` in a thread: there math-verify and TRL leave SIGALRM alone, which belongs to reward.timeout_s."""
    import logging

    # Both warn on every call that their own timeout is off.
    logging.getLogger("math_verify.parser").setLevel(logging.ERROR)
    logging.getLogger("math_verify.grader").setLevel(logging.ERROR)
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # handed to the caller below
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True, name="math-verify")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


# ---- TRL's, as a library ------------------------------------------------------------------------------------------
def accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    """TRL's: 1 where the LaTeX answer equals `solution`, None where `solution` cannot be parsed."""
    from trl.rewards import accuracy_reward as trl_reward

    messages = _as_messages(completions)
    log_extra = kwargs.get("log_extra")
    rewards: list[float | None] = _outside_main_thread(
        lambda: trl_reward(completions=messages, solution=list(solution), log_extra=log_extra)
    )
    return rewards


def reasoning_accuracy_reward(completions: Sequence[Any], solution: Sequence[str], **kwargs: Any) -> list[float | None]:
    """TRL's: accuracy_reward of what follows </think>; 0 where the reasoning does not end."""
    from trl.rewards import reasoning_accuracy_reward as trl_reward

    messages = _as_messages(completions)
    log_extra = kwargs.get("log_extra")
    rewards: list[float | None] = _outside_main_thread(
        lambda: trl_reward(completions=messages, solution=list(solution), log_extra=log_extra)
    )
    return rewards


def think_format_reward(completions: Sequence[Any], **_: Any) -> list[float]:
    """TRL's: 1 where the completion is <think>...</think> and an answer, else 0."""
    from trl.rewards import think_format_reward as trl_reward

    rewards: list[float] = trl_reward(completions=_as_messages(completions))
    return rewards


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> RewardCallable:
    """TRL's (DAPO, eq. 13): 0 to -1 over the last `soft_punish_cache` tokens before the limit."""
    from trl.rewards import get_soft_overlong_punishment as trl_factory

    reward: RewardCallable = trl_factory(max_completion_len, soft_punish_cache)
    return reward


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> RewardCallable:
    """TRL's: `max_penalty` times the share of repeated n-grams."""
    from trl.rewards import get_repetition_penalty_reward as trl_factory

    reward: RewardCallable = trl_factory(ngram_size, max_penalty)
    return reward


def _as_messages(completions: Sequence[Any]) -> list[list[dict[str, Any]]]:
    return [[{"role": "assistant", "content": completion_text(completion)}] for completion in completions]


BUILTIN_REWARDS: dict[str, RewardCallable] = {
    "accuracy_reward": accuracy_reward,
    "reasoning_accuracy_reward": reasoning_accuracy_reward,
    "think_format_reward": think_format_reward,
    "reasoning_gym": reasoning_gym,
    "reasoning_gym_exact": reasoning_gym_exact,
    "last_number": last_number,
    "math_verify": math_verify,
}

# These need `args` in the run file and return the reward function.
BUILTIN_FACTORIES: dict[str, RewardCallable] = {
    "get_soft_overlong_punishment": get_soft_overlong_punishment,
    "get_repetition_penalty_reward": get_repetition_penalty_reward,
}


def unknown_builtin(name: str) -> str:
    """The sentence for a name that is neither a built-in nor module:function."""
    names = [*BUILTIN_REWARDS, *BUILTIN_FACTORIES]
    near = difflib.get_close_matches(name, names, n=1)
    nearest = f"; nearest: {near[0]}" if near else ""
    return (
        f"{name!r} is no built-in reward; allowed: {', '.join(names)}, module:function or path/to/file.py:function"
        f"{nearest}"
    )
