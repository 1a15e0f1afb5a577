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

    tensors: in the order of the file; put those with the largest elements first so that all stay aligned. source:
    what the tensors are made from, in words that change when the sources do; a part file of other sources is not
    continued. Used as a context manager, which holds a lock against a second process that makes the same file.
    """

    def __init__(
        self, path: Path, tensors: Sequence[StreamedTensor], metadata: Mapping[str, str], *, source: str = ""
    ) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.record = path.with_name(path.name + ".part.jsonl")
        self.tensors = tuple(tensors)
        self.header = header(self.tensors, metadata)
        self._plan = hashlib.sha256(self.header + source.encode()).hexdigest()
        self._lock: Any = None

    @property
    def nbytes(self) -> int:
        """Size of the finished file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors)

    @property
    def finished(self) -> bool:
        """Whether ``path`` already is the whole file, as its size and everything but its values say."""
        try:
            with self.path.open("rb") as file:
                return os.fstat(file.fileno()).st_size == self.nbytes and file.read(len(self.header)) == self.header
        except OSError:
            return False

    @property
    def missing_bytes(self) -> int:
        """Bytes that still have to be written at most, going by what the part file holds now."""
        kept = self.part.stat().st_size if self._recorded() and self.part.is_file() else 0
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
        with self.part.open("r+b" if digests or end else "wb", buffering=0) as file:
            if end:
                file.truncate(end)
                file.seek(end)
            else:
                _write_all(file, self.header)
                self._begin_record()
            advance(len(self.header) + sum(tensor.nbytes for tensor in self.tensors[: len(digests)]))
            with self.record.open("ab", buffering=0) as record:
                for tensor in self.tensors[len(digests) :]:
                    digests.append(_append(file, tensor, advance))
                    _write_all(record, json.dumps([tensor.name, digests[-1]]).encode() + b"\n")
            os.fsync(file.fileno())
        return digests

    def _resume(self) -> tuple[list[str], int]:
        """Digests of the tensors that the part file holds intact, and where they end; 0 when nothing can be kept."""
        recorded = self._recorded()
        if not recorded or not self.part.is_file():
            return [], 0
        kept: list[str] = []
        with self.part.open("rb") as file:
            if file.read(len(self.header)) != self.header:
                return [], 0
            for tensor, (name, digest) in zip(self.tensors, recorded[1:], strict=False):
                if name != tensor.name or _digest_of(file, tensor.nbytes) != digest:
                    break
                kept.append(digest)
        # The record keeps as many lines; one more may be there, cut off when the process died.
        lines = self.record.read_bytes().split(b"\n")[: 1 + len(kept)]
        os.truncate(self.record, sum(len(line) + 1 for line in lines))
        return kept, len(self.header) + sum(tensor.nbytes for tensor in self.tensors[: len(kept)])

    def _recorded(self) -> list[tuple[str, str]]:
        """The lines of the record, the first of which names the plan; nothing for a record of another plan."""
        lines: list[tuple[str, str]] = []
        try:
            text = self.record.read_bytes()
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
        self.record.write_text(json.dumps(["plan", self._plan]) + "\n", encoding="utf-8")

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
        with self.part.open("rb") as stored:
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


def _lock(path: Path) -> Any:
    """An open file that no other process can lock at the same time. Raises InputFileError when one has."""
    try:
        file = path.open("ab")
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
