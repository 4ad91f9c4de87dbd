"""Scoring completions by TRL's reward contract: `f(prompts, completions, completion_ids, **columns) -> list`.

A plain class that works in one process; the reward actors of a run hold one. Every way in which user code can fail
either ends the run with the function and the row, or counts the row as not scored (reward.on_error).

B completions of a batch in generation order - R reward functions - G completions of a prompt
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from rlneuron.data import column_names
from rlneuron.prompts import PromptRow
from rlneuron.reward_call import RewardError, RowFault, row_values
from rlneuron.reward_functions import RewardFunction, check_columns, load_reward, load_rewards

if TYPE_CHECKING:
    from rlneuron.config import RunConfig

__all__ = [
    "RewardBatch",
    "RewardError",
    "RewardFunction",
    "RewardMatrix",
    "RewardScorer",
    "TrainerState",
    "check_columns",
    "load_reward",
    "load_rewards",
]

# A function that fails on every row of so many batches in a row ends the run, also with on_error: unscorable.
MAX_FAILED_BATCHES = 3

# Columns of the completions table that a function's log_extra may not replace.
TABLE_COLUMNS = (
    "step",
    "uid",
    "prompt",
    "completion",
    "completion_ids",
    "finish_reason",
    "weight_version",
    "advantage",
)


@dataclass(frozen=True, slots=True)
class TrainerState:
    """What reward functions see of the run (TRL passes its trainer state)."""

    global_step: int = 0
    max_steps: int = -1
    epoch: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardBatch:
    """Completions to score, in generation order: a prompt's G completions stand together.

    Example: 2 prompts x 2 completions -> 4 rows; `groups(range(1, 2))` are the last two.
    """

    rows: list[PromptRow]
    """[B] the prompt row of each completion (repeated within its group)."""
    texts: list[str]
    """[B] completions as text."""
    completion_ids: list[list[int]]
    """[B] completions as token ids."""
    group_size: int
    """G."""
    state: TrainerState = field(default_factory=TrainerState)
    first_row: int = 0
    """Number of the first row in the whole batch, for errors of a part."""

    @staticmethod
    def from_completions(
        rows: Sequence[PromptRow],
        texts: Sequence[str],
        completion_ids: Sequence[list[int]],
        *,
        group_size: int,
        step: int = 0,
    ) -> "RewardBatch":
        assert len(rows) == len(texts) == len(completion_ids), "one row, text and id list per completion"
        assert len(rows) % group_size == 0, "whole groups"
        return RewardBatch(
            rows=list(rows),
            texts=list(texts),
            completion_ids=list(completion_ids),
            group_size=group_size,
            state=TrainerState(global_step=step),
        )

    @property
    def num_groups(self) -> int:
        return len(self.rows) // self.group_size

    def groups(self, which: range) -> "RewardBatch":
        """The consecutive groups `which`."""
        rows = slice(which.start * self.group_size, which.stop * self.group_size)
        return replace(
            self,
            rows=self.rows[rows],
            texts=self.texts[rows],
            completion_ids=self.completion_ids[rows],
            first_row=self.first_row + rows.start,
        )

    def columns(self) -> list[str]:
        return column_names(self.rows)

    def arguments(self, rows: slice) -> dict[str, Any]:
        """What reward functions get: conversations as lists of messages, every column as a list."""
        chosen = self.rows[rows]
        texts = zip(chosen, self.texts[rows], strict=True)
        return {
            "prompts": [row.prompt for row in chosen],
            "completions": [
                [{"role": "assistant", "content": text}] if row.is_conversational else text for row, text in texts
            ],
            "completion_ids": [list(ids) for ids in self.completion_ids[rows]],
            **{name: [row.columns.get(name) for row in chosen] for name in self.columns()},
            "trainer_state": self.state,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardMatrix:
    """Rewards of a batch, and what the functions logged."""

    names: list[str]
    """[R] names of the functions."""
    values: torch.Tensor
    """[B, R] float32; NaN where a function does not apply to the row, or failed on it (on_error: unscorable)."""
    weights: torch.Tensor
    """[R] float32 reward.reward_weights."""
    num_unscorable: list[int]
    """[R] rows on which a function failed."""
    extra: dict[str, list[Any]] = field(default_factory=dict)
    """[B] columns of log_extra."""
    logged: dict[str, list[float]] = field(default_factory=dict)
    """Numbers of log_metric."""

    def metrics(self) -> dict[str, float]:
        """TRL's rewards/<name>/mean and std over the rows that have one, rewards/<name>/unscorable, log_metric's means.

        The standard deviation divides by n - 1 as in TRL; of a single row it is NaN.
        """
        found: dict[str, float] = {}
        for index, name in enumerate(self.names):
            scored = self.values[:, index][~self.values[:, index].isnan()]
            found[f"rewards/{name}/mean"] = float(scored.mean()) if len(scored) else float("nan")
            found[f"rewards/{name}/std"] = float(scored.std()) if len(scored) > 1 else float("nan")
            if self.num_unscorable[index]:
                found[f"rewards/{name}/unscorable"] = float(self.num_unscorable[index])
        return {**found, **{name: sum(numbers) / len(numbers) for name, numbers in self.logged.items()}}

    def columns(self) -> dict[str, list[Any]]:
        """One column per function (None where there is no reward), and those of log_extra."""
        table: dict[str, list[Any]] = dict(self.extra)
        for index, name in enumerate(self.names):
            table[name] = [None if value != value else value for value in self.values[:, index].tolist()]
        return table

    @staticmethod
    def concatenate(parts: Sequence["RewardMatrix"]) -> "RewardMatrix":
        """Parts of one batch, in order."""
        first = parts[0]
        names = dict.fromkeys(name for part in parts for name in part.extra)
        logged: dict[str, list[float]] = {}
        for part in parts:
            for name, numbers in part.logged.items():
                logged.setdefault(name, []).extend(numbers)
        return RewardMatrix(
            names=first.names,
            values=torch.cat([part.values for part in parts]),
            weights=first.weights,
            num_unscorable=[sum(counts) for counts in zip(*(part.num_unscorable for part in parts), strict=True)],
            extra={n: [v for p in parts for v in p.extra.get(n, [None] * len(p.values))] for n in names},
            logged=logged,
        )


class RewardScorer:
    """Scores batches with the functions of a run. Not for use by two threads at once."""

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        reward_weights: Sequence[float] | None = None,
        on_error: Literal["raise", "unscorable"] = "raise",
        timeout_s: float = 60.0,
    ) -> None:
        if not functions:
            raise ValueError("reward.funcs is empty; at least one reward function is needed")
        if reward_weights is not None and len(reward_weights) != len(functions):
            raise ValueError(f"reward.reward_weights has {len(reward_weights)} values for {len(functions)} functions")
        self.functions = list(functions)
        self.weights = torch.tensor(reward_weights or [1.0] * len(functions), dtype=torch.float32)
        self.on_error = on_error
        self.timeout_s = timeout_s
        self._failed_batches = [0] * len(functions)

    @staticmethod
    def from_config(config: "RunConfig") -> "RewardScorer":
        """Imports the functions of `config.reward`; ValueError in one sentence if one cannot be found."""
        reward = config.reward
        return RewardScorer(
            load_rewards(reward.funcs),
            reward_weights=reward.reward_weights,
            on_error=reward.on_error,
            timeout_s=reward.timeout_s,
        )

    def score(self, batch: RewardBatch) -> RewardMatrix:
        """[B, R] rewards. RewardError names the function and the row, before anything is returned."""
        check_columns(self.functions, batch.columns())
        log = _Log(len(batch.rows))
        values = torch.full((len(batch.rows), len(self.functions)), float("nan"))
        num_unscorable = []
        for index, function in enumerate(self.functions):
            found = row_values(
                function,
                lambda rows: {**batch.arguments(rows), **log.callbacks(rows)},
                len(batch.rows),
                self.timeout_s,
                stop_at_first=self.on_error == "raise",
            )
            faults = {row: value for row, value in enumerate(found) if isinstance(value, RowFault)}
            self._judge(index, faults, batch)
            for row, value in enumerate(found):
                if isinstance(value, float):
                    values[row, index] = value
            num_unscorable.append(len(faults))
        return RewardMatrix(
            names=[function.name for function in self.functions],
            values=values,
            weights=self.weights,
            num_unscorable=num_unscorable,
            extra=log.extra,
            logged=log.numbers,
        )

    def _judge(self, index: int, faults: Mapping[int, RowFault], batch: RewardBatch) -> None:
        """Raises if the faults of one function end the run."""
        name = self.functions[index].name
        self._failed_batches[index] = self._failed_batches[index] + 1 if len(faults) == len(batch.rows) else 0
        if not faults:
            return
        row, fault = next(iter(faults.items()))
        blame = f"the reward function {name!r} {fault.text} for row {batch.first_row + row}"
        if self.on_error == "raise":
            advice = "write reward.on_error: unscorable to leave such rows out"
            raise RewardError(f"{blame}; {advice}\n{fault.trace}".rstrip())
        if self._failed_batches[index] == MAX_FAILED_BATCHES:
            text = f"{blame}, and failed for every row of {MAX_FAILED_BATCHES} batches in a row"
            raise RewardError(f"{text}\n{fault.trace}".rstrip())


class _Log:
    """Collects what reward functions log while a batch is scored."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.extra: dict[str, list[Any]] = {}
        self.numbers: dict[str, list[float]] = {}

    def callbacks(self, rows: slice) -> dict[str, Any]:
        """log_extra and log_metric for a call with these rows."""
        count = rows.stop - rows.start

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if column in TABLE_COLUMNS:
                raise ValueError(f"log_extra: the column {column!r} is taken; choose another name")
            if len(values) != count:
                raise ValueError(f"log_extra: {len(values)} values of {column!r} for {count} completions")
            self.extra.setdefault(column, [None] * self.num_rows)[rows] = list(values)

        def log_metric(name: str, value: float) -> None:
            self.numbers.setdefault(name, []).append(float(value))

        return {"log_extra": log_extra, "log_metric": log_metric}
