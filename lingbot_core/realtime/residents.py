"""Sessions by name: who drives them, how many stay awake, and when they end.

Everything here belongs to the event loop; what touches the model is handed to the worker. A session is awake as long
as there is room: beyond that the least recently driven idle ones are put to sleep, and come back from their history.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..camera.controls import Controls
from ..engine.chunk import Chunk
from ..engine.drive import Drive
from ..engine.fragments import FragmentWriter
from ..engine.handle import WorldHandle
from ..engine.image import PreparedImage
from .errors import MessageError
from .host import Beginning, Host
from .worker import Worker, run

Key = str | None
Steer = Callable[[Drive], Controls]


class StoppedError(Exception):
    """A chunk that nobody waits for any more; the world stays at its last whole chunk."""


@dataclass(eq=False)
class Resident:
    """One session. owner: the connection that drives it, None while nobody does. handle: None until it is begun.

    lock: held while a message of its owner is worked on; the next owner waits for what is left of the one before.
    stop: set when nobody waits for the owner's chunk any more. picture, prompt: the last ones, kept across a reset.
    ended: set when the session is forgotten; what still runs for it then gives back what it made.
    settled: whether its translation unit is final. broken: after an internal error, until a reset. event_id: of the
    last event, kept across a reset.
    """

    key: Key
    owner: object | None = None
    handle: WorldHandle | None = None
    stream: FragmentWriter | None = None
    picture: PreparedImage | None = None
    prompt: str | None = None
    settled: bool = True
    broken: bool = False
    event_id: int = -1
    used: float = 0.0
    stop: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    running: bool = False
    _expiry: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def chunks(self) -> int:
        """Chunks made so far."""
        return 0 if self.handle is None else self.handle.chunks


class Residents:
    """awake: sessions whose caches are kept. cache_bytes: of all of them together, None without a bound. known: of all
    sessions. timeout: seconds after which a session that nobody drives ends; 0: at once.
    """

    def __init__(
        self,
        host: Host,
        worker: Worker,
        *,
        awake: int = 4,
        cache_bytes: int | None = None,
        known: int = 64,
        timeout: float = 300.0,
    ) -> None:
        self.host, self.worker = host, worker
        self.awake, self.cache_bytes, self.known, self.timeout = awake, cache_bytes, known, timeout
        self._all: dict[Key, Resident] = {}  # the least recently driven first
        self._ends: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Any:
        return iter(list(self._all.values()))

    def claim(self, key: Key, owner: object) -> Resident:
        """The session of that name, which ``owner`` drives from now on; a new one if there is none.

        Raises MessageError (session_busy) while another connection drives it, or when there are too many.
        """
        resident = self._all.get(key)
        if resident is None:
            self._make_way()
            resident = self._all[key] = Resident(key)
        elif resident.owner is not None and resident.owner is not owner:
            raise MessageError(
                f"session {shown(key)} is driven by another connection; close that one, or use another session_id",
                code="session_busy",
            )
        if resident.owner is not owner:
            # What the owner before still runs goes on being stopped.
            resident.owner, resident.stop = owner, threading.Event()
        if resident._expiry is not None:
            resident._expiry.cancel()
            resident._expiry = None
        self._touch(resident)
        return resident

    def leave(self, resident: Resident) -> None:
        """Its connection is gone: a chunk that is running stops, and the session ends after the time-out."""
        resident.owner = None
        resident.stop.set()
        if self._all.get(resident.key) is not resident:
            return
        if self.timeout <= 0:
            self._end_soon(resident)
        else:
            loop = asyncio.get_running_loop()
            resident._expiry = loop.call_later(self.timeout, lambda: self._end_soon(resident))

    async def begin(self, resident: Resident, beginning: Beginning) -> None:
        """Starts, or starts anew, the world of a session. Raises LingBotError, and StoppedError when it was ended."""
        await self.reset(resident)

        def work() -> WorldHandle:
            if resident.ended.is_set():
                raise StoppedError
            self._make_room(resident)
            # Already here: the worker may begin another one before the event loop hears of this one.
            resident.handle = self.host.begin(beginning)
            return resident.handle

        await self._take(resident, await self._work(resident, work))
        assert resident.handle is not None
        start = resident.handle.history.start
        resident.stream = FragmentWriter(width=start.width, height=start.height, fps=start.fps)

    async def advance(
        self,
        resident: Resident,
        steer: Steer,
        *,
        prompt: str | None = None,
        on_frames: Callable[[Chunk], None] | None = None,
    ) -> Mapping[str, float]:
        """Makes the next chunk; returns seconds by stage.

        steer: gives its controls; called, as on_frames is with the frames before they are committed, by the worker.
        prompt: another one from this chunk on. Raises LingBotError, and StoppedError when the connection went away.
        """
        host, handle, stop = self.host, resident.handle, resident.stop
        assert handle is not None

        def on_step(step: int, total: int) -> None:
            if stop.is_set():
                raise StoppedError
            host.check()

        def work() -> tuple[WorldHandle, Mapping[str, float]]:
            on_step(0, 0)
            self._make_room(resident)
            states = {} if prompt is None else host.encode((prompt,))
            with host.drive(handle) as drive:
                for text, known in states.items():
                    drive.give_prompt(text, known)
                if prompt is not None:
                    drive.set_prompt(prompt)
                drive.advance(steer(drive), on_step=on_step, on_frames=on_frames)
                return drive.handle, drive.history.chunks[-1].timings

        made, seconds = await self._work(resident, work)
        await self._take(resident, made)
        await self._trim()
        return seconds

    async def reset(self, resident: Resident) -> None:
        """Forgets the world of a session; its name, picture and prompt stay."""
        handle, resident.handle, resident.stream = resident.handle, None, None
        resident.broken, resident.settled = False, True
        if handle is not None:
            await run(self.worker, partial(self.host.close, handle))

    async def end(self, resident: Resident) -> None:
        """Forgets a session."""
        resident.owner = None
        resident.ended.set()
        resident.stop.set()
        if self._all.get(resident.key) is resident:
            del self._all[resident.key]
        if resident._expiry is not None:
            resident._expiry.cancel()
        await self.reset(resident)

    async def end_all(self) -> None:
        """Forgets all sessions."""
        for resident in self:
            resident.stop.set()  # all of them first: else the chunks that wait would be made before their turn comes
        for resident in self:
            await self.end(resident)
        await asyncio.gather(*self._ends)

    def nbytes(self) -> int:
        """Bytes that the caches of all sessions take."""
        return sum(self.nbytes_of(resident) for resident in self)

    def nbytes_of(self, resident: Resident) -> int:
        """Bytes that the caches of one take; 0 while it sleeps."""
        handle = resident.handle  # read once: the worker asks, too
        return 0 if handle is None else self.host.nbytes(handle)

    async def _work(self, resident: Resident, work: Callable[[], Any]) -> Any:
        resident.running = True
        try:
            return await run(self.worker, work)
        finally:
            resident.running = False
            self._touch(resident)

    async def _take(self, resident: Resident, handle: WorldHandle) -> None:
        """Keeps what the worker made, unless the session was ended meanwhile."""
        if not resident.ended.is_set():
            resident.handle = handle
            return
        resident.handle = None
        await run(self.worker, partial(self.host.close, handle))
        raise StoppedError

    def _make_room(self, resident: Resident) -> None:
        """Called by the worker, before a session's caches are made or woken: all others are idle then, also those whose
        chunks wait, so that the bounds hold however many clients ask at once."""
        others = [(r.handle, size) for r in self if r is not resident and (size := self.nbytes_of(r))]
        held, count = self.nbytes_of(resident) + sum(size for _, size in others), 1 + len(others)
        for handle, size in others:
            if count <= self.awake and (self.cache_bytes is None or held <= self.cache_bytes):
                break
            if handle is not None:
                self.host.sleep(handle)
                held, count = held - size, count - 1

    async def _trim(self) -> None:
        """Keeps the bounds; the one that was driven last, and those that are running, stay awake."""
        idle = [r for r in self if self.nbytes_of(r)]
        held, count = sum(self.nbytes_of(r) for r in idle), len(idle)
        for resident in idle[:-1]:
            if count <= self.awake and (self.cache_bytes is None or held <= self.cache_bytes):
                break
            handle = resident.handle
            if resident.running or handle is None:
                continue
            held, count = held - self.nbytes_of(resident), count - 1
            await run(self.worker, partial(self.host.sleep, handle))

    def _make_way(self) -> None:
        if len(self._all) < self.known:
            return
        oldest = next((r for r in self if r.owner is None), None)
        if oldest is None:
            raise MessageError(
                f"{len(self._all)} sessions are open, which is all that this server takes; end one", code="session_busy"
            )
        self._end_soon(oldest)

    def _end_soon(self, resident: Resident) -> None:
        if self._all.get(resident.key) is resident:
            del self._all[resident.key]
        task = asyncio.ensure_future(self.end(resident))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    def _touch(self, resident: Resident) -> None:
        resident.used = asyncio.get_running_loop().time()
        if self._all.get(resident.key) is resident:
            self._all[resident.key] = self._all.pop(resident.key)


def shown(key: Key) -> str:
    """A session's name for messages."""
    return "without a name" if key is None else repr(key)
