"""Joins a folder of mp4 fragments, in the order of their names, to a file that plays."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lingbot_core.errors import LingBotError
from lingbot_core.realtime.client import write_mp4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with files such as 00000.m4s, the first with the init segment")
    parser.add_argument("--output", type=Path, default=Path("joined.mp4"), help="(default: %(default)s)")
    args = parser.parse_args()
    files = sorted(args.folder.glob("*.m4s"), key=lambda file: (len(file.name), file.name))
    try:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        info = write_mp4((file.read_bytes() for file in files), args.output)
    except (LingBotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {info.frames} frames of {len(files)} fragments, {info.fps:g} per second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
