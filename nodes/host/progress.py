"""How far a run is, on the node: a bar over chunks and steps, the newest frames, seconds and frames per second.

And the other way: whether the user has cancelled, asked at every step.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
from comfy.cli_args import args
from comfy_api import feature_flags
from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context
from protocol import BinaryEventTypes

PREVIEW_SECONDS = 0.1
JPEG_QUALITY = 85
_JPEG = struct.pack(">I", 1)


def prompt_server() -> Any:
    """ComfyUI's server; None where there is none, as in tests."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


def stop_if_cancelled() -> None:
    """Raises ComfyUI's InterruptProcessingException when the user has cancelled."""
    comfy.model_management.throw_exception_if_processing_interrupted()


class RunProgress:
    """Progress of one run of ``chunks`` chunks with ``steps`` denoising steps each, on the node ``node_id``."""

    def __init__(
        self, node_id: str | None, chunks: int, steps: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._chunks, self._steps, self._node = chunks, steps, node_id
        self._clock, self._begun = clock, clock()
        self._bar = comfy.utils.ProgressBar(chunks * steps, node_id=node_id)
        self._preview = LivePreview(node_id, clock=clock)
        self._newest: np.ndarray | None = None
        self.chunks_done = self.frames_done = 0

    @property
    def seconds(self) -> float:
        """Since the run began."""
        return self._clock() - self._begun

    @property
    def fps(self) -> float:
        """Frames made per second of the run."""
        return self.frames_done / self.seconds if self.seconds > 0 else 0.0

    def step(self, index: int, total: int) -> None:
        """A denoising step begins; raises when the user has cancelled. The chunk before is played meanwhile."""
        stop_if_cancelled()
        self._bar.update_absolute(self.chunks_done * self._steps + self._steps * index // total)
        if self._newest is not None:
            self._preview.show(self._newest[len(self._newest) * index // total])

    def finish_chunk(self, frames: np.ndarray) -> None:
        """A chunk's frames, uint8 [T, H, W, 3], are made and kept."""
        self._newest = frames
        self.chunks_done += 1
        self.frames_done += len(frames)
        self._preview.show(frames[-1], now=self.chunks_done == self._chunks)
        self.say(
            f"chunk {self.chunks_done}/{self._chunks}: {self.frames_done} frames in {self.seconds:.1f} s, "
            f"{self.fps:.2f} fps"
        )
        self._bar.update_absolute(self.chunks_done * self._steps)

    def say(self, text: str) -> None:
        """Text on the node, for whoever queued the prompt."""
        server = prompt_server()
        if server is not None and server.client_id is not None and self._node is not None:
            server.send_progress_text(text, self._node, server.client_id)


class LivePreview:
    """Shows frames on a node: encoded here, at most every PREVIEW_SECONDS, and dropped while one is on its way."""

    def __init__(self, node_id: str | None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._node, self._clock = node_id, clock
        self._shown = float("-inf")
        self._sending: Future[Any] | None = None

    def show(self, frame: np.ndarray, *, now: bool = False) -> bool:
        """Sends a frame, uint8 [H, W, 3], unless there is no client, it is too soon, or the one before is not out.

        now: however soon. Returns whether it was sent.
        """
        server = prompt_server()
        if server is None or server.client_id is None or self._node is None:
            return False
        if not now and self._clock() - self._shown < PREVIEW_SECONDS:
            return False
        if self._sending is not None and not self._sending.done():
            return False
        self._shown = self._clock()
        event, message = _message(server, self._node, encode_jpeg(frame))
        self._sending = asyncio.run_coroutine_threadsafe(
            server.send_bytes(event, message, server.client_id), server.loop
        )
        return True


def encode_jpeg(frame: np.ndarray, largest: int | None = None) -> bytes:
    """A frame, uint8 [H, W, 3] RGB, no larger than ``largest`` pixels a side (ComfyUI's own for previews)."""
    import cv2

    height, width = frame.shape[:2]
    scale = min(1.0, (largest or args.preview_size) / max(height, width))
    if scale < 1.0:
        size = (max(1, round(width * scale)), max(1, round(height * scale)))
        frame = cv2.resize(frame, size, interpolation=cv2.INTER_AREA)
    done, data = cv2.imencode(".jpg", frame[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY])
    if not done:
        raise RuntimeError("OpenCV could not encode a preview as JPEG")
    return bytes(data)


def _message(server: Any, node_id: str, jpeg: bytes) -> tuple[int, bytes]:
    """A preview as the server would send it after encoding, for front ends that know nodes and those that do not."""
    if not feature_flags.supports_feature(server.sockets_metadata, server.client_id, "supports_preview_metadata"):
        return BinaryEventTypes.PREVIEW_IMAGE, _JPEG + jpeg
    nodes, context = get_progress_state().dynprompt, get_executing_context()
    about = json.dumps(
        {
            "node_id": node_id,
            "prompt_id": getattr(server, "last_prompt_id", None) if context is None else context.prompt_id,
            "display_node_id": nodes.get_display_node_id(node_id),
            "parent_node_id": nodes.get_parent_node_id(node_id),
            "real_node_id": nodes.get_real_node_id(node_id),
            "image_type": "image/jpeg",
        }
    ).encode()
    return BinaryEventTypes.PREVIEW_IMAGE_WITH_METADATA, struct.pack(">I", len(about)) + about + jpeg
