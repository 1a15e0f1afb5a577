"""A client of ComfyUI's prompt queue for ``queue_world.py``: the standard library and aiohttp, nothing of the pack."""
