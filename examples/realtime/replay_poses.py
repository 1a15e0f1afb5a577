"""Replays a folder of camera files on a realtime server, one infer per chunk, and writes what comes back as mp4."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from lingbot_core.camera import load_camera
from lingbot_core.errors import LingBotError
from lingbot_core.realtime.client import SyncCameraClient, clip_maximum, slices, write_mp4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="with poses.npy and intrinsics.npy, such as examples/04")
    parser.add_argument("--server", default="ws://127.0.0.1:8760", help="address (default: %(default)s)")
    parser.add_argument("--image", type=Path, help="start picture (default: image.jpg of the folder)")
    parser.add_argument("--prompt", help="what is seen (default: prompt.txt of the folder)")
    parser.add_argument("--session-id", default="replay", help="name of the session (default: %(default)s)")
    parser.add_argument("--infers", type=int, help="stop after so many chunks (default: as far as the poses reach)")
    parser.add_argument("--seed", type=int, default=42, help="(default: %(default)s)")
    parser.add_argument("--fragments", type=Path, help="also keep each fragment as a file in this folder")
    parser.add_argument("--output", type=Path, default=Path("replay.mp4"), help="(default: %(default)s)")
    return parser.parse_args()


def replay(args: argparse.Namespace, client: SyncCameraClient) -> Iterator[bytes]:
    """The fragments of the video, one for each chunk."""
    path = load_camera(args.folder)
    parts, left_over = slices(path.poses, client.chunk)
    lenses, _ = slices(path.intrinsics, client.chunk)
    asked = parts[: args.infers]
    used = sum(map(len, asked))
    unit = clip_maximum(path.poses[:used])
    print(f"{len(path)} poses: {len(asked)} infers of {len(parts[0])} and then {4 * client.chunk} poses")
    print(f"translation unit {unit:.6g}, the longest step of these poses")
    if args.infers is None:
        print(f"{len(left_over)} poses left over")
    client.reset(args.session_id)  # the name may have a world from an earlier replay
    image: Path | None = args.image or args.folder / "image.jpg"
    prompt = args.prompt or (args.folder / "prompt.txt").read_text(encoding="utf-8").strip()
    for poses, lens in zip(asked, lenses, strict=False):
        for frame in client.infer(
            poses,
            lens,
            image=image,
            prompt=prompt,
            session_id=args.session_id,
            translation_unit=unit,
            first_delta="identity",
            seed=args.seed,
        ):
            print(f"chunk {frame.chunk_id}: {len(frame.video)} bytes", flush=True)
            if args.fragments:
                args.fragments.mkdir(parents=True, exist_ok=True)
                (args.fragments / f"{frame.chunk_id:05}.m4s").write_bytes(frame.video)
            yield bytes(frame.video)
        image = None  # the session has it now


def main() -> int:
    args = arguments()
    try:
        with SyncCameraClient(args.server) as client:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            info = write_mp4(replay(args, client), args.output)
    except (LingBotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {info.frames} frames, {info.width} x {info.height}, {info.fps:g} per second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
