"""Waiting for Ray: every wait has an owner and a deadline, and names them when it fails.

The only place that calls `ray.get`. A dead actor, an exception inside an actor and a passed deadline become a
`RunError` of one or a few lines: which actor, what it was doing, the cause, and where its log lies.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError


class RunError(RuntimeError):
    """The run cannot go on. Its text is what the user reads: actor, task, cause, log path."""


@dataclass(frozen=True, slots=True)
class Owner:
    """One actor that the controller waits for."""

    name: str
    """Readable name, as in the Ray dashboard: "rollout-0"."""
    handle: ActorHandle
    pid: int


def _log_path(owner: Owner) -> str:
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]
    found = sorted(logs.glob(f"worker-*-{owner.pid}.err"))
    return str(found[-1] if found else logs)


def _last_lines(path: str, count: int = 12) -> str:
    file = Path(path)
    if not file.is_file():
        return ""
    lines = [line for line in file.read_text(errors="replace").splitlines() if line.strip() and ":job_id:" not in line]
    return "\n".join(f"  | {line}" for line in lines[-count:])


def _died(owner: Owner, task: str, error: RayActorError) -> RunError:
    log = _log_path(owner)
    if "creation task" in str(error):  # an exception in __init__: its traceback is the text, its last line the cause
        lines = [line for line in str(error).splitlines() if line.strip()]
        return RunError(f"{owner.name} could not {task}: {lines[-1].strip()}\n" + "\n".join(lines[:-1]))
    cause = " ".join(str(error).split())
    tail = _last_lines(log)
    return RunError(
        f"actor {owner.name} (pid {owner.pid}) died while it was to {task}: {cause[:600]}\nlog: {log}"
        + (f"\n{tail}" if tail else "")
    )


def wait(owners: Sequence[Owner], refs: Sequence[Any], *, task: str, timeout_s: float, key: str) -> list[Any]:
    """The results of `refs`, one per owner, in order; raises `RunError` at the first failure or at the deadline.

    `task` is what they were asked to do, `key` the setting that moves the deadline; both are for the message.
    """
    assert len(owners) == len(refs), "one reference per owner"
    owner_of = dict(zip(refs, owners, strict=True))
    pending = list(refs)
    results: dict[Any, Any] = {}
    deadline = time.monotonic() + timeout_s
    while pending:
        # One at a time as they finish: a dead worker is noticed while another is still busy.
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            late = ", ".join(
                f"{owner_of[r].name} (pid {owner_of[r].pid}, log {_log_path(owner_of[r])})" for r in pending
            )
            raise RunError(f"{late} did not {task} within {timeout_s:g} s; raise ray.timeout_s if it needs longer")
        results[done[0]] = _get(owner_of[done[0]], done[0], task)
    return [results[ref] for ref in refs]


def _get(owner: Owner, ref: Any, task: str) -> Any:
    try:
        return ray.get(ref, timeout=30)
    except RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        if isinstance(cause, ValueError):  # the user's mistake: its sentence is the message
            raise RunError(f"{owner.name} could not {task}: {cause}\nlog: {_log_path(owner)}") from None
        raise RunError(
            f"actor {owner.name} (pid {owner.pid}) failed to {task}:\n{error}\nlog: {_log_path(owner)}"
        ) from None
    except RayActorError as error:
        raise _died(owner, task, error) from None
    except GetTimeoutError:
        raise RunError(f"the answer of {owner.name} to '{task}' could not be fetched within 30 s") from None
