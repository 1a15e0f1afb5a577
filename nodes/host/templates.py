"""The pack's workflows for ComfyUI's template browser."""

from __future__ import annotations

import logging
from pathlib import Path

from aiohttp import web

from .progress import prompt_server

# Not resolved: ComfyUI calls the pack by the name that stands in custom_nodes, also where that is a link.
PACK = Path(__file__).parents[2]


def serve_workflows() -> None:
    """Makes ``workflows`` what ComfyUI serves as templates of this pack.

    ComfyUI lists the workflows of ``examples``, ``workflows`` and other folders under one address, but only the first
    of these folders that a pack has is ever asked for a file there, which here would be ``examples``. Has to run before
    the server adds its own routes. Nothing that goes wrong keeps the pack from loading.
    """
    server = prompt_server()
    if server is None:
        return
    try:
        server.app.add_routes([web.static(f"/api/workflow_templates/{PACK.name}", PACK / "workflows")])
    except (RuntimeError, ValueError) as error:
        logging.info("LingBot World: its workflows cannot be opened from the template browser: %s", error)
