"""Files of tensors: what is in them without reading it, and one tensor at a time.

Safetensors files are read by seeking, not by mapping: the pages of a mapping count as the process's own memory, so that
a folder of float32 shards would seem to need all of its size. Only the header is kept.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ..errors import InputFileError, WeightsError

SAFETENSORS = (".safetensors", ".sft")
PICKLED = (".pth", ".pt", ".ckpt")

# Names that safetensors gives to dtypes.
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

P = ParamSpec("P")
R = TypeVar("R")

# Elements read, converted and stored at once.
PIECE = 2**24
# A .pth file is mapped by PyTorch; after so many bytes it is mapped anew, which gives the pages back.
REMAP_BYTES = 2**29


def names_the_path(function: Callable[P, R]) -> Callable[P, R]:
    """Makes an InputFileError that names the path of whatever OSError leaves a function that looks around on a disk."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except OSError as error:
            raise cannot_read(error.filename, error) from error

    return wrapped


def cannot_read(path: Any, error: OSError) -> InputFileError:
    """The error for a path that is there and may not be read."""
    return InputFileError(
        f"{path} cannot be read: {error.strerror or error}; change its permissions, or give another path"
    )


@dataclass(frozen=True)
class Entry:
    """One stored tensor. dtype: as safetensors names it, or PyTorch's name where safetensors has none."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


class SafetensorsFile:
    """A .safetensors file. Raises WeightsError for one that is truncated or no such file."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            # Opening it checks the header against the length of the file; numpy, because the tensors stay unread.
            with safe_open(path, "np"):
                pass
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header: dict[str, Any] = json.loads(file.read(length))
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise WeightsError(
                f"{path} cannot be read: it is truncated or not a safetensors file ({error}); get it again"
            ) from error
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._begin = {name: 8 + length + about["data_offsets"][0] for name, about in header.items()}
        self.entries = {
            name: Entry(
                name,
                about["dtype"],
                tuple(about["shape"]),
                about["data_offsets"][1] - about["data_offsets"][0],
                path,
            )
            for name, about in header.items()
        }

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """One tensor, converted piece by piece; dtype None keeps the stored one. Raises WeightsError."""
        entry = self.entries[name]
        stored = _known(entry)
        result = torch.empty(entry.shape, dtype=dtype or stored, device=device)
        flat = result.view(-1)
        in_place = result.dtype == stored and result.device.type == "cpu"
        scratch = flat if in_place else torch.empty(min(PIECE, flat.numel()), dtype=stored)
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self._begin[name])
                for start in range(0, flat.numel(), PIECE):
                    count = min(PIECE, flat.numel() - start)
                    piece = flat[start : start + count] if in_place else scratch[:count]
                    _read_into(file, piece)
                    if not in_place:
                        flat[start : start + count].copy_(piece)
        except OSError as error:
            raise WeightsError(f"{self.path}: reading {name} failed: {error}") from error
        return result


class PickledFile:
    """A .pth file of a flat state dict, read without running code from it. Raises WeightsError."""

    metadata: Mapping[str, str] = {}

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = self._open()
        self._read_bytes = 0
        for name, value in self._state.items():
            if not isinstance(name, str) or not isinstance(value, Tensor):
                raise WeightsError(
                    f"{path}: {name!r} is {type(value).__name__} instead of a tensor; a flat state dict is needed"
                )
        self.entries = {
            name: Entry(
                name,
                DTYPE_NAMES.get(value.dtype, str(value.dtype).removeprefix("torch.")),
                tuple(value.shape),
                value.numel() * value.element_size(),
                path,
            )
            for name, value in self._state.items()
        }

    def _open(self) -> dict[Any, Any]:
        try:
            # Files in PyTorch's format before 1.6 are no archives and cannot be mapped.
            with warnings.catch_warnings():
                # For a program (TorchScript) it would advise how to run it.
                warnings.simplefilter("ignore")
                archive = zipfile.is_zipfile(self.path)
                state = torch.load(self.path, map_location="cpu", weights_only=True, mmap=archive)
        except Exception as error:
            # The unpickler lets through whatever a damaged stream makes it do, of any type.
            raise WeightsError(f"{self.path} {_why_refused(error)}") from error
        if not isinstance(state, dict):
            raise WeightsError(f"{self.path} holds {type(state).__name__} instead of a state dict")
        return state

    def read(self, name: str, dtype: torch.dtype | None = None, device: torch.device | str = "cpu") -> Tensor:
        """A copy of one tensor; dtype None keeps the stored one."""
        entry = self.entries[name]
        self._read_bytes += entry.nbytes
        if self._read_bytes > REMAP_BYTES:
            self._state, self._read_bytes = self._open(), entry.nbytes
        return self._state[name].to(device=device, dtype=dtype or _known(entry), copy=True).contiguous()


TensorFile = SafetensorsFile | PickledFile


@names_the_path
def open_file(path: Path) -> TensorFile:
    """Opens a file of tensors by its suffix. Raises InputFileError or WeightsError."""
    suffix = path.suffix.lower()
    if suffix == ".gguf":
        raise WeightsError(
            f"{path}: GGUF files are not supported; use the bf16 or fp8 safetensors file of the same model"
        )
    if suffix not in (*SAFETENSORS, *PICKLED):
        raise InputFileError(f"{path}: {suffix or 'no suffix'} is not known; files of tensors are .safetensors or .pth")
    if not path.is_file():
        raise InputFileError(f"{path} does not exist, or is not a file")
    if _is_pointer(path):
        raise WeightsError(f"{path} is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    return SafetensorsFile(path) if suffix in SAFETENSORS else PickledFile(path)


def _why_refused(error: Exception) -> str:
    """Why a .pth file was not read. PyTorch's own message is not repeated: it tells people how to run the file."""
    text = " ".join(str(error).split())
    advice = "weights_only" in text
    unpickled = isinstance(error, pickle.UnpicklingError)
    wanted = re.search(r"GLOBAL ([\w.]+)", text)
    # From elsewhere than the unpickler, such advice is about TorchScript archives, which are programs.
    if wanted or "allowlisted" in text or "unrecognized function" in text or (advice and not unpickled):
        wish = f" (it asks for {wanted[1]})" if wanted else ""
        return (
            f"was refused: it holds more than tensors{wish}, and nothing in it was run; get the original file from the "
            "publisher of the model"
        )
    reason = f" ({text[:200]})" if text and not advice else ""
    return f"cannot be read: it is truncated, damaged, or no file of tensors{reason}; get it again"


def _is_pointer(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(24).startswith(b"version https://git-lfs")
    except OSError as error:
        raise InputFileError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error


def _known(entry: Entry) -> torch.dtype:
    if entry.dtype not in DTYPES:
        raise WeightsError(
            f"{entry.name} in {entry.file} has dtype {entry.dtype}, which is not supported; known are "
            f"{', '.join(DTYPES)}"
        )
    return DTYPES[entry.dtype]


def _read_into(file: FileIO, piece: Tensor) -> None:
    """Fills a contiguous CPU tensor with the next bytes; OSError when the file ends before."""
    array: Any = piece.view(torch.uint8).numpy()
    rest = memoryview(array)
    while rest:
        count = file.readinto(rest)
        if not count:
            raise OSError("the file ends too early; it may have changed")
        rest = rest[count:]
