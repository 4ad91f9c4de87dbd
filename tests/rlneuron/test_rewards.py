"""TRL's reward contract, and every way in which a reward function can fail."""

import contextlib
import math
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from rlneuron.config_sections import RewardCall
from rlneuron.prompts import with_uids
from rlneuron.reward_call import with_deadline
from rlneuron.reward_functions import RewardFunction
from rlneuron.rewards import (
    RewardBatch,
    RewardError,
    RewardMatrix,
    RewardScorer,
    check_columns,
    load_reward,
    load_rewards,
)


def batch(num_prompts: int = 3, group: int = 2, *, conversational: bool = False, step: int = 0) -> RewardBatch:
    """Prompts p0, p1, ... with the columns answer (the prompt's number) and level; completions c0, c1, ..."""
    rows = with_uids(
        [
            ([{"role": "user", "content": f"p{i}"}] if conversational else f"p{i}", {"answer": i, "level": None})
            for i in range(num_prompts)
        ]
    )
    repeated = [row for row in rows for _ in range(group)]
    count = len(repeated)
    return RewardBatch.from_completions(
        repeated, [f"c{i}" for i in range(count)], [[i] * (i + 1) for i in range(count)], group_size=group, step=step
    )


def scorer(*functions: Callable[..., Any], **kwargs: Any) -> RewardScorer:
    return RewardScorer([RewardFunction(f.__name__, f) for f in functions], **kwargs)


def failure(function: Callable[..., Any], **kwargs: Any) -> str:
    with pytest.raises(RewardError) as caught:
        scorer(function, **kwargs).score(batch())
    return str(caught.value)


# ---- the contract -------------------------------------------------------------------------------------------------
def test_functions_get_trls_arguments_and_every_column():
    seen: dict[str, Any] = {}

    def f(prompts, completions, completion_ids, **kwargs):
        seen.update(kwargs, prompts=prompts, completions=completions, completion_ids=completion_ids)
        return [0.0] * len(prompts)

    scorer(f).score(batch(2, 2, step=7))
    assert seen["prompts"] == ["p0", "p0", "p1", "p1"]
    assert seen["completions"] == ["c0", "c1", "c2", "c3"]
    assert seen["completion_ids"] == [[0], [1, 1], [2, 2, 2], [3, 3, 3, 3]]
    assert seen["answer"] == [0, 0, 1, 1]
    assert seen["level"] == [None] * 4
    assert seen["trainer_state"].global_step == 7
    assert set(seen) == {"prompts", "completions", "completion_ids", "answer", "level", "trainer_state", "log_extra",
                         "log_metric"}  # fmt: skip


def test_completions_of_conversations_are_messages():
    def f(completions, prompts, **kwargs):
        assert prompts[0] == [{"role": "user", "content": "p0"}]
        return [len(c[0]["content"]) * (c[0]["role"] == "assistant") for c in completions]

    assert scorer(f).score(batch(conversational=True)).values[:, 0].tolist() == [2.0] * 6


