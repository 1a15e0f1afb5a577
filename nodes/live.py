"""Nodes: walking by hand."""

from __future__ import annotations

import itertools
from typing import Any

from comfy_api.latest import io

from ..lingbot_core.engine.registry import WorldHandle
from ..lingbot_core.errors import SessionError
from .host.live import LIVE, LiveWish, with_clip
from .sockets import Camera, Controls, World, expect
from .widgets import widgets_checked
from .world.advance import HIDDEN
from .world.inputs import CATEGORY

MODES = ("restart", "continue")
_revisions = itertools.count()


class LingBotLiveWorld(io.ComfyNode):
    """WORLD -> a walk by hand, until it is stopped."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotLiveWorld",
            display_name="LingBot Live World",
            category=CATEGORY,
            description="Walk through a world while it is made: queue the workflow, then steer on the node with keys, "
            "mouse, pads or a gamepad. It runs until Stop; then the frames, the place, the path and the controls come "
            "out, and the same walk can be made again.",
            search_aliases=["live", "play", "wasd", "realtime", "game", "interactive", "steer", "walk"],
            inputs=[
                World.Input("world", tooltip="Where the walk begins: LingBotStartWorld, or any other WORLD."),
                io.String.Input(
                    "name",
                    default="live",
                    tooltip="Under which the node's element finds the running walk. Another tab with the same name "
                    "watches.",
                ),
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default=MODES[0],
                    tooltip="restart: begin at world. continue: go on where the last walk of that name from world "
                    "ended, also after a cancel; begins at world if there is none.",
                ),
                io.Boolean.Input("paused", default=False, tooltip="On: the world stands still until Start is pressed."),
                io.Boolean.Input(
                    "keep_going",
                    default=False,
                    tooltip="On: chunks are made also when nobody drives. Off: the world waits then.",
                ),
                io.Int.Input(
                    "chunks",
                    default=0,
                    min=0,
                    max=100_000,
                    tooltip="The walk ends by itself after so many chunks; 0: when it is stopped.",
                ),
                io.Boolean.Input(
                    "all_images",
                    default=False,
                    tooltip="On: images holds all frames, decoded once more at the end, which takes memory and time. "
                    "Off: the last one; video has all of them either way.",
                ),
                io.Clip.Input(
                    "clip",
                    optional=True,
                    tooltip="To change the prompt in words; else the one where the world begins is used.",
                ),
            ],
            outputs=[
                io.Image.Output("images", tooltip="The frames of this walk, or the last one."),
                io.Video.Output("video", tooltip="The frames of this walk as a file; for SaveVideo."),
                World.Output("world", tooltip="The place where the walk ended."),
                World.Output("snapshot", tooltip="The place of the last snapshot; without one, where the walk ended."),
                Camera.Output("camera", tooltip="The way from the world's beginning, one pose per latent frame."),
                Controls.Output("controls", tooltip="What steered it; the same start walks it again bit for bit."),
                io.String.Output("report", tooltip="What was made, as JSON."),
            ],
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> int:
        """A walk is never the same twice."""
        return next(_revisions)

    @classmethod
    @widgets_checked
    def execute(
        cls,
        world: Any,
        name: str = "live",
        mode: str = MODES[0],
        paused: bool = False,
        keep_going: bool = False,
        chunks: int = 0,
        all_images: bool = False,
        clip: Any = None,
    ) -> io.NodeOutput:
        handle = expect(world, WorldHandle, "WORLD", "LingBotStartWorld or LingBotAdvanceWorld")
        if mode not in MODES:
            raise SessionError(f"mode={mode!r} is unknown; use one of {', '.join(MODES)}")
        wish = LiveWish(
            name=name.strip(),
            paused=paused,
            keep_going=keep_going,
            chunks=chunks,
            again=mode == MODES[1],
            whole_image=all_images,
            hidden=cls.hidden,
        )
        walked = LIVE.walk(with_clip(handle, clip), wish)
        return io.NodeOutput(
            walked.images,
            walked.video,
            walked.handle,
            walked.snapshot,
            walked.camera,
            walked.controls,
            walked.report,
        )


NODES: list[type[io.ComfyNode]] = [LingBotLiveWorld]
