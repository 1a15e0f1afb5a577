"""A walk by hand inside ComfyUI: one long prompt, whose chunks are steered from the node's element until it is stopped.

Routes and connections are there from the start; what is behind them comes and goes with the node's run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import comfy.model_management
import numpy as np
import torch
from comfy.cli_args import args
from torch import Tensor

from ...lingbot_core.camera.trajectory import CameraTrajectory
from ...lingbot_core.engine.chunk import Chunk
from ...lingbot_core.engine.controls_file import ControlsRecord
from ...lingbot_core.engine.handle import WorldHandle, same_walk
from ...lingbot_core.engine.image import frames_to_uint8
from ...lingbot_core.engine.revival import frames_again
from ...lingbot_core.engine.route import RecordedRoute, Route
from ...lingbot_core.engine.walked import walked_camera
from ...lingbot_core.errors import LingBotError
from ...lingbot_core.realtime.live_routes import LiveWorlds, live_routes, web_routes
from ...lingbot_core.realtime.live_walk import HostWalk
from ...lingbot_core.realtime.live_world import LiveWorld
from ...lingbot_core.realtime.server import LOCAL, Visitors
from .named import NamedWorld, NamedWorlds
from .progress import RunProgress, prompt_server, stop_if_cancelled
from .realtime import ComfyHost, PromptWorker
from .report import about_world, as_json
from .run import require_image_room
from .source import WorldSource
from .video import VIDEOS, RunVideo, workflow_tags

T = TypeVar("T")
WEB_PREFIX = "/lingbot_world/web"
SAY_SECONDS = 1.0


@dataclass(frozen=True, eq=False)
class LiveWish:
    """What a walk is begun with.

    name: under which pages find it. paused: it waits for Start. keep_going: it goes on when nobody drives. chunks:
    after which it ends by itself, 0 for no end. again: it goes on where the last walk of that name ended. whole_image:
    IMAGE holds all frames, else the last one. hidden: the node's hidden inputs.
    """

    name: str
    paused: bool = False
    keep_going: bool = False
    chunks: int = 0
    again: bool = False
    whole_image: bool = False
    hidden: Any = None


@dataclass(frozen=True, eq=False)
class Walked:
    """What a walk leaves: IMAGE, VIDEO, WORLD at its end and where the last snapshot was taken, CAMERA, CONTROLS."""

    images: Tensor
    video: Any
    handle: WorldHandle
    snapshot: WorldHandle
    camera: CameraTrajectory
    controls: Route
    report: str


class LiveHost(ComfyHost):
    """Of a world that is there already; see realtime.host.Host."""

    def __init__(self, source: WorldSource) -> None:
        super().__init__(source.model, source.vae, source.clip)
        self._source = source

    def encode(self, prompts: tuple[str, ...]) -> Any:
        return self._source.encode(prompts)


class LivePlace:
    """Where live worlds are reached on ComfyUI's server. last: where the walks of each name ended."""

    def __init__(self) -> None:
        self.worlds = LiveWorlds()
        self.last = NamedWorlds()
        self._loop: asyncio.AbstractEventLoop | None = None

    def offer(self) -> None:
        """Adds the routes; before ComfyUI's server starts. Nothing that goes wrong keeps the pack from loading."""
        server = prompt_server()
        if server is None:
            return
        self._loop = server.loop
        # Where ComfyUI listens to other machines, it answers to any name, too.
        visitors = Visitors(LOCAL, any_address=True, any_host=not _only_local())
        try:
            server.app.add_routes([*live_routes(self.worlds, lambda: visitors), *web_routes(WEB_PREFIX)])
        except (RuntimeError, ValueError) as error:
            logging.info("LingBot World: live worlds cannot be offered: %s", error)

    def walk(self, handle: WorldHandle, wish: LiveWish) -> Walked:
        """Walks from a handle on until it is stopped. On a cancel or an error the chunks stay in the world, and their
        frames in the file; the walk can be taken up again.

        Raises LingBotError, and ComfyUI's InterruptProcessingException.
        """
        if self._loop is None:
            raise LingBotError("there is no server to walk on: ComfyUI runs without one")
        begun = handle.chunks
        walk = HostWalk(LiveHost(handle.source), self._begin(handle, wish))
        taken_up = walk.handle.chunks > begun
        run = _Run(handle, wish)
        worker = PromptWorker()
        try:
            world, life = self._on_loop(self._open(wish, walk, worker, run)).result()

            def go_on() -> bool:
                run.say(world)
                stop_if_cancelled()
                return life.done()

            try:
                worker.serve(go_on)
            finally:
                ended = self._on_loop(self._close(wish.name, world, life))
                worker.finish(ended.done)
                self.last.put(wish.name, NamedWorld(walk.handle, ""))
            ended.result()
            return run.outputs(walk, world, begun, anew=taken_up or world.rewound)
        except BaseException as error:
            run.stop(error, kept=walk.handle.chunks - begun)
            raise

    def _begin(self, handle: WorldHandle, wish: LiveWish) -> WorldHandle:
        """The place to begin at: the handle's, or, to go on, where the last walk from it ended."""
        last = self.last.get(wish.name) if wish.again else None
        if (
            last is None
            or len(last.handle.history) < handle.chunks
            or not same_walk(handle.history, last.handle.history)
        ):
            return handle
        return last.handle.from_source(handle.source)

    async def _open(
        self, wish: LiveWish, walk: HostWalk, worker: PromptWorker, run: _Run
    ) -> tuple[LiveWorld, asyncio.Future[None]]:
        image = walk.handle.source.picture.image
        world = LiveWorld(
            walk,
            worker,
            running=not wish.paused,
            keep_going=wish.keep_going,
            limit=walk.handle.chunks + wish.chunks if wish.chunks else None,
            ends=True,
            picture=frames_to_uint8(image.pixels[:, None])[0],
            on_chunk=run.take,
        )
        try:
            self.worlds.open(wish.name, world)
        except BaseException:
            world.close()
            raise
        return world, asyncio.ensure_future(world.run())

    async def _close(self, name: str, world: LiveWorld, life: asyncio.Future[None]) -> None:
        world.close()
        try:
            await life
        finally:
            self.worlds.close(name, "the walk is over; queue the workflow to walk again")

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _Run:
    """Where the frames of a walk go, and what becomes of them at its end."""

    def __init__(self, handle: WorldHandle, wish: LiveWish) -> None:
        start = handle.history.start
        about = json.dumps(handle.history.summary())
        self._wish, self._handle = wish, handle
        self._node = None if wish.hidden is None else wish.hidden.unique_id
        self._tags = {**workflow_tags(wish.hidden), "lingbot_world": about}
        self._size = {"width": start.width, "height": start.height, "fps": start.fps}
        self._video = RunVideo(**self._size, tags=self._tags)
        self._progress = RunProgress(self._node, 1, start.preset.steps)
        self._last: Tensor | None = None
        self._said, self._said_at = "", 0.0

    def take(self, chunk: Chunk, frames: np.ndarray) -> None:
        """A chunk was made; called by the prompt worker."""
        self._video.write(frames)
        self._last = chunk.frames[:, -1:].movedim(0, -1).add(1).div(2).cpu()

    def say(self, world: LiveWorld) -> None:
        """How the walk is, on the node, for those who cannot see its element."""
        now = time.monotonic()
        text = f"live, {world.state}: {world.chunks} chunks"
        if text != self._said and now - self._said_at >= SAY_SECONDS:
            self._said, self._said_at = text, now
            self._progress.say(text)

    def outputs(self, walk: HostWalk, world: LiveWorld, begun: int, *, anew: bool) -> Walked:
        """After the end.

        anew: the file does not hold just the frames since ``begun``, because chunks were taken back, or
        taken over from the walk before; it is written once more.
        """
        handle = walk.handle
        history = handle.history
        if len(history) <= begun:
            raise LingBotError("nothing was walked, so there is nothing to give out; queue again, and walk before Stop")
        controls, camera = RecordedRoute(ControlsRecord.of(history)), walked_camera(history)
        if self._wish.whole_image or anew:
            images = self._again(walk, begun, whole=self._wish.whole_image, video=anew)
        else:
            assert self._last is not None
            images = self._last.to(
                comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
            )
        video = self._video.finish()
        if self._node is not None:
            VIDEOS.gave(str(self._node), self._video.path)
        snapshot = world.snapshot_handle or handle
        made = history.start.preset.frames(len(history)) - history.start.preset.frames(begun)
        report = {
            **about_world(handle, handle.source),
            "made": {"chunks": len(history) - begun, "frames": made},
            "snapshot_at_chunk": snapshot.chunks,
            "taken_back": world.rewound,
            "video": self._video.path,
        }
        return Walked(images, video, handle, snapshot, camera, controls, as_json(report))

    def _again(self, walk: HostWalk, begun: int, *, whole: bool, video: bool) -> Tensor:
        """IMAGE from the history: the same frames as when they were made. video: the file is written anew as well."""
        history = walk.handle.history
        start = history.start
        count = start.preset.frames(len(history)) - start.preset.frames(begun)
        device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
        shape = (count if whole else 1, start.height, start.width, 3)
        require_image_room(shape, dtype, device, walk.handle.source.host.patchers)
        images, filled = torch.empty(shape, device=device, dtype=dtype), 0
        if video:
            self._video.keep()
            self._video = RunVideo(**self._size, tags=self._tags)
        with walk.host.drive(walk.handle) as drive:
            for _, frames in frames_again(drive.world, history, begun):
                stop_if_cancelled()
                if video:
                    self._video.write(frames_to_uint8(frames))
                kept = frames if whole else frames[:, -1:]
                images[filled : filled + kept.shape[1]] = kept.movedim(0, -1).add(1).div(2).to(images)
                filled += kept.shape[1] if whole else 0
        return images

    def stop(self, error: BaseException, *, kept: int) -> None:
        """The walk ends early: closes the file and says where it is."""
        frames = self._video.keep()
        if not frames:
            return
        where = f"{frames} frames are in {self._video.path}; queue again with mode 'continue' to go on"
        logging.info("LingBot World: stopped after %d chunks; %s", kept, where)
        with suppress(Exception):
            self._progress.say(f"stopped; {where}")
        if isinstance(error, LingBotError):
            raise type(error)(f"{error} ({where})") from error


def with_clip(handle: WorldHandle, clip: Any) -> WorldHandle:
    """The same place, where prompts in words are encoded by that CLIP."""
    source = handle.source
    assert isinstance(source, WorldSource)
    if clip is None or clip is source.clip:
        return handle
    return handle.from_source(replace(source, clip=clip))


def _only_local() -> bool:
    return all(address in LOCAL for address in args.listen.split(","))


LIVE = LivePlace()
"""What the pack registers with ComfyUI."""
