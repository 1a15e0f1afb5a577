"""A run's VIDEO: an mp4 file in ComfyUI's temp folder that grows while the world runs and always plays."""

from __future__ import annotations

import json
import logging
import os
import threading
import uuid
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import folder_paths
import numpy as np
from comfy.cli_args import args
from comfy_api.latest import InputImpl

from ...lingbot_core.engine.encoding import can_be_tag
from ...lingbot_core.engine.video import VideoWriter
from ...lingbot_core.errors import VideoError


def workflow_tags(hidden: Any) -> dict[str, str]:
    """The tags from which ComfyUI restores a workflow when the file is dropped on the canvas; none if switched off.

    hidden: a node's hidden inputs with prompt and extra_pnginfo, or None. What other packs and clients put there and a
    file cannot carry is left out: it is no reason not to make a world.
    """
    if args.disable_metadata or hidden is None:
        return {}
    given = getattr(hidden, "extra_pnginfo", None)
    tags = dict(given) if isinstance(given, dict) else {}
    if getattr(hidden, "prompt", None) is not None:
        tags["prompt"] = hidden.prompt
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in tags.items()}
    # As JSON, any text can be carried.
    texts = {key: text if can_be_tag(key, text) else json.dumps(text) for key, text in texts.items()}
    kept = {key: text for key, text in texts.items() if can_be_tag(key, text)}
    if lost := sorted(repr(key)[:40] for key in texts.keys() - kept.keys()):
        logging.warning("LingBot World: a video cannot carry these entries of the workflow: %s", ", ".join(lost))
    return kept


_WAITING = 2  # chunks that may wait to be encoded
_REMEMBERED = 64  # files of a node


class RunVideo:
    """The file of one run. Frames reach it chunk by chunk; memory does not grow with its length.

    They are encoded in a thread of their own, so that the next chunk need not wait for them. A file that cannot be
    written is therefore told by a later call.
    """

    def __init__(self, *, width: int, height: int, fps: float, tags: dict[str, str]) -> None:
        folder = folder_paths.get_temp_directory()
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise VideoError(
                f"ComfyUI's temp folder {folder} cannot be made: {error.strerror or error}; remove what is in its "
                "place, or start ComfyUI with --temp-directory"
            ) from error
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


class GivenVideos:
    """The files that each node's outputs name.

    ComfyUI keeps outputs for as long as it likes, and whoever tidies the temp folder takes their files away: then the
    node has to run again although its inputs are what they were.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._paths: dict[str, deque[str]] = {}
        self._lost: dict[str, int] = {}

    def gave(self, node: str, path: str) -> None:
        """A node's output names that file."""
        with self._lock:
            self._paths.setdefault(node, deque(maxlen=_REMEMBERED)).append(path)

    def lost(self, node: str) -> int:
        """A number that changes when files of the node are gone."""
        with self._lock:
            paths = self._paths.get(node, deque())
            for path in [path for path in paths if not os.path.isfile(path)]:
                paths.remove(path)
                self._lost[node] = self._lost.get(node, 0) + 1
            return self._lost.get(node, 0)


VIDEOS = GivenVideos()
"""Of all nodes of this ComfyUI."""
