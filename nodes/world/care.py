"""Nodes about a world that exists: close it, look at it, take its latents."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from comfy_api.latest import io, ui

from ...lingbot_core.engine.registry import WorldHandle
from ...lingbot_core.errors import LengthError
from ...lingbot_core.models.vae import LATENT_MEAN, LATENT_STD
from ..host.report import about_world, as_json
from ..host.run import WORLDS
from ..sockets import World, expect
from ..widgets import widgets_checked
from .inputs import CATEGORY

MADE_BY = "LingBotStartWorld or LingBotAdvanceWorld"


class LingBotCloseWorld(io.ComfyNode):
    """Ends a world."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotCloseWorld",
            display_name="LingBot Close World",
            category=CATEGORY,
            description="Ends a world and frees all it holds. Nodes that go on from it fail from then on; its branches "
            "and its videos stay.",
            search_aliases=["free world", "end session", "unload world"],
            is_output_node=True,
            inputs=[
                World.Input("world", tooltip="The world to close, at any of its places."),
                io.AnyType.Input(
                    "after", optional=True, tooltip="Connect what is to be done before: the world closes after it."
                ),
            ],
            outputs=[io.String.Output("info", tooltip="What was closed.")],
        )

    @classmethod
    @widgets_checked
    def execute(cls, world: Any, after: Any = None) -> io.NodeOutput:
        handle = expect(world, WorldHandle, "WORLD", MADE_BY)
        before = WORLDS.info(handle)
        WORLDS.close(handle)
        text = f"closed a world of {before.head} chunks ({before.state}); {before.cache_bytes} bytes of caches freed"
        return io.NodeOutput(text, ui=ui.PreviewText(text))


class LingBotWorldInfo(io.ComfyNode):
    """What is known of a world."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotWorldInfo",
            display_name="LingBot World Info",
            category=CATEGORY,
            description="State, length and memory of a world, now. Always runs.",
            search_aliases=["world state", "world memory", "inspect world"],
            is_output_node=True,
            inputs=[World.Input("world", tooltip="The world to look at.")],
            outputs=[
                io.String.Output(
                    "state", tooltip="ready, running, failed, asleep (rebuilt when it is driven again) or closed."
                ),
                io.Int.Output("chunks", tooltip="Chunks up to this place."),
                io.Int.Output("frames", tooltip="Video frames up to this place."),
                io.Float.Output("seconds", tooltip="Seconds of video up to this place."),
                io.Int.Output("bytes", tooltip="Bytes that the world holds: caches and latents."),
                io.String.Output("info", tooltip="All of it and the recipe, as JSON."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """A new nan each time equals nothing, so the node always runs."""
        return float("nan")

    @classmethod
    @widgets_checked
    def execute(cls, world: Any) -> io.NodeOutput:
        handle = expect(world, WorldHandle, "WORLD", MADE_BY)
        info = WORLDS.info(handle)
        text = as_json({**dataclasses.asdict(info), "world": about_world(handle, handle.source)})
        held = info.cache_bytes + info.history_bytes
        return io.NodeOutput(info.state, info.chunks, info.frames, info.seconds, held, text, ui=ui.PreviewText(text))


class LingBotWorldLatents(io.ComfyNode):
    """WORLD -> LATENT."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotWorldLatents",
            display_name="LingBot World Latents",
            category=CATEGORY,
            description="A world's latents in ComfyUI's own scale, for VAEDecode and other latent nodes.",
            search_aliases=["world to latent", "decode world"],
            inputs=[
                World.Input("world", tooltip="The world, up to this place."),
                io.Int.Input(
                    "first_chunk",
                    default=0,
                    min=0,
                    max=4096,
                    optional=True,
                    advanced=True,
                    tooltip="The first chunk to take. Decoding from a later chunk on begins with a single frame.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="[1, 16, latent frames, height / 8, width / 8].")],
        )

    @classmethod
    @widgets_checked
    def execute(cls, world: Any, first_chunk: int = 0) -> io.NodeOutput:
        handle = expect(world, WorldHandle, "WORLD", MADE_BY)
        records = handle.history.chunks[first_chunk:]
        if not records:
            raise LengthError(
                f"the world has {handle.chunks} chunks and none from chunk {first_chunk} on; connect the world of "
                "LingBotAdvanceWorld"
            )
        latents = torch.cat([record.latents for record in records], dim=1)
        mean, std = (torch.tensor(values).view(-1, 1, 1, 1) for values in (LATENT_MEAN, LATENT_STD))
        return io.NodeOutput({"samples": (latents * std + mean).unsqueeze(0)})
