"""Ctrl-C without half a step: an interrupt inside a protected block waits for the block's end.

While the learner updates and the weights go out, learner and controller must not part; a checkpoint taken there
would name a step whose data position is the one before.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupt:
    """Handles SIGINT (and SIGTERM) of the main thread while it is installed."""

    def __init__(self) -> None:
        self._protected = 0
        self._waiting = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Raises KeyboardInterrupt on SIGINT and SIGTERM until the block ends, then restores the old handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread receives signals
            return
        old = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    @contextmanager
    def protected(self) -> Iterator[None]:
        """A block that is finished before an interrupt takes effect; a second interrupt takes effect at once."""
        self._protected += 1
        try:
            yield
        finally:
            self._protected -= 1
        if self._waiting and self._protected == 0:
            self._waiting = False
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._protected and not self._waiting:
            self._waiting = True
            return
        raise KeyboardInterrupt
