"""``/v1/realtime/video``: one start, then chunks until the end, steered while they come; in JSON and mp4."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .connection import Connection, Data, GoneError
from .errors import MessageError
from .interactions import Interactions
from .json_text import read_json
from .service import Service
from .video_messages import MAX_CONTROL, message_type, read_event_id, read_interaction, read_start
from .video_session import VideoSession

START_SECONDS, STALL_SECONDS = 10.0, 60.0
AHEAD = 4
"""Chunks that are made although the client has not read them."""
# The event loop itself keeps no task alive. aiohttp cancels a request whose client is gone.
_running: set[asyncio.Task[None]] = set()
_LARGE = 1 << 16
"""Characters; longer messages are read off the event loop."""


class VideoSocket:
    """One connection, which makes one video.

    start_seconds: it may stand open without a session.start that can be honoured, or another message. stall_seconds:
    without a chunk or a ping after which a client is told that nothing has come; it is told only, the work goes on.
    """

    def __init__(
        self,
        service: Service,
        connection: Connection,
        *,
        start_seconds: float = START_SECONDS,
        stall_seconds: float = STALL_SECONDS,
    ) -> None:
        self._service, self._connection = service, connection
        self._start_seconds, self._stall_seconds = start_seconds, stall_seconds
        self._sending = asyncio.Lock()
        self._session: VideoSession | None = None
        self._task: asyncio.Task[None] | None = None
        self._over = False
        self._touched = 0.0
        self._busy = False

    async def serve(self) -> None:
        """Until the video is whole or stopped, or the other side closes."""
        self._touch()
        watching = asyncio.ensure_future(self._watch())
        try:
            await self._connection.run(self._take, self._flooded, self._gone)
        finally:
            watching.cancel()
            self._gone()
            await asyncio.gather(watching, return_exceptions=True)
            if self._task is not None:
                # Never cancelled: what the worker makes would belong to nobody then.
                await asyncio.shield(self._task)

    # Messages

    async def _take(self, data: Data) -> None:
        self._service.metrics.add("messages_total", socket="video")
        self._busy = True
        try:
            await self._dispatch(data)
        except MessageError as error:
            await self.send_error(error)
        except GoneError:
            raise
        except Exception as error:
            self._service.failed(error)
            name = type(error).__name__
            await self.send_error(MessageError(f"something failed inside the server ({name})", code="internal"))
        finally:
            self._busy = False
            if self._session is None:
                self._touch()

    async def _dispatch(self, data: Data) -> None:
        if not isinstance(data, str):
            raise MessageError("this socket takes JSON in text frames, no binary frames")
        if self._over:
            raise MessageError("the session is over; open another connection for the next one", code="out_of_order")
        if self._session is not None and len(data) > MAX_CONTROL:
            raise MessageError(
                f"the message has {len(data)} characters; at most {MAX_CONTROL} are read after the start"
            )
        limits = self._service.limits
        message = read_json(data, limits) if len(data) < _LARGE else await asyncio.to_thread(read_json, data, limits)
        match message_type(message):
            case "session.start":
                self._start(message)
            case "session.interaction":
                await self._interact(message)
            case "session.ping":
                self._touch()
                await self.send({"type": "session.pong"})
            case "session.stop":
                self._running("session.stop").stop()
            case kind:
                raise MessageError(
                    f"type {kind!r:.60} is unknown; use session.start, session.interaction, session.ping or "
                    "session.stop"
                )

    def _start(self, message: Mapping[str, Any]) -> None:
        if self._session is not None:
            raise MessageError("the session has started; a connection makes one video", code="out_of_order")
        host = self._service.residents.host
        start = read_start(message, preset=host.preset, model=host.name)
        interactions = Interactions(start.preset.chunk, steerable=host.control != "act")
        self._session = VideoSession(self._service, start, interactions, self)
        self._touch()
        self._task = asyncio.ensure_future(self._run(self._session))
        _running.add(self._task)
        self._task.add_done_callback(_running.discard)

    async def _interact(self, message: Mapping[str, Any]) -> None:
        event_id = read_event_id(message)
        try:
            session = self._running("session.interaction")
            interaction = read_interaction(message, event_id)
            session.interactions.queue(interaction)
        except MessageError as error:
            await self.send_error(error, event_id=event_id)
            return
        answer: dict[str, Any] = {
            "type": "session.interaction.queued",
            "request_id": session.request_id,
            "event_id": event_id,
        }
        warnings = session.warnings(interaction.unknown)
        camera = interaction.camera
        velocity = camera is not None and camera.mode == "velocity"
        if velocity and interaction.transition_chunks and interaction.prompt is None:
            warnings.append("transition_chunks means nothing for a velocity, which holds at once")
        if warnings:
            answer["warnings"] = warnings
        await self.send(answer)

    def _running(self, kind: str) -> VideoSession:
        if self._session is None:
            raise MessageError(f"{kind} came before a session.start that was accepted", code="out_of_order")
        return self._session

    # The session

    async def _run(self, session: VideoSession) -> None:
        try:
            well = await session.run()
        except GoneError:
            return
        except MessageError as error:
            # Nothing was begun: the client may try another start.
            self._session = None
            self._touch()
            await self._quietly(error)
            return
        except Exception as error:  # the client is told, and the log has it whole
            self._service.failed(error)
            name = type(error).__name__
            well = False
            await self._quietly(MessageError(f"something failed inside the server ({name})", code="internal"))
        self._over = True
        code, reason = (1000, "the video ended") if well else (1011, "the session failed and cannot go on")
        with suppress(GoneError):
            await self._connection.finish(code, reason)

    async def _watch(self) -> None:
        """Reports what does not come."""
        loop = asyncio.get_running_loop()
        while not self._over:
            allowed = self._start_seconds if self._session is None else self._stall_seconds
            left = self._touched + allowed - loop.time()
            if left > 0 or self._busy:
                await asyncio.sleep(max(left, 0.05))
                continue
            if self._session is not None:
                self._touch()
                await self._quietly(
                    MessageError(f"no chunk and no ping for {allowed:g} seconds; the work goes on", code="stalled")
                )
                continue
            self._over = True
            reason = f"no session.start within {allowed:g} seconds"
            await self._quietly(MessageError(reason, code="start_timeout"))
            with suppress(GoneError):
                await self._connection.finish(1011, reason)

    def _touch(self) -> None:
        self._touched = asyncio.get_running_loop().time()

    def _gone(self) -> None:
        if self._session is not None:
            self._session.leave()

    async def _flooded(self) -> None:
        await self.send_error(MessageError("too many messages wait already; this one was dropped", code="session_busy"))

    # Answers: what a session asks of its client

    async def send(self, message: Mapping[str, Any]) -> None:
        """See Client."""
        async with self._sending:
            await self._connection.send(_text(message))

    async def send_chunk(self, message: Mapping[str, Any], fragment: bytes) -> None:
        """See Client."""
        async with self._sending:
            await self._connection.send(_text(message))
            await self._connection.send(fragment)
        await self._connection.mark()
        self._touch()

    async def send_error(self, error: MessageError, *, event_id: str | None = None) -> None:
        """See Client."""
        self._service.metrics.add("errors_total", code=error.code)
        message = {"type": "error", "code": error.code, "message": str(error), "event_id": event_id}
        if self._session is not None:
            message["request_id"] = self._session.request_id
        await self.send(message)

    async def caught_up(self) -> None:
        """See Client."""
        await self._connection.unread_at_most(AHEAD - 1)

    async def _quietly(self, error: MessageError) -> None:
        with suppress(GoneError):
            await self.send_error(error)


def _text(message: Mapping[str, Any]) -> str:
    return json.dumps(message, ensure_ascii=False, allow_nan=False)
