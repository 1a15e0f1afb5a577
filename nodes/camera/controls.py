"""LingBotControls: what steers a world, from a camera path, keys, an event script, or a recorded run."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ...lingbot_core.camera.trajectory import CameraTrajectory
from ...lingbot_core.engine.controls_file import load_controls
from ...lingbot_core.engine.event_rows import parse_script
from ...lingbot_core.engine.plan import LENGTHS
from ...lingbot_core.engine.route import (
    RecordedRoute,
    Route,
    route_from_camera,
    route_from_events,
    route_from_keys,
)
from ...lingbot_core.errors import CameraError, LengthError
from ...lingbot_core.presets import Preset
from ..sockets import Camera, expect
from ..widgets import widgets_checked
from .inputs import (
    CATEGORY,
    chunk_input,
    chunks_input,
    given,
    key_inputs,
    preset_inputs,
    preset_of,
    route_outputs,
    route_values,
    rule_inputs,
    snap_input,
    steps_of,
)


class LingBotControls(io.ComfyNode):
    """CAMERA, keys, events or a record -> CONTROLS."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotControls",
            display_name="LingBot Controls",
            category=CATEGORY,
            description="Makes controls, one entry per chunk, from exactly one of: a camera path, keys, an event "
            "script, or the record of an earlier run, which is then repeated exactly.",
            search_aliases=["camera controls", "steering", "keys", "wasd", "jsonl", "replay", "trajectory to controls"],
            inputs=[
                *preset_inputs(),
                Camera.Input("camera", optional=True, tooltip="A camera path, from LingBot Load Camera or from keys."),
                io.String.Input(
                    "keys",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="Keys and how long they are held (w-12, wj-8, none-4), or one line per chunk with the keys "
                    "of the whole chunk or of each latent frame (w w wj). One line without numbers is held for all "
                    "chunks.",
                ),
                io.String.Input(
                    "events",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip='Event script: JSON lines, one chunk each, or rows such as "0: A meadow | w".',
                ),
                io.String.Input(
                    "record",
                    default="",
                    multiline=True,
                    optional=True,
                    tooltip="The text that LingBot Record Controls wrote down. The run is repeated exactly, in a world "
                    "that is started with the same image, seed, preset and model.",
                ),
                chunks_input(),
                io.Int.Input(
                    "frames",
                    default=0,
                    min=0,
                    max=100_000,
                    optional=True,
                    tooltip="How many video frames to make of it, in place of chunks; 0 takes all there is.",
                ),
                io.Combo.Input(
                    "length",
                    options=list(LENGTHS),
                    default="compress",
                    optional=True,
                    tooltip="How a path is fitted to whole chunks. compress: spread over the frames that are made, as "
                    "the reference does; cut: keep its speed and leave the last poses over; hold: keep its speed and "
                    "stand still at the end. For keys and events only hold counts: stand still where they are too "
                    "short, in place of an error.",
                ),
                snap_input(),
                *key_inputs("per-latent"),
                *rule_inputs(),
                chunk_input(),
            ],
            outputs=route_outputs(),
        )

    @classmethod
    @widgets_checked
    def execute(
        cls,
        preset: str,
        camera: CameraTrajectory | None = None,
        keys: str = "",
        events: str = "",
        record: str = "",
        chunks: int = 0,
        frames: int = 0,
        length: str = "compress",
        snap: str = "auto",
        key_steps: str = "per-latent",
        speed: float = 1.0,
        turn: float = 1.0,
        translation_unit: str = "auto",
        first_delta: str = "auto",
        chunk: int = 0,
    ) -> io.NodeOutput:
        recipe, steps = preset_of(preset, chunk), steps_of(key_steps, speed, turn)
        wish = {"num_frames": given(frames), "chunks": given(chunks), "snap": given(snap)}
        rules = {"unit": given(translation_unit), "first_delta": given(first_delta)}
        match _only(camera=camera, keys=keys, events=events, record=record):
            case "camera":
                path = expect(camera, CameraTrajectory, "camera", "LingBot Load Camera or LingBot Camera from Keys")
                route: Route = route_from_camera(path, recipe, length=length, **wish)
            case "keys":
                route = route_from_keys(keys, recipe, steps=steps, stands_still=length == "hold", **wish)
            case "events":
                script = parse_script(events, chunk=recipe.chunk, steps=steps, chunks=given(chunks))
                route = route_from_events(script, recipe, steps=steps, stands_still=length == "hold", **wish)
            case _:
                route = _recorded(record, recipe, changed=[*wish.values(), *rules.values()])
        values = route_values(route.with_choices(**rules), recipe)
        return io.NodeOutput(*values, ui=ui.PreviewText(values[-1]))


def _only(**sources: Any) -> str:
    """The name of the one source that is given."""
    named = [
        name for name, value in sources.items() if (value.strip() if isinstance(value, str) else value is not None)
    ]
    if len(named) != 1:
        what = " and ".join(named) + " are given" if named else "nothing is given"
        raise CameraError(f"{what}; give exactly one of camera, keys, events and record")
    return named[0]


def _recorded(text: str, recipe: Preset, *, changed: list[Any]) -> RecordedRoute:
    route = RecordedRoute(load_controls(text))
    if any(value is not None for value in changed):
        raise LengthError(
            "a record is repeated as it was; set chunks and frames to 0, and snap, translation_unit and first_delta to "
            "auto, or use other controls"
        )
    if route.chunk != recipe.chunk:
        raise LengthError(
            f"the record has chunks of {route.chunk} latent frames, but the preset {recipe.label} has {recipe.chunk}; "
            f"choose the preset that it was made with ({route.record.start.preset.label})"
        )
    return route