def test_functions_may_name_only_what_they_need():
    def f(completions, answer):
        return answer

    assert scorer(f).score(batch()).values[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_sync_async_arrays_and_none_are_all_rewards():
    import asyncio

    async def slow(completions, **kwargs):
        async def one(index: int) -> float:
            await asyncio.sleep(0.001 * (len(completions) - index))  # finishes in reverse order
            return float(index)

        return await asyncio.gather(*(one(i) for i in range(len(completions))))

    class Length:
        __name__ = "length"

        async def __call__(self, completion_ids, **kwargs):
            return torch.tensor([len(ids) for ids in completion_ids])

    def sometimes(completions, **kwargs):
        return [None, True, numpy.float32(0.5), torch.tensor(2), 3, None]

    def array(completions, **kwargs):
        return numpy.arange(6.0)

    found = scorer(slow, Length(), sometimes, array).score(batch())
    assert found.names == ["slow", "length", "sometimes", "array"]
    assert found.values[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.values[:, 1].tolist() == [1, 2, 3, 4, 5, 6]
    assert found.columns()["sometimes"] == [None, 1.0, 0.5, 2.0, 3.0, None]
    assert found.values[:, 3].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.num_unscorable == [0, 0, 0, 0]


def test_async_functions_work_inside_a_running_event_loop():
    import asyncio

    async def f(completions, **kwargs):
        return [1.0] * len(completions)

    async def notebook():
        return scorer(f).score(batch())

    assert asyncio.run(notebook()).values[:, 0].tolist() == [1.0] * 6


def test_metrics_have_trls_names_and_statistics():
    def f(completions, log_metric, log_extra, **kwargs):
        log_metric("accuracy", 0.25)
        log_extra("note", [f"n{i}" for i in range(len(completions))])
        return [1.0, None, 2.0, 4.0, None, None]

    found = scorer(f, reward_weights=[0.5]).score(batch())
    assert found.metrics() == {
        "rewards/f/mean": pytest.approx(7 / 3),
        "rewards/f/std": pytest.approx(numpy.std([1, 2, 4], ddof=1)),
        "accuracy": 0.25,
    }
    assert found.columns() == {"note": [f"n{i}" for i in range(6)], "f": [1.0, None, 2.0, 4.0, None, None]}
    assert found.weights.tolist() == [0.5]


def test_the_standard_deviation_is_trls():
    from trl.trainer.utils import nanstd

    def f(completions, **kwargs):
        return [1.0, None, 2.0, 4.0, None, None]

    found = scorer(f).score(batch())
    assert found.metrics()["rewards/f/std"] == pytest.approx(nanstd(found.values[:, 0]).item())


def test_parts_of_a_batch_come_together_in_order():
    def f(completions, completion_ids, log_metric, log_extra, **kwargs):
        log_metric("size", len(completions))
        if completions[0] != "c0":
            log_extra("late", list(completions))
        return [ids[0] for ids in completion_ids]

    whole = batch(5, 2)
    parts = [whole.groups(range(2)), whole.groups(range(2, 5))]
    assert (whole.num_groups, [part.num_groups for part in parts]) == (5, [2, 3])
    joined = RewardMatrix.concatenate([pickle.loads(pickle.dumps(scorer(f).score(part))) for part in parts])
    assert joined.values[:, 0].tolist() == list(range(10))
    assert joined.metrics()["size"] == 5.0
    assert joined.columns()["late"] == [None] * 4 + [f"c{i}" for i in range(4, 10)]


# ---- wrong lengths and types: never broadcast ---------------------------------------------------------------------
MUST = "it must return one per completion"


@pytest.mark.parametrize("on_error", ["raise", "unscorable"])
@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0], f"the reward function 'f' returned 1 rewards for 6 completions; {MUST}"),
        ([1.0] * 5, f"the reward function 'f' returned 5 rewards for 6 completions; {MUST}"),
        ([1.0] * 7, f"the reward function 'f' returned 7 rewards for 6 completions; {MUST}"),
        ([], f"the reward function 'f' returned 0 rewards for 6 completions; {MUST}"),
        (1.0, "the reward function 'f' returned 1.0, which is no list; it must return a list of 6 numbers"),
        (None, "the reward function 'f' returned nothing (None); it must return a list of 6 numbers"),
        ("123456", "the reward function 'f' returned '123456', which is no list; it must return a list of 6 numbers"),
        ({0: 1.0}, "the reward function 'f' returned {0: 1.0}, which is no list; it must return a list of 6 numbers"),
        (
            torch.zeros(6, 1),
            "the reward function 'f' returned an array of 2 dimensions; it must return a list of 6 numbers",
        ),
        (
            torch.tensor(1.0),
            "the reward function 'f' returned an array of 0 dimensions; it must return a list of 6 numbers",
        ),
    ],
)
def test_anything_but_one_reward_per_completion_ends_the_run(returned, sentence, on_error):
    def f(completions, **kwargs):
        return returned

    assert failure(f, on_error=on_error) == sentence

    async def g(completions, **kwargs):
        return returned

    g.__name__ = "f"
    assert failure(g, on_error=on_error) == sentence


