"""What a run shows while it goes on: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

COLUMNS = {
    "step": "step",
    "reward": "reward",
    "eval_reward": "eval",
    "eval_reward_greedy": "eval greedy",
    "loss": "loss",
    "entropy": "entropy",
    "kl": "kl",
    "grad_norm": "grad",
    "completions/mean_length": "length",
    "wall_step_s": "wall s",
}
ROWS_SHOWN = 12


def _cell(name: str, row: Mapping[str, float]) -> str:
    if name not in row:
        return ""
    if name == "step":
        return str(int(row[name]))
    return f"{row[name]:.4g}" if name in ("loss", "kl") else f"{row[name]:.3f}"


class ProgressView:
    """Use as a context manager; `show(step, metrics)` after every logged step, `say(text)` for anything else."""

    def __init__(self, *, max_steps: int, first_step: int, console: Console | None = None) -> None:
        self.console = console or Console()
        self._rows: deque[dict[str, float]] = deque(maxlen=ROWS_SHOWN)
        self._max_steps = max_steps
        self._started = time.monotonic()
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
        )
        self._task = self._progress.add_task("steps", total=max_steps, completed=first_step)
        self._live = Live(console=self.console, refresh_per_second=4) if self.console.is_terminal else None

    def __enter__(self) -> ProgressView:
        if self._live:
            self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def finish(self) -> None:
        """Leaves the table as it is; what is said from now on stands below it."""
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """A line above the table, while there is one."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
        sys.stdout.flush()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)
        if self._live:
            self._live.update(Group(self._table(), self._progress))

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        row = {"step": float(step), **metrics}
        if self._live:
            self._rows.append(row)
            self._live.update(Group(self._table(), self._progress))
            return
        shown = [f"{label} {_cell(name, row)}" for name, label in COLUMNS.items() if name in row and name != "step"]
        self.say(f"step {step}/{self._max_steps} | " + " | ".join(shown))

    def _table(self) -> Table:
        columns = [name for name in COLUMNS if any(name in row for row in self._rows)]
        table = Table(*(COLUMNS[name] for name in columns), expand=False)
        for row in self._rows:
            table.add_row(*(_cell(name, row) for name in columns))
        return table
