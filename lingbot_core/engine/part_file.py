"""A file that is written under another name and takes its own when it is worth it."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from typing import Any

from ..errors import LingBotError

PART = ".part"


class PartFile:
    """``NAME.part``: a file of one process that takes the place of ``NAME`` when it is worth it.

    It is locked until it is closed, also once it has its name, so that a second process is refused. What a killed one
    left there is taken over. Where NAME is a link, the file it points to is replaced. example: a good name, for
    messages. Raises ``error``.
    """

    def __init__(self, path: str, example: str, error: type[LingBotError]) -> None:
        self.published = False
        try:
            self._check(path, example, error)
            self.path = os.path.realpath(path)
            self.part = self.path + PART
            self.file = self._open(path, error)
        except (OSError, ValueError) as failure:  # ValueError: a NUL byte in the path
            why = getattr(failure, "strerror", None) or failure
            raise error(f"{path} cannot be written: {why}; choose another place or change its permissions") from failure

    def publish(self) -> None:
        """Gives the file its name. Raises OSError, on Windows always as long as the file is open."""
        if not self.published:
            os.replace(self.part, self.path)
            self.published = True

    def finish(self) -> None:
        """Gives the file its name, if it does not have it yet, and closes it. Raises OSError."""
        with suppress(OSError):
            self.publish()  # before the lock goes
        self.file.close()
        self.publish()

    def discard(self) -> None:
        """Removes the file, unless it has its name, and closes it."""
        gone = self.published or _remove(self.part)
        with suppress(OSError):
            self.file.close()
        if not gone:
            _remove(self.part)

    @staticmethod
    def _check(path: str, example: str, error: type[LingBotError]) -> None:
        folder = os.path.dirname(path) or "."
        try:
            mode = os.stat(path).st_mode
        except FileNotFoundError:
            folder = os.path.dirname(os.path.realpath(path))
            if not os.path.exists(folder):
                raise error(f"{path} cannot be written: the folder {folder} does not exist; create it first") from None
            return
        except NotADirectoryError:
            raise error(f"{path} cannot be written: {folder} is not a folder; choose another place") from None
        if stat.S_ISDIR(mode):
            raise error(f"{path} is a folder; name a file in it, such as {os.path.join(path, example)}")
        if not stat.S_ISREG(mode):
            raise error(f"{path} is not a regular file; name a file such as {example}")
        if not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, "it is read-only")

    def _open(self, path: str, error: type[LingBotError]) -> FileIO:
        with suppress(FileNotFoundError):
            status = os.lstat(self.part)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise error(f"{path} cannot be written: {self.part} is in the way, a link or no plain file; remove it")
        # O_NOFOLLOW, O_NONBLOCK: should it become a link or a pipe now. Windows has neither.
        flags = os.O_RDWR | os.O_CREAT
        for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"):
            flags |= getattr(os, name, 0)
        file = FileIO(os.open(self.part, flags, 0o666), "r+")
        busy = error(f"{path} is being written by another process; wait for its end, or choose another name")
        try:
            # Another process may have named or removed what was opened here before it was locked.
            if not _lock(file) or not os.path.samestat(os.fstat(file.fileno()), os.stat(self.part)):
                raise busy
            if self._is_taken():
                _remove(self.part)
                raise busy
            file.truncate(0)
        except FileNotFoundError:
            file.close()
            raise busy from None
        except BaseException:
            file.close()
            raise
        return file

    def _is_taken(self) -> bool:
        """Whether another process has its file under the name already and goes on writing."""
        try:
            with open(self.path, "rb") as there:
                return not _lock(there)
        except OSError:
            return False


def _lock(file: Any) -> bool:
    """Locks an open file for this process; False when another one has. True where files cannot be locked."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody can give an open file another name there
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems have no locks
        return True
    return True


def _remove(path: str) -> bool:
    try:
        os.unlink(path)
    except OSError:
        return False
    return True
