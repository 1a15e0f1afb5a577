"""A run beside a stored one: whether the two can be compared, and how alike their first and last frames are."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..engine.image import read_image
from ..engine.similarity import ssim
from ..errors import HistoryError, InputFileError
from .prepare import Job

Picture = NDArray[np.uint8]

MINIMUM_SSIM = 0.85
FRAMES = ("first_frame", "last_frame")
ROUNDING = 1e-4  # relative; numbers that are worked out may differ in their last digits on another machine
SHOWN = 40
# What may differ, and is said: these are what one wants to compare.
NOTED = (("weights in memory (model or dtype)", "model_fingerprint"), ("start image", "image_digest"))


@dataclass(frozen=True)
class Comparison:
    """similarities: SSIM by name of the frame. notes: what differs between the runs and is no reason not to compare."""

    report: str
    similarities: Mapping[str, float]
    notes: tuple[str, ...]

    @property
    def failures(self) -> list[str]:
        """A line for each frame that is too different."""
        return [
            f"{name}.png: SSIM {value:.4f} against {self.report} is below {MINIMUM_SSIM}"
            for name, value in self.similarities.items()
            if not value >= MINIMUM_SSIM
        ]

    def as_dict(self) -> dict[str, Any]:
        """What the report says of it; JSON types only."""
        return {
            "report": self.report,
            "minimum_ssim": MINIMUM_SSIM,
            "ssim": dict(self.similarities),
            "passed": not self.failures,
            "notes": list(self.notes),
        }


@dataclass(frozen=True, eq=False)
class StoredRun:
    """An earlier run: its report, and its first and last frame, uint8 [H, W, 3]."""

    file: Path
    report: Mapping[str, Any]
    pictures: Mapping[str, Picture]

    @classmethod
    def read(cls, file: Path, job: Job) -> StoredRun:
        """Reads a report.json and the PNG files beside it.

        Raises InputFileError for what cannot be read, HistoryError naming every setting that keeps it from being
        compared with ``job``.
        """
        if os.path.exists(file) and not os.path.isfile(file):
            raise InputFileError(f"--against {file} is not a regular file; name a report.json")
        try:
            report = json.loads(file.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputFileError(
                f"--against {file} cannot be read: {error.strerror or error}; name a report.json"
            ) from None
        except (ValueError, RecursionError) as error:
            raise InputFileError(f"--against {file} is not JSON ({error}); name a report.json") from None
        settings = _settings(job)
        if not isinstance(report, dict) or (missing := [name for name in settings if name not in report]):
            what = "" if not isinstance(report, dict) else f" ({', '.join(missing)} missing)"
            raise InputFileError(f"--against {file} is no report of a run{what}; name the report.json of `verify`")
        if differences := list(_differences(report, settings)):
            raise HistoryError(f"{file} is not comparable with this run: " + "; ".join(differences))
        pictures = {name: read_image(file.with_name(f"{name}.png")) for name in FRAMES}
        size = (job.image.height, job.image.width, 3)
        for name, picture in pictures.items():
            if picture.shape != size or picture.dtype != np.uint8:
                raise InputFileError(
                    f"{file.with_name(name)}.png is {picture.dtype} {list(picture.shape)}, but its report says "
                    f"{size[0]}x{size[1]}; it belongs to another run"
                )
        return cls(file, report, pictures)

    def compare(self, first: Picture, last: Picture, report: Mapping[str, Any]) -> Comparison:
        """This run's first and last frame, and its report, beside the stored ones."""
        frames = dict(zip(FRAMES, (first, last), strict=True))
        return Comparison(
            report=str(self.file),
            similarities={name: ssim(self.pictures[name], frame) for name, frame in frames.items()},
            notes=tuple(
                f"not the same {what} as in {self.file}"
                for what, name in NOTED
                if self.report.get(name) != report[name]
            ),
        )


def _settings(job: Job) -> dict[str, Any]:
    """What two runs must share to be compared, by its name in a report.

    The start image is not in it: another build of a JPEG decoder gives other pixels by a hair, and another picture
    shows in the first frame.
    """
    return {
        "preset": job.preset.label,
        "seed": job.args.seed,
        "noise": job.args.noise,
        "height": job.image.height,
        "width": job.image.width,
        "chunks": job.route.chunks,
        "prompt": job.args.prompt,
        "first_delta": job.first_delta,
        "translation_unit": job.unit,
        "intrinsics": list(job.intrinsics),
    }


def _differences(report: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
    if report.get("stopped") is not None:
        yield f"it ended early ({report['stopped']})"
    for name, here in settings.items():
        if not _same(report[name], here):
            yield f"{name} {_shown(report[name])} there and {_shown(here)} here"


def _same(there: Any, here: Any) -> bool:
    if isinstance(here, list):
        return isinstance(there, list) and len(there) == len(here) and all(map(_same, there, here))
    if isinstance(here, float):
        return isinstance(there, (int, float)) and math.isclose(there, here, rel_tol=ROUNDING)
    return bool(there == here)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."
