"""Calling user code safely: a deadline around it, every way to fail caught, every returned value checked.

A call gives a list with one entry per row: a number, None (not applicable), or a `RowFault` (what went wrong).
"""

import asyncio
import inspect
import math
import signal
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from types import FrameType
from typing import Any

from rlneuron.prompts import shorten
from rlneuron.reward_functions import RewardFunction

# After so many rows of one batch that ran into the deadline, the others are not called any more.
MAX_TIMEOUTS = 3


class RewardError(ValueError):
    """A reward function failed; str() names function, row and cause, and ends with the traceback of its code."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """Why a row has no reward."""

    text: str
    trace: str = ""


class _Expired(BaseException):
    """The deadline passed. No Exception, so that a user's `except Exception` does not swallow it."""


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    trace: str
    timed_out: bool


def row_values(
    function: RewardFunction,
    arguments: Callable[[slice], Mapping[str, Any]],
    num_rows: int,
    timeout_s: float,
    *,
    stop_at_first: bool,
) -> list[float | RowFault | None]:
    """Calls the function on the whole batch; if that raises, row by row to find the rows to blame.

    `arguments(rows)` gives the arguments of a slice of the batch. With `stop_at_first` the rows after the first fault
    are not called. RewardError if the function breaks the contract for the batch (wrong length, no list), or raises
    on the batch and on no single row.
    """
    outcome = _attempt(function, arguments(slice(0, num_rows)), timeout_s)
    if not isinstance(outcome, _Failure):
        return checked_values(function.name, outcome, num_rows)
    values: list[float | RowFault | None] = []
    timeouts = 0
    for row in range(num_rows):
        if timeouts == MAX_TIMEOUTS or (stop_at_first and any(isinstance(value, RowFault) for value in values)):
            values.append(RowFault(f"not called after {timeouts} timeouts") if timeouts else None)
            continue
        single = _attempt(function, arguments(slice(row, row + 1)), timeout_s)
        if isinstance(single, _Failure):
            timeouts += single.timed_out
            values.append(RowFault(single.text, single.trace))
        else:
            values.extend(checked_values(function.name, single, 1))
    if not any(isinstance(value, RowFault) for value in values):
        raise RewardError(
            f"the reward function {function.name!r} {outcome.text} when called with {num_rows} rows at once, and with "
            f"no single row\n{outcome.trace}".rstrip()
        )
    return values


def checked_values(name: str, returned: Any, num_rows: int) -> list[float | RowFault | None]:
    """One entry per row. RewardError unless `returned` is a list (or 1-D array) of `num_rows` entries."""
    if hasattr(returned, "tolist") and hasattr(returned, "ndim"):  # numpy arrays and torch tensors
        if returned.ndim != 1:
            raise RewardError(
                f"the reward function {name!r} returned an array of {returned.ndim} dimensions; it must return a list "
                f"of {num_rows} numbers"
            )
        returned = returned.tolist()
    if not isinstance(returned, (list, tuple)):
        what = "nothing (None)" if returned is None else f"{shorten(returned)}, which is no list"
        if inspect.iscoroutine(returned):
            returned.close()
            what = "a coroutine; write `async def`"
        raise RewardError(f"the reward function {name!r} returned {what}; it must return a list of {num_rows} numbers")
    if len(returned) != num_rows:
        raise RewardError(
            f"the reward function {name!r} returned {len(returned)} rewards for {num_rows} completions; it must return "
            "one per completion"
        )
    return [_checked_value(value) for value in returned]


def _checked_value(value: Any) -> float | RowFault | None:
    if value is None:
        return None
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:  # numpy and torch numbers
        value = value.item()
    if not isinstance(value, Real):
        return RowFault(f"returned {shorten(value)}, which is no number")
    number = float(value)
    return number if math.isfinite(number) else RowFault(f"returned {number}")


def _attempt(function: RewardFunction, arguments: Mapping[str, Any], timeout_s: float) -> Any:
    """What the function returned, or a _Failure."""
    accepted = function.accepted(arguments)
    try:
        if function.is_async:
            return _run_async(lambda: function.call(**accepted), timeout_s)
        return with_deadline(lambda: function.call(**accepted), timeout_s)
    except (TimeoutError, _Expired) as error:
        # The user's own TimeoutError (of a request, say) is a failure of its own.
        ours = isinstance(error, _Expired)
        text = f"took more than {timeout_s:g} s (reward.timeout_s)" if ours else f"raised {_named(error)}"
        return _Failure(text, _user_trace(error), timed_out=ours)
    except (Exception, SystemExit) as error:
        return _Failure(f"raised {_named(error)}", _user_trace(error), timed_out=False)


def _named(error: BaseException) -> str:
    """Type and first line of the message; the rest goes with the traceback."""
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _user_trace(error: BaseException) -> str:
    """The traceback without our own frames, and the message if it has several lines."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN_FILES)]
    message = f"{type(error).__name__}: {error}" if "\n" in str(error) else ""
    return ("".join(traceback.format_list(frames)) + message).rstrip()


_OWN_FILES = (__file__, asyncio.__file__.removesuffix("__init__.py"), threading.__file__)


# ---- deadlines ----------------------------------------------------------------------------------------------------
def with_deadline(work: Callable[[], Any], seconds: float) -> Any:
    """`work()`, interrupted after `seconds`.

    In the main thread by SIGALRM, which also gets a regular expression out of its backtracking; elsewhere the work
    runs in a thread of its own, which is left behind if it does not end.
    """
    if threading.current_thread() is not threading.main_thread():
        return _in_thread(work, seconds)

    def expire(signum: int, frame: FrameType | None) -> None:
        raise _Expired

    previous = signal.signal(signal.SIGALRM, expire)
    started = time.monotonic()
    # Again every second, for code that swallows the first one in a bare `except:`.
    remaining, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
        if remaining > 0:  # someone else's timer goes on
            signal.setitimer(signal.ITIMER_REAL, max(remaining - (time.monotonic() - started), 1e-3), interval)


def _run_async(make_coroutine: Callable[[], Any], seconds: float) -> Any:
    """A coroutine on an event loop of its own thread: a notebook's thread already has a running loop."""

    async def limited() -> Any:
        task = asyncio.ensure_future(make_coroutine())
        done, _ = await asyncio.wait([task], timeout=seconds)
        if not done:
            task.cancel()
            raise _Expired
        return task.result()

    # The loop's own deadline comes first; the second one is for coroutines that block the loop.
    return _in_thread(lambda: asyncio.run(limited()), seconds + 1.0)


def _in_thread(work: Callable[[], Any], seconds: float) -> Any:
    returned: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(work())
        except BaseException as error:  # raised again in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True, name="reward")
    thread.start()
    thread.join(seconds)
    if raised:
        raise raised[0]
    if not returned:
        raise _Expired
    return returned[0]
