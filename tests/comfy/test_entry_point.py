"""The front door of the pack, as ComfyUI goes through it."""

from __future__ import annotations

import asyncio

from comfy_api.latest import ComfyExtension


def test_the_entry_point_gives_an_extension(pack):
    extension = asyncio.run(pack.comfy_entrypoint())
    assert isinstance(extension, ComfyExtension)
    assert asyncio.run(extension.get_node_list()) is not None


def test_the_old_way_of_naming_nodes_is_not_used(pack):
    # Even an empty mapping would make ComfyUI ignore the entry point.
    assert not hasattr(pack, "NODE_CLASS_MAPPINGS")
