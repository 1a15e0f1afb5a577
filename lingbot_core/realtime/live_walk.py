"""The world that a live session walks through, as the worker sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from ..camera.controls import Controls
from ..engine.chunk import Chunk, OnStep
from ..engine.drive import Drive
from ..engine.handle import WorldHandle
from ..engine.history import History
from ..errors import LingBotError
from .host import Host

Steer = Callable[[Drive], Controls]


class Walk(Protocol):
    """One world that is walked. Methods are called by the worker only, properties by anyone."""

    @property
    def handle(self) -> WorldHandle:
        """The place where the walk stands."""
        ...

    @property
    def act(self) -> bool:
        """Whether the model is steered by actions, too."""
        ...

    def advance(self, steer: Steer, *, prompt: str | None, on_step: OnStep, on_frames: Callable[[Chunk], None]) -> None:
        """Makes the next chunk. steer: gives its controls, called at its very beginning. prompt: a new one, or None.

        Raises LingBotError, and what on_step raises; the chunks before it are kept in any case.
        """
        ...

    def rewind(self, chunks: int) -> None:
        """Takes back all but the first ``chunks`` chunks."""
        ...

    def nbytes(self) -> int:
        """Bytes of the caches. Also callable from the event loop."""
        ...


class HostWalk:
    """A walk on a realtime Host, from a handle on; see Walk."""

    def __init__(self, host: Host, handle: WorldHandle) -> None:
        self.host, self.handle = host, handle

    @property
    def history(self) -> History:
        """All chunks so far."""
        return self.handle.history

    @property
    def act(self) -> bool:
        return self.host.control == "act"

    def advance(self, steer: Steer, *, prompt: str | None, on_step: OnStep, on_frames: Callable[[Chunk], None]) -> None:
        def step(index: int, total: int) -> None:
            on_step(index, total)
            self.host.check()

        on_step(0, 0)
        states = {} if prompt is None else self.host.encode((prompt,))
        with self.host.drive(self.handle) as drive:
            for text, known in states.items():
                drive.give_prompt(text, known)
            if prompt is not None:
                drive.set_prompt(prompt)
            try:
                drive.advance(steer(drive), on_step=step, on_frames=on_frames)
            except BaseException:
                # Its frames may have been seen: the walk goes on from there once the rest can be made good.
                longer = drive.living.history
                if len(longer) == len(drive.history) + 1:
                    self.handle = drive.living.handle(longer, self.handle.source)
                raise
            self.handle = drive.handle

    def rewind(self, chunks: int) -> None:
        with self.host.drive(self.handle) as drive:
            try:
                drive.rewind(chunks)
            finally:
                self.handle = drive.handle

    def nbytes(self) -> int:
        return self.host.nbytes(self.handle)

    def close(self) -> None:
        """Ends the session."""
        with suppress(LingBotError):
            self.host.close(self.handle)
