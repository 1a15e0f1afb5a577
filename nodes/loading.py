"""Nodes: loading."""

from __future__ import annotations

from comfy_api.latest import io

NODES: list[type[io.ComfyNode]] = []
