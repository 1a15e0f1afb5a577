"""The pack's own socket types. Everything else uses ComfyUI's: MODEL, VAE, CLIP, CONDITIONING, IMAGE, VIDEO, LATENT.

Other packs may use the same names for other things, so a node checks what it was given with `expect`.
"""

from __future__ import annotations

from typing import Any, TypeVar

from comfy_api.latest import io

World = io.Custom("WORLD")
"""Carries a ``lingbot_core.engine.registry.WorldHandle``: a session's id, a number of chunks and their history."""

Camera = io.Custom("CAMERA")
"""Carries a ``lingbot_core.CameraTrajectory``."""

Controls = io.Custom("CONTROLS")
"""Carries a ``lingbot_core.engine.route.Route``: what steers a run, one entry per chunk."""

StartImage = io.Custom("START_IMAGE")
"""Carries a ``nodes.host.start_image.StartPicture``: the prepared picture and what the VAE makes of it."""

T = TypeVar("T")


def expect(value: Any, kind: type[T], socket: str, made_by: str) -> T:
    """Returns ``value`` when it is what the socket is to carry; else TypeError naming the node that makes it."""
    if isinstance(value, kind):
        return value
    raise TypeError(
        f"the {socket} input got a {type(value).__name__} of another pack; connect the {socket} output of {made_by}"
    )
