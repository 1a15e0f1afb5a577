"""What a verification keeps of a run: statistics and hashes of each chunk, and pictures that show it at a glance."""

from __future__ import annotations

import hashlib
import textwrap
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..engine.session import Chunk
from ..errors import InputFileError
from .comparison import Comparison, StoredRun
from .contact_sheet import ContactSheet
from .prepare import Job

FIRST, LAST, SHEET = "first_frame.png", "last_frame.png", "contact_sheet.png"
PICTURES = (FIRST, LAST, SHEET)


class Evidence:
    """Looks on while a job is recorded (see record.Observer), in memory that does not grow with the run.

    Hashes are information: another card, driver or PyTorch rounds differently. stored: the run to compare with.
    """

    def __init__(self, job: Job, stored: StoredRun | None) -> None:
        self.comparison: Comparison | None = None
        self._job, self._stored = job, stored
        self._sheet = ContactSheet(job.route.chunks, job.args.fps)
        self._all_latents = hashlib.sha256()
        self._latents: list[dict[str, Any]] = []
        self._first: NDArray[np.uint8] | None = None
        self._last: NDArray[np.uint8] | None = None

    def take(self, chunk: Chunk, frames: NDArray[np.uint8]) -> None:
        """See record.Observer."""
        data = chunk.latents.contiguous().numpy().tobytes()
        self._all_latents.update(data)
        self._latents.append({"chunk": chunk.index, **statistics(chunk.latents), "sha256": _sha256(data)})
        self._first = frames[0].copy() if self._first is None else self._first
        self._last = frames[-1].copy()
        self._sheet.add(chunk.index, frames)

    def add_to(self, report: dict[str, Any]) -> None:
        """See record.Observer; this is also where a whole run is compared with the stored one."""
        if self._first is None or self._last is None:
            return
        if self._stored is not None and len(self._latents) == self._job.route.chunks:
            self.comparison = self._stored.compare(self._first, self._last, report)
        report["verify"] = {
            "latents": self._latents,
            "latents_sha256": self._all_latents.hexdigest(),
            "first_frame_sha256": _sha256(self._first.tobytes()),
            "last_frame_sha256": _sha256(self._last.tobytes()),
            "pictures": list(PICTURES),
            "comparison": None if self.comparison is None else self.comparison.as_dict(),
        }

    def save(self, folder: Path) -> None:
        """Writes the pictures; those of an earlier run do not stay. Raises InputFileError once the others are there."""
        if self._first is None or self._last is None:
            for name in PICTURES:
                with suppress(OSError):
                    (folder / name).unlink()
            return
        args = self._job.args
        heading = [
            f"{self._job.layout.name}: {self._job.preset.label}, seed {args.seed}, noise {args.noise}, "
            f"{self._job.image.height}x{self._job.image.width}",
            f"{len(self._latents)} of {self._job.route.chunks} chunks made. {textwrap.shorten(args.prompt, 240)}",
        ]
        failure: InputFileError | None = None
        for name, picture in zip(PICTURES, (self._first, self._last, self._sheet.draw(heading)), strict=True):
            try:
                write_png(folder / name, picture)
            except InputFileError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def statistics(latents: torch.Tensor) -> dict[str, Any]:
    """Whether all numbers are finite, their range, mean and standard deviation (of the population), in float64."""
    values = latents.double()
    return {
        "finite": bool(torch.isfinite(values).all()),
        "minimum": values.min().item(),
        "maximum": values.max().item(),
        "mean": values.mean().item(),
        "std": values.std(correction=0).item(),
    }


def write_png(file: Path, picture: NDArray[np.uint8]) -> None:
    """Writes uint8 [H, W, 3] RGB without loss. Raises InputFileError and leaves no half file."""
    import cv2

    _, data = cv2.imencode(".png", np.ascontiguousarray(picture[..., ::-1]))
    try:
        file.write_bytes(data.tobytes())
    except OSError as error:
        with suppress(OSError):
            file.unlink()
        raise InputFileError(f"{file} could not be written: {error.strerror or error}") from error


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
