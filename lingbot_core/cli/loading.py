"""How far the loading of a model is: a bar on a terminal, a line every few seconds anywhere else."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO

GB = 10**9


class LoadingBar:
    """Called with bytes read so far and in all. Small models are loaded before there is anything to say."""

    name = "loading"

    def __init__(self, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._stream, self._every = stream or sys.stderr, every
        self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        if self._stream.isatty():
            if self._bar is None:
                from tqdm import tqdm

                self._bar = tqdm(total=total, desc=self.name, leave=False, file=self._stream, **self._units())
            self._bar.update(done - self._bar.n)
        elif time.monotonic() - self._said >= self._every:
            self._said = time.monotonic()
            print(f"{self.name}: {self._shown(done, total)}", file=self._stream, flush=True)

    def _units(self) -> dict[str, Any]:
        return {"unit": "B", "unit_scale": True}

    def _shown(self, done: int, total: int) -> str:
        return f"{done / GB:.1f} of {total / GB:.1f} GB"


class WarmingBar(LoadingBar):
    """Called with passes done and in all, while a GPU's kernels are compiled for the first time on this machine."""

    name = "preparing the GPU's kernels"

    def _units(self) -> dict[str, Any]:
        return {"unit": ""}

    def _shown(self, done: int, total: int) -> str:
        return f"{done} of {total}"
