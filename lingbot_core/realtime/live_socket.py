"""One connection to a live world: a page or a program that drives it, or watches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from aiohttp import WSMsgType, web

from ..errors import LingBotError
from .connection import GoneError
from .errors import MessageError
from .json_text import read_json
from .limits import Limits
from .live_messages import (
    MAX_RECORD,
    MAX_TEXT,
    message_type,
    read_control,
    read_hello,
    read_prompt,
    read_record,
    read_rewind,
    read_seq,
    read_settings,
)
from .live_outbox import Outbox
from .live_world import LiveWorld

RATE, BURST = 400.0, 800.0
"""Messages a second that are read, and at once after a silence. Pages send a few dozen."""
HELLO_SECONDS = 10.0
COMMANDS = (
    "start", "pause", "step", "stop", "restart", "rewind", "prompt", "settings", "snapshot", "replay",
)  # fmt: skip
"""What only the driver may say, besides control."""
_LARGE = Limits(items=50_000_000)
"""A record is one text; the brackets in it are counted as entries."""


class LiveSocket:
    """See LiveWorld's Viewer. world: what the connection is about; None while there is none of its name.

    greeted: called once the other side has introduced itself.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        limits: Limits,
        *,
        name: str = "",
        greeted: Callable[[LiveSocket], None] = lambda socket: None,
    ) -> None:
        self.client, self.format, self.visible = "", "jpeg", True
        self.world: LiveWorld | None = None
        self._name, self._wants_to_drive, self._greeted = name, False, False
        self._socket, self._limits, self._on_greeted = socket, limits, greeted
        self._outbox = Outbox(socket)
        self._bucket, self._filled_at = BURST, 0.0
        self._dropped, self._last_dropped = 0, ""
        self._told_at = float("-inf")

    async def serve(self) -> None:
        """Until the other side closes, is gone, or does not read."""
        sending = asyncio.ensure_future(self._outbox.run())
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        watching = asyncio.ensure_future(self._watch())
        try:
            async for message in self._socket:
                match message.type:
                    case WSMsgType.PING:
                        await self._socket.pong(message.data)
                    case WSMsgType.PONG:
                        self._outbox.was_read(bytes(message.data))
                    case WSMsgType.TEXT:
                        await self._take(message.data)
                    case WSMsgType.BINARY:
                        self._refuse(MessageError("this socket takes JSON in text frames, no binary frames"))
                    case _:
                        break
        except (ConnectionError, GoneError):
            pass
        finally:
            if self.world is not None:
                self.world.leave(self)
            self.world = None
            watching.cancel()
            sending.cancel()
            await asyncio.gather(watching, sending, return_exceptions=True)

    # What a world asks of its viewers

    @property
    def dropped(self) -> int:
        """Frames that were not sent."""
        return self._outbox.dropped

    def say(self, message: Mapping[str, Any], *, replaces: str | None = None) -> None:
        """Queues a message."""
        self._outbox.say(message, replaces=replaces)

    def show(self, frame: bytes) -> None:
        """Queues a frame."""
        self._outbox.show(frame)

    def forget_frames(self) -> None:
        """What waits is of a place that was left."""
        self._outbox.forget_frames()

    def attach(self, world: LiveWorld) -> None:
        """A world of its name is there."""
        if self._greeted and self.world is None:
            self.world = world
            world.join(self, drive=self._wants_to_drive)

    def detach(self, reason: str) -> None:
        """The world is closed; the connection waits for another one of its name."""
        if self.world is not None:
            self.world.leave(self)
            self.world = None
            self.say({"type": "closed", "reason": reason})

    def close(self, code: int, reason: str) -> None:
        """Ends the connection."""
        self._outbox.close(code, reason)

    # Messages

    async def _take(self, data: str) -> None:
        if not self._may_read(data):
            return
        seq = None
        try:
            message = await self._read(data)
            seq = read_seq(message)
            await self._dispatch(message_type(message), message, seq)
        except MessageError as error:
            self._refuse(error, seq)
        except LingBotError as error:
            self._refuse(MessageError(str(error), code="internal"), seq)
        except Exception as error:  # a mistake of ours ends no connection
            logging.getLogger("lingbot_world.live").error("a message could not be worked on", exc_info=error)
            name = type(error).__name__
            self._refuse(MessageError(f"something failed inside the server ({name})", code="internal"), seq)

    async def _read(self, data: str) -> dict[str, Any]:
        if len(data) <= MAX_TEXT:
            return read_json(data, self._limits)
        most = MAX_RECORD if '"replay"' in data[:200] else MAX_TEXT
        if len(data) > most:
            raise MessageError(f"the message has {len(data)} characters; at most {most} are read")
        return await asyncio.to_thread(read_json, data, _LARGE)

    async def _dispatch(self, kind: str, message: Mapping[str, Any], seq: int | None) -> None:
        if kind == "hello":
            self._greet(message)
            return
        if kind == "ping":
            self.say({"type": "pong", "t": message.get("t") if isinstance(message.get("t"), int | float) else None,
                      "time": None if self.world is None else self.world.time})  # fmt: skip
            return
        if not self._greeted:
            raise MessageError(f"{kind[:40]} came before hello; introduce yourself first", code="out_of_order")
        world = self.world
        if world is None:
            raise MessageError(f"no world {self._name!r:.60} is open; it begins when it is queued", code="loading")
        answer: dict[str, Any] = {}
        match kind:
            case "claim":
                world.claim(self, force=message.get("force") is True)
            case "visible":
                world.looked_at(self, message.get("visible") is not False)
            case "record":
                answer["record"] = await world.record()
            case "control":
                self._require_wheel(world)
                world.steering.add(read_control(message))
                return  # its frames are the answer
            case "release":
                world.release(self)
            case _ if kind in COMMANDS:
                self._require_wheel(world)
                answer = await self._command(world, kind, message)
            case _:
                known = ", ".join(("hello", "control", *COMMANDS, "record", "claim", "release", "visible", "ping"))
                raise MessageError(f"type {kind!r:.60} is unknown; use one of {known}")
        self.say({"type": "done", "of": kind, "seq": seq, "time": world.time, **answer})

    async def _command(self, world: LiveWorld, kind: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Of the driver. Returns more fields of the answer."""
        match kind:
            case "start":
                world.start()
            case "pause":
                world.pause()
            case "step":
                world.step()
            case "stop":
                world.stop()
            case "restart":
                world.rewind(None)
                world.start()
            case "rewind":
                world.rewind(read_rewind(message))
            case "prompt":
                world.set_prompt(read_prompt(message))
            case "settings":
                world.set(read_settings(message))
            case "snapshot":
                return {"chunks": world.snapshot()}
            case _:
                return {"chunks": await world.replay(read_record(message))}
        return {}

    def _greet(self, message: Mapping[str, Any]) -> None:
        if self._greeted:
            raise MessageError("hello came twice; open another connection", code="out_of_order")
        hello = read_hello(message)
        self.client, self.format, self._wants_to_drive = hello.client, hello.format, hello.drive
        self._greeted = True
        self._on_greeted(self)
        if self.world is None:
            self.say({"type": "waiting", "name": self._name})

    def _require_wheel(self, world: LiveWorld) -> None:
        if world.driver is not self:
            raise MessageError("you are watching; claim the wheel to steer this world", code="not_driving")

    def _refuse(self, error: MessageError, seq: int | None = None) -> None:
        self.say({"type": "error", "code": error.code, "message": str(error), "seq": seq})

    # Floods

    def _may_read(self, data: str) -> bool:
        """Whether a message may be read now. Of those that may not the last one is read once there is room, because the
        last one says what is held."""
        now = asyncio.get_running_loop().time()
        if self._filled_at:
            self._bucket = min(BURST, self._bucket + (now - self._filled_at) * RATE)
        self._filled_at = now
        if self._bucket >= 1.0:
            self._bucket -= 1.0
            self._last_dropped = ""
            return True
        self._dropped += 1
        self._last_dropped = data if len(data) <= MAX_TEXT else ""
        return False

    async def _watch(self) -> None:
        """Tells of floods, once a second, and ends a connection that never introduces itself."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        while True:
            await asyncio.sleep(0.2)
            if not self._greeted and loop.time() - begun > HELLO_SECONDS:
                self._outbox.close(1008, f"no hello within {HELLO_SECONDS:g} seconds")
                return
            if self._last_dropped and self._bucket + (loop.time() - self._filled_at) * RATE >= 1.0:
                data, self._last_dropped = self._last_dropped, ""
                await self._take(data)
            if self._dropped and loop.time() - self._told_at >= 1.0:
                self._told_at = loop.time()
                count, self._dropped = self._dropped, 0
                told = f"{count} messages were dropped: at most {RATE:.0f} a second are read"
                self._refuse(MessageError(told, code="flooded"))


async def quietly_close(sockets: list[web.WebSocketResponse], reason: str) -> None:
    """Closes sockets, all at once."""
    with suppress(Exception):
        message = reason.encode()[:123]
        await asyncio.gather(*(one.close(code=1001, message=message) for one in sockets), return_exceptions=True)
