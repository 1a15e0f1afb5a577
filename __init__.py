"""LingBot World for ComfyUI: the folder that ComfyUI loads as a custom node pack.

This file is ComfyUI's front door. It imports nothing at module level, so that the test runner and other tools can
import it on a machine without ComfyUI. The nodes are in ``nodes``; the work is done by ``lingbot_core``, which knows
nothing of ComfyUI.
"""

WEB_DIRECTORY = "./js"


async def comfy_entrypoint():
    """Called once by ComfyUI; returns the extension that lists the nodes."""
    from .nodes.extension import LingBotWorld

    return LingBotWorld()
