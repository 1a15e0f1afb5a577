"""A live world in a thread, for tests that drive a browser and cannot wait on an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any

from live_server import LiveServer, live_server

from lingbot_core.engine.world import World


class LiveThread:
    """``with LiveThread(world) as live``: ``live.url`` of the page, ``live.history``, ``live.at`` (see live_server)."""

    def __init__(self, world: World, **options: Any) -> None:
        self._loaded, self._options = world, options
        self._ready = threading.Event()
        self._problem: BaseException | None = None

    def __enter__(self) -> LiveThread:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(60)
        if self._problem is not None:
            raise self._problem
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)

    async def _serve(self) -> None:
        try:
            self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
            async with live_server(self._loaded, **self._options) as self.at:
                self.url = f"http://127.0.0.1:{self.at.server.port}/"
                self._ready.set()
                await self._over.wait()
        except BaseException as error:
            self._problem = error
            self._ready.set()

    @property
    def history(self) -> Any:
        return self.at.history

    @property
    def port(self) -> int:
        return int(self.at.server.port or 0)

    def on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine beside the server, and returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def call(self, work: Any, *values: Any) -> None:
        """Calls something on the event loop."""
        self.loop.call_soon_threadsafe(work, *values)


__all__ = ["LiveServer", "LiveThread"]
