"""``lingbot-world play``: walk through a world by hand, on a page of this machine, without ComfyUI."""

from __future__ import annotations

import argparse
import asyncio
import gc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputFileError
from ..presets import PRESETS, Preset
from . import arguments
from .generate import FITS, add_machine_arguments
from .inspect import add_part_arguments
from .listening import listening, say, stop_on_signals

if TYPE_CHECKING:
    from ..realtime.live_walk import HostWalk
    from ..realtime.live_world import LiveWorld
    from ..realtime.worker import ThreadWorker

PORT = 8761
PROMPT = "a sunny day"
REWIND_DEPTH = 1
WINDOW, SINK = 18, 3  # of presets without a window: their key/value cache would grow for as long as somebody walks


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "play",
        help="walk through a world with keys, mouse, pads or a gamepad, on a page of this machine",
        description="Begins a world from one image and serves a page on which it is walked live, until Ctrl-C; "
        "docs/live.md says what can be done there. Only this machine is answered, unless --host and --allow-host say "
        "otherwise; nobody has to log in.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, help="folder or file of a LingBot-World model, or 'tiny' for the embedded one"
    )
    parser.add_argument(
        "--image", type=arguments.path, metavar="FILE", help="the start image (tiny has one of its own)"
    )
    parser.add_argument("--prompt", default=PROMPT, help=f"what the world is at first (default: {PROMPT!r})")
    add_part_arguments(parser.add_argument_group("parts of the model that do not lie beside it"))

    recipe = parser.add_argument_group("the world")
    recipe.add_argument("--preset", choices=sorted(PRESETS), help="sampling recipe (default: what the files point to)")
    recipe.add_argument(
        "--window",
        type=arguments.window,
        metavar="N",
        help="latent frames attention sees, or none (default: the preset's; where it has none, 18 with a sink of 3)",
    )
    recipe.add_argument("--sink", type=arguments.whole(0), metavar="N", help="first latent frames that are always seen")
    recipe.add_argument(
        "--still-window",
        type=arguments.whole(0),
        metavar="N",
        help="latent frames attention sees while the camera stands still: faster, another result; 0 is off",
    )
    recipe.add_argument(
        "--seed", type=arguments.whole(0, arguments.SEED_LIMIT - 1), default=0, help="of the noise (default: 0)"
    )
    recipe.add_argument(
        "--size", type=arguments.size, help="480p, 720p, or HEIGHTxWIDTH (default: the model's own, else 480p)"
    )
    recipe.add_argument("--fit", choices=FITS, default="area", help="how the image is brought to size (default: area)")
    recipe.add_argument("--paused", action="store_true", help="stand still until somebody presses Start")
    recipe.add_argument("--keep-going", action="store_true", help="go on when nobody drives")

    kept = parser.add_argument_group("what is kept when it ends")
    file: dict[str, Any] = {"type": arguments.file_to_write, "metavar": "FILE"}
    kept.add_argument("--output", **file, help="a video of everything that was made, NAME.mp4, written while it runs")
    kept.add_argument("--record", **file, help="the controls, as JSON lines; the page walks them again")

    reach = parser.add_argument_group("who is answered")
    reach.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1)")
    reach.add_argument(
        "--port", type=arguments.whole(0, 65535), default=PORT, help=f"0 takes a free one (default: {PORT})"
    )
    for option, name, words in (
        ("--allow-host", "NAME", "another name of this server"),
        ("--allow-origin", "URL", "another server whose pages may connect"),
    ):
        reach.add_argument(option, action="append", default=[], metavar=name, help=f"{words}; may be repeated")
    reach.add_argument("--open", action="store_true", help="open the page in a browser")
    add_machine_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted; returns 0."""
    from ..weights.layout import TINY

    if args.image is None:
        if args.model != TINY:
            raise InputFileError(f"--image is missing: a world of {args.model} begins with a picture of yours")
        args.image = Path(__file__).parents[1] / "web" / "start.png"
    if args.output is not None and args.output.suffix.lower() != ".mp4":
        raise InputFileError(f"--output {args.output} must end in .mp4, the only kind of video made here")
    asyncio.run(_play(args))
    return 0


async def _play(args: argparse.Namespace) -> None:
    from ..realtime.live_routes import LiveWorlds, play_application
    from ..realtime.worker import ThreadWorker

    worlds, worker = LiveWorlds(), ThreadWorker()
    stop = stop_on_signals()
    try:
        async with listening(args, partial(play_application, worlds)) as place:
            place = f"http://{place}/"
            say(f"loading {args.model}; the page is there already: {place}")
            if args.open:
                import webbrowser

                await asyncio.to_thread(webbrowser.open, place)
            await _walk(args, worlds, worker, stop, place)
    finally:
        await asyncio.to_thread(worker.close)


async def _walk(
    args: argparse.Namespace, worlds: Any, worker: ThreadWorker, stop: asyncio.Future[None], place: str
) -> None:
    """From the loading of the model to the end of the walk."""
    from ..realtime.live_world import LiveWorld
    from ..realtime.worker import run as run_on

    loading = asyncio.ensure_future(run_on(worker, partial(_begin, args)))
    waited: set[asyncio.Future[Any]] = {loading, stop}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        return
    walk, picture, writer = loading.result()
    world = LiveWorld(
        walk,
        worker,
        running=not args.paused,
        keep_going=args.keep_going,
        picture=picture,
        on_chunk=None if writer is None else lambda chunk, frames: writer.write(frames),
    )
    worlds.open("", world)
    life = asyncio.ensure_future(world.run())
    say(f"ready: walk on {place} (Ctrl-C ends it)")
    try:
        await asyncio.wait([life, stop], return_when=asyncio.FIRST_COMPLETED)
    finally:
        world.close()
        await asyncio.gather(life, return_exceptions=True)
        worlds.close("", "the server stops")
        await asyncio.to_thread(_keep, args, world, writer)
        gc.unfreeze()  # else what was frozen is told at the end to have leaked
        await run_on(worker, walk.close)


def walkable(preset: Preset, window: int | None, sink: int | None, still_window: int | None) -> Preset:
    """The preset of a walk that goes on until somebody ends it: with a window, unless none is asked for.

    Without one every chunk would take memory that it keeps, and more time than the one before.
    """
    if window is None and preset.window is None:
        window, sink = WINDOW, SINK if sink is None else sink
    return preset.with_overrides(window=window, sink=sink, still_window=still_window)


def _begin(args: argparse.Namespace) -> tuple[HostWalk, Any, Any]:
    """In the worker: the walk at its beginning, its picture, and the file that frames go to."""
    from ..engine.image import RESOLUTIONS, frames_to_uint8, prepare_image
    from ..engine.video import VideoWriter
    from ..realtime.host import Beginning, LoadedHost
    from ..realtime.live_walk import HostWalk
    from .loading import load_world
    from .report import walk_tags
    from .threads import limit_threads

    limit_threads()
    world = load_world(args)
    size = args.size if isinstance(args.size, tuple) else None
    area = RESOLUTIONS[args.size] if isinstance(args.size, str) else world.area
    image = prepare_image(args.image, size=size, area=area, mode=args.fit)
    settings = {
        "seed": args.seed,
        "translation_unit": 0.05,
        "unit_rule": "key",
        "first_delta": "from_rest",
        "rewind_depth": REWIND_DEPTH,
    }
    # What is loaded stays: looking through all of it for garbage would hold up the event loop for half a second.
    gc.collect()
    gc.freeze()
    host = LoadedHost(world)
    preset = walkable(world.preset, args.window, args.sink, args.still_window)
    say(f"preset {preset.label}")
    walk = HostWalk(host, host.begin(Beginning(image, args.prompt, preset, settings)))
    start = walk.history.start
    writer = None
    if args.output is not None:
        writer = VideoWriter(
            args.output, width=start.width, height=start.height, fps=start.fps, metadata=walk_tags(world, start)
        )
    return walk, frames_to_uint8(image.pixels[:, None])[0], writer


def _keep(args: argparse.Namespace, world: LiveWorld, writer: Any) -> None:
    """Closes the video and writes the record; what cannot be written is told, and keeps nothing else from it."""
    from ..engine.controls_file import ControlsRecord, dump_controls

    history = world.walk.handle.history
    if writer is not None:
        frames = writer.abort()
        say(f"{args.output}: {frames} frames" if frames else f"{args.output}: no frames were made, and no file is left")
    if args.record is not None and history.chunks:
        try:
            args.record.write_text(dump_controls(ControlsRecord.of(history)), encoding="utf-8")
        except OSError as error:
            say(f"error: {args.record} cannot be written: {error.strerror or error}")
        else:
            say(f"{args.record}: the controls of {len(history)} chunks")
