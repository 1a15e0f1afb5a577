"""The fragments of a stream as one file that plays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from ...engine.part_file import PartFile
from ...engine.probe import VideoInfo, probe
from ...errors import LingBotError, VideoError


class FragmentFile:
    """An mp4 file that grows fragment by fragment; use it with ``with``.

    It has its name once the block ends. When the block fails, the fragments before make the file, unless they were at
    fault. Raises VideoError for fragments that are no video together, and where the file cannot be written; what was
    there before is then as it was. info: what the whole file holds, once the block has ended.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.fragments = 0
        self._part = PartFile(self.path, "world.mp4", VideoError)
        self._usable = True
        self._info: VideoInfo | None = None

    @property
    def info(self) -> VideoInfo:
        if self._info is None:
            raise VideoError(f"{self.path} is not finished; ask for what it holds after the block")
        return self._info

    def add(self, fragment: bytes) -> None:
        """Appends a fragment; the first one brings the init segment, and only that one."""
        with self._refusing():
            begins = fragment[4:8] == b"ftyp"
            if not self.fragments and not begins:
                raise VideoError(
                    "the first fragment has no init segment (ftyp); it is in the first answer of a session, put that "
                    "one in front"
                )
            if self.fragments and begins:
                raise VideoError(
                    f"fragment {self.fragments} begins another stream (the session was reset or made anew there); "
                    "write it and what follows to a file of its own"
                )
            self._part.file.write(fragment)
            self.fragments += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
            elif self.fragments and self._usable:
                with suppress(OSError):  # the first error counts
                    self._part.finish()
        finally:
            if not self._part.file.closed:
                self._part.discard()

    def _finish(self) -> None:
        with self._refusing():
            if not self.fragments:
                raise VideoError("there are no fragments; check what the server answered")
            info = probe(self._part.part)
            if not info.frames:
                raise VideoError(f"no frame of its {self.fragments} fragments can be decoded")
            self._part.finish()
        self._info = info

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, LingBotError) as error:
            self._usable = False
            why = getattr(error, "strerror", None) or error
            raise VideoError(f"{self.path} was not written: {why}") from error


def write_mp4(fragments: Iterable[bytes], path: str | os.PathLike[str]) -> VideoInfo:
    """Joins fragments of one stream, in their order, to an mp4 file; it is decoded, and what it holds is returned.

    Raises VideoError as :class:`FragmentFile`. When the fragments end with an error of their source, those before it
    make the file and the error is raised on.
    """
    with FragmentFile(path) as file:
        for fragment in fragments:
            file.add(fragment)
    return file.info
