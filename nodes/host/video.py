"""A run's VIDEO: an mp4 file in ComfyUI's temp folder that grows while the world runs and always plays."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import folder_paths
import numpy as np
from comfy.cli_args import args
from comfy_api.latest import InputImpl

from ...lingbot_core.engine.video import VideoWriter


def workflow_tags(hidden: Any) -> dict[str, str]:
    """The tags from which ComfyUI restores a workflow when the file is dropped on the canvas; none if switched off.

    hidden: a node's hidden inputs with prompt and extra_pnginfo, or None.
    """
    if args.disable_metadata or hidden is None:
        return {}
    tags = dict(getattr(hidden, "extra_pnginfo", None) or {})
    if getattr(hidden, "prompt", None) is not None:
        tags["prompt"] = hidden.prompt
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in tags.items()}


class RunVideo:
    """The file of one run. Frames reach it chunk by chunk; memory does not grow with its length."""

    def __init__(self, *, width: int, height: int, fps: float, tags: dict[str, str]) -> None:
        folder = folder_paths.get_temp_directory()
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, f"lingbot_world_{uuid.uuid4().hex[:12]}.mp4")
        self._writer = VideoWriter(self.path, width=width, height=height, fps=fps, metadata=tags)

    @property
    def frames(self) -> int:
        """Frames written so far."""
        return self._writer.frames

    def write(self, frames: np.ndarray) -> None:
        """Adds frames, uint8 [T, H, W, 3]. Raises VideoError."""
        self._writer.write(frames)

    def finish(self) -> Any:
        """Closes the file; the VIDEO for a socket."""
        self._writer.close()
        return InputImpl.VideoFromFile(self.path)

    def keep(self) -> int:
        """Closes the file after an error or a cancel; returns how many frames it holds, 0: there is no file."""
        return self._writer.abort()
