"""What the interactions of a video session do to its chunks.

An interaction waits until a chunk begins. Of several that wait the last prompt and the last camera count; one that is
replaced before its chunk never takes effect. ``transition_chunks`` = N says when they arrive:

* a camera target is walked to evenly and reached at the end of the N-th chunk; 0 is a jump in the first latent frame,
  and without N it is 1.
* a prompt changes as a whole when the N-th chunk begins; 0, or without N, is the first. It is not blended: a history
  holds one text for each chunk.
* a velocity is held from the first latent frame on until another camera comes, whatever N is.

Nothing here touches a model or a socket.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import numpy as np

from ..camera.pose import Array, check_poses
from ..errors import CameraError
from .deltas import approach_poses, velocity_poses
from .errors import MessageError
from .video_messages import CameraMove, Interaction

WAITING, REMEMBERED = 64, 10_000


@dataclass(frozen=True)
class _Switch:
    """left: chunks until the prompt holds, the next one included."""

    event_id: str
    text: str
    left: int


@dataclass(frozen=True, eq=False)
class _Move:
    """pose: the delta of a velocity, or the pose that a walk from ``origin`` ends at. total: latent frames of the walk.
    made: latent frames since it began. event_id: None for standing still."""

    event_id: str | None
    pose: Array
    origin: Array | None = None
    total: int = 0
    made: int = 0

    def poses(self, pose: Array, latents: int) -> Array:
        """Of the next latent frames, after ``pose``. Raises CameraError."""
        if self.origin is None:
            found = velocity_poses(pose, self.pose, latents)
        else:
            found = approach_poses(self.origin, self.pose, first=self.made, total=self.total, latents=latents)
        check_poses(found, name="the camera")  # for its distance; the poses stay as they are
        return found

    @property
    def over(self) -> bool:
        """Whether it has no more part in what comes."""
        return self.event_id is None or (self.origin is not None and 0 < self.made >= self.total)

    def arrives(self, latents: int) -> bool:
        """Whether it is where it wants to be after so many more."""
        return self.origin is None or self.made + latents >= self.total


@dataclass(frozen=True, eq=False)
class Turn:
    """What interactions want of one chunk.

    prompt: the new one, or None; prompt_id: whose. poses: absolute, float64 [latent frames, 4, 4]; None where none has
    steered the camera so far. started, active, completed: ids of those that begin in it, have a part in it, and arrive
    in it with all that they want. rejected: ids of those that cannot be, and why.
    """

    prompt: str | None = None
    prompt_id: str | None = None
    poses: Array | None = None
    started: tuple[str, ...] = ()
    active: tuple[str, ...] = ()
    completed: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()


class Interactions:
    """Those of one session.

    latents: frames of a chunk. steerable: whether the model follows poses. start: the pose that targets are relative
    to, [4, 4]; it may be set as long as no chunk has begun.
    """

    def __init__(self, latents: int, *, steerable: bool = True) -> None:
        self._latents, self._steerable = latents, steerable
        self.start: Array = np.eye(4)
        self._waiting: list[Interaction] = []
        self._known: OrderedDict[str, None] = OrderedDict()
        self._begun: set[str] = set()
        self._arrived: set[str] = set()
        self._switch: _Switch | None = None
        self._move: _Move | None = None
        self._before: _Move | None = None  # what a move replaced that has not made a chunk yet

    def queue(self, interaction: Interaction) -> None:
        """Raises MessageError (event_id_conflict, or session_busy when too many wait)."""
        if interaction.event_id in self._known:
            raise MessageError(
                f"event_id {interaction.event_id[:60]!r} was used before in this session; use another one",
                code="event_id_conflict",
            )
        if len(self._waiting) >= WAITING:
            raise MessageError(
                f"{WAITING} interactions wait for the next chunk already; this one was dropped", code="session_busy"
            )
        self._waiting.append(interaction)
        self._known[interaction.event_id] = None
        if len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def turn(self, pose: Array) -> Turn:
        """What the chunk that begins now is to be; asked again, it is the same, but those rejected are told once.

        pose: of the camera before it, [4, 4]. The ids of those that are rejected may be used again.
        """
        rejected = self._admit(pose)
        poses = None
        if self._move is not None:
            try:
                poses = self._move.poses(pose, self._latents)
            except CameraError as error:  # a velocity that was held for too long
                assert self._move.event_id is not None
                rejected.append((self._move.event_id, str(error)))
                self._known.pop(self._move.event_id, None)
                self._move = _Move(None, pose, pose)
                poses = self._move.poses(pose, self._latents)
        switch, move = self._switch, None if self._move is None or self._move.over else self._move
        parts: dict[str, bool] = {}  # id -> whether all its parts arrive
        if switch is not None:
            parts[switch.event_id] = switch.left == 1
        if move is not None and move.event_id is not None:
            parts[move.event_id] = parts.get(move.event_id, True) and move.arrives(self._latents)
        now = switch is not None and switch.left == 1
        return Turn(
            prompt=switch.text if switch is not None and now else None,
            prompt_id=switch.event_id if switch is not None and now else None,
            poses=poses,
            started=tuple(one for one in parts if one not in self._begun),
            active=tuple(parts),
            completed=tuple(one for one, arrives in parts.items() if arrives and one not in self._arrived),
            rejected=tuple(rejected),
        )

    def made(self, turn: Turn) -> None:
        """The chunk of the last turn exists."""
        switch, move = self._switch, self._move
        if switch is not None:
            self._switch = replace(switch, left=switch.left - 1) if switch.left > 1 else None
        if move is not None:
            self._move = replace(move, made=move.made + self._latents)
        self._before = None
        self._begun, self._arrived = set(turn.active), (self._arrived & set(turn.active)) | set(turn.completed)

    def reject(self, event_id: str) -> None:
        """Takes back what an interaction still wants to change; its id may be used again.

        A camera that it has moved already goes on; one that it has not is steered as before.
        """
        self._known.pop(event_id, None)
        if self._switch is not None and self._switch.event_id == event_id:
            self._switch = None
        if self._move is not None and self._move.event_id == event_id and not self._move.made:
            self._move, self._before = self._before, None

    def _admit(self, pose: Array) -> list[tuple[str, str]]:
        """Those that waited become what is wanted. Returns those that cannot be."""
        rejected = []
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            move = None
            try:
                if one.camera is not None:
                    move = self._move_of(one, one.camera, pose)
            except CameraError as error:
                rejected.append((one.event_id, str(error)))
                self._known.pop(one.event_id, None)
                continue
            if one.prompt is not None:
                self._switch = _Switch(one.event_id, one.prompt, max(1, one.transition_chunks or 1))
            if move is not None:
                if self._move is None or self._move.made:
                    self._before = self._move
                self._move = move
        return rejected

    def _move_of(self, one: Interaction, camera: CameraMove, pose: Array) -> _Move:
        if not self._steerable:
            raise CameraError("this model is steered by actions and follows no poses; give a camera_action_script")
        if camera.mode == "velocity":
            move = _Move(one.event_id, camera.pose)
        else:
            chunks = 1 if one.transition_chunks is None else one.transition_chunks
            move = _Move(one.event_id, self.start @ camera.pose, pose, chunks * self._latents)
        move.poses(pose, self._latents)  # one that cannot begin must not take the place of the one before
        return move
