"""Host time by phase. Everything that it reports is measured on this machine's clock: `wall_*_s`, never `sim_*`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Stopwatch:
    """Adds up seconds by phase: `outputs = watch.time("generate", lambda: ...)`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._started = time.perf_counter()

    def time(self, phase: str, work: Callable[[], Result]) -> Result:
        begin = time.perf_counter()
        try:
            return work()
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin

    def total_s(self) -> float:
        """Seconds since this stopwatch was made."""
        return time.perf_counter() - self._started
