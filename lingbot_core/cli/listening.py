"""A command that serves: whom it answers, where it listens, what it says, and how a signal ends it."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ..errors import LingBotError

if TYPE_CHECKING:
    from ..realtime.server import Visitors


@asynccontextmanager
async def listening(args: argparse.Namespace, application: Callable[[Visitors], Any]) -> AsyncIterator[str]:
    """Answers on --host and --port while entered; gives ``host:port`` as a URL has it.

    application: makes what answers of who may come in. Raises LingBotError where it cannot listen.
    """
    from aiohttp import web

    from ..realtime.server import LOCAL, Visitors

    if not args.host.strip():
        raise LingBotError(
            "--host is empty, which would be every address of this machine; write 0.0.0.0 if that is meant"
        )
    open_to_all = args.host not in LOCAL
    visitors = Visitors({*LOCAL, args.host, *args.allow_host}, frozenset(args.allow_origin), any_address=open_to_all)
    runner = web.AppRunner(application(visitors), access_log=None, shutdown_timeout=5.0)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, args.host, args.port).start()
        except OSError as error:
            raise LingBotError(f"cannot listen on {args.host}:{args.port}: {error.strerror or error}") from None
        host, port = runner.addresses[0][:2]
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        await runner.cleanup()


def stop_on_signals() -> asyncio.Future[None]:
    """Done at the first Ctrl-C or SIGTERM, which lets the worker come to the end of its step, or of a model's loading;
    the second one ends at once. Where the event loop cannot catch them, they interrupt as ever."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def ask() -> None:
        if stop.done():
            os._exit(130)
        stop.set_result(None)
        say("ending as soon as the running step is over; Ctrl-C again ends at once")

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, ask)
        except (NotImplementedError, RuntimeError):  # Windows' event loops, and any thread but the main one
            break
    return stop


def say(text: str) -> None:
    """A line for whoever started the command."""
    print(text, file=sys.stderr, flush=True)
