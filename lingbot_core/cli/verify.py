"""``lingbot-world verify``: a known run of a model, with evidence that others can compare theirs with."""

from __future__ import annotations

import argparse
import os
import re
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputFileError, LengthError, NumericsError
from ..presets import PRESETS, Preset, get_preset
from . import arguments
from .generate import NOISES, add_machine_arguments
from .inspect import add_part_arguments

if TYPE_CHECKING:
    from .comparison import Comparison
    from .prepare import Job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SEED, CHUNKS = 42, 7
VIDEO, REPORT = "world.mp4", "report.json"


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "verify",
        help="run a model on the example inputs, keep evidence, and compare it with an earlier run",
        description="Runs the inputs of examples/ with a fixed seed at 480p (at its own size for a small model) and "
        "writes a video, a report, the first and last frame and a contact sheet into a folder. Exit code 1 when the "
        "numbers are not finite or the frames are too unlike those of --against, 2 when the two cannot be compared.",
        allow_abbrev=False,
    )
    file: dict[str, Any] = {"type": arguments.path, "metavar": "FILE"}
    parser.add_argument("model", help="folder or file of a LingBot-World model, or 'tiny' for the embedded one")
    parser.add_argument(
        "--output", type=arguments.path, metavar="DIR", help="folder (default: outputs/verify/NAME of the model)"
    )
    parser.add_argument(
        "--against", **file, help="report.json of an earlier run, its PNG files beside it: compare with that"
    )
    add_part_arguments(parser.add_argument_group("parts of the model that do not lie beside it"))

    inputs = parser.add_argument_group("inputs in place of the example's")
    inputs.add_argument("--example", choices=("03", "04"), default="03", help="folder of examples/ (default: 03)")
    inputs.add_argument("--image", **file, help="the start image")
    inputs.add_argument("--prompt", help="what the world is")
    inputs.add_argument(
        "--poses",
        type=arguments.path,
        metavar="PATH",
        help="poses [N, 4, 4], one per video frame, or a folder with poses.npy, intrinsics.npy (and action.npy)",
    )
    inputs.add_argument("--intrinsics", **file, help="fx, fy, cx, cy in pixels of 832x480; the first row counts")

    recipe = parser.add_argument_group("sampling recipe")
    recipe.add_argument(
        "--preset", choices=tuple(PRESETS), help="the recipe the weights are for (default: as the files say)"
    )
    recipe.add_argument(
        "--chunks", type=arguments.whole(1), default=CHUNKS, metavar="N", help=f"to make (default: {CHUNKS})"
    )
    recipe.add_argument("--seed", type=arguments.whole(0, arguments.SEED_LIMIT - 1), default=SEED, metavar="N")
    recipe.add_argument(
        "--noise",
        choices=NOISES,
        default="seeded",
        help="seeded: per chunk and step (default); reference: the reference's order of draws, to lie beside its video "
        "of the same seed and length",
    )
    add_machine_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Makes the run and its evidence; returns the exit code."""
    from .comparison import StoredRun
    from .evidence import Evidence
    from .prepare import prepare
    from .record import record
    from .signals import Interrupts

    job = prepare(as_generate(args))
    _refuse_overwriting(args, job)
    stored = None if args.against is None else StoredRun.read(args.against, job)
    evidence = Evidence(job, stored)
    try:
        code = record(job, evidence)
    except NumericsError as error:  # in the first chunk: the model does not pass, and there is nothing to show for it
        return _fail(error, verbose=args.verbose)
    folder = job.output.parent
    with Interrupts() as interrupts:
        interrupts.ignore()
        try:
            evidence.save(folder)
        except InputFileError as error:
            return _fail(error, verbose=args.verbose)
    print(f"{folder}: first_frame.png, last_frame.png, contact_sheet.png")
    return code if code or evidence.comparison is None else _judge(evidence.comparison)


def as_generate(args: argparse.Namespace) -> argparse.Namespace:
    """The command line of ``generate`` that makes the same run: one verb decides what a run is."""
    from ..weights.layout import find_layout
    from . import build_parser

    layout = find_layout(args.model, vae=args.vae, text_encoder=args.text_encoder, tokenizer=args.tokenizer)
    preset = layout.require_preset() if args.preset is None else get_preset(args.preset)
    folder = args.output or Path("outputs") / "verify" / folder_name(layout.name)
    inputs = choose_inputs(args)
    camera = inputs.get("action-path") or inputs["poses"]
    options = {
        **inputs,
        "model": args.model,
        "output": folder / VIDEO,
        "report": folder / REPORT,
        "num-frames": frames_on(camera, args.intrinsics, preset, args.chunks),
        "intrinsics": args.intrinsics,
        "vae": args.vae,
        "text-encoder": args.text_encoder,
        "tokenizer": args.tokenizer,
        "preset": args.preset,
        "seed": args.seed,
        "noise": args.noise,
        "device": args.device,
        "dtype": args.dtype,
        "vae-dtype": args.vae_dtype,
        "decoder": args.decoder,
        "attention": args.attention,
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return build_parser().parse_args(["generate", *words, *(["--verbose"] if args.verbose else [])])


def choose_inputs(args: argparse.Namespace) -> dict[str, Any]:
    """Image, prompt and camera as options of ``generate``: those given, and the example's for the rest.

    Raises InputFileError, naming the options to give, where the examples are not installed.
    """
    example = EXAMPLES / args.example
    given = {"--image": args.image, "--prompt": args.prompt, "--poses": args.poses}
    absent = [option for option, value in given.items() if value is None]
    if absent and not all((example / name).is_file() for name in ("image.jpg", "prompt.txt", "poses.npy")):
        raise InputFileError(
            f"the example inputs are not here ({example}): they come with a git clone of the pack, an installed wheel "
            f"has none. Give {', '.join(absent)}, and --intrinsics for what the camera of your poses has"
        )
    prompt = args.prompt
    if prompt is None:
        prompt = (example / "prompt.txt").read_text(encoding="utf-8").strip()
    poses = example if args.poses is None else args.poses
    return {
        "image": args.image or example / "image.jpg",
        "prompt": prompt,
        "action-path" if os.path.isdir(poses) else "poses": poses,
    }


def frames_on(poses: Path, intrinsics: Path | None, preset: Preset, chunks: int) -> int:
    """Video frames of ``chunks`` chunks. Raises LengthError when the path is shorter."""
    from .camera_files import path_from_files

    frames, rows = preset.frames(chunks), len(path_from_files(poses, intrinsics, fps=16.0))
    if rows < frames:
        raise LengthError(
            f"--chunks {chunks} makes {frames} frames, but {poses} has {rows} poses, one per frame; give --chunks "
            f"{preset.chunks_for(rows)} or less, or a longer path with --poses"
        )
    return frames


def folder_name(model: str) -> str:
    """A model's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "_", model).strip("._") or "model"


