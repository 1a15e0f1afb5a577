"""What the driver of a live world holds, taps and turns, until a chunk takes it.

Messages come at any time and a chunk takes what there is at its boundary. Nothing that came is lost: a key that went
down and up again in between moves one latent frame for each press, and what a mouse turned further than a chunk may
turn is left for the chunk after it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from ..camera.controls import Controls, KeyMotion
from ..camera.keys import IJKL, PER_LATENT, WASD, KeySteps, arrays_from_keys, move_pose, pitch_of
from ..camera.pose import Array
from ..engine.drive import Drive

KEYS = frozenset(WASD + IJKL + "qe")
"""What can be held: those of camera.keys, and Q and E for down and up, which the model's own recipe does not have."""
MOVES = {
    "w": ("forward", 1), "s": ("forward", -1), "d": ("right", 1), "a": ("right", -1), "e": ("up", 1), "q": ("up", -1),
    "i": ("pitch", 1), "k": ("pitch", -1), "l": ("yaw", 1), "j": ("yaw", -1),
}  # fmt: skip
AXES = ("forward", "right", "up", "pitch", "yaw")
SPEEDS = (0.1, 2.0)
"""Of moving and turning, in steps of a held key; the models were trained with 1 at most."""
LOOK_PER_LATENT = (2 * PER_LATENT.yaw_deg, 2 * PER_LATENT.pitch_deg)
"""Degrees that a mouse may turn the camera in one latent frame: twice what a held key does."""
LOOK_WAITING = 180.0
"""Degrees that may wait to be turned; a mouse that was thrown around does not spin the camera for minutes."""
HOLD_SECONDS = 5.0
"""Keys are up again when their driver has said nothing for so long. Pages repeat what is held every second."""


@dataclass(frozen=True)
class Control:
    """One message of a driver.

    seq: rises from message to message. press: keys that went down since the last message, once for each time.
    held: all keys that are down now. axes: of sticks and pads, -1 to 1, in the order of AXES. look: degrees that the
    mouse turned since the last message, right and up.
    """

    seq: int
    press: str = ""
    held: frozenset[str] = frozenset()
    axes: tuple[float, ...] = (0.0,) * len(AXES)
    look: tuple[float, float] = (0.0, 0.0)

    @property
    def moves(self) -> bool:
        """Whether the camera is to move because of it."""
        return bool(self.press or self.held or any(self.axes) or any(self.look))


@dataclass(frozen=True)
class Speeds:
    """How far one step goes: factors of a held key's 0.05 units, and of its 6 and 4 degrees."""

    move: float = 1.0
    turn: float = 1.0

    @property
    def steps(self) -> KeySteps:
        """As steps of keys."""
        if (self.move, self.turn) == (1.0, 1.0):
            return PER_LATENT
        return replace(
            PER_LATENT,
            name="live",
            move=PER_LATENT.move * self.move,
            pitch_deg=PER_LATENT.pitch_deg * self.turn,
            yaw_deg=PER_LATENT.yaw_deg * self.turn,
        )


@dataclass(frozen=True)
class Taken:
    """What one chunk is steered with.

    keys: held in each of its latent frames. axes: sticks, for all of them. look: degrees right and up for each latent
    frame. seq: of the last message that counts in it. at: when the first one that is new in it came, in seconds of the
    steering's clock; None when nothing was new. presses: taps that it took, to be given back if it fails.
    """

    keys: tuple[frozenset[str], ...]
    axes: tuple[float, ...]
    look: tuple[float, float]
    speeds: Speeds
    seq: int
    at: float | None
    presses: Counter[str] = field(default_factory=Counter)

    @property
    def only_keys(self) -> bool:
        """Whether keys that the model's own recipe knows are all there is."""
        return not (any(self.axes) or any(self.look) or any("q" in keys or "e" in keys for keys in self.keys))

    def poses(self, pose: Array) -> Array:
        """The poses [latents, 4, 4] after ``pose``."""
        steps, out = self.speeds.steps, np.empty((len(self.keys), 4, 4))
        for index, keys in enumerate(self.keys):
            axis = dict(zip(AXES, self.axes, strict=True))
            for key in keys:
                name, sign = MOVES[key]
                axis[name] += sign
            axis = {name: min(1.0, max(-1.0, value)) for name, value in axis.items()}
            pose = move_pose(
                pose,
                forward=axis["forward"],
                right=axis["right"],
                up=axis["up"],
                yaw_deg=axis["yaw"] * steps.yaw_deg + self.look[0],
                pitch_deg=_within_limit(pose, axis["pitch"] * steps.pitch_deg + self.look[1], steps.pitch_limit_deg),
                distance=steps.move,
            )
            out[index] = pose
        return out

    def controls(self, drive: Drive, *, act: bool) -> Controls:
        """Of the chunk that comes next. act: for a model that is steered by actions as well."""
        known = [keys & frozenset(WASD + IJKL) for keys in self.keys]
        actions = arrays_from_keys(known)[0] if act else None
        if self.only_keys:
            return drive.controls(KeyMotion(tuple(known), self.speeds.steps), actions=actions)
        return drive.controls(self.poses(drive.carry.pose), actions=actions)


