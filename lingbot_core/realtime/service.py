"""One loaded world, or one that is still loading, behind all the sockets of a server."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from aiohttp import web

from .errors import MessageError
from .host import Host
from .limits import Limits
from .metrics import Metrics
from .residents import Residents
from .worker import Worker


class Service:
    """limits: of messages. awake, cache_bytes, known, timeout: see Residents. allow_urls: pictures may be fetched from
    public addresses. trusted: the folder that action_path may name files below; None refuses it.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        awake: int = 4,
        cache_bytes: int | None = None,
        known: int = 64,
        timeout: float = 300.0,
        allow_urls: bool = False,
        trusted: Path | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.allow_urls, self.trusted = allow_urls, trusted
        self.metrics = Metrics()
        self.connections = 0
        self.sockets: weakref.WeakSet[web.WebSocketResponse] = weakref.WeakSet()
        self._bounds: dict[str, Any] = {
            "awake": awake,
            "cache_bytes": cache_bytes,
            "known": known,
            "timeout": timeout,
        }
        self._residents: Residents | None = None
        self._problem: MessageError | None = None
        self._decided = asyncio.Event()
        self.metrics.gauge("connections", lambda: {(): self.connections})
        self.metrics.gauge("sessions", self._states)
        self.metrics.gauge("cache_bytes", lambda: {(): 0 if self._residents is None else self._residents.nbytes()})

    def open(self, host: Host, worker: Worker, **bounds: Any) -> None:
        """From now on sessions can be begun. bounds: in place of those that the service was made with."""
        self._residents, self._problem = Residents(host, worker, **{**self._bounds, **bounds}), None
        self._decided.set()

    async def load(self, loading: Awaitable[tuple[Host, Worker]]) -> None:
        """Waits for a model; until it is there everybody is told that it loads, and why, if it never will."""
        try:
            self.open(*await loading)
        except Exception as error:
            self._problem = MessageError(f"the model could not be loaded: {error}", code="internal")
            self._decided.set()
            raise

    async def close(self, reason: str = "the world is not served any more") -> None:
        """Ends all sessions; whoever asks from now on is told the reason. It may be opened again."""
        residents, self._residents = self._residents, None
        self._problem = MessageError(reason, code="internal")
        self._decided.clear()  # who comes now is told the reason, and greeted when it is opened again
        if residents is not None:
            await residents.end_all()

    async def hang_up(self, reason: str) -> None:
        """Closes all sockets, all at once: one that does not answer takes aiohttp's ten seconds."""
        message = reason.encode()[:123]
        closing = [socket.close(code=1001, message=message) for socket in list(self.sockets)]
        await asyncio.gather(*closing, return_exceptions=True)

    @property
    def state(self) -> str:
        """'loading', 'ready' or 'failed'."""
        return "ready" if self._residents is not None else "loading" if self._problem is None else "failed"

    @property
    def residents(self) -> Residents:
        """Raises MessageError (loading, or internal where loading failed)."""
        if self._residents is not None:
            return self._residents
        raise self._problem or MessageError("the model is loading; try again in a while", code="loading")

    async def decided(self) -> None:
        """Returns when the model is loaded, or cannot be."""
        await self._decided.wait()

    def sessions(self) -> list[dict[str, Any]]:
        """What /v1/realtime/sessions tells; JSON types only."""
        if self._residents is None:
            return []
        now = asyncio.get_running_loop().time()
        rows = []
        for resident in self._residents:
            history = None if resident.handle is None else resident.handle.history
            size = self._residents.nbytes_of(resident)
            rows.append(
                {
                    "session_id": resident.key,
                    "state": "running" if resident.running else "idle" if size else "asleep",
                    "driven": resident.owner is not None,
                    "chunks": resident.chunks,
                    "frames": 0 if history is None else history.frames,
                    "cache_bytes": size,
                    "idle_seconds": round(now - resident.used, 3),
                    "width": None if history is None else history.start.width,
                    "height": None if history is None else history.start.height,
                    "translation_unit": None if history is None else history.start.translation_unit,
                }
            )
        return rows

    def failed(self, error: BaseException) -> None:
        """Something that should not happen is in the log, whole."""
        logging.getLogger("lingbot_world.realtime").error("a realtime session failed", exc_info=error)

    def _states(self) -> dict[tuple[tuple[str, str], ...], float]:
        counts = {"running": 0, "idle": 0, "asleep": 0}
        for row in self.sessions():
            counts[row["state"]] += 1
        return {(("state", state),): float(count) for state, count in counts.items()}
