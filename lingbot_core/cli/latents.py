"""Latents on disk: one safetensors file per chunk, written as soon as the chunk exists."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from ..engine.history import StartRecord
from ..engine.session import Chunk
from ..errors import InputFileError

PATTERN = "chunk_[0-9][0-9][0-9][0-9]*.safetensors"


class LatentFolder:
    """Writes chunk_0000.safetensors and so on, each with ``latents``, float32 [16, frames, h, w].

    The folder is made, and tried, at once; chunks of an earlier run in it are removed with the first new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise InputFileError(f"latents cannot be saved to {folder}: {error.strerror or error}") from None

    def save(self, chunk: Chunk, start: StartRecord) -> None:
        """Writes one chunk. Raises InputFileError and leaves no half file."""
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self.folder / f"chunk_{chunk.index:04d}.safetensors"
        about = {
            "chunk": str(chunk.index),
            "prompt": chunk.prompt,
            "preset": start.preset.label,
            "seed": str(start.seed),
            "noise": start.noise,
            "image": start.image,
            "height": str(start.height),
            "width": str(start.width),
            "model": start.model,
        }
        try:
            if not self._written:
                for old in self.folder.glob(PATTERN):
                    old.unlink()
            save_file({"latents": chunk.latents.contiguous()}, file, metadata=about)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                file.unlink()
            raise InputFileError(
                f"{file} could not be written: {error}; free some space or leave --save-latents out"
            ) from error
        self._written += 1
