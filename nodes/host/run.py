"""One run of a node: from a WORLD on, chunk by chunk, into an IMAGE, a VIDEO, a new WORLD and a report."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch
from torch import Tensor

from ...lingbot_core.engine.chunk import Chunk
from ...lingbot_core.engine.image import frames_to_uint8
from ...lingbot_core.engine.memory import GIB, free_bytes
from ...lingbot_core.engine.registry import Drive, Registry, WorldHandle
from ...lingbot_core.engine.route import Route
from ...lingbot_core.errors import LingBotError, MemoryPlanError, VideoError
from .memory import make_room, out_of_memory_explained
from .progress import RunProgress, stop_if_cancelled
from .report import about_world, as_json
from .source import HostRoom, WorldSource
from .steering import Steering, chunks_wanted, require_length, still_route
from .video import VIDEOS, RunVideo, workflow_tags

WORLDS = Registry()
"""All living worlds of this ComfyUI."""

OUTPUTS = ("new frames", "all frames")


@dataclass(frozen=True, eq=False)
class Wish:
    """What a run is asked for. prompt: a new one, or ''. output: one of OUTPUTS. whole_image: IMAGE holds all frames of
    the output, else the last one. states: of a prompt given as CONDITIONING. hidden: the node's hidden inputs.
    notes: for the report's warnings.
    """

    steering: Steering
    length: str = "chunks"
    chunks: int = 1
    seconds: float = 0.0
    prompt: str = ""
    states: Tensor | None = None
    output: str = OUTPUTS[0]
    whole_image: bool = True
    hidden: Any = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Made:
    """images: IMAGE. video: VIDEO. handle: WORLD. report: a JSON text."""

    images: Tensor
    video: Any
    handle: WorldHandle
    report: str


def make_chunks(handle: WorldHandle, wish: Wish) -> Made:
    """Goes on from a handle. On a cancel or an error finished chunks stay in the world, and their frames in the file.

    Raises LingBotError, TypeError, and ComfyUI's InterruptProcessingException.
    """
    source, start = handle.source, handle.history.start
    assert isinstance(source, WorldSource)
    if wish.output not in OUTPUTS:
        raise LingBotError(f"output={wish.output!r} is unknown; use one of {', '.join(OUTPUTS)}")
    preset, image = start.preset, source.picture.image
    act = source.host.world.dit.config.control == "act"
    begin = wish.steering.begin(handle.history, image, act=act)
    count = chunks_wanted(
        wish.length,
        chunks=wish.chunks,
        seconds=wish.seconds,
        preset=preset,
        fps=start.fps,
        made=handle.chunks,
        route=wish.steering.route,
        begin=begin,
    )
    route = wish.steering.route or still_route(preset)
    require_length(route, begin, count)
    total = handle.chunks + count
    room = HostRoom(source, preset, chunks=total, rewind_depth=handle.rewind_depth, noise=start.noise)
    states = _states(source, wish, route)
    node = None if wish.hidden is None else wish.hidden.unique_id
    run = _Run(
        handle,
        room.patchers(WORLDS.living(handle)),
        frames=preset.frames(total) - (preset.frames(handle.chunks) if wish.output == OUTPUTS[0] else 0),
        whole_image=wish.whole_image,
        progress=RunProgress(node, count, preset.steps),
        tags=workflow_tags(wish.hidden),
    )
    drive: Drive | None = None

    def explain() -> str:
        chunk = handle.chunks if drive is None else len(drive.history)
        return (
            f"the memory of {source.host.world.device} ran out in chunk {chunk}; this world needs "
            f"{room.estimate.session / GIB:.2f} GiB beside the weights, in all {room.estimate.describe()}. What it "
            "took is free again and finished chunks are kept. Use a smaller picture or a window, or close other "
            "worlds, and queue again"
        )

    def give_back() -> None:
        living = WORLDS.living(handle) if drive is None else drive.living
        if living is not None:
            living.sleep()

    try:
        with (
            out_of_memory_explained(explain, give_back),
            WORLDS.drive(handle, room, on_wait=stop_if_cancelled) as drive,
        ):
            try:
                if wish.output == OUTPUTS[1]:
                    for chunk in drive.past():
                        stop_if_cancelled()
                        run.take(chunk)
                for prompt, known in states.items():
                    drive.give_prompt(prompt, known)
                if wish.prompt:
                    drive.set_prompt(wish.prompt)
                for controls in route.controls(drive, image, act=act, begin=begin, chunks=count):
                    drive.advance(controls, on_step=run.progress.step, on_frames=run.take_new)
            finally:
                room.settle(drive.living)
        video = run.video.finish()
    except BaseException as error:
        run.stop(error, kept=0 if drive is None else len(drive.living.history) - handle.chunks)
        raise
    if node is not None:
        VIDEOS.gave(str(node), run.video.path)
    report = {
        **about_world(drive.handle, source),
        "made": {
            "chunks": count,
            "chunks_reused": drive.reused,
            "frames": run.progress.frames_done,
            "seconds": round(run.progress.seconds, 3),
            "fps": round(run.progress.fps, 3),
            "by_chunk": [dict(record.timings) for record in drive.history.chunks[handle.chunks :]],
        },
        "length": length_text(wish, count, preset, start.fps, run.progress.frames_done),
        "controls": {"begins_at_chunk": begin, "text": route.describe(), **route.report()},
        "video": run.video.path,
        "warnings": [*wish.notes, *wish.steering.warnings(start), *route.warnings()],
    }
    return Made(run.images, video, drive.handle, as_json(report))


def length_text(wish: Wish, chunks: int, preset: Any, fps: float, frames: int) -> str:
    """What was asked, and what whole chunks make of it."""
    asked = {"chunks": f"{wish.chunks} chunks", "seconds": f"{wish.seconds:g} seconds"}.get(wish.length, wish.length)
    return (
        f"{asked} asked: {chunks} chunks of {preset.chunk} latent frames, {frames} frames, {frames / fps:.2f} seconds"
    )


def _states(source: WorldSource, wish: Wish, route: Route) -> Mapping[str, Tensor]:
    """Text states of all prompts that the run may switch to."""
    if wish.states is not None:
        return {wish.prompt: wish.states, **source.encode(route.prompts)}
    return source.encode((*([wish.prompt] if wish.prompt else ()), *route.prompts))


def require_image_room(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device, keep: Sequence[Any]
) -> None:
    """Raises MemoryPlanError when an IMAGE of that shape will not fit into memory.

    keep: patchers of the world that makes it.
    """
    needed = math.prod(shape) * dtype.itemsize
    # With --gpu-only it lies on the GPU, where other models may be in its way.
    make_room(needed, device, keep)
    free = free_bytes(device)
    if free is not None and needed > free:
        raise MemoryPlanError(
            f"an IMAGE of {shape[0]} frames takes {needed / GIB:.1f} GiB, {free / GIB:.1f} GiB are free: make fewer "
            "chunks at a time, or switch all_images off and use VIDEO, whose memory does not grow"
        )


class _Run:
    """Where frames go as they are made: the file, the IMAGE, the preview."""

    def __init__(
        self,
        handle: WorldHandle,
        patchers: Sequence[Any],
        *,
        frames: int,
        whole_image: bool,
        progress: RunProgress,
        tags: dict[str, str],
    ) -> None:
        start = handle.history.start
        about = json.dumps(handle.history.summary())
        self.progress = progress
        device, dtype = comfy.model_management.intermediate_device(), comfy.model_management.intermediate_dtype()
        shape = (frames if whole_image else 1, start.height, start.width, 3)
        require_image_room(shape, dtype, device, patchers)
        self.images = torch.empty(shape, device=device, dtype=dtype)
        self.video = RunVideo(
            width=start.width, height=start.height, fps=start.fps, tags={**tags, "lingbot_world": about}
        )
        self._filled, self._whole = 0, whole_image

    def take(self, chunk: Chunk) -> Any:
        """Frames for the outputs; returns them as uint8 [T, H, W, 3]."""
        frames = frames_to_uint8(chunk.frames)
        self.video.write(frames)
        kept = chunk.frames if self._whole else chunk.frames[:, -1:]
        count = kept.shape[1]
        self.images[self._filled : self._filled + count] = kept.movedim(0, -1).add(1).div(2).to(self.images)
        if self._whole:
            self._filled += count
        return frames

    def take_new(self, chunk: Chunk) -> None:
        """Frames of a chunk that this run was asked for."""
        self.progress.finish_chunk(self.take(chunk))
        stop_if_cancelled()

    def stop(self, error: BaseException, *, kept: int) -> None:
        """The run ends early: closes the file and says where it is. Raises the error anew with that in its message.

        kept: chunks that the world has beyond the place where the run began.
        """
        frames = self.video.keep()
        if isinstance(error, VideoError):  # says itself what became of the file
            if kept:
                raise VideoError(f"{error}. The world keeps the {kept} new chunks: queue again to go on") from error
            return
        if not frames:
            return
        where = f"{frames} finished frames are in {self.video.path}"
        logging.info("LingBot World: stopped; %s", where)
        with suppress(Exception):
            self.progress.say(f"stopped; {where}")
        if isinstance(error, LingBotError):
            raise type(error)(f"{error} ({where})") from error
        if isinstance(error, Exception):
            raise LingBotError(f"{type(error).__name__}: {error} ({where})") from error
