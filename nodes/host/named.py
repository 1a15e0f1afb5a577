"""Worlds by name, for the node that goes on with the same world every time it is queued."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from ...lingbot_core.engine.history import StartRecord
from ...lingbot_core.engine.registry import WorldHandle
from ...lingbot_core.errors import HistoryError

LIMIT = 64
# What a world keeps from its start; the seed, the unit and the lens of a node that only continues do not matter.
_FIXED = ("model", "preset", "height", "width", "image", "noise", "negative_prompt")


@dataclass(frozen=True, eq=False)
class NamedWorld:
    """handle: without its source, which would keep a model alive. positive: name of the prompt that was connected."""

    handle: WorldHandle
    positive: str


class NamedWorlds:
    """A bounded number of names; the least recently used is forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worlds: OrderedDict[str, NamedWorld] = OrderedDict()
        self._continued: dict[str, int] = {}

    def get(self, name: str) -> NamedWorld | None:
        """The world of that name."""
        with self._lock:
            return self._worlds.get(name)

    def put(self, name: str, world: NamedWorld) -> None:
        """Sets the world of a name."""
        with self._lock:
            self._worlds[name] = NamedWorld(world.handle.from_source(None), world.positive)
            self._worlds.move_to_end(name)
            while len(self._worlds) > LIMIT:
                self._worlds.popitem(last=False)

    def continued(self, name: str) -> int:
        """How often a world of that name was continued, ever."""
        with self._lock:
            return self._continued.get(name, 0)

    def count(self, name: str) -> None:
        """Counts one more continuation."""
        with self._lock:
            self._continued[name] = self._continued.get(name, 0) + 1


class Closings:
    """How often the world that a node began last was closed since: the node's outputs are of no use then, and it has to
    run again although its inputs are what they were.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def began(self, node: str, session: str) -> None:
        """A node began a session."""
        with self._lock:
            self._last[node] = session

    def count(self, node: str, is_closed: Callable[[str], bool]) -> int:
        """A number that changes when the node's last world was closed."""
        with self._lock:
            last = self._last.get(node)
            if last is not None and is_closed(last):
                del self._last[node]
                self._counts[node] = self._counts.get(node, 0) + 1
            return self._counts.get(node, 0)


def require_same_start(name: str, began: StartRecord, now: StartRecord) -> None:
    """Raises HistoryError naming the first thing that a world cannot change while it goes on."""
    for field in _FIXED:
        before, after = getattr(began, field), getattr(now, field)
        if before != after:
            shown = (before.label, after.label) if field == "preset" else (before, after)
            raise HistoryError(
                f"the world {name!r} was begun with {field}={shown[0]!r}, but now it is {shown[1]!r}; set it back, or "
                "set mode to restart"
            )
