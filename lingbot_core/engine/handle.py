"""What a caller holds of a world between two runs: a frozen name for a place in its history."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .history import History
from .prompts import PromptStates


@dataclass(frozen=True, eq=False)
class WorldHandle:
    """A session and a number of its chunks, with everything that is needed to make them live again.

    session: the registry's name of it. root: the name of the session that all its forks come from. history: its chunks
    up to here. states: text states of all its prompts. source: how to make the model and the condition again; opaque to
    the engine, for the caller's ``Room``.
    """

    session: str
    root: str
    history: History
    states: PromptStates = field(default_factory=PromptStates)
    source: Any = None
    rewind_depth: int = 0

    @property
    def chunks(self) -> int:
        """Chunks up to here."""
        return len(self.history)

    def from_source(self, source: Any) -> WorldHandle:
        """The same place, to be made again from another source."""
        return replace(self, source=source)


def same_walk(one: History, other: History) -> bool:
    """Whether one history is the other one, or its beginning: the very same records, not equal ones."""
    shared = zip(one.chunks, other.chunks, strict=False)
    # A record is replaced when its timings become known; its latents never are.
    return one.start == other.start and all(a.latents is b.latents for a, b in shared)
