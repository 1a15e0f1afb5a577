"""Lines for a person: one that is rewritten on a terminal, a line now and then where output goes to a file."""

from __future__ import annotations

import re
import shutil
import sys
import time
from typing import TextIO


class Console:
    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.every = every
        self._live = self.stream.isatty()
        self._shown = ""
        self._times: dict[str, float] = {}

    def line(self, text: str) -> None:
        self._clear()
        print(text, file=self.stream, flush=True)

    def progress(self, name: str, text: str) -> None:
        """What a run is doing now; on no terminal one line in ``every`` seconds for each activity."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._clear()
            self._shown = f"  {name}: {text}".replace("\n", " ")[:width]
            print(self._shown, end="", file=self.stream, flush=True)
            return
        # Numbers move; what is left of the text says which activity it is.
        activity, now = name + re.sub(r"[\d.]+", "", text), time.monotonic()
        if now - self._times.get(activity, -self.every) >= self.every:
            self._times[activity] = now
            print(f"  {name}: {text}", file=self.stream, flush=True)

    def _clear(self) -> None:
        if self._shown:
            print("\r" + " " * len(self._shown) + "\r", end="", file=self.stream, flush=True)
            self._shown = ""
