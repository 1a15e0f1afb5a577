"""Nodes: realtime."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..lingbot_core.errors import LingBotError
from .host.progress import RunProgress
from .host.realtime import ENDPOINT, ComfyHost
from .widgets import widgets_checked
from .world.inputs import CATEGORY

GIB = 2**30


class LingBotRealtimeEndpoint(io.ComfyNode):
    """Publishes a world on ComfyUI's own server."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LingBotRealtimeEndpoint",
            display_name="LingBot Realtime Endpoint",
            category=CATEGORY,
            description="Serves a world to programs, robots and games over web sockets, on ComfyUI's address, until "
            "the run is cancelled: /v1/realtime/world/camera and /v1/realtime/video. No other workflow runs meanwhile.",
            search_aliases=["websocket server", "serve world", "robot", "api server", "live"],
            is_output_node=True,
            inputs=[
                io.Model.Input("model", tooltip="The world model."),
                io.Vae.Input("vae", tooltip="The VAE that belongs to it."),
                io.Clip.Input("clip", tooltip="The text encoder that belongs to it: clients send prompts in words."),
                io.Int.Input(
                    "sessions",
                    default=4,
                    min=1,
                    max=64,
                    tooltip="Sessions whose caches are kept. Beyond that the one that was driven least recently is put "
                    "to sleep, and rebuilt from its history when its client returns.",
                ),
                io.Float.Input(
                    "timeout",
                    default=300.0,
                    min=0.0,
                    max=86400.0,
                    step=1.0,
                    tooltip="Seconds after which a session that no client drives ends; 0: as soon as the client is "
                    "gone.",
                ),
                io.Float.Input(
                    "cache_gib",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.5,
                    advanced=True,
                    tooltip="Most memory in GiB for the caches of all sessions together; 0: no bound of its own.",
                ),
                io.String.Input(
                    "allow_origins",
                    default="",
                    advanced=True,
                    tooltip="Other servers whose pages may connect, such as http://studio:3000, separated by spaces. "
                    "Pages of this ComfyUI, and programs, may always.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_: Any) -> float:
        """Serving has no result that could be kept."""
        return float("nan")

    @classmethod
    @widgets_checked
    def execute(
        cls,
        model: Any,
        vae: Any,
        clip: Any,
        sessions: int,
        timeout: float,
        cache_gib: float = 0.0,
        allow_origins: str = "",
    ) -> io.NodeOutput:
        origins = tuple(allow_origins.split())
        if wrong := [origin for origin in origins if not origin.startswith(("http://", "https://"))]:
            raise LingBotError(f"allow_origins: {wrong[0]!r} is no origin; write it as http://name:port")
        ENDPOINT.serve(
            ComfyHost(model, vae, clip),
            origins=origins,
            say=RunProgress(cls.hidden.unique_id, 1, 1).say,
            awake=sessions,
            cache_bytes=int(cache_gib * GIB) or None,
            timeout=timeout,
        )


NODES: list[type[io.ComfyNode]] = [LingBotRealtimeEndpoint]
