"""Checkpoints in files of a bounded size, and logs as lines of JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LIMIT = 15 * 2**20


def save_parts(
    folder: Path,
    name: str,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    *,
    about: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes ``name.0.safetensors``, ``name.1.safetensors``, ... of at most LIMIT bytes each.

    about: goes into every part's header as JSON. A file appears when it is complete.
    """
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for key, tensor in tensors.items():
        value = tensor.detach().to("cpu", dtype).contiguous()
        if size + value.nbytes > LIMIT - 2**16 and groups[-1]:
            groups.append({})
            size = 0
        groups[-1][key] = value
        size += value.nbytes
    metadata = {"about": json.dumps(dict(about or {}), sort_keys=True), "parts": str(len(groups))}
    paths = []
    for index, group in enumerate(groups):
        path = folder / f"{name}.{index}.safetensors"
        partial = path.with_suffix(".tmp")
        save_file(group, partial, metadata=metadata)
        partial.chmod(0o644)
        partial.replace(path)
        paths.append(path)
    return paths


def load_parts(folder: Path, name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_parts` wrote: tensors by name, and ``about``. Raises FileNotFoundError for a missing part."""
    from safetensors import safe_open

    first = folder / f"{name}.0.safetensors"
    if not first.is_file():
        raise FileNotFoundError(f"there is no {first}")
    with safe_open(first, framework="pt") as file:
        metadata = file.metadata()
    tensors: dict[str, Tensor] = {}
    for index in range(int(metadata["parts"])):
        tensors.update(load_file(folder / f"{name}.{index}.safetensors"))
    return tensors, json.loads(metadata["about"])


class Log:
    """One JSON object a line, on the screen and in a file; numbers are rounded to what one wants to read."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._begin = time.monotonic()

    def __call__(self, what: str, **fields: Any) -> None:
        shown = {key: float(f"{value:.5g}") if isinstance(value, float) else value for key, value in fields.items()}
        line = json.dumps({"what": what, "at": round(time.monotonic() - self._begin, 1), **shown})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def fail(message: str) -> None:
    """Ends the program with one line."""
    sys.exit(f"error: {message}")
