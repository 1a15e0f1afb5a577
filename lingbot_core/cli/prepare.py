"""Everything about a run that can be decided, and refused, before a model is loaded."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..camera.controls import FirstDelta, Intrinsics
from ..camera.intrinsics import intrinsics_for
from ..camera.keys import KEY_STEPS
from ..engine.events import parse_events
from ..engine.image import RESOLUTIONS, PreparedImage, prepare_image
from ..engine.plan import plan_length, plan_script
from ..engine.route import PathRoute, Route, ScriptRoute
from ..engine.world import lens_of
from ..errors import LengthError, PresetError, PromptError
from ..presets import Preset, get_preset
from ..weights.keys import TEXT, VAE
from ..weights.layout import Layout, find_layout
from .camera_files import (
    actions_from_folder,
    path_from_action_string,
    path_from_files,
    read_intrinsics,
    require_folder,
)
from .outputs import choose_outputs

OVERRIDES = (
    "chunk",
    "shift",
    "indices",
    "labels",
    "steps",
    "window",
    "sink",
    "still_window",
    "guidance_scale",
    "negative_prompt",
    "reuse_last_step_kv",
)


@dataclass(frozen=True, eq=False)
class Job:
    """One run, fully decided. args: the command line, for what nothing had to be decided about."""

    args: argparse.Namespace
    layout: Layout
    preset: Preset
    route: Route
    image: PreparedImage
    unit: float
    unit_rule: str
    first_delta: FirstDelta
    intrinsics: Intrinsics
    output: Path
    report: Path
    warnings: tuple[str, ...]

    @property
    def frames(self) -> int:
        """Video frames that will be made."""
        return self.preset.frames(self.route.chunks)


def prepare(args: argparse.Namespace) -> Job:
    """Reads and checks every input but the weights; raises LingBotError naming what is wrong."""
    _check_text("--prompt", args.prompt)
    _check_text("--negative-prompt", args.negative_prompt)
    layout = find_layout(args.model, vae=args.vae, text_encoder=args.text_encoder, tokenizer=args.tokenizer)
    output, report = choose_outputs(args, layout)
    layout.require(VAE, TEXT, "tokenizer")
    preset = choose_preset(layout, args)
    route = open_route(args, preset)
    for prompt in route.prompts:
        _check_text(f"a prompt of {args.events}", prompt)
    image = _image(args, layout)
    rule = args.translation_unit or route.unit
    unit, rule_name = route.translation_unit(rule)
    fx, fy, cx, cy = route.intrinsics(image) or intrinsics_for(lens_of(layout), image.width, image.height)
    return Job(
        args=args,
        layout=layout,
        preset=preset,
        route=route,
        image=image,
        unit=unit,
        unit_rule=rule_name,
        first_delta=args.first_delta or route.first_delta,
        intrinsics=(fx, fy, cx, cy),
        output=output,
        report=report,
        warnings=tuple(route.warnings()),
    )


def choose_preset(layout: Layout, args: argparse.Namespace) -> Preset:
    """The preset that was named, or that the files point to, with the overrides of the command line."""
    base = layout.require_preset() if args.preset is None else get_preset(args.preset)
    return base.with_overrides(**{field: getattr(args, field) for field in OVERRIDES})


def open_route(args: argparse.Namespace, preset: Preset) -> Route:
    """The camera that the command line names, planned to whole chunks."""
    if args.events is not None:
        return _script(args, preset)
    if args.key_steps is not None:
        raise PresetError(
            "--key-steps is for the held keys of --events; an action string always steps per video frame, and poses "
            "have no keys. Leave it out"
        )
    actions = None
    if args.action_string is not None:
        source = f"action string {args.action_string}"
        path, actions = path_from_action_string(args.action_string, args.intrinsics, fps=args.fps)
    elif args.action_path is not None:
        source = str(args.action_path)
        path = path_from_files(require_folder(args.action_path), args.intrinsics, fps=args.fps)
        actions = actions_from_folder(args.action_path)
    else:
        source = str(args.poses)
        path = path_from_files(args.poses, args.intrinsics, fps=args.fps)
    try:
        plan = plan_length(
            len(path), preset, num_frames=args.num_frames, snap=args.snap, length=args.length or "compress"
        )
    except LengthError as error:
        raise LengthError(f"{error} (--num-frames, --snap, --length)") from None
    return PathRoute(source, path, plan, preset.chunk, actions)


def _script(args: argparse.Namespace, preset: Preset) -> ScriptRoute:
    if args.length is not None:
        raise LengthError("--length fits paths to chunks; a line of --events is one chunk as it is. Leave it out")
    if args.snap is not None and args.num_frames is None:
        raise LengthError("--snap rounds --num-frames; without it every line of --events is one chunk. Leave it out")
    steps = KEY_STEPS[args.key_steps or "per-latent"]
    events = parse_events(args.events, chunk=preset.chunk, steps=steps)
    return ScriptRoute(
        str(args.events),
        events,
        plan_script(len(events), preset, num_frames=args.num_frames, snap=args.snap),
        chunk=preset.chunk,
        steps=steps,
        intrinsics=None if args.intrinsics is None else read_intrinsics(args.intrinsics),
    )


def _image(args: argparse.Namespace, layout: Layout) -> PreparedImage:
    size = args.size if isinstance(args.size, tuple) else None
    area = RESOLUTIONS[args.size] if isinstance(args.size, str) else layout.native_area or RESOLUTIONS["480p"]
    return prepare_image(args.image, size=size, area=area, mode=args.fit)


def _check_text(name: str, text: str | None) -> None:
    if text is None:
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError(f"{name} is not valid text (bytes that are no UTF-8); type it again") from None
    if "\0" in text:
        raise PromptError(f"{name} holds a NUL character; remove it")


def about_weights(layout: Layout) -> dict[str, Any]:
    """What the model's folder says of its weights: ``trained`` (None where it does not say) and a ``note``."""
    return {"trained": layout.about.get("trained"), "note": str(layout.about.get("note", ""))}
