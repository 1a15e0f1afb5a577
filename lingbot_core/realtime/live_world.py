"""A world that is walked live: made chunk after chunk while somebody drives, and shown to all who watch.

It belongs to the event loop; chunks are made by the worker, frames encoded by a thread of their own. What a driver
wants takes effect when the next chunk begins.
"""

from __future__ import annotations

import asyncio
import math
import os
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..camera.controls import Controls
from ..camera.keys import pitch_of
from ..engine.chunk import Chunk
from ..engine.controls_file import ControlsRecord, dump_chunk, dump_controls, load_controls
from ..engine.drive import Drive
from ..engine.handle import WorldHandle
from ..engine.image import frames_to_uint8
from ..engine.walked import poses_of_chunk, walked_poses
from ..errors import LingBotError, PromptError
from .errors import MessageError
from .live_messages import VERSION, Settings
from .live_screen import Screen, Viewer
from .live_steering import Speeds, Steering, Taken
from .live_walk import Walk
from .residents import StoppedError
from .worker import Worker, run

STATUS_SECONDS = 0.5
PATH_POINTS = 2000
"""Of the way behind, that a page is told when it comes; longer ways are thinned out."""


class LiveWorld:
    """One walk, from when it is opened until it is closed. ``run`` is its life, called once.

    running: whether it goes on as soon as somebody drives. keep_going: also when nobody does. limit: chunks in all
    after which it stops, None for no end. ends: a stop ends it, else it can be started again. picture: the start image,
    uint8 [H, W, 3], shown before the first chunk. on_chunk: gets every chunk's frames, uint8 [T, H, W, 3], in the
    worker's thread; what it raises fails the chunk.
    """

    def __init__(
        self,
        walk: Walk,
        worker: Worker,
        *,
        running: bool = True,
        keep_going: bool = False,
        limit: int | None = None,
        ends: bool = False,
        picture: np.ndarray | None = None,
        on_chunk: Callable[[Chunk, np.ndarray], None] | None = None,
    ) -> None:
        self.walk, self.instance = walk, uuid.uuid4().hex
        self.driver: Viewer | None = None
        self.snapshot_handle: WorldHandle | None = None
        self.rewound = False
        self._worker, self._ends, self._limit, self._on_chunk = worker, ends, limit, on_chunk
        self._loop = asyncio.get_running_loop()
        self._born = self._loop.time()
        self.steering = Steering(self._loop.time)
        start = walk.handle.history.start
        self._first = walk.handle.chunks
        self._viewers: list[Viewer] = []
        self._screen = Screen(start, self._viewers, lambda: self.time, picture)
        self._pace = self._screen.pace
        self._wanted, self._keep_going = running, keep_going
        self._steps, self._rewinds, self._rewind_all = 0, 0, False
        self._prompt: str | None = None
        self._replay: deque[Controls] = deque()
        self._stopping = self.over = False
        self._problem = self._notice = ""
        self._making = False
        self._news = asyncio.Event()
        self._poses = walked_poses(walk.handle.history)

    # What can be asked at any time

    @property
    def time(self) -> float:
        """Seconds since the world was opened: the server's time in every message."""
        return round(self._loop.time() - self._born, 4)

    @property
    def chunks(self) -> int:
        """Chunks so far."""
        return self.walk.handle.chunks

    @property
    def state(self) -> str:
        """'running', 'paused', 'waiting' (it would go on, and nobody drives), 'replaying', 'failed' or 'stopped'."""
        if self._stopping:
            return "stopped"
        if self._problem:
            return "failed"
        if not (self._wanted or self._steps):
            return "paused"
        if not (self._is_driven or self._keep_going):
            return "waiting"
        return "replaying" if self._replay else "running"

    def status(self) -> dict[str, Any]:
        """What pages show; JSON types only."""
        history, now = self.walk.handle.history, self._loop.time()
        start = history.start
        frames = start.preset.frames(max(2, len(history) + 1)) - start.preset.frames(max(1, len(history)))
        seconds = self._pace.chunk_seconds
        return {
            "type": "status",
            "time": self.time,
            "state": self.state,
            "problem": self._problem,
            "notice": self._notice,
            "making": self._making,
            "chunks": len(history),
            "frames": history.frames,
            "seconds": round(history.frames / start.fps, 3),
            "fps": start.fps,
            "made_fps": None if seconds is None else round(frames / seconds, 2),
            "chunk_seconds": None if seconds is None else round(seconds, 3),
            "real_time": self._pace.is_real_time(frames),
            "buffer": round(self._pace.ahead(now), 3),
            "latency": None if self._screen.latency is None else round(self._screen.latency, 3),
            "cache_bytes": self.walk.nbytes(),
            "process_bytes": _resident(),
            "held": self.steering.held,
            "move": self.steering.speeds.move,
            "turn": self.steering.speeds.turn,
            "keep_going": self._keep_going,
            "prompt": history.prompt,
            "prompt_waits": self._prompt is not None,
            "replay_left": len(self._replay),
            "viewers": len(self._viewers),
            "driven": self.driver is not None,
        }

    async def record(self) -> str:
        """The walk so far as a record of controls. Raises LingBotError before the first chunk."""
        history = self.walk.handle.history
        return await asyncio.to_thread(lambda: dump_controls(ControlsRecord.of(history)))

    # Who is there

    def join(self, viewer: Viewer, *, drive: bool) -> None:
        """Somebody watches, and drives if nobody else does. A page that comes back takes its own place again."""
        self._viewers.append(viewer)
        role = "watch"
        if drive and (self.driver is None or self.driver.client == viewer.client):
            if self.driver is not None:
                self.driver.say({"type": "role", "role": "watch", "reason": "this page has connected once more"})
            self._seat(viewer)
            role = "drive"
        history = self.walk.handle.history
        start, thinned = history.start, max(1, math.ceil(len(self._poses) / PATH_POINTS))
        viewer.say(
            {
                "type": "hello", "v": VERSION, "time": self.time, "instance": self.instance, "role": role,
                "reason": "somebody else drives; you are watching" if drive and role == "watch" else "",
                "width": start.width, "height": start.height, "fps": start.fps, "chunk_latents": start.preset.chunk,
                "preset": start.preset.label, "seed": start.seed, "translation_unit": start.translation_unit,
                "path": self._points(self._poses[::thinned]),
            }
        )  # fmt: skip
        viewer.say(self.status(), replaces="status")
        self._screen.welcome(viewer)
        self._news.set()

    def leave(self, viewer: Viewer) -> None:
        """Somebody is gone. Without a driver the world waits, unless it is to keep going."""
        if viewer in self._viewers:
            self._viewers.remove(viewer)
        self.release(viewer)

    def claim(self, viewer: Viewer, *, force: bool = False) -> None:
        """Takes the wheel. Raises MessageError (driver_taken) while somebody else has it, unless ``force``."""
        if self.driver is not None and self.driver is not viewer:
            if not force:
                raise MessageError("somebody else drives this world; wait until they leave it", code="driver_taken")
            self.driver.say({"type": "role", "role": "watch", "reason": "another page has taken the wheel"})
        self._seat(viewer)
        viewer.say({"type": "role", "role": "drive", "reason": ""})

    def release(self, viewer: Viewer) -> None:
        """Lets the wheel go; keys that were held are up."""
        if self.driver is viewer:
            self.driver = None
            self.steering.clear()
            self._tell()
            for other in self._viewers:
                other.say({"type": "free", "time": self.time})

    def looked_at(self, viewer: Viewer, visible: bool) -> None:
        """A page was hidden, or is seen again."""
        viewer.visible = visible
        self._tell()

    # What the driver wants

    def start(self) -> None:
        """Goes on; after an error it is tried again."""
        if self._stopping and self._ends:
            raise MessageError("this world was stopped; queue the workflow again", code="out_of_order")
        self._wanted, self._steps, self._stopping, self._problem, self._notice = True, 0, False, "", ""
        self._tell()

    def pause(self) -> None:
        """Stands still once the running chunk is made."""
        self._wanted, self._steps = False, 0
        self._tell()

    def step(self) -> None:
        """Makes one chunk and stands still."""
        self._wanted, self._problem, self._notice = False, "", ""
        self._stopping = self._stopping and self._ends
        self._steps = min(self._steps + 1, 16)
        self._tell()

    def stop(self) -> None:
        """No more chunks; one that is being made is given up."""
        self._stopping, self._wanted, self._steps = True, False, 0
        self._replay.clear()
        self._tell()

    def rewind(self, chunks: int | None) -> None:
        """Takes chunks back, for None all that this walk has made."""
        waiting, here = self._rewinds + (chunks or 0), self.chunks - self._first
        if chunks is not None and waiting > here:
            raise MessageError(f"{waiting} chunks cannot be taken back; this walk has {here}", code="out_of_order")
        self._rewinds, self._rewind_all = waiting, self._rewind_all or chunks is None
        self._replay.clear()
        self._tell()

    def set_prompt(self, prompt: str) -> None:
        """Another prompt, from the next chunk on."""
        self._prompt = prompt
        self._tell()

    def set(self, settings: Settings) -> None:
        """Speeds, and whether it goes on alone."""
        old = self.steering.speeds
        self.steering.speeds = Speeds(
            old.move if settings.move is None else settings.move, old.turn if settings.turn is None else settings.turn
        )
        if settings.keep_going is not None:
            self._keep_going = settings.keep_going
        self._tell()

    def snapshot(self) -> int:
        """Remembers the place where the walk stands; returns its number of chunks."""
        self.snapshot_handle = self.walk.handle
        return self.snapshot_handle.chunks

    async def replay(self, text: str) -> int:
        """Walks a record again from the world's beginning; returns its number of chunks.

        Raises MessageError (replay_failed) for one that is damaged, or of another world.
        """
        if self._first:
            raise MessageError(
                f"this walk began at chunk {self._first}, and a record begins at 0; walk it in a world that has none",
                code="replay_failed",
            )
        try:
            record = await asyncio.to_thread(load_controls, text)
            record.require_same(self.walk.handle.history.start)
        except LingBotError as error:
            raise MessageError(str(error), code="replay_failed") from None
        self.rewind(None)
        self._replay = deque(record.controls)
        self.start()
        return len(record.controls)

    # Its life

    async def run(self) -> None:
        """Makes chunks until it is closed, or stopped where that ends it."""
        helpers = [asyncio.ensure_future(work()) for work in (self._screen.play, self._report)]
        try:
            while not (self.over or (self._stopping and self._ends)):
                self._news.clear()
                if self._rewind_all or self._rewinds:
                    await self._take_back()
                elif self.state in ("running", "replaying") and not self._is_full():
                    await self._chunk_in_time()
                else:
                    await self._news.wait()
        finally:
            self.over = True
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await asyncio.to_thread(self._screen.close)
            self._tell()

    def close(self) -> None:
        """Ends its life; a chunk that is being made is given up."""
        self.stop()
        self.over = True
        self._news.set()

    def _is_full(self) -> bool:
        if self._limit is None or self.chunks < self._limit:
            return False
        self._notice = f"this is the end: {self._limit} chunks were asked for"
        self.stop()
        return True

    async def _chunk_in_time(self) -> None:
        """Makes the next chunk as late as it may begin, so that it knows the newest controls."""
        wait = self._pace.wait(self._loop.time())
        if wait > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._news.wait()
            return
        prompt, replayed = self._prompt, self._replay[0] if self._replay else None
        if replayed is not None:
            prompt = replayed.prompt
        taken: list[Taken] = []
        steps = min(1, self._steps)  # one that is asked for while this chunk is made is another one
        begun = self._loop.time()
        shown = [begun]
        self._making = True
        try:
            await run(self._worker, partial(self._make, prompt, replayed, taken, shown))
        except StoppedError:
            self._returned(taken)
            return
        except LingBotError as error:
            self._returned(taken)
            if prompt is not None and replayed is None and isinstance(error, PromptError):
                self._forget_prompt(prompt)
                self._to_driver({"type": "error", "code": "prompt_failed", "message": str(error), "time": self.time})
                return
            self._failed(str(error))
            return
        except Exception as error:  # the page is told, and whoever runs the server finds all of it in the log
            self._returned(taken)
            _log(error)
            self._failed(f"something failed inside the server ({type(error).__name__})")
            return
        finally:
            self._making = False
        if replayed is not None:
            self._replay.popleft()
            if not self._replay:
                self._wanted, self._notice = False, "the recorded way has been walked"
        elif prompt is not None:
            self._forget_prompt(prompt)
        self._steps = max(0, self._steps - steps)
        now = self._loop.time()
        self._pace.took(shown[0] - begun, now - begun)
        self._tell_chunk()

    def _make(self, prompt: str | None, replayed: Controls | None, taken: list[Taken], shown: list[float]) -> None:
        """The worker's part of a chunk."""
        walk = self.walk

        def on_step(index: int, total: int) -> None:
            if self._stopping or self.over:
                raise StoppedError

        def steer(drive: Drive) -> Controls:
            if replayed is not None:
                return replayed
            taken.append(self.steering.take(drive.history.start.preset.chunk))
            return taken[0].controls(drive, act=walk.act)

        def on_frames(chunk: Chunk) -> None:
            frames = frames_to_uint8(chunk.frames)
            shown[0] = self._loop.time()
            if self._on_chunk is not None:
                self._on_chunk(chunk, frames)
            self._screen.put(chunk.index, frames, taken[0] if taken else None)

        walk.advance(steer, prompt=prompt, on_step=on_step, on_frames=on_frames)

    async def _take_back(self) -> None:
        chunks = self._first if self._rewind_all else max(self._first, self.chunks - self._rewinds)
        self._rewinds, self._rewind_all = 0, False
        self._screen.clear()
        self._making = True
        try:
            await run(self._worker, partial(self.walk.rewind, chunks))
        except LingBotError as error:
            self._failed(str(error))
            return
        except StoppedError:
            return
        finally:
            self._making = False
        self.rewound = True
        self._notice = ""
        latents = self.walk.handle.history.start.preset.chunk
        self._poses = self._poses[: chunks * latents]
        for viewer in self._viewers:
            viewer.say({"type": "rewound", "time": self.time, "chunks": chunks, "latents": len(self._poses)})
            if not chunks and viewer.format != "fragments":
                self._screen.welcome(viewer)
        self._tell()

    # Telling

    def _tell(self) -> None:
        """Everybody hears how things are, and the loop looks again at what there is to do."""
        self._news.set()
        status = self.status()
        for viewer in self._viewers:
            viewer.say({**status, "dropped": viewer.dropped}, replaces="status")

    def _tell_chunk(self) -> None:
        history = self.walk.handle.history
        record = history.chunks[-1]
        before = self._poses[-1] if len(self._poses) else np.eye(4)
        poses = poses_of_chunk(record, before, history.start.translation_unit)
        self._poses = np.concatenate([self._poses, poses])
        message = {
            "type": "chunk",
            "time": self.time,
            "chunk": record.index,
            "path": self._points(poses),
            "keys": None if record.controls.keys is None else list(record.controls.keys),
            "timings": {stage: round(seconds, 4) for stage, seconds in record.timings.items()},
        }
        for viewer in self._viewers:
            viewer.say(message)
        # The driver's page writes them down: a server that is started again knows nothing.
        self._to_driver({"type": "line", "chunk": record.index, "line": dump_chunk(history, record.index)})
        self._tell()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            if self._viewers and (self._making or self._screen.is_busy or self.steering.held):
                self._tell()

    def _to_driver(self, message: Mapping[str, Any]) -> None:
        if self.driver is not None:
            self.driver.say(message)

    # Small things

    @property
    def _is_driven(self) -> bool:
        return self.driver is not None and self.driver.visible

    def _seat(self, viewer: Viewer) -> None:
        self.driver = viewer
        self.steering.clear()
        self._tell()

    def _forget_prompt(self, prompt: str) -> None:
        if self._prompt == prompt:  # else another one came meanwhile
            self._prompt = None

    def _returned(self, taken: list[Taken]) -> None:
        for one in taken:
            self.steering.give_back(one)

    def _failed(self, why: str) -> None:
        self._problem, self._steps = why, 0
        self._replay.clear()
        self._tell()

    def _points(self, poses: np.ndarray) -> list[list[float]]:
        """[x, z, degrees to the right, y, degrees up] of each pose, for a map."""
        heading = np.degrees(np.arctan2(poses[:, 0, 2], poses[:, 2, 2]))
        return [
            [round(float(value), 4) for value in (pose[0, 3], pose[2, 3], turn, pose[1, 3], pitch_of(pose))]
            for pose, turn in zip(poses, heading, strict=True)
        ]


def _resident() -> int | None:
    """Bytes of memory that the process takes; None where the system does not say."""
    with suppress(OSError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return None


def _log(error: BaseException) -> None:
    import logging

    logging.getLogger("lingbot_world.live").error("a live world failed", exc_info=error)
