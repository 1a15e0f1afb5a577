"""What the pack registers with ComfyUI."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import camera, live, loading, realtime, world
from .host.example_picture import offer_example_picture
from .host.live import LIVE
from .host.realtime import ENDPOINT
from .host.templates import serve_workflows


class LingBotWorld(ComfyExtension):
    """All nodes of the pack."""

    async def on_load(self) -> None:
        """Once, before the server adds its routes."""
        offer_example_picture()
        serve_workflows()
        ENDPOINT.offer()
        LIVE.offer()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """In the order of a graph: loading, camera, world, live, realtime."""
        return [*loading.NODES, *camera.NODES, *world.NODES, *live.NODES, *realtime.NODES]
