"""The node that walks on."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ...lingbot_core.engine.registry import WorldHandle
from ..host.run import Made, Wish, make_chunks
from ..host.steering import Steering
from ..host.video import VIDEOS
from ..sockets import World, expect
from ..widgets import widgets_checked
from .inputs import CATEGORY, chunks_input, run_inputs, steering_sockets

HIDDEN = [io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo]


def run_outputs() -> list[io.Output]:
    """Of every node that makes chunks."""
    return [
        io.Image.Output("images", tooltip="The frames."),
        io.Video.Output("video", tooltip="The same frames as a file, written while the world runs; for SaveVideo."),
        World.Output("world", tooltip="The place after the last chunk; go on from it, or branch."),
        io.String.Output("report", tooltip="What was asked and made, with recipe, unit, seconds per stage, as JSON."),
    ]


def run_wish(steering: Steering, hidden: Any, inputs: dict[str, Any]) -> Wish:
    """From the values of chunks_input and run_inputs."""
    defaults = Wish(steering)
    return Wish(
        steering=steering,
        length=inputs.get("length", defaults.length),
        chunks=inputs.get("chunks", 4),
        seconds=inputs.get("seconds", 3.0),
        prompt=str(inputs.get("prompt") or "").strip(),
        output=inputs.get("output", defaults.output),
        whole_image=inputs.get("all_images", True),
        hidden=hidden,
    )


def as_output(made: Made) -> io.NodeOutput:
    """In the order of run_outputs."""
    return io.NodeOutput(made.images, made.video, made.handle, made.report)


class LingBotAdvanceWorld(io.ComfyNode):
    """WORLD -> the next chunks and the WORLD after them."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotAdvanceWorld",
            display_name="LingBot Advance World",
            category=CATEGORY,
            description="Walks on through a world: steered by controls, a camera path or keys, or standing still. A "
            "cancelled or failed run keeps its finished frames, and queueing it again goes on where it stopped.",
            search_aliases=["continue world", "generate world", "walk", "branch", "extend video"],
            inputs=[
                World.Input("world", tooltip="From LingBotStartWorld, or from another LingBotAdvanceWorld to go on."),
                chunks_input(),
                *steering_sockets("At most one of controls, camera and keys; none stands still."),
                *run_inputs(),
            ],
            outputs=run_outputs(),
            hidden=HIDDEN,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> int:
        """Another number once a file of its videos is gone, so that it is written again."""
        return VIDEOS.lost(str(cls.hidden.unique_id))

    @classmethod
    @widgets_checked
    def execute(
        cls, world: Any, controls: Any = None, camera: Any = None, keys: str = "", **more: Any
    ) -> io.NodeOutput:
        handle = expect(world, WorldHandle, "WORLD", "LingBotStartWorld or LingBotAdvanceWorld")
        start, entry, hold = handle.history.start, more.get("controls_from", "auto"), more.get("hold", False)
        steering = Steering.of(controls, camera, keys, start.preset, entry=entry, hold=hold)
        return as_output(make_chunks(handle, run_wish(steering, cls.hidden, more)))
