"""``lingbot-world serve``: worlds over sockets, without ComfyUI and without a browser."""

from __future__ import annotations

import argparse
import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from ..presets import PRESETS
from . import arguments
from .generate import add_machine_arguments
from .inspect import add_part_arguments
from .listening import listening, say, stop_on_signals

if TYPE_CHECKING:
    from ..realtime.host import LoadedHost
    from ..realtime.worker import ThreadWorker

PORT = 8760
GIB, MIB = 2**30, 2**20


def add_parser(verbs: Any) -> argparse.ArgumentParser:
    """Adds this verb to the subparsers of ``lingbot-world``."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "serve",
        help="serve worlds over sockets: /v1/realtime/world/camera and more",
        description="Loads a model and serves worlds over web sockets until Ctrl-C; docs/realtime.md says what they "
        "speak. Only this machine is answered, unless --host and --allow-host say otherwise; nobody has to log in.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--model", required=True, help="folder or file of a LingBot-World model, or 'tiny' for the embedded one"
    )
    add_part_arguments(parser.add_argument_group("parts of the model that do not lie beside it"))
    parser.add_argument("--preset", choices=sorted(PRESETS), help="sampling recipe (default: what the files point to)")

    reach = parser.add_argument_group("who is answered")
    reach.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)"
    )
    reach.add_argument(
        "--port", type=arguments.whole(0, 65535), default=PORT, help=f"0 takes a free one (default: {PORT})"
    )
    reach.add_argument(
        "--allow-host", action="append", default=[], metavar="NAME", help="another name of this server; may be repeated"
    )
    reach.add_argument(
        "--allow-origin",
        action="append",
        default=[],
        metavar="URL",
        help="another server whose pages may connect, such as http://studio:8188; may be repeated",
    )
    reach.add_argument(
        "--allow-urls", action="store_true", help="start images may be http(s) URLs; only public addresses are asked"
    )
    reach.add_argument(
        "--action-root", type=arguments.path, metavar="DIR", help="clients may name camera files below this folder"
    )

    bounds = parser.add_argument_group("bounds")
    bounds.add_argument(
        "--sessions", type=arguments.whole(1, 4096), default=4, metavar="N", help="whose caches are kept (default: 4)"
    )
    bounds.add_argument(
        "--cache-gib", type=arguments.positive, metavar="GIB", help="of all caches together (default: no bound)"
    )
    bounds.add_argument(
        "--timeout",
        type=arguments.seconds,
        default=300.0,
        metavar="SECONDS",
        help="a session that nobody drives ends after it; 0: at once (default: 300)",
    )
    bounds.add_argument(
        "--message-mib", type=arguments.whole(1, 1024), default=64, metavar="MIB", help="largest message (default: 64)"
    )
    add_machine_arguments(parser)
    return parser


def run(args: argparse.Namespace) -> int:
    """Serves until it is interrupted; returns 0."""
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from ..realtime.limits import Limits
    from ..realtime.server import application
    from ..realtime.service import Service
    from ..realtime.worker import ThreadWorker

    service = Service(
        limits=Limits(message_bytes=args.message_mib * MIB),
        awake=args.sessions,
        cache_bytes=None if args.cache_gib is None else int(args.cache_gib * GIB),
        timeout=args.timeout,
        allow_urls=args.allow_urls,
        trusted=args.action_root,
    )
    worker = ThreadWorker()
    stop = stop_on_signals()
    try:
        async with listening(args, partial(application, service)) as place:
            say(f"loading {args.model}; the sockets answer already: ws://{place}/v1/realtime/world/camera")
            loading = asyncio.ensure_future(service.load(_load(args, worker)))
            await asyncio.wait([loading, stop], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
                say(f"ready: {args.model} on http://{place}/ (Ctrl-C ends it)")
                await stop
            else:
                loading.cancel()
    finally:
        await service.close()
        await asyncio.to_thread(worker.close)  # it waits; the event loop hears of signals meanwhile


async def _load(args: argparse.Namespace, worker: ThreadWorker) -> tuple[LoadedHost, ThreadWorker]:
    from ..realtime.worker import run as run_on

    return await run_on(worker, partial(_load_world, args)), worker


def _load_world(args: argparse.Namespace) -> LoadedHost:
    from ..realtime.host import LoadedHost
    from .loading import load_world
    from .threads import limit_threads

    limit_threads()
    return LoadedHost(load_world(args))
