"""Whether files have changed since they were read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path


def state_of(paths: Iterable[Path]) -> str:
    """A mark of names, times and sizes of files, which are not opened: another one once any of them has changed.

    Files that are not there count as such. It is a digest because ComfyUI writes what ``fingerprint_inputs`` returns
    into the metadata of saved pictures and videos, where nobody's paths belong.
    """
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = path.stat()
        except (OSError, ValueError):
            digest.update(b"none\0")
        else:
            name = str(path).encode("utf-8", "surrogateescape")
            digest.update(name + f"\0{found.st_mtime_ns}\0{found.st_size}\0".encode())
    return digest.hexdigest()