def _refuse_overwriting(args: argparse.Namespace, job: Job) -> None:
    from .evidence import PICTURES
    from .outputs import refuse_overwriting

    folder = job.output.parent
    here = os.path.realpath(folder)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise InputFileError(f"--output {folder} is a file; name a folder")
    if args.against is not None and os.path.dirname(os.path.realpath(args.against)) == here:
        raise InputFileError(
            f"--against {args.against} lies in the folder that this run writes to and would be overwritten; name "
            "another --output"
        )
    if args.image is not None and os.path.dirname(os.path.realpath(args.image)) == here:
        raise InputFileError(f"--image {args.image} lies in the folder that this run writes to; name another --output")
    refuse_overwriting([("--output", folder / name) for name in PICTURES], job.args, job.layout)


def _judge(comparison: Comparison) -> int:
    """Says how alike the runs are; returns 1 when they are not alike enough."""
    for note in comparison.notes:
        print(f"note: {note}")
    values = ", ".join(f"{name} {value:.4f}" for name, value in comparison.similarities.items())
    print(f"SSIM against {comparison.report}: {values}")
    for failure in comparison.failures:
        print(f"error: {failure}", file=sys.stderr)
    return 1 if comparison.failures else 0


def _fail(error: Exception, *, verbose: bool) -> int:
    if verbose:
        traceback.print_exception(error)
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1
