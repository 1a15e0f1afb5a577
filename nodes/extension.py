"""What the pack registers with ComfyUI."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from . import camera, loading, world


class LingBotWorld(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """In the order of a graph: loading, camera, world."""
        return [*loading.NODES, *camera.NODES, *world.NODES]
