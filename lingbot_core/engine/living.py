"""One world that is alive: its session, or, while that sleeps, what it takes to wake it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..errors import SessionBusyError
from .condition import Condition
from .handle import WorldHandle
from .history import ChunkRecord, History
from .prompts import PromptStates
from .session import WorldSession
from .world import World


class Living:
    """A session that may be put to sleep at any time: then only history and text states stay, and no model is held.

    Whoever drives it holds ``lock``; ``sleep`` does nothing while another thread does. root: see WorldHandle.
    """

    def __init__(self, name: str, root: str, history: History, states: PromptStates, rewind_depth: int) -> None:
        self.name, self.root = name, root
        self.session: WorldSession | None = None
        self.rewind_depth = rewind_depth
        self.lock = threading.RLock()
        self._history, self._states = history, states
        self._resting = False

    @classmethod
    def awake(cls, name: str, session: WorldSession, root: str | None = None) -> Living:
        """Of a session that runs already."""
        living = cls(name, root or name, session.history, session.prompt_states, session.rewind_depth)
        living.session = session
        return living

    @classmethod
    def asleep(cls, name: str, handle: WorldHandle) -> Living:
        """Of what a handle remembers."""
        return cls(name, handle.root, handle.history, handle.states, handle.rewind_depth)

    def handle(self, history: History, source: Any = None) -> WorldHandle:
        """A place in this world."""
        return WorldHandle(self.name, self.root, history, self.states, source, self.rewind_depth)

    @property
    def history(self) -> History:
        session = self.session
        return self._history if session is None else session.history

    @property
    def states(self) -> PromptStates:
        session = self.session
        return self._states if session is None else session.prompt_states

    @property
    def state(self) -> str:
        """That of the session, or 'asleep'."""
        session = self.session
        return "asleep" if session is None or self._resting else session.state

    @property
    def resting(self) -> bool:
        """Whether its caches are gone and its model is still held; see ``rest``."""
        return self._resting

    @property
    def world(self) -> World | None:
        """The model that the session runs on; None while it sleeps."""
        session = self.session
        return None if session is None else session.world

    @property
    def cache_nbytes(self) -> int:
        """Bytes that ``sleep`` gives back."""
        session = self.session
        return 0 if session is None else session.cache_nbytes

    def wake(self, world: World, condition: Condition) -> WorldSession:
        """The session, ready for the next chunk: rebuilt when it slept or ran on other networks, finished if need be.

        Raises HistoryError when model or image are not those of the history.
        """
        if self.session is not None and not self.session.runs_on(world):
            self.sleep()
        if self.session is None:
            self.session = WorldSession.from_history(
                world,
                condition,
                self._history,
                prompt_states=self._states.positive,
                negative_states=self._states.negative,
                rewind_depth=self.rewind_depth,
            )
        self._resting = False
        self.session.resume()
        return self.session

    def take(self, records: tuple[ChunkRecord, ...], states: Mapping[str, Tensor]) -> None:
        """Goes on with chunks that were made from here before."""
        if self.session is None:
            for record in records:
                self._history = self._history.append(record)
            self._states = PromptStates({**self._states.positive, **states}, self._states.negative)
            return
        for record in records:
            if record.prompt != self.session.prompt:
                self.session.set_prompt(record.prompt, states=states.get(record.prompt))
            self.session.adopt(record)

    def settle_unit(self, unit: float, rule: str) -> None:
        """See WorldSession.settle_unit; a sleeping world remembers it."""
        if self.session is None:
            self._history = self._history.with_unit(unit, rule)
        else:
            self.session.settle_unit(unit, rule)

    def knows_otherwise(self, prompt: str, states: Tensor | None) -> bool:
        """Whether this world's chunks of that prompt were made with other text states."""
        known = self.states.positive.get(prompt)
        if states is None or known is None:
            return False
        return known.shape != states.shape or not torch.equal(known.to(states), states)

    def rest(self) -> int:
        """The part of ``sleep`` that a thread may do which must never let go of a model: gives back the caches only.

        The death of a model is news to whoever keeps a list of models, and that host may be walking through it in a
        thread of its own. Returns bytes freed, 0 while somebody drives the session.
        """
        with self._if_free() as free:
            # No name is given to the session: after the lock is released it must not be this thread that lets it go.
            if not free or self.session is None or self._resting:
                return 0
            freed = self.session.cache_nbytes
            try:
                self.session.release(image=False)
            except SessionBusyError:
                return 0
            self._resting = True
            return freed

    def sleep(self) -> int:
        """Gives back the caches and lets go of the model; returns bytes freed, 0 while somebody drives the session."""
        with self._if_free() as free:
            session = self.session
            if not free or session is None:
                return 0
            freed = session.cache_nbytes
            try:
                # The image may be other worlds', too; whoever made it knows when to free it.
                session.release(image=False)
            except SessionBusyError:
                return 0
            self._history, self._states, self.session = session.history, session.prompt_states, None
            self._resting = False
            session.close()
            return freed

    def close(self) -> None:
        """Ends the session. Raises SessionBusyError while another thread drives it."""
        with self._if_free() as free:
            if not free:
                raise SessionBusyError("this world is running; stop it first, or close it when it is done")
            if self.session is not None:
                self.session.close()
                self._history, self.session, self._resting = self.session.history, None, False

    @contextmanager
    def _if_free(self) -> Iterator[bool]:
        free = self.lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self.lock.release()
