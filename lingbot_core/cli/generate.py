"""``lingbot-world generate``: a video from one image and a camera."""

from __future__ import annotations

import argparse
from typing import Any

from ..presets import PRESETS
from . import arguments
from .inspect import add_part_arguments

SNAPS = ("down", "up")
LENGTHS = ("compress", "cut", "hold")
FITS = ("area", "stretch", "crop", "pad")
NOISES = ("seeded", "reference")
FIRST_DELTAS = ("identity", "from_rest")
KEY_STEP_NAMES = ("per-latent", "per-video")
VAE_DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")
DTYPE_NAMES = (*VAE_DTYPE_NAMES, "float8")


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "generate",
        help="make a video from one image and a camera path, keys, or an event script",
        description="Makes a video chunk by chunk, and a JSON report beside it. Ctrl-C keeps the frames made so far.",
        allow_abbrev=False,
    )
    file: dict[str, Any] = {"type": arguments.path, "metavar": "FILE"}
    made: dict[str, Any] = {"type": arguments.file_to_write, "metavar": "FILE"}

    need = parser.add_argument_group("what is needed")
    need.add_argument(
        "--model", required=True, help="folder or file of a LingBot-World model, or 'tiny' for the embedded one"
    )
    need.add_argument("--image", required=True, **file, help="the start image")
    need.add_argument("--prompt", required=True, help="what the world is; may be empty")
    need.add_argument(
        "--output", required=True, **made, help="the video, NAME.mp4; an existing one is replaced by the first chunk"
    )

    add_part_arguments(parser.add_argument_group("parts of the model that do not lie beside it"))

    camera = parser.add_argument_group("camera, exactly one of these")
    one = camera.add_mutually_exclusive_group(required=True)
    one.add_argument("--action-string", metavar="KEYS", help="keys and video frames, such as w-10,iw-15,none-10")
    one.add_argument(
        "--action-path",
        type=arguments.path,
        metavar="DIR",
        help="folder with poses.npy, intrinsics.npy (and action.npy)",
    )
    one.add_argument("--poses", **file, help="poses [N, 4, 4], camera to world, OpenCV axes, one per video frame")
    one.add_argument("--events", **file, help="event script: JSON lines, one chunk each")

    more = parser.add_argument_group("more about the camera")
    more.add_argument("--intrinsics", **file, help="fx, fy, cx, cy in pixels of 832x480; the first row counts")
    more.add_argument("--num-frames", type=arguments.whole(1), metavar="N", help="wish (default: every pose or line)")
    more.add_argument(
        "--snap",
        choices=SNAPS,
        help="a wish between two valid totals goes down or up (default: down; up for --length hold without a wish)",
    )
    more.add_argument(
        "--length",
        choices=LENGTHS,
        help="the first NUM_FRAMES poses count. When they are no whole number of chunks, compress spreads them over "
        "the frames that are made, as the reference does (default), cut keeps their speed and leaves the last ones "
        "over, and hold keeps their speed and stands still at the end when there are too few",
    )
    more.add_argument(
        "--translation-unit",
        metavar="UNIT",
        help="clip: the longest latent step (default for paths); key: one held key (default for scripts of keys); pNN: "
        "a percentile of the steps; or a number",
    )
    more.add_argument(
        "--first-delta",
        choices=FIRST_DELTAS,
        help="the first step is the identity (default for paths) or taken from rest (default for scripts of keys)",
    )
    more.add_argument(
        "--key-steps",
        choices=KEY_STEP_NAMES,
        help="what a held key of --events does: 0.05 units, 4 and 6 degrees per latent frame (default), or upstream's "
        "0.05 units and 2 degrees per video frame",
    )

    recipe = parser.add_argument_group("sampling recipe")
    recipe.add_argument(
        "--preset", choices=tuple(PRESETS), help="the recipe the weights are for (default: as the files say)"
    )
    recipe.add_argument("--chunk", type=arguments.whole(1), metavar="N", help="latent frames per chunk")
    recipe.add_argument("--shift", type=arguments.positive, metavar="X", help="shift of the noise schedule")
    recipe.add_argument("--indices", type=arguments.numbers(int), metavar="I,I,..", help="steps of a table preset")
    recipe.add_argument("--labels", type=arguments.numbers(float), metavar="X,X,..", help="steps of a label preset")
    recipe.add_argument("--steps", type=arguments.whole(1), metavar="N", help="steps of a UniPC preset")
    recipe.add_argument("--window", type=arguments.window, metavar="N", help="latent frames attention sees, or none")
    recipe.add_argument("--sink", type=arguments.whole(0), metavar="N", help="first latent frames that are always seen")
    recipe.add_argument(
        "--still-window",
        type=arguments.whole(0),
        metavar="N",
        help="latent frames attention sees in chunks whose camera stands still: faster, another result; 0 is off",
    )
    recipe.add_argument("--guidance-scale", type=arguments.positive, metavar="X", help="1 is off")
    recipe.add_argument("--negative-prompt", metavar="TEXT", help="for presets with guidance")
    recipe.add_argument(
        "--reuse-last-step-kv",
        action=argparse.BooleanOptionalAction,
        help="keep the keys and values of the last noisy step instead of a clean pass",
    )
    recipe.add_argument(
        "--seed",
        type=arguments.whole(0, arguments.SEED_LIMIT - 1),
        default=0,
        metavar="N",
        help="of the noise (default 0)",
    )
    recipe.add_argument(
        "--noise",
        choices=NOISES,
        default="seeded",
        help="seeded: per chunk and step (default); reference: the reference's order of draws",
    )

    picture = parser.add_argument_group("picture and video")
    picture.add_argument(
        "--size",
        type=arguments.size,
        metavar="SIZE",
        help="480p, 720p, or HxW such as 480x832 (default: the model's)",
    )
    picture.add_argument(
        "--fit",
        choices=FITS,
        default="area",
        help="area: the image's shape, each side rounded down to a multiple of 16 (default; with HxW as stretch); or "
        "stretch, crop or pad it to the size",
    )
    picture.add_argument("--fps", type=arguments.positive, default=16.0, metavar="X", help="of the video (default: 16)")
    picture.add_argument(
        "--crf", type=arguments.positive, default=17.0, metavar="X", help="1 (best) to 51 (default: 17)"
    )
    picture.add_argument(
        "--save-latents",
        type=arguments.path,
        metavar="DIR",
        help="write every chunk's latents as safetensors; those of an earlier run in it are removed",
    )
    picture.add_argument("--report", **made, help="the JSON report (default: beside the video)")

    add_machine_arguments(parser)
    return parser


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Where and how exactly a model runs."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", type=arguments.device, default="auto", metavar="D", help="auto, cpu, cuda, cuda:N")
    machine.add_argument("--dtype", choices=DTYPE_NAMES, default="auto", help="of the transformer")
    machine.add_argument(
        "--vae-dtype", choices=VAE_DTYPE_NAMES, default="auto", help="of the VAE's decoder; the encoder is float32"
    )
    machine.add_argument(
        "--decoder",
        type=arguments.path,
        metavar="FILE",
        help="tiny weights (taew2_1 or lighttaew2_1) that decode instead of the VAE: drafts, much faster",
    )
    machine.add_argument(
        "--attention", default="auto", metavar="NAME", help="auto, cudnn, flash, efficient or math; used or refused"
    )


def run(args: argparse.Namespace) -> int:
    """Checks everything that can be checked without the model, then loads it and records. Returns the exit code."""
    from .prepare import prepare
    from .record import record

    return record(prepare(args))