def test_a_function_that_forgot_async_is_told_so():
    async def judge(completions):
        return [1.0]

    assert "returned a coroutine; write `async def`" in failure(lambda completions, **kwargs: judge(completions))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (math.nan, "returned nan"),
        (math.inf, "returned inf"),
        ("0.5", "returned '0.5', which is no number"),
        ([1.0], "returned [1.0], which is no number"),
        (1j, "returned 1j, which is no number"),
        (torch.tensor(math.nan), "returned nan"),
    ],
)
def test_a_row_that_is_no_finite_number_is_named_or_left_out(value, words):
    def f(completions, **kwargs):
        return [1.0, 1.0, 1.0, value, 1.0, 1.0]

    text = f"the reward function 'f' {words} for row 3; write reward.on_error: unscorable to leave such rows out"
    assert failure(f) == text
    found = scorer(f, on_error="unscorable").score(batch())
    assert found.columns()["f"] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert found.metrics()["rewards/f/unscorable"] == 1.0


# ---- exceptions, exits, deadlines ---------------------------------------------------------------------------------
def raiser(error: Callable[[], BaseException], *, row: str = "c3") -> Callable[..., Any]:
    def f(completions, **kwargs):
        if row in completions:
            raise error()
        return [1.0] * len(completions)

    return f


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: ZeroDivisionError("division by zero"), "raised ZeroDivisionError: division by zero"),
        (lambda: TimeoutError("judge"), "raised TimeoutError: judge"),
        (lambda: SystemExit(3), "raised SystemExit: 3"),
        (lambda: AssertionError(), "raised AssertionError"),
        (lambda: StopIteration(), "raised StopIteration"),
    ],
)
def test_a_function_that_raises_for_one_row_names_it_or_leaves_it_out(error, words):
    text = failure(raiser(error))
    first, *trace = text.splitlines()
    assert first == (
        f"the reward function 'f' {words} for row 3; write reward.on_error: unscorable to leave such rows out"
    )
    assert any("test_rewards.py" in line and "in f" in line for line in trace)
    assert not any("reward_call.py" in line for line in trace)
    found = scorer(raiser(error), on_error="unscorable").score(batch())
    assert found.columns()["f"] == [1.0, 1.0, 1.0, None, 1.0, 1.0]
    assert found.num_unscorable == [1]


def test_rows_of_a_part_are_numbered_in_the_whole_batch():
    with pytest.raises(RewardError, match="for row 3;"):
        scorer(raiser(ValueError)).score(batch().groups(range(1, 3)))


def test_an_async_function_that_raises_names_its_row():
    async def f(completions, **kwargs):
        return raiser(lambda: ValueError("no"))(completions)

    assert "'f' raised ValueError: no for row 3;" in failure(f)


def test_an_error_of_the_batch_alone_is_told_as_such():
    def f(completions, **kwargs):
        assert len(completions) == 1, "one at a time"
        return [1.0]

    for on_error in ("raise", "unscorable"):
        assert failure(f, on_error=on_error).splitlines()[0] == (
            "the reward function 'f' raised AssertionError: one at a time when called with 6 rows at once, and with no "
            "single row"
        )


def test_ctrl_c_is_not_swallowed():
    for on_error in ("raise", "unscorable"):
        with pytest.raises(KeyboardInterrupt):
            scorer(raiser(KeyboardInterrupt), on_error=on_error).score(batch())


def test_a_function_that_always_fails_soon_ends_the_run():
    def f(completions, **kwargs):
        raise ValueError("always")

    always = scorer(f, on_error="unscorable")
    for _ in range(2):
        assert always.score(batch()).num_unscorable == [6]
    with pytest.raises(RewardError, match="for row 0, and failed for every row of 3 batches in a row"):
        always.score(batch())


