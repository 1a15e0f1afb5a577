"""The JSON report of a run: everything one needs to know to judge, repeat or trust a video."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..camera.units import step_statistics
from ..encodable import as_text
from ..engine.history import History, StartRecord
from ..engine.part_file import PartFile
from ..engine.world import World
from ..errors import InputFileError, LingBotError
from ..models.text import Encoded
from ..version import __version__
from .prepare import Job, about_weights

RESERVED_BYTES = 32 << 10
RESERVED_BYTES_PER_CHUNK = 1 << 10


@dataclass
class Measured:
    """What was measured. chunks: seconds by stage for each chunk made; seconds: of all of them by the clock."""

    stopped: str | None = None
    frames: int = 0
    seconds: float = 0.0
    load_seconds: float = 0.0
    start_seconds: float = 0.0
    chunks: list[dict[str, float]] = field(default_factory=list)


class ReservedFile:
    """A file whose room is taken before the run, so that a full disk cannot keep the report from being written.

    Until :meth:`write` the room is in FILE.part (see PartFile), and FILE is as it was. Raises InputFileError.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._part = PartFile(os.fspath(path), "report.json", InputFileError)
        with suppress(OSError):  # a disk that has no room now may have some later
            self._put(b" " * size)

    def remove_earlier(self) -> None:
        """Removes the report of an earlier run, whose video is no more."""
        if not self._part.published:
            with suppress(OSError):
                os.unlink(self._part.path)

    def write(self, text: str) -> None:
        """Puts the text into place. Raises InputFileError."""
        try:
            # What is no text, such as bytes in the name of a file, becomes the escapes that JSON has for it.
            self._put(text.encode("utf-8", "backslashreplace"))
            self._part.file.truncate()
            self._part.finish()
        except OSError as error:
            self.discard()
            raise InputFileError(f"the report {self.path} could not be written: {error.strerror or error}") from None

    def discard(self) -> None:
        """Gives the room back. After :meth:`write` this does nothing."""
        self._part.discard()

    def _put(self, data: bytes) -> None:
        self._part.file.seek(0)
        rest = memoryview(data)
        while rest:
            rest = rest[self._part.file.write(rest) :]


def reserved_size(chunks: int) -> int:
    """Bytes that the report of a run of that many chunks stays below."""
    return RESERVED_BYTES + RESERVED_BYTES_PER_CHUNK * chunks


def versions() -> dict[str, str]:
    """The versions that decide about results."""
    return {"lingbot_world": __version__, "torch": str(torch.__version__), "python": platform.python_version()}


def video_tags(job: Job) -> dict[str, str]:
    """What the video itself says of its making."""
    return {
        "prompt": job.args.prompt,
        "preset": job.preset.label,
        "seed": str(job.args.seed),
        "noise": job.args.noise,
        "model": as_text(job.layout.name),
        "translation_unit": repr(job.unit),
        "translation_unit_rule": job.unit_rule,
        "first_delta": job.first_delta,
        "dtype": job.args.dtype,
        "versions": json.dumps(versions()),
        **({} if job.args.decoder is None else {"decoder": f"{job.args.decoder.stem} (draft)"}),
    }


def walk_tags(world: World, start: StartRecord) -> dict[str, str]:
    """The same of a walk by hand, whose prompts may change."""
    return {
        "prompt": start.prompt,
        "preset": start.preset.label,
        "seed": str(start.seed),
        "noise": start.noise,
        "model": as_text(world.name),
        "translation_unit": repr(start.translation_unit),
        "translation_unit_rule": start.unit_rule,
        "first_delta": start.first_delta,
        "dtype": world.precision,
        "versions": json.dumps(versions()),
        **({} if world.vae.draft is None else {"decoder": world.vae.decoder_name}),
    }


def build_report(
    job: Job,
    world: World,
    history: History,
    prompts: Mapping[str, Encoded],
    warnings: Sequence[str],
    measured: Measured,
) -> dict[str, Any]:
    """The report: the history's summary, and beside it what was asked, what was made of it, with what, and how fast."""
    args, image = job.args, job.image
    return {
        "stopped": measured.stopped,
        **history.summary(),
        "length": {
            "asked": args.num_frames,
            "planned": job.frames,
            "made": measured.frames,
            "text": length_text(job, measured.frames),
        },
        "camera": {
            **job.route.report(),
            "step_statistics": dataclasses.asdict(step_statistics(job.route.latent_poses)),
        },
        "warnings": list(warnings),
        "model": {
            "name": world.name,
            "path": args.model,
            "control": world.dit.config.control,
            "preset_reason": "chosen by the user" if args.preset else job.layout.preset_reason,
            "attention": args.attention,
            "decoder": world.vae.decoder_name,
            **about_weights(job.layout),
        },
        "prompts": [
            {"prompt": prompt, "tokens": encoded.tokens, "truncated": encoded.truncated}
            for prompt, encoded in prompts.items()
        ],
        "image": {
            "path": str(args.image),
            "source_size": [image.source_height, image.source_width],
            "size": [image.height, image.width],
            "fit": image.mode,
            "digest": image.digest,
        },
        "machine": machine(world),
        "versions": versions(),
        "seconds": {
            "load": measured.load_seconds,
            "start": measured.start_seconds,
            "generate": measured.seconds,
            "by_stage": _summed(measured.chunks),
            "by_chunk": measured.chunks,
        },
        "fps_made": measured.frames / measured.seconds if measured.seconds else 0.0,
        "peak_memory": peak_memory(world.device),
        "video": {
            "path": str(job.output),
            "frames": measured.frames,
            "size": [image.height, image.width],
            "fps": args.fps,
            "duration": measured.frames / args.fps,
            "bytes": os.path.getsize(job.output) if os.path.exists(job.output) else None,
            "crf": args.crf,
        },
        "latents": None if args.save_latents is None else str(args.save_latents),
    }


def length_text(job: Job, made: int) -> str:
    """ "133 asked, 129 made": what people want to know first."""
    asked = f"{job.frames} planned" if job.args.num_frames is None else f"{job.args.num_frames} asked"
    return f"{asked}, {made} made"


def one_line(error: BaseException) -> str:
    """An error as one line; the type's name is shown where the message was not written for people."""
    name = "" if isinstance(error, LingBotError) else f"{type(error).__name__}: "
    return " ".join(f"{name}{error}".split())


def machine(world: World) -> dict[str, Any]:
    """Device, dtype and threads."""
    device = world.device
    return {
        "device": str(device),
        "name": torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine(),
        "dtype": world.precision,
        "vae_dtype": str(world.vae.decoder_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
    }


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """Bytes at the peak: of PyTorch on the GPU, and of the process on the host; None where nobody counts."""
    on_device = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    try:
        import resource
    except ImportError:  # Windows
        return {"device": on_device, "host": None}
    kilobytes = 1 if sys.platform == "darwin" else 1024
    return {"device": on_device, "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kilobytes}


def _summed(chunks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    out: dict[str, float] = {}
    for chunk in chunks:
        for stage, seconds in chunk.items():
            out[stage] = out.get(stage, 0.0) + seconds
    return out
