"""Drives a realtime server by keys: each latent frame of the text becomes a pose by the pack's own key maths."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lingbot_core.camera import KEY_STEPS, default_intrinsics, frames_of, parse_action_string, walk
from lingbot_core.errors import LingBotError
from lingbot_core.realtime.client import SyncCameraClient, write_mp4

# Intrinsics on the wire are for a view of this size, whatever size the world has.
WIDTH, HEIGHT = 832, 480


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("keys", help='keys and latent frames, such as "w-2,wl-3" (w a s d move, i j k l look)')
    parser.add_argument("--image", type=Path, required=True, help="start picture")
    parser.add_argument("--prompt", required=True, help="what is seen")
    parser.add_argument("--server", default="ws://127.0.0.1:8760", help="address (default: %(default)s)")
    parser.add_argument("--session-id", default="keys", help="name of the session (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=42, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("keys.mp4"), help="(default: %(default)s)")
    return parser.parse_args()


def drive(args: argparse.Namespace, client: SyncCameraClient) -> Iterator[bytes]:
    """The fragments of the video, one for each chunk."""
    steps = KEY_STEPS["per-latent"]
    held = frames_of(parse_action_string(args.keys))
    held += [frozenset()] * (-len(held) % client.chunk)  # rests until the end of the last chunk
    poses = walk(np.eye(4), held, steps, per_latent=True)
    lens = np.tile(default_intrinsics(WIDTH, HEIGHT), (client.chunk, 1))
    client.reset(args.session_id)  # the name may have a world from an earlier drive
    for begin in range(0, len(poses), client.chunk):
        # One pose for each latent frame is taken as it is. `from_rest`: the very first key moves the camera too.
        for frame in client.infer(
            poses[begin : begin + client.chunk],
            lens,
            image=args.image if begin == 0 else None,
            prompt=args.prompt,
            session_id=args.session_id,
            translation_unit=steps.move_per_latent,
            first_delta="from_rest",
            seed=args.seed,
        ):
            shown = " ".join("".join(sorted(keys)) or "none" for keys in held[begin : begin + client.chunk])
            print(f"chunk {frame.chunk_id}: {shown}", flush=True)
            yield bytes(frame.video)


def main() -> int:
    args = arguments()
    try:
        with SyncCameraClient(args.server) as client:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            info = write_mp4(drive(args, client), args.output)
    except (LingBotError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.output}: {info.frames} frames, {info.width} x {info.height}, {info.fps:g} per second")
    return 0


if __name__ == "__main__":
    sys.exit(main())
