"""Going on from a handle: chunks that exist are decoded again, others are made, and a path that divides is a fork."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ..camera.controls import CameraCarry, Controls, KeyMotion
from ..errors import HistoryError
from .chunk import Chunk, OnStep
from .condition import Condition
from .handle import WorldHandle, same_walk
from .history import ChunkRecord
from .living import Living
from .revival import frames_again, require_match
from .session import OnFrames, WorldSession
from .steering import next_controls
from .world import World


class Room(Protocol):
    """How a caller makes a world ready to run on ``device``."""

    @property
    def device(self) -> torch.device: ...

    def ready(self, living: Living | None) -> tuple[World, Condition]:
        """Loads the models and makes room for the caches of one session: those of ``living``, or new ones (None).

        It may put other worlds of the registry to sleep.
        """
        ...


class Drive:
    """One caller's walk from a handle on, while it holds the world. Made by ``Registry.drive``.

    It stands at a place in a history, like a session does, and has what a route asks of a session: ``history``,
    ``carry``, ``prompt``, ``controls``. reused: chunks so far that were not denoised again.
    """

    def __init__(
        self,
        handle: WorldHandle,
        living: Living,
        room: Room,
        world: World,
        condition: Condition,
        *,
        others: Callable[[], Sequence[Living]],
        keep: Callable[[Living], None],
        holds: ExitStack,
    ) -> None:
        require_match(world, condition, handle.history.start)
        self._room, self._world, self._condition = room, world, condition
        self._others, self._keep, self._holds = others, keep, holds
        self._living = living
        self._source, self._handle = handle.source, handle
        self._given: dict[str, Tensor] = {}
        self._prompt = handle.history.prompt
        self._again: Iterator[tuple[ChunkRecord, Tensor]] | None = None
        self.history = handle.history
        self.reused = 0
        if missing := handle.history.chunks[len(living.history) :]:
            if living.session is not None:
                living.wake(world, condition)
            living.take(missing, handle.states.positive)

    @property
    def living(self) -> Living:
        """The world that is being driven; another one after a fork."""
        return self._living

    @property
    def world(self) -> World:
        """The loaded model."""
        return self._world

    @property
    def carry(self) -> CameraCarry:
        """The camera pose that the next chunk goes on from."""
        return self.history.carry

    @property
    def prompt(self) -> str:
        """The prompt of the next chunk."""
        return self._prompt

    @property
    def handle(self) -> WorldHandle:
        """The place where this walk stands."""
        return self._living.handle(self.history, self._source)

    def controls(
        self,
        motion: np.ndarray | KeyMotion,
        *,
        prompt: str | None = None,
        actions: np.ndarray | None = None,
        intrinsics: Sequence[float] | None = None,
    ) -> Controls:
        """See WorldSession.controls."""
        return next_controls(self.history, motion, prompt=prompt, actions=actions, intrinsics=intrinsics)

    def give_prompt(self, prompt: str, states: Tensor) -> None:
        """Text states of a prompt that ``set_prompt`` or coming controls name."""
        self._given[prompt] = states

    def set_prompt(self, prompt: str) -> None:
        """The prompt from the next chunk on."""
        self._prompt = prompt

    def settle_unit(self, unit: float, rule: str) -> None:
        """Another translation unit, as long as nothing has moved; handles from before it are of another world then.

        Raises HistoryError once a chunk has moved, or where the walk does not stand at the end of its world.
        """
        if len(self._living.history) != len(self.history):
            raise HistoryError("the translation unit can only be settled at the end of a world")
        self._living.settle_unit(unit, rule)
        self.history = self._living.history

    def advance(self, controls: Controls, *, on_step: OnStep | None = None, on_frames: OnFrames | None = None) -> Chunk:
        """The next chunk; see WorldSession.advance.

        A chunk that was made from this place before, with the same controls, prompt and noise, is decoded only; then
        on_step is called once. Where what is asked differs from what exists, the walk goes on in a fork.
        """
        prompt = self._prompt if controls.prompt is None else controls.prompt
        holder = self._holder_of(controls, prompt)
        if holder is not None:
            chunk = self._decode_again(holder, on_step, on_frames)
        else:
            session = self._session()
            self._tell(session, prompt)
            chunk = session.advance(controls, on_step=on_step, on_frames=on_frames)
        self.history = self._living.history.first(len(self.history) + 1)
        self._prompt = self.history.prompt
        return chunk

    def rewind(self, chunks: int) -> None:
        """Goes back to the first ``chunks`` chunks; see WorldSession.rewind.

        A walk at the end of its world takes the world back with it, in place. Handles to what is taken back have a
        history of their own and live on.
        """
        shorter = self.history.first(chunks)
        if len(self._living.history) == len(self.history) > chunks:
            self._living.wake(self._world, self._condition).rewind(chunks)
            shorter = self._living.history
        self.history, self._prompt, self._again = shorter, shorter.prompt, None

    def past(self) -> Iterator[Chunk]:
        """The chunks of the handle, decoded again one at a time."""
        for record, frames in frames_again(self._world, self._handle.history):
            yield _chunk(record, frames)

    def _holder_of(self, controls: Controls, prompt: str) -> Living | None:
        """A living world whose next chunk from here is the one that is asked for; the one being driven first.

        Only forks of one session count: an equal start may still run on a model that was patched otherwise.
        """
        here, states = len(self.history), self._given.get(prompt)
        for living in (self._living, *self._others()):
            related = living.root == self._living.root and same_walk(self.history, living.history)
            if not related or len(living.history) <= here:
                continue
            record = living.history.chunks[here]
            if (
                record.prompt == prompt
                and record.noise == self.history.start.noise
                and record.controls == controls
                and not living.knows_otherwise(prompt, states)
                and (living is self._living or self._hold(living))
            ):
                return living
        return None

    def _hold(self, living: Living) -> bool:
        # Never waiting for a second world: two walks could wait for each other.
        if not living.lock.acquire(blocking=False):
            return False
        self._holds.callback(living.lock.release)
        return True

    def _decode_again(self, holder: Living, on_step: OnStep | None, on_frames: OnFrames | None) -> Chunk:
        if on_step is not None:
            on_step(0, 1)
        here = len(self.history)
        if holder is not self._living:
            self._living, self._again = holder, None
        self.reused += 1
        session = holder.session
        if session is not None and session.state == "failed" and here == len(holder.history) - 1:
            finished = session.resume(on_frames=on_frames) if session.runs_on(self._world) else None
            if finished is not None:
                self._again = None
                return finished
        if self._again is None:
            self._again = frames_again(self._world, holder.history, here)
        try:
            chunk = _chunk(*next(self._again))
        except BaseException:
            self._again = None  # a generator that failed is over
            raise
        if on_frames is not None:
            on_frames(chunk)
        return chunk

    def _session(self) -> WorldSession:
        """The session that stands here, ready to make a chunk."""
        self._again = None
        if len(self._living.history) == len(self.history):
            return self._living.wake(self._world, self._condition)
        self._world, self._condition = self._room.ready(None)
        old = self._living.session
        name = uuid.uuid4().hex
        if old is not None and old.runs_on(self._world):
            fork = Living.awake(name, old.fork(len(self.history)), self._living.root)
        else:
            fork = Living.asleep(name, self.handle)
        self._living = fork
        self._hold(fork)
        self._keep(fork)
        return fork.wake(self._world, self._condition)

    def _tell(self, session: WorldSession, prompt: str) -> None:
        """Sets the prompt of the next chunk, with the states that were given for it."""
        states = self._given.get(prompt)
        new = states is not None and prompt not in session.prompt_states.positive
        if session.prompt != prompt or new or self._living.knows_otherwise(prompt, states):
            session.set_prompt(prompt, states=states)


def _chunk(record: ChunkRecord, frames: Tensor) -> Chunk:
    poses = record.controls.relative
    return Chunk(record.index, frames, record.latents.clone(), poses, record.prompt, dict(record.timings))
