"""Which controls a node was given, and where in them a run begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...lingbot_core import CameraTrajectory
from ...lingbot_core.camera.keys import KEY_STEPS
from ...lingbot_core.engine.history import History, StartRecord
from ...lingbot_core.engine.image import PreparedImage
from ...lingbot_core.engine.route import Route, route_from_camera, route_from_keys
from ...lingbot_core.errors import CameraError, LengthError, LingBotError
from ...lingbot_core.presets import Preset
from ..sockets import expect

ENTRIES = ("auto", "continue", "beginning")
LENGTHS = ("chunks", "seconds", "all of the controls")


@dataclass(frozen=True, eq=False)
class Steering:
    """route: None stands still. entry: where the route is entered, one of ENTRIES. paces: of a camera path the longest
    step of the route that each setting of hold makes of it; empty for other controls.
    """

    route: Route | None
    entry: str = "auto"
    hold: bool = False
    paces: Mapping[bool, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        controls: Any,
        camera: Any,
        keys: str | None,
        preset: Preset,
        *,
        entry: str = "auto",
        hold: bool = False,
    ) -> Steering:
        """From a node's inputs, of which at most one may be given. hold: stand still where they end too early; a camera
        path then keeps its own speed, as in LingBotControls, and is spread over whole chunks otherwise.

        Raises CameraError, LengthError and TypeError.
        """
        if entry not in ENTRIES:
            raise CameraError(f"controls_from={entry!r} is unknown; use one of {', '.join(ENTRIES)}")
        given = [name for name, value in _named(controls, camera, keys) if value is not None]
        if len(given) > 1:
            raise CameraError(f"{' and '.join(given)} both steer the world; keep one of them")
        if controls is not None:
            route = expect(controls, Route, "CONTROLS", "LingBotControls")
            return cls(route.with_choices(stands_still=True) if hold else route, entry)
        if camera is not None:
            path = expect(camera, CameraTrajectory, "CAMERA", "LingBotCameraKeys or LingBotCameraLoad")
            return cls(_paced(path, preset, hold), entry, hold, _paces(path, preset))
        if keys is not None and keys.strip():
            return cls(route_from_keys(keys, preset, stands_still=hold), "beginning" if entry == "auto" else entry)
        return cls(None, entry)

    def warnings(self, start: StartRecord) -> list[str]:
        """What is odd about this steering in a world that was started so."""
        here, other = self.paces.get(self.hold), self.paces.get(not self.hold)
        if start.unit_rule != "clip" or here == other or start.translation_unit != other or here is None:
            return []
        return [
            f"the world was started with this camera path and hold {_switch(not self.hold)}, here hold is "
            f"{_switch(self.hold)}: its longest step is {here / other:.2f} units long instead of 1. Set hold alike "
            "where the world starts and where it goes on"
        ]

    def begin(self, history: History, image: PreparedImage, *, act: bool) -> int:
        """The route's own chunk that comes next in a world.

        'auto': a route that made all of the world so far goes on, if it has chunks left; any other is begun.
        """
        made = len(history)
        if self.route is None or self.entry == "beginning" or not made:
            return 0
        if self.entry == "continue":
            return made
        goes_on = made < self.route.chunks and _made_by(self.route, history, image, act=act)
        return made if goes_on else 0


def chunks_wanted(
    length: str, *, chunks: int, seconds: float, preset: Preset, fps: float, made: int, route: Route | None, begin: int
) -> int:
    """How many chunks a run makes. made: chunks there are already; seconds are snapped up to whole chunks.

    Raises LengthError naming the input.
    """
    if length == "chunks":
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise LengthError(f"chunks={chunks!r} must be a whole number of at least 1")
        return chunks
    if length == "seconds":
        if not 0 < seconds < float("inf"):
            raise LengthError(f"seconds={seconds!r} must be above 0")
        total = preset.frames(made) + max(1, round(seconds * fps))
        return max(1, preset.chunks_for(total, snap="up") - made)
    if length != LENGTHS[2]:
        raise LengthError(f"length={length!r} is unknown; use one of {', '.join(LENGTHS)}")
    if route is None:
        raise LengthError(f"length {length!r} needs controls, a camera or keys; connect one, or give chunks or seconds")
    return route.span(begin)


def still_route(preset: Preset) -> Route:
    """Keys that nobody presses, for as long as one likes."""
    steps = KEY_STEPS["per-latent"]
    return route_from_keys(f"none-{preset.chunk}", preset, steps=steps, stands_still=True, source="standing still")


def require_length(route: Route, begin: int, chunks: int) -> None:
    """Raises LengthError when the route is shorter than the run."""
    route.span(begin, chunks)


def _paced(path: CameraTrajectory, preset: Preset, hold: bool) -> Route:
    return route_from_camera(path, preset, length="hold" if hold else "compress")


def _paces(path: CameraTrajectory, preset: Preset) -> dict[bool, float]:
    paces = {}
    for hold in (False, True):
        with suppress(LengthError):  # a path that is shorter than a chunk can only be held
            paces[hold] = _paced(path, preset, hold).translation_unit("clip")[0]
    return paces


def _switch(on: bool) -> str:
    return "on" if on else "off"


def _named(controls: Any, camera: Any, keys: str | None) -> Sequence[tuple[str, Any]]:
    return ("controls", controls), ("camera", camera), ("keys", keys if keys and keys.strip() else None)


class _Place:
    """A place in a history that a route can be asked at, as if nothing had been made yet."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.carry = history.carry


def _made_by(route: Route, history: History, image: PreparedImage, *, act: bool) -> bool:
    """Whether a world's chunks so far are what this route gives from its beginning, bit for bit."""
    made = len(history)
    try:
        would = list(islice(route.controls(_Place(history.first(0)), image, act=act, chunks=made), made))
    except LingBotError:
        return False
    return [record.controls for record in history.chunks] == would
