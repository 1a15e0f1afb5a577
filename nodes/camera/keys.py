"""LingBotCameraKeys: a camera path from keys that are held for a number of frames."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ...lingbot_core.camera.describe import describe_path
from ...lingbot_core.camera.key_path import path_from_keys
from ..sockets import Camera
from ..widgets import widgets_checked
from .inputs import CATEGORY, key_inputs, steps_of


class LingBotCameraKeys(io.ComfyNode):
    """Text of held keys -> CAMERA."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotCameraKeys",
            display_name="LingBot Camera from Keys",
            category=CATEGORY,
            description="A camera path from keys, each held for a number of frames: w/s forward and back, a/d left and "
            "right, i/k look up and down, j/l look left and right.",
            search_aliases=["wasd", "action string", "camera path", "camera motion", "dolly", "pan"],
            inputs=[
                io.String.Input(
                    "keys",
                    default="w-24, wj-16, none-8",
                    multiline=True,
                    tooltip="Keys and how long they are held, such as w-12, wj-8, none-4. Keys may be combined; none "
                    "is no key; commas or line breaks separate.",
                ),
                *key_inputs("per-video"),
            ],
            outputs=[
                Camera.Output("camera", display_name="camera", tooltip="The path, one pose per video frame."),
                io.Int.Output("frames", display_name="frames", tooltip="Video frames of the path."),
                io.String.Output("text", display_name="text", tooltip="Length and steps of the path, and warnings."),
            ],
        )

    @classmethod
    @widgets_checked
    def execute(cls, keys: str, key_steps: str = "per-video", speed: float = 1.0, turn: float = 1.0) -> io.NodeOutput:
        path = path_from_keys(keys, steps_of(key_steps, speed, turn))
        text = describe_path(path)
        return io.NodeOutput(path, len(path), text, ui=ui.PreviewText(text))
