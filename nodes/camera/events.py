"""LingBotWorldEvents: prompts and keys for each chunk."""

from __future__ import annotations

from comfy_api.latest import io, ui

from ...lingbot_core.engine.event_rows import parse_script
from ...lingbot_core.engine.route import route_from_events
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
    steps_of,
)


class LingBotWorldEvents(io.ComfyNode):
    """Rows or JSON lines -> CONTROLS."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotWorldEvents",
            display_name="LingBot World Events",
            category=CATEGORY,
            description="What happens chunk by chunk: new prompts and held keys, as rows that people type or as JSON "
            "lines.",
            search_aliases=["prompt schedule", "prompt travel", "events", "jsonl", "script", "timeline", "keys"],
            inputs=[
                io.String.Input(
                    "script",
                    default="0: | w\n2: Night falls | wj\n4: | none",
                    multiline=True,
                    tooltip='Rows "chunk: prompt | keys", chunks counted from 0. What a row leaves out stays as it is: '
                    "the prompt holds, and keys stay down until a row with | says otherwise. Keys are those of the "
                    "whole chunk, or one entry per latent frame (w w wj). Or JSON lines, one chunk each.",
                ),
                *preset_inputs(),
                chunks_input(),
                *key_inputs("per-latent"),
                io.Boolean.Input(
                    "stand_still",
                    default=False,
                    optional=True,
                    tooltip="Keep the camera still where more chunks are asked for than the script has, in place of an "
                    "error.",
                ),
                *rule_inputs(),
                chunk_input(),
            ],
            outputs=route_outputs(),
        )

    @classmethod
    @widgets_checked
    def execute(
        cls,
        script: str,
        preset: str,
        chunks: int = 0,
        key_steps: str = "per-latent",
        speed: float = 1.0,
        turn: float = 1.0,
        stand_still: bool = False,
        translation_unit: str = "auto",
        first_delta: str = "auto",
        chunk: int = 0,
    ) -> io.NodeOutput:
        recipe, steps, wish = preset_of(preset, chunk), steps_of(key_steps, speed, turn), given(chunks)
        events = parse_script(script, chunk=recipe.chunk, steps=steps, chunks=wish)
        route = route_from_events(events, recipe, steps=steps, chunks=wish, stands_still=stand_still)
        route = route.with_choices(unit=given(translation_unit), first_delta=given(first_delta))
        values = route_values(route, recipe)
        return io.NodeOutput(*values, ui=ui.PreviewText(values[-1]))
