"""Standard output and error that cannot end a run: what cannot be shown is dropped."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO


class PatientStream(io.TextIOBase):
    """Passes text on to a stream, None for one that is closed, until that fails: from then on it is dropped.

    failure: why the stream was given up. Characters that its encoding does not have are shown as escapes.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.failure: Exception | None = None

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return getattr(self._stream, "encoding", None) or "utf-8"

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise io.UnsupportedOperation("fileno")
        return self._stream.fileno()

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError) as error:
                self._give_up(self._stream, error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._give_up(self._stream, error)

    def _give_up(self, stream: TextIO, error: Exception) -> None:
        self._stream, self.failure = None, error
        # What the stream still holds would fail once more when Python ends.
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


@contextmanager
def patient_streams() -> Iterator[PatientStream]:
    """Within it sys.stdout and sys.stderr are patient; yields the one for output."""
    out, error = PatientStream(sys.stdout), PatientStream(sys.stderr)
    with redirect_stdout(out), redirect_stderr(error):
        try:
            yield out
        finally:
            out.flush()
            error.flush()


def occupy_standard_files() -> None:
    """Opens nothing as file 0, 1 and 2 where they are closed; the next file, a video say, would get their number and
    with it what C libraries print.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
