"""The command ``lingbot-world``. A verb is one module with ``add_parser(verbs)`` and ``run(args) -> exit code``.

Exit codes: 0 done; 2 what was asked cannot be done, and nothing was made; 1 it failed on the way, what was made is
kept; 130 interrupted, what was made is kept.
"""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence

from ..errors import LingBotError
from ..version import __version__
from . import convert, generate, inspect, play, serve, verify
from .console import PatientStream, occupy_standard_files, patient_streams
from .signals import Interrupts

VERBS = (generate, play, inspect, convert, serve, verify)
PACKAGES = {
    "aiohttp": "aiohttp",
    "av": "av",
    "cv2": "opencv-python",
    "einops": "einops",
    "ftfy": "ftfy",
    "msgpack": "msgpack",
    "numpy": "numpy",
    "safetensors": "safetensors",
    "scipy": "scipy",
    "sentencepiece": "sentencepiece",
    "torch": "torch",
    "tqdm": "tqdm",
    "transformers": "transformers",
}
"""Modules that are needed, and the package that pip knows them by."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code; errors are one line on stderr. Without ``argv`` it is the process."""
    if argv is None:
        occupy_standard_files()
    with patient_streams() as out:
        code = _run(argv, out)
    if argv is None and code == 130:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another Ctrl-C would show how Python ends
    return code


def _run(argv: Sequence[str] | None, out: PatientStream) -> int:
    parser, verbose = build_parser(), False
    try:
        with Interrupts():
            args = parser.parse_args(argv)
            if args.verb is None:
                parser.print_help()
                return 0
            verbose = args.verbose
            code: int = args.run(args)
    except SystemExit as end:  # --help, --version, or an argument that argparse refused
        return end.code if isinstance(end.code, int) else 2
    except LingBotError as error:
        return _fail(error, str(error), 2, verbose=verbose)
    except KeyboardInterrupt:
        print("interrupted before the first chunk; nothing was written", file=sys.stderr)
        return 130
    except Exception as error:
        package = PACKAGES.get((error.name or "").partition(".")[0]) if isinstance(error, ModuleNotFoundError) else None
        if package is not None:
            return _fail(
                error, f"the package {package} is not installed; run: pip install {package}", 2, verbose=verbose
            )
        hint = "" if verbose else " (--verbose shows where)"
        return _fail(error, f"{type(error).__name__}: {error}{hint}", 1, verbose=verbose)
    if args.verb == "inspect":  # what it prints is all there is of it; a reader that left early has what it wanted
        out.flush()
        if out.failure is not None and not isinstance(out.failure, BrokenPipeError):
            return _fail(out.failure, f"the output could not be written: {out.failure}", 1, verbose=verbose)
    return code


def build_parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="lingbot-world",
        description="A world from one image, steered by a camera, chunk by chunk.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb in VERBS:
        added = verb.add_parser(verbs)
        added.add_argument("--verbose", action="store_true", help="show where an error comes from")
        added.set_defaults(run=verb.run)
    return parser


def _fail(error: BaseException, message: str, code: int, *, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return code