def test_a_batch_that_works_starts_the_count_again():
    def f(prompts, trainer_state, **kwargs):
        if trainer_state.global_step % 3 != 2:
            raise ValueError
        return [0.0] * len(prompts)

    sometimes = scorer(f, on_error="unscorable")
    found = [sometimes.score(batch(step=step)).num_unscorable for step in range(6)]
    assert found == [[6], [6], [0], [6], [6], [0]]


def hanging(completions, **kwargs):
    if "c3" in completions:
        time.sleep(60)
    return [1.0] * len(completions)


def backtracking(completions, **kwargs):
    import re

    if "c3" in completions:  # in C code, which holds the interpreter: only a signal gets out
        re.match(r"(1*0*)*$", "10" * 40 + "&")
    return [1.0] * len(completions)


def stubborn(completions, **kwargs):
    for _ in range(2 if "c3" in completions else 0):
        with contextlib.suppress(Exception):  # does not catch the deadline
            time.sleep(60)
    return [1.0] * len(completions)


async def waiting(completions, **kwargs):
    import asyncio

    if "c3" in completions:
        await asyncio.sleep(60)
    return [1.0] * len(completions)


@pytest.mark.parametrize("function", [hanging, backtracking, stubborn, waiting])
def test_a_row_that_takes_too_long_is_named_or_left_out(function):
    text = failure(function, timeout_s=0.05)
    assert f"{function.__name__!r} took more than 0.05 s (reward.timeout_s) for row 3;" in text
    found = scorer(function, on_error="unscorable", timeout_s=0.05).score(batch())
    assert found.columns()[function.__name__] == [1.0, 1.0, 1.0, None, 1.0, 1.0]


def test_after_three_timeouts_the_other_rows_are_not_called():
    calls = []

    def f(completions, **kwargs):
        calls.append(len(completions))
        time.sleep(60)

    found = scorer(f, on_error="unscorable", timeout_s=0.02).score(batch())
    assert found.num_unscorable == [6]
    assert calls == [6, 1, 1, 1]


def test_a_deadline_works_outside_the_main_thread_and_leaves_foreign_timers_alone():
    import signal
    import threading

    caught: list[BaseException] = []

    def work() -> None:
        try:
            with_deadline(lambda: time.sleep(5), 0.02)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(4)
    assert len(caught) == 1

    handler = signal.getsignal(signal.SIGALRM)
    signal.setitimer(signal.ITIMER_REAL, 50)
    assert with_deadline(lambda: 5, 1.0) == 5
    assert 40 < signal.getitimer(signal.ITIMER_REAL)[0] <= 50
    assert signal.getsignal(signal.SIGALRM) == handler
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_rows_of_log_extra_survive_a_retry_row_by_row():
    def f(completions, log_extra, **kwargs):
        log_extra("seen", list(completions))
        return raiser(ValueError)(completions)

    found = scorer(f, on_error="unscorable").score(batch())
    assert found.columns()["seen"] == ["c0", "c1", "c2", "c3", "c4", "c5"]


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [("note", [1, 2], "2 values of 'note' for 1 completions"), ("advantage", [0], "the column 'advantage' is taken")],
)
def test_mistakes_in_log_extra_are_the_functions(column, values, words):
    def f(completions, log_extra, **kwargs):
        log_extra(column, values)
        return [0.0] * len(completions)

    assert f"'f' raised ValueError: log_extra: {words}" in failure(f)


# ---- several functions --------------------------------------------------------------------------------------------
def test_all_functions_run_and_counts_are_checked():
    def f(completions, **kwargs):
        return [1.0] * len(completions)

    def g(completions, **kwargs):
        return [2.0] * len(completions)

    assert scorer(f, g).score(batch()).values.tolist() == [[1.0, 2.0]] * 6
    with pytest.raises(ValueError, match="3 values for 2 functions"):
        scorer(f, g, reward_weights=[1, 2, 3])
    with pytest.raises(ValueError, match=r"reward\.funcs is empty"):
        scorer()


