"""Latents on disk: one safetensors file per chunk, written as soon as the chunk exists."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ..encodable import as_text
from ..engine.history import StartRecord
from ..engine.session import Chunk
from ..errors import InputFileError

PATTERN = "chunk_[0-9][0-9][0-9][0-9]*.safetensors"
OURS = {"chunk", "preset", "seed", "noise", "model"}
"""Names in the metadata of every chunk."""


class LatentFolder:
    """Writes chunk_0000.safetensors and so on, each with ``latents``, float32 [16, frames, h, w].

    The folder is made, and tried, at once. Chunks of an earlier run in it are removed with the first new one; a file of
    such a name that is not one of them is never touched, and the folder is refused.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
            self._earlier = sorted(folder.glob(PATTERN))
        except OSError as error:
            raise InputFileError(f"latents cannot be saved to {folder}: {error.strerror or error}") from None
        for file in self._earlier:
            if not _is_ours(file):
                raise InputFileError(
                    f"{file} is no chunk that --save-latents wrote, and chunks of that name are written there; name "
                    "another folder"
                )

    def save(self, chunk: Chunk, start: StartRecord) -> None:
        """Writes one chunk. Raises InputFileError and leaves no half file."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self.folder / f"chunk_{chunk.index:04d}.safetensors"
        part = file.with_name(f"{file.name}.part")
        about = {
            "chunk": str(chunk.index),
            "prompt": chunk.prompt,
            "preset": start.preset.label,
            "seed": str(start.seed),
            "noise": start.noise,
            "image": start.image,
            "height": str(start.height),
            "width": str(start.width),
            "model": as_text(start.model),
        }
        try:
            if not self._written:
                for old in self._earlier:
                    old.unlink(missing_ok=True)
            save_file({"latents": chunk.latents.contiguous()}, part, metadata=about)
            os.replace(part, file)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                part.unlink()
            raise InputFileError(
                f"{file} could not be written: {error}; free some space or leave --save-latents out"
            ) from error
        self._written += 1


def _is_ours(file: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "np") as saved:
            return saved.metadata() is not None and saved.metadata().keys() >= OURS
    except (OSError, SafetensorError):
        return False
