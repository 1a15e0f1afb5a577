"""A run's VIDEO: an mp4 file in ComfyUI's temp folder that grows while the world runs and always plays."""

from __future__ import annotations

import json
import os
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
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


_WAITING = 2  # chunks that may wait to be encoded


class RunVideo:
    """The file of one run. Frames reach it chunk by chunk; memory does not grow with its length.

    They are encoded in a thread of their own, so that the next chunk need not wait for them. A file that cannot be
    written is therefore told by a later call.
    """

    def __init__(self, *, width: int, height: int, fps: float, tags: dict[str, str]) -> None:
        folder = folder_paths.get_temp_directory()
        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, f"lingbot_world_{uuid.uuid4().hex[:12]}.mp4")
        self._writer = VideoWriter(self.path, width=width, height=height, fps=fps, metadata=tags)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lingbot-video")
        self._waiting: deque[Future[None]] = deque()

    @property
    def frames(self) -> int:
        """Frames in the file so far."""
        return self._writer.frames

    def write(self, frames: np.ndarray) -> None:
        """Adds frames, uint8 [T, H, W, 3], which nobody may change any more. Raises VideoError."""
        while len(self._waiting) >= _WAITING:
            self._waiting.popleft().result()
        self._waiting.append(self._thread.submit(self._writer.write, frames))

    def finish(self) -> Any:
        """Closes the file; the VIDEO for a socket. Raises VideoError."""
        while self._waiting:
            self._waiting.popleft().result()
        self._thread.shutdown()
        self._writer.close()
        return InputImpl.VideoFromFile(self.path)

    def keep(self) -> int:
        """Closes the file after an error or a cancel; returns how many frames it holds, 0: there is no file."""
        self._thread.shutdown()  # what waits is written
        self._waiting.clear()
        return self._writer.abort()
