"""How far a run is: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import Any, Self, TextIO


class Progress:
    """Counts finished chunks and their frames, from its first use as a context manager on.

    The bar shows chunk, frames per second so far, and the time left; elsewhere a line per chunk says the same.
    """

    def __init__(self, chunks: int, frames: int, stream: TextIO | None = None) -> None:
        self.chunks, self.frames = chunks, frames
        self.done_chunks = self.done_frames = 0
        self._stream = stream or sys.stderr
        self._begun = self._ended = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        self._begun = self._ended = time.monotonic()
        if self._stream.isatty():
            from tqdm import tqdm

            form = "{desc}{percentage:3.0f}%|{bar}| chunk {n_fmt}/{total_fmt}{postfix} [{elapsed}, {remaining} left]"
            columns, rows = _size(self._stream)
            self._bar = tqdm(
                total=self.chunks,
                bar_format=form,
                file=self._stream,
                ncols=columns,
                nrows=rows,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    @property
    def seconds(self) -> float:
        """From the start to the last finished chunk."""
        return self._ended - self._begun

    @property
    def fps(self) -> float:
        """Finished frames per second of that time; 0 before the first chunk."""
        return self.done_frames / self.seconds if self.seconds > 0 else 0.0

    def step(self, index: int, total: int) -> None:
        """A denoising step of the next chunk begins."""
        if self._bar is not None:
            self._bar.set_description_str(f"step {index + 1}/{total} ")

    def finish_chunk(self, frames: int) -> None:
        """A chunk is made, and its frames are in the video."""
        self._ended = time.monotonic()
        self.done_chunks += 1
        self.done_frames += frames
        if self._bar is not None:
            self._bar.set_postfix_str(f"{self.fps:.2f} fps", refresh=False)
            self._bar.update(1)
            return
        left = (self.frames - self.done_frames) / self.fps if self.fps else 0.0
        self.say(
            f"chunk {self.done_chunks}/{self.chunks}: {self.done_frames}/{self.frames} frames, {self.fps:.2f} fps, "
            f"{clock(left)} left"
        )

    def say(self, text: str) -> None:
        """A line for people that does not spoil the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)


def clock(seconds: float) -> str:
    """Seconds as m:ss, or h:mm:ss."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _size(stream: TextIO) -> tuple[int | None, int | None]:
    """80 x 24 for a terminal that says it has no size, as some in containers do; None leaves the size to tqdm."""
    try:
        return (None, None) if os.get_terminal_size(stream.fileno()).columns else (80, 24)
    except OSError:
        return None, None
