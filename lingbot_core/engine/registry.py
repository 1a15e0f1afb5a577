"""Who is alive: a bounded number of worlds, each driven by one thread at a time, one run per device."""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import SessionError
from .drive import Drive, Room
from .handle import WorldHandle, same_walk
from .living import Living
from .session import WorldSession

__all__ = ["Drive", "Living", "Registry", "Room", "WorldHandle", "WorldInfo"]

OnWait = Callable[[], None]
POLL_SECONDS = 0.05


@dataclass(frozen=True)
class WorldInfo:
    """state: 'ready', 'running', 'failed', 'asleep' (rebuilt when driven) or 'closed'. chunks, frames, seconds: at the
    handle. head: chunks that exist after it included. cache_bytes: freed by sleep. history_bytes: of the latents.
    """

    state: str
    chunks: int
    head: int
    frames: int
    seconds: float
    cache_bytes: int
    history_bytes: int


class Registry:
    """Living sessions by name.

    sessions, cache_bytes: bounds of what is awake; beyond them the least recently driven worlds are put to sleep.
    known: bound of all worlds; beyond it sleeping ones are forgotten. idle_seconds: after which a world's caches are
    given back by a timer; None never. Whatever the registry forgets lives on in its handles.

    Models are let go of by the threads that call in here, never by the timer's.
    """

    def __init__(
        self,
        *,
        sessions: int = 4,
        cache_bytes: int | None = None,
        known: int = 64,
        idle_seconds: float | None = 900.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.sessions, self.cache_bytes, self.known, self.idle_seconds = sessions, cache_bytes, known, idle_seconds
        self._clock = clock
        self._mutex = threading.RLock()
        self._living: dict[str, Living] = {}  # the least recently driven first
        self._used: dict[str, float] = {}
        self._closed: set[str] = set()
        self._leases: dict[str, threading.Lock] = {}
        self._timer: threading.Timer | None = None

    def add(self, session: WorldSession, source: Any = None) -> WorldHandle:
        """Takes charge of a session that was just started; from now on it is reached by its handles only."""
        living = Living.awake(uuid.uuid4().hex, session)
        self._keep(living)
        self._trim()
        return living.handle(living.history, source)

    @contextmanager
    def drive(self, handle: WorldHandle, room: Room, *, on_wait: OnWait | None = None) -> Iterator[Drive]:
        """Holds the handle's world, and the device, for the body: a walk from the handle on.

        At the head of its session it is driven in place; elsewhere see ``Drive.advance``; a world that slept or was
        forgotten is rebuilt from its history. on_wait: called while another thread has the world or the device; may
        raise. Raises SessionError for a closed world, HistoryError when ``room`` gives another model or image.
        """
        living = self._find(handle)
        with ExitStack() as holds:
            _acquire(living.lock, on_wait, holds)
            self._require_open(handle)  # it may have been closed while we waited
            holds.enter_context(self.lease(room.device, on_wait=on_wait))
            world, condition = room.ready(living)
            drive = Drive(
                handle,
                living,
                room,
                world,
                condition,
                others=lambda: self._all()[::-1],
                keep=self._keep,
                holds=holds,
            )
            try:
                yield drive
            finally:
                self._touch(drive.living)
        self._trim()

    @contextmanager
    def lease(self, device: torch.device, *, on_wait: OnWait | None = None) -> Iterator[None]:
        """The right to run on a device; one at a time."""
        with self._mutex:
            lock = self._leases.setdefault(str(device), threading.Lock())
        with ExitStack() as holds:
            _acquire(lock, on_wait, holds)
            self._put_resting_to_sleep()  # before room is made: what they let go of need not be moved out of the way
            yield

    def living(self, handle: WorldHandle) -> Living | None:
        """The handle's world, if it is known."""
        with self._mutex:
            return self._living.get(handle.session)

    def info(self, handle: WorldHandle) -> WorldInfo:
        """What is known of a world; never waits."""
        living = self.living(handle)
        history = handle.history
        state = "closed" if handle.session in self._closed else "asleep" if living is None else living.state
        head = history if living is None or not same_walk(history, living.history) else living.history
        return WorldInfo(
            state=state,
            chunks=len(history),
            head=max(len(history), len(head)),
            frames=history.frames,
            seconds=history.frames / history.start.fps,
            cache_bytes=0 if living is None else living.cache_nbytes,
            history_bytes=max(history.nbytes, head.nbytes),
        )

    def close(self, handle: WorldHandle) -> None:
        """Ends a session: all its handles are refused from now on; forks are others. Twice is fine.

        Raises SessionBusyError while another thread drives it.
        """
        with self._mutex:
            living = self._living.get(handle.session)
            if living is not None:
                living.close()
                self._forget(living.name)
            self._closed.add(handle.session)

    def is_closed(self, session: str) -> bool:
        """Whether a session of that name was closed."""
        return session in self._closed

    def free(self) -> int:
        """Puts everything to sleep that nobody drives; returns bytes freed. Nothing is lost."""
        return sum(living.sleep() for living in self._all())

    def reap(self) -> int:
        """Gives back the caches of what was idle for too long; returns bytes freed. The timer does this, too.

        Such a world is asleep, but its model is held until the next ``lease`` or ``free``.
        """
        if self.idle_seconds is None:
            return 0
        limit = self._clock() - self.idle_seconds
        return sum(living.rest() for living in self._all() if self._used.get(living.name, limit + 1) <= limit)

    # Inside

    def _require_open(self, handle: WorldHandle) -> None:
        if handle.session in self._closed:
            raise SessionError("this world was closed; start a new one (its finished frames and videos stay)")

    def _find(self, handle: WorldHandle) -> Living:
        with self._mutex:
            self._require_open(handle)
            living = self._living.get(handle.session)
            if living is None:
                living = Living.asleep(handle.session, handle)
            elif not same_walk(living.history, handle.history):
                # It was forgotten, rebuilt from an earlier place, and went another way since.
                living = Living.asleep(uuid.uuid4().hex, handle)
            self._keep(living)
            return living

    def _all(self) -> list[Living]:
        with self._mutex:
            return list(self._living.values())

    def _keep(self, living: Living) -> None:
        with self._mutex:
            self._living[living.name] = living
            self._touch(living)

    def _touch(self, living: Living) -> None:
        with self._mutex:
            if living.name not in self._living:
                return
            self._living[living.name] = self._living.pop(living.name)
            self._used[living.name] = self._clock()
            self._wind()

    def _forget(self, name: str) -> None:
        self._living.pop(name, None)
        self._used.pop(name, None)

    def _put_resting_to_sleep(self) -> None:
        """What the timer began and may not finish; see Living.rest."""
        for living in self._all():
            if living.resting:
                living.sleep()

    def _trim(self) -> None:
        """Keeps the bounds; what somebody drives is left alone."""
        with self._mutex:
            awake = [living for living in self._all() if living.session is not None]
            held, count = sum(living.cache_nbytes for living in awake), len(awake)
            for living in awake[:-1]:
                if count <= self.sessions and (self.cache_bytes is None or held <= self.cache_bytes):
                    break
                size = living.cache_nbytes
                living.sleep()
                if living.session is None:
                    held, count = held - size, count - 1
            for living in self._all()[: max(0, len(self._living) - self.known)]:
                if living.session is None:
                    self._forget(living.name)

    def _wind(self) -> None:
        """Sets the timer that calls ``reap``; it does not keep the registry alive."""
        if self._timer is not None or self.idle_seconds is None:
            return
        me = weakref.ref(self)

        def ring() -> None:
            registry = me()
            if registry is not None:
                registry._ring()

        self._timer = threading.Timer(self.idle_seconds + 1.0, ring)
        self._timer.daemon = True
        self._timer.start()

    def _ring(self) -> None:
        with self._mutex:
            self._timer = None
        self.reap()
        with self._mutex:
            if any(living.session is not None and not living.resting for living in self._living.values()):
                self._wind()


def _acquire(lock: threading.Lock | threading.RLock, on_wait: OnWait | None, holds: ExitStack) -> None:
    while not lock.acquire(timeout=POLL_SECONDS):
        if on_wait is not None:
            on_wait()
    holds.callback(lock.release)