def test_a_missing_column_is_named_before_anything_is_called():
    def f(completions, solution, weight=1.0, **kwargs):
        raise AssertionError("called")

    words = "reward.funcs: 'f' needs the column 'solution', which the data does not have; its columns: answer, level"
    with pytest.raises(ValueError, match=words):
        scorer(f).score(batch())
    with pytest.raises(ValueError, match="nearest: solutions"):
        check_columns([RewardFunction("f", f)], ["solutions"])
    check_columns([RewardFunction("f", f)], ["solution"])


# ---- names --------------------------------------------------------------------------------------------------------
CODE = """\
from helper import HALF
def f(completions, **kwargs): return [HALF] * len(completions)
def make(value): return lambda completions, **kwargs: [value] * len(completions)
class Judge:
    def __init__(self, value=3.0): self.value = value
    def __call__(self, completions, **kwargs): return [self.value] * len(completions)
NUMBER = 3
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("HALF = 0.5\n")
    (tmp_path / "math.py").write_text(CODE)
    return tmp_path / "math.py"


def test_functions_come_from_files_modules_and_factories(code):
    specs = [
        f"{code}:f",
        RewardCall(func=f"{code}:make", args={"value": 2.0}, name="two"),
        RewardCall(func=f"{code}:Judge", args={}),
        "reasoning_gym",
        "rlneuron.builtin_rewards:last_number",
    ]
    functions = load_rewards(specs)
    assert [f.name for f in functions] == ["f", "two", "Judge", "reasoning_gym", "last_number"]
    found = RewardScorer(functions[:3]).score(batch())
    assert found.values[0].tolist() == [0.5, 2.0, 3.0]
    assert math.pi > 3, "the file math.py must not replace the module math"
    assert sys.modules["math"] is math


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("g", "has no function 'g'; it has: f, make, Judge"),
        ("juge", "has no function 'juge'; nearest: Judge"),
        ("NUMBER", "is int, not a function"),
        ("Judge", "is a class; write args: {} to make an instance of it"),
    ],
)
def test_what_is_no_function_is_one_sentence(code, function, words):
    with pytest.raises(ValueError, match=r"^reward\.funcs: ") as caught:
        load_reward(f"{code}:{function}")
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "could not be imported: SyntaxError: invalid syntax"),
        ("import nothing_of_that_name\n", "could not be imported: ModuleNotFoundError: No module named"),
        ("1 / 0\n", "could not be imported: ZeroDivisionError: division by zero"),
        ("raise SystemExit(1)\n", "could not be imported: SystemExit: 1"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_sentence(tmp_path, text, words):
    (tmp_path / "broken.py").write_text(text)
    for _ in range(2):  # a half-imported module must not stay behind
        with pytest.raises(ValueError, match=r"^reward\.funcs: ") as caught:
            load_reward(f"{tmp_path}/broken.py:f")
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)


def test_mistakes_in_names_and_arguments_are_one_sentence(code):
    cases: list[tuple[RewardCall | str, str]] = [
        ("no_such_module_here:f", "the module 'no_such_module_here' could not be imported: ModuleNotFoundError"),
        ("lenght", "'lenght' is no built-in reward; allowed: accuracy_reward"),
        (str(code.with_name("nowhere.py")) + ":f", "does not exist"),
        (RewardCall(func=f"{code}:make", args={"valeu": 1}), "could not be called with args {'valeu': 1}: TypeError"),
        (RewardCall(func="json:dumps", args={"obj": 1}), "returned str, not a reward function"),
        ("get_soft_overlong_punishment", "needs args; write {func: get_soft_overlong_punishment, args: "
         "{max_completion_len, soft_punish_cache: ...}}"),
    ]  # fmt: skip
    for spec, words in cases:
        with pytest.raises(ValueError, match=r"^reward\.funcs: ") as caught:
            load_reward(spec)
        assert words in str(caught.value)


def test_two_functions_of_one_name_are_refused(code):
    with pytest.raises(ValueError, match="2 functions are called 'f'; give them names of their own"):
        load_rewards([f"{code}:f", RewardCall(func="last_number", name="f")])
