"""Writes a safetensors file tensor by tensor: bounded memory, resumable after any kind of end, verified.

The data goes into ``NAME.part`` and, after each tensor, its checksum into ``NAME.part.jsonl``. The next run keeps the
tensors of the part file whose bytes still have the recorded checksums and goes on after them. A file gets its own
name only when every byte of it was read back.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ..errors import InputFileError, WeightsError

PIECE_BYTES = 16 << 20

SAFETENSORS_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}

Advance = Callable[[int], None]


@dataclass(frozen=True)
class StreamedTensor:
    """One tensor of the file to be. read(): the tensor in this shape and dtype, on the CPU; called at its turn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self) -> Iterator[memoryview]:
        """The bytes, in pieces that are written in a moment, so that progress shows and Ctrl-C works."""
        tensor = self.read()
        if (tuple(tensor.shape), tensor.dtype) != (self.shape, self.dtype):
            raise WeightsError(
                f"{self.name} was read as {list(tensor.shape)} {tensor.dtype} instead of {list(self.shape)} "
                f"{self.dtype}; its file has changed"
            )
        data = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        for begin in range(0, len(data), PIECE_BYTES):
            yield data[begin : begin + PIECE_BYTES]


def header(tensors: Sequence[StreamedTensor], metadata: Mapping[str, str]) -> bytes:
    """The beginning of the file: 8 bytes of length, then JSON with the place of every tensor, in the given order."""
    about: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for tensor in tensors:
        place = [offset, offset + tensor.nbytes]
        about[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": place,
        }
        offset = place[1]
    text = json.dumps(about, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class StreamedFile:
    """One safetensors file that is being made at ``path``.

    tensors: in the order of the file; put those with the largest elements first so that all stay aligned. metadata:
    should say what the tensors are made from in words that change when that does, because a part file is continued,
    and a finished one kept, when its names, shapes and metadata are the same. Used as a context manager, which holds a
    lock against a second process that makes the same file.
    """

    def __init__(self, path: Path, tensors: Sequence[StreamedTensor], metadata: Mapping[str, str]) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.record = path.with_name(path.name + ".part.jsonl")
        self.tensors = tuple(tensors)
        self.header = header(self.tensors, metadata)
        self._plan = hashlib.sha256(self.header).hexdigest()
        self._lock: Any = None

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def finished(self) -> bool:
        """Whether ``path`` already is the whole file, as its size and everything but its values say."""
        try:
            if not self.path.is_file():  # a pipe would be waited for
                return False
            with self.path.open("rb") as file:
                return os.fstat(file.fileno()).st_size == self.nbytes and file.read(len(self.header)) == self.header
        except OSError:
            return False

    @property
    def missing_bytes(self) -> int:
        """Bytes that still have to be written at most, going by what the part file holds now. Raises InputFileError."""
        kept = self.part.stat().st_size if self._recorded() and _is_own(self.part) else 0
        return max(0, self.nbytes - kept)

    def make(self, advance: Advance = lambda count: None) -> None:
        """Writes what is missing, reads everything back, and gives the file its name.

        advance: called with bytes written or found written, then again with bytes read back: 2 * nbytes in all.
        Whatever ends this early, the next call goes on. Raises InputFileError when the disk is full or refuses, and
        WeightsError for tensors that cannot be read and for bytes that do not read back as they were written.
        """
        try:
            digests = self._write(advance)
            self._verify(digests, advance)
            self._publish()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise InputFileError(
                    f"the disk is full: {self.part} is not finished, {gigabytes(self.missing_bytes)} are missing; make "
                    "room and run the same command again, it goes on from there"
                ) from error
            raise InputFileError(f"{self.part} cannot be written: {error}") from error

    def __enter__(self) -> Self:
        self._lock = _lock(self.record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        if self.path.is_file() and not self.part.exists():
            self.record.unlink(missing_ok=True)

    def _write(self, advance: Advance) -> list[str]:
        digests, end = self._resume()
        with _open_own(self.part) as file:
            file.truncate(end)
            file.seek(end)
            if not end:
                _write_all(file, self.header)
                self._begin_record()
            advance(len(self.header) + sum(tensor.nbytes for tensor in self.tensors[: len(digests)]))
            with _open_own(self.record) as record:
                record.seek(0, os.SEEK_END)
                for tensor in self.tensors[len(digests) :]:
                    digests.append(_append(file, tensor, advance))
                    _write_all(record, json.dumps([tensor.name, digests[-1]]).encode() + b"\n")
            os.fsync(file.fileno())
        return digests

    def _resume(self) -> tuple[list[str], int]:
        """Digests of the tensors that the part file holds intact, and where they end; 0 when nothing can be kept."""
        recorded = self._recorded()
        if not recorded or not _is_own(self.part):
            return [], 0
        kept: list[str] = []
        with _open_own(self.part) as file:
            if file.read(len(self.header)) != self.header:
                return [], 0
            for tensor, (name, digest) in zip(self.tensors, recorded[1:], strict=False):
                if name != tensor.name or _digest_of(file, tensor.nbytes) != digest:
                    break
                kept.append(digest)
        # The record keeps as many lines; one more may be there, cut off when the process died.
        with _open_own(self.record) as record:
            lines = record.readall().split(b"\n")[: 1 + len(kept)]
            record.truncate(sum(len(line) + 1 for line in lines))
        return kept, len(self.header) + sum(tensor.nbytes for tensor in self.tensors[: len(kept)])

    def _recorded(self) -> list[tuple[str, str]]:
        """The lines of the record, the first of which names the plan; nothing for a record of another plan."""
        lines: list[tuple[str, str]] = []
        try:
            text = self.record.read_bytes() if _is_own(self.record) else b""
        except OSError:
            return []
        # A line without its end was being written when the process died.
        for line in text.split(b"\n")[:-1]:
            try:
                name, digest = json.loads(line)
            except (ValueError, TypeError):
                break
            lines.append((name, digest))
        return lines if lines and lines[0] == ("plan", self._plan) else []

    def _begin_record(self) -> None:
        """Starts the record anew; an existing file is emptied and not replaced, because it carries the lock."""
        with _open_own(self.record) as record:
            record.truncate(0)
            record.write(json.dumps(["plan", self._plan]).encode() + b"\n")

    def _verify(self, digests: Sequence[str], advance: Advance) -> None:
        """Opens the part file with safetensors' own reader and compares names, shapes, dtypes and checksums."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.part, "np") as file:
                found = set(file.keys())
                if found != {tensor.name for tensor in self.tensors}:
                    raise WeightsError(f"{self.part} was not written as it should be: its names differ; delete it")
                for tensor in self.tensors:
                    entry = file.get_slice(tensor.name)
                    if (tuple(entry.get_shape()), entry.get_dtype()) != (
                        tensor.shape,
                        SAFETENSORS_DTYPES[tensor.dtype],
                    ):
                        raise WeightsError(f"{self.part}: {tensor.name} has a wrong shape or dtype; delete the file")
        except SafetensorError as error:
            raise WeightsError(f"{self.part} cannot be read back ({error}); delete it and run this again") from error
        with _open_own(self.part) as stored:
            advance(len(stored.read(len(self.header))))
            for tensor, digest in zip(self.tensors, digests, strict=True):
                if _digest_of(stored, tensor.nbytes, advance) != digest:
                    raise WeightsError(
                        f"{self.part}: {tensor.name} reads back with other bytes than were written, the disk may be "
                        "failing; run this again, it goes on before that tensor"
                    )

    def _publish(self) -> None:
        os.replace(self.part, self.path)
        if os.name == "posix":
            # Without this the new name could be lost in a power failure.
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def gigabytes(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def _digest() -> Any:
    return hashlib.blake2b(digest_size=16)


def _digest_of(file: Any, count: int, advance: Advance = lambda count: None) -> str:
    """Checksum of the next ``count`` bytes; of fewer at the end of the file."""
    digest = _digest()
    while count > 0:
        data = file.read(min(count, PIECE_BYTES))
        if not data:
            break
        digest.update(data)
        advance(len(data))
        count -= len(data)
    return digest.hexdigest()


def _append(file: FileIO, tensor: StreamedTensor, advance: Advance) -> str:
    """Writes one tensor, which is gone from memory when this returns, and returns its checksum."""
    digest = _digest()
    for data in tensor.pieces():
        digest.update(data)
        _write_all(file, data)
        advance(len(data))
    return digest.hexdigest()


def _write_all(file: FileIO, data: bytes | memoryview) -> None:
    """An unbuffered write may take a part of the data only."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _is_own(path: Path) -> bool:
    """Whether an unfinished file is there. Raises InputFileError for anything else that has its name.

    What a link leads to, or what has a second name, is somebody else's and would be overwritten; a pipe would be
    waited for.
    """
    try:
        found = path.lstat()
    except OSError:
        return False
    _require_own(path, found)
    return True


def _require_own(path: Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no ordinary file"
    elif found.st_nlink > 1:
        what = "a hard link, whose file has another name too"
    else:
        return
    raise InputFileError(f"{path} is {what}, and an unfinished file is to be made under this name; remove it")


def _open_own(path: Path) -> FileIO:
    """Opens an unfinished file for reading and writing, made when it is not there. Raises InputFileError, OSError."""
    _is_own(path)
    flags = os.O_RDWR | os.O_CREAT
    # Whatever has taken its place since then is neither followed nor waited for. Windows lacks most of these.
    for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"):
        flags |= getattr(os, name, 0)
    descriptor = os.open(path, flags, 0o666)
    try:
        _require_own(path, os.fstat(descriptor))
        return os.fdopen(descriptor, "r+b", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def _lock(path: Path) -> Any:
    """An open file that no other process can lock at the same time. Raises InputFileError when one has."""
    try:
        file = _open_own(path)
    except OSError as error:
        raise InputFileError(f"{path} cannot be written: {error}") from error
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # Windows
        pass
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            file.close()
            raise InputFileError(f"{path}: another process is making this file right now") from None
        # Some network file systems have no locks; two processes at once are then the user's own care.
    return file
