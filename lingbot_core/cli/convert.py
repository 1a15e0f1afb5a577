"""``lingbot-world convert``: any layout into the single files that ComfyUI reads."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from ..errors import LingBotError
from ..presets import PRESETS
from .inspect import add_part_arguments
from .progress import clock

if TYPE_CHECKING:
    from ..weights.convert import Conversion

DTYPE_CHOICES = ("bf16", "fp16", "fp32")
PART_CHOICES = ("dit", "text", "vae")


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "convert",
        help="make the single files that ComfyUI reads from any layout of weights",
        description="Makes diffusion_models, text_encoders and vae files in DST, one tensor at a time, and verifies "
        "them. Interrupted in any way, the same command goes on where it was.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="folder or file of a LingBot-World model")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to make them in, such as ComfyUI/models")
    parser.add_argument(
        "--dtype",
        choices=(*DTYPE_CHOICES, "fp8"),
        default="bf16",
        help="of transformer and text encoder (default: bf16). fp8: the transformer's large matrices with a scale, "
        "half the size, and bf16 for the rest",
    )
    parser.add_argument("--vae-dtype", choices=DTYPE_CHOICES, help="of the VAE (default: as it is stored)")
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help="the recipe the weights are for (default: as the files say)"
    )
    parser.add_argument("--only", choices=PART_CHOICES, help="make one of the files only")
    add_part_arguments(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    return parser


def run(args: argparse.Namespace) -> int:
    """Plans, then makes the files. Returns the exit code."""
    from ..weights.convert import plan
    from ..weights.stream import gigabytes
    from .signals import Interrupts

    conversion = plan(
        args.source,
        args.target,
        dtype=args.dtype,
        vae_dtype=args.vae_dtype,
        preset=args.preset,
        only=args.only,
        overwrite=args.overwrite,
        vae=args.vae,
        text_encoder=args.text_encoder,
        tokenizer=args.tokenizer,
    )
    for output in conversion.outputs:
        if output.done:
            print(
                f"{output.path} is there already, made from this source; its values were not read again (--overwrite "
                "makes it anew)",
                file=sys.stderr,
            )
    try:
        with Interrupts(), ByteProgress(2 * conversion.nbytes) as progress:
            conversion.run(
                lambda output: progress.say(f"{output.path}: {output.dtype}, {gigabytes(output.file.nbytes)}"),
                progress.advance,
            )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except LingBotError as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 1
    for note in conversion.notes:
        print(f"note: {note}", file=sys.stderr)
    for output in conversion.outputs:
        print(output.path)
    if (model := _model(conversion, args.target)) is not None:
        print(f"to use it: --model {shlex.quote(str(model))}", file=sys.stderr)
    return 0


def _model(conversion: Conversion, target: Path) -> Path | None:
    """What to pass as a model: the folder, when the new transformer is the only one in it, else its file."""
    from ..weights.layout import find_layout

    made = next((output.path for output in conversion.outputs if output.part == "dit"), None)
    if made is None:
        return None
    try:
        alone = find_layout(target).transformer.files == (Path(os.path.abspath(made)),)
    except LingBotError:
        alone = False
    return target if alone else made


class ByteProgress:
    """Bytes written and read back, of ``total``: a bar on a terminal, a line every few seconds anywhere else."""

    def __init__(self, total: int, stream: TextIO | None = None, every: float = 5.0) -> None:
        self._total, self._every = total, every
        self._done = 0
        self._stream = stream or sys.stderr
        self._begun = self._said = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._stream.isatty() and self._total:
            from tqdm import tqdm

            self._bar = tqdm(total=self._total, unit="B", unit_scale=True, desc="convert", file=self._stream)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self, count: int) -> None:
        """``count`` bytes more are written or read back."""
        self._done += count
        if self._bar is not None:
            self._bar.update(count)
            return
        now = time.monotonic()
        if now - self._said >= self._every:
            self._said = now
            left = (now - self._begun) * (self._total - self._done) / max(1, self._done)
            self.say(f"{100 * self._done / max(1, self._total):.0f} %, {clock(left)} left")

    def say(self, text: str) -> None:
        """A line for people that does not spoil the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._stream)
        else:
            print(text, file=self._stream, flush=True)