class Steering:
    """Messages go in on the event loop, chunks take out on the worker. clock: seconds that only go forward."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.speeds = Speeds()
        self._clock, self._lock = clock, threading.Lock()
        self._seq = -1
        self._held: frozenset[str] = frozenset()
        self._presses: Counter[str] = Counter()
        self._axes = Control(0).axes
        self._look = np.zeros(2)
        self._changed: float | None = None
        self._heard = clock()

    @property
    def seq(self) -> int:
        """Of the last message that counted."""
        return self._seq

    @property
    def held(self) -> str:
        """The keys that are down, sorted."""
        with self._lock:
            return "".join(sorted(self._current()))

    def add(self, control: Control) -> bool:
        """A message of the driver. False: it is older than one that came before it, and means nothing any more."""
        with self._lock:
            if control.seq <= self._seq:
                return False
            before = (self._current(), self._axes)
            self._seq, self._heard = control.seq, self._clock()
            self._presses.update(control.press)
            self._held, self._axes = control.held, control.axes
            self._look = np.clip(self._look + control.look, -LOOK_WAITING, LOOK_WAITING)
            news = control.press or any(control.look) or before != (self._held, self._axes)
            if news and self._changed is None:
                self._changed = self._heard
            return True

    def take(self, latents: int) -> Taken:
        """What there is for a chunk of so many latent frames."""
        with self._lock:
            held = self._current()
            axes = self._axes if self._is_heard else (0.0,) * len(AXES)
            taps = {key: min(count, latents) for key, count in self._presses.items() if key not in held}
            keys = tuple(held | {key for key, count in taps.items() if index < count} for index in range(latents))
            most = np.array(LOOK_PER_LATENT)
            look = np.clip(self._look / latents, -most, most)
            self._look = self._look - look * latents
            self._look[np.abs(self._look) < 1e-9] = 0.0  # what rounding leaves is no wish to turn
            taken = Taken(
                keys, axes, (float(look[0]), float(look[1])), self.speeds, self._seq, self._changed, self._presses
            )
            self._presses, self._changed = Counter(), None
            return taken

    def give_back(self, taken: Taken) -> None:
        """A chunk that took it came to nothing: its taps and turns are for the next one."""
        with self._lock:
            self._presses.update(taken.presses)
            self._look = np.clip(self._look + np.array(taken.look) * len(taken.keys), -LOOK_WAITING, LOOK_WAITING)
            self._changed = taken.at if self._changed is None else self._changed

    def clear(self) -> None:
        """The driver is gone, or another one begins to count: everything is up, and nothing waits."""
        with self._lock:
            self._seq, self._held, self._axes = -1, frozenset(), Control(0).axes
            self._presses, self._look, self._changed = Counter(), np.zeros(2), None

    @property
    def _is_heard(self) -> bool:
        return self._clock() - self._heard <= HOLD_SECONDS

    def _current(self) -> frozenset[str]:
        return self._held if self._is_heard else frozenset()


def _within_limit(pose: Array, pitch: float, limit: float) -> float:
    """A pitch as far as the limit allows. Sticks and mice stop there; keys, whose steps are all alike, stop before."""
    # A camera that stands on its head never gets here: it can only be brought there by poses, which a driver has not.
    now = pitch_of(pose)
    return min(max(pitch, min(0.0, -limit - now)), max(0.0, limit - now))
