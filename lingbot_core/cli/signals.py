"""Ctrl-C and SIGTERM: they end a run at a safe point, so that what is made is kept."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self


class Interrupts:
    """While entered, SIGINT and SIGTERM raise KeyboardInterrupt; at once, or, after ``wait_for_safe_points``, the
    first one only at the next :meth:`check` and any further one at once. What a body that was interrupted at once
    raises is that KeyboardInterrupt, whatever the library it struck made of it.

    Outside of the main thread nothing is installed, and an ignored SIGINT (a background job) stays ignored.
    """

    def __init__(self) -> None:
        self.requested = False
        self._gentle = self._ignored = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            # None: a handler that was not installed from Python; it cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()
        # An import that is interrupted raises ImportError, and so on.
        if self.requested and not self._gentle and isinstance(error, Exception):
            raise KeyboardInterrupt from error

    def wait_for_safe_points(self) -> None:
        """From here on a first signal is only noted."""
        self._gentle = True

    def ignore(self) -> None:
        """From here on signals do nothing: what is left to do is short, and half of it would be a loss."""
        self._ignored = True

    def check(self) -> None:
        """A safe point: raises KeyboardInterrupt when a signal was noted."""
        if self.requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._ignored:
            return
        again, self.requested = self.requested, True
        if again or not self._gentle:
            raise KeyboardInterrupt
