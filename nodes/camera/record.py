"""LingBotControlsRecord: what steered a world, written down so that the run can be repeated exactly."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ...lingbot_core.engine.controls_file import ControlsRecord, dump_controls
from ...lingbot_core.engine.history import History
from ...lingbot_core.engine.route import RecordedRoute
from ..host.text_files import save_text
from ..sockets import Controls, World, expect
from ..widgets import widgets_checked
from .inputs import CATEGORY


class LingBotControlsRecord(io.ComfyNode):
    """WORLD -> CONTROLS and their text."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotControlsRecord",
            display_name="LingBot Record Controls",
            category=CATEGORY,
            description="Writes down what steered a world, with its seed, preset, size, unit, start image and model, "
            "so that the run can be repeated exactly with LingBot Controls.",
            search_aliases=["save controls", "replay", "reproduce", "export controls", "camera record"],
            is_output_node=True,
            inputs=[
                World.Input("world", tooltip="The world whose run is written down."),
                io.String.Input(
                    "filename_prefix",
                    default="",
                    optional=True,
                    tooltip="Also save the text below the output folder, as PREFIX_00001_.jsonl; empty: do not.",
                ),
            ],
            outputs=[
                Controls.Output("controls", display_name="controls", tooltip="The controls of the run, as they were."),
                io.String.Output("record", display_name="record", tooltip="The same as text, for LingBot Controls."),
                io.String.Output("file", display_name="file", tooltip="Where the text was saved, if it was."),
            ],
        )

    @classmethod
    @widgets_checked
    def execute(cls, world: Any, filename_prefix: str = "") -> io.NodeOutput:
        history = expect(getattr(world, "history", world), History, "world", "LingBot Advance World")
        record = ControlsRecord.of(history)
        text = dump_controls(record)
        file = save_text(text, filename_prefix, ".jsonl") if filename_prefix.strip() else ""
        route = RecordedRoute(record)
        shown = route.describe() + (f"\nsaved as {file}" if file else "")
        return io.NodeOutput(route, text, file, ui=ui.PreviewText(shown))
