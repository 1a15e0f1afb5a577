"""What lies in a folder of a model: its files of tensors, shards of one name among them, and small files of JSON."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

from ..errors import InputFileError, WeightsError
from .files import PICKLED, SAFETENSORS, cannot_read

SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")


def tensor_files(folder: Path) -> list[Path]:
    """Sorted; safetensors, or .pth files when there are none."""
    for suffixes in (SAFETENSORS, PICKLED):
        files = [path for path in listing(folder) if path.suffix.lower() in suffixes and path.is_file()]
        if files:
            return files
    return []


def listing(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing when it is none. Raises InputFileError for one that may not be read."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise cannot_read(folder, error) from error


def own_listing(folder: Path, base: Path) -> list[Path]:
    """The same, but a folder outside of the model's own ``base`` that may not be read has nothing to offer."""
    try:
        return listing(folder)
    except InputFileError:
        if folder.is_relative_to(base):
            raise
        return []


def tensors_in(folder: Path) -> tuple[Path, ...]:
    """The files of one part: one file, or all shards of one name. Raises WeightsError when shards are missing."""
    files = tensor_files(folder)
    if not files:
        raise WeightsError(
            f"{folder}: there is no *.safetensors file in it (nor a *.pth); download the model again, finished files "
            "are kept, or give the file or the folder that has the weights"
        )
    present = {file.name for file in files}
    wanted = _shards_of_index(folder) or _shards_of_names(present)
    if wanted:
        missing = sorted(wanted - present)
        if missing:
            raise WeightsError(
                f"{folder}: {len(missing)} of {len(wanted)} shards are missing, the first is {missing[0]}; download "
                "the folder again, finished files are kept"
            )
        return tuple(file for file in files if file.name in wanted)
    if len(files) > 1:
        raise WeightsError(
            f"{folder} holds {len(files)} files of tensors and no index that joins them; give one of them: "
            + ", ".join(file.name for file in files[:5])
        )
    return tuple(files)


def _shards_of_index(folder: Path) -> set[str]:
    """Names of files in the index; of several indices (other precisions) the first."""
    for index in sorted(folder.glob("*.safetensors.index.json")):
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(isinstance(name, str) for name in table.values()):
            raise InputFileError(f"{index} has no table 'weight_map' of tensor names and files")
        return set(table.values())
    return set()


def _shards_of_names(names: set[str]) -> set[str]:
    """The full set that names like ``x-00001-of-00008.safetensors`` promise."""
    for name in sorted(names):
        if shard := SHARD.fullmatch(name):
            return {f"{shard[1]}-{number:05}-of-{shard[3]}.safetensors" for number in range(1, int(shard[3]) + 1)}
    return set()


def existing(path: str | Path, what: str, hint: str = "") -> Path:
    """The absolute path of what is there. Raises InputFileError saying ``what`` is missing or cannot be reached."""
    try:
        # The name counts, so links are not followed.
        found = Path(os.path.abspath(Path(path).expanduser()))
        found.stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputFileError(f"{what} {str(path)!r} is a loop of symbolic links; mend the link") from None
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise InputFileError(f"{what} {str(path)!r} does not exist{hint}") from None
        raise InputFileError(f"{what} {str(path)!r} cannot be reached: {error.strerror}") from None
    except (RuntimeError, ValueError) as error:  # an unknown home such as ~nobody, and a NUL in the name
        raise InputFileError(f"{what} {str(path)!r} cannot be a path: {error}") from None
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; {} when there is none. Raises InputFileError for anything else."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputFileError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputFileError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data
