"""Where a run writes to, and that none of it is something the run reads."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..engine.part_file import PART
from ..errors import InputFileError
from ..weights.layout import EMBEDDED_TINY, TINY, Layout

Written = Sequence[tuple[str, Path]]


def choose_outputs(args: argparse.Namespace, layout: Layout) -> tuple[Path, Path]:
    """Video and report; neither they nor the files they grow in may be an input or each other.

    Raises InputFileError.
    """
    output: Path = args.output
    if os.path.isdir(output):
        raise InputFileError(f"--output {output} is a folder; name a video file in it, such as world.mp4")
    if output.suffix.lower() != ".mp4":
        better = output.with_name(f"{output.stem}.mp4")
        raise InputFileError(f"--output {output} must end in .mp4, the only kind of video made here; name it {better}")
    report: Path = args.report or output.with_suffix(".json")
    video_files, report_files = ((path, path.with_name(path.name + PART)) for path in (output, report))
    if any(_same(mine, other) for mine in video_files for other in report_files):
        raise InputFileError(f"{output}: video and report cannot be one file; name another --report")
    written = [("--output", path) for path in video_files] + [("--report", path) for path in report_files]
    if args.save_latents is not None:
        written.append(("--save-latents", args.save_latents))
    refuse_overwriting(written, args, layout)
    return output, report


def refuse_overwriting(written: Written, args: argparse.Namespace, layout: Layout) -> None:
    """Raises InputFileError for a path that is an input, by any name, or that lies in the folder of a model.

    written: pairs of the option to change and the path.
    """
    inputs, folders = list(_input_files(args, layout)), list(_model_folders(args, layout))
    for option, path in written:
        for other, source in inputs:
            if _same(path, source):
                raise InputFileError(f"{path} is the input {other} and would be overwritten; name another {option}")
        for other, folder in folders:
            if _inside(path, folder):
                raise InputFileError(
                    f"{path} lies in the folder of {other} ({folder}), where nothing is written; name another {option}"
                )


def _input_files(args: argparse.Namespace, layout: Layout) -> Iterator[tuple[str, Path]]:
    for name in ("image", "action_path", "poses", "intrinsics", "events"):
        source: Path | None = getattr(args, name)
        if source is None:
            continue
        option = f"--{name.replace('_', '-')}"
        yield option, source
        if name in ("action_path", "poses"):
            with suppress(OSError):  # what cannot be listed is reported when it is read
                yield from ((option, file) for file in source.glob("*.npy"))
    parts = (("--model", layout.transformer), ("--vae", layout.vae), ("--text-encoder", layout.text))
    for option, part in parts:
        if part is not None:
            yield from ((option, file) for file in part.files)
    if layout.tokenizer is not None:
        yield "--tokenizer", layout.tokenizer


def _model_folders(args: argparse.Namespace, layout: Layout) -> Iterator[tuple[str, Path]]:
    yield "--model", EMBEDDED_TINY if args.model == TINY else Path(args.model).expanduser()
    for option, given in (("--vae", args.vae), ("--text-encoder", args.text_encoder)):
        if given is not None:
            yield option, Path(given).expanduser()
    if layout.tokenizer is not None:
        yield "--tokenizer", layout.tokenizer


def _same(path: Path, other: Path) -> bool:
    """One file, also by links of any kind."""
    with suppress(OSError, ValueError):
        if os.path.samefile(path, other):
            return True
    return os.path.realpath(path) == os.path.realpath(other)


def _inside(path: Path, folder: Path) -> bool:
    real = os.path.realpath(folder)
    with suppress(ValueError):  # another drive
        return os.path.isdir(real) and os.path.commonpath((os.path.realpath(path), real)) == real
    return False
