"""The command ``lingbot-world``. A verb is one module with ``add_parser(verbs)`` and ``run(args) -> exit code``.

Exit codes: 0 done; 2 what was asked cannot be done, and nothing was made; 1 it failed on the way, what was made is
kept; 130 interrupted, what was made is kept.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from ..errors import LingBotError
from ..version import __version__
from . import convert, generate, inspect, verify

VERBS = (generate, inspect, convert, verify)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and returns the exit code; errors are one line on stderr."""
    parser = build_parser()
    try:
        args = parser.parse_args(argv)
    except SystemExit as end:  # --help, --version, or an argument that argparse refused
        return end.code if isinstance(end.code, int) else 2
    if args.verb is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except LingBotError as error:
        return _fail(error, str(error), 2, verbose=args.verbose)
    except KeyboardInterrupt:
        print("interrupted before the first chunk; nothing was written", file=sys.stderr)
        return 130
    except Exception as error:
        hint = "" if args.verbose else " (--verbose shows where)"
        return _fail(error, f"{type(error).__name__}: {error}{hint}", 1, verbose=args.verbose)


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
