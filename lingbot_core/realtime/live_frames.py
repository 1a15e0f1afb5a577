"""Frames as they travel down a live socket: one binary message each, a header in JSON before the picture.

A message is four bytes (big-endian) with the length of the header, the header, and a JPEG, a WebP, or a fragment of mp4
that holds all frames of a chunk.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from ..engine.fragments import FragmentWriter
from ..errors import LingBotError

QUALITY = {"jpeg": 88, "webp": 80}


def pack_frame(header: Mapping[str, Any], data: bytes) -> bytes:
    """One message."""
    head = json.dumps(header, separators=(",", ":")).encode()
    return len(head).to_bytes(4) + head + data


def unpack_frame(message: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a message."""
    length = int.from_bytes(message[:4])
    return json.loads(message[4 : 4 + length]), message[4 + length :]


def encode_picture(frame: np.ndarray, format: str) -> bytes:
    """A frame, uint8 [H, W, 3], as 'jpeg' or 'webp'."""
    import cv2

    extension, option = (".jpg", cv2.IMWRITE_JPEG_QUALITY) if format == "jpeg" else (".webp", cv2.IMWRITE_WEBP_QUALITY)
    done, data = cv2.imencode(extension, cv2.cvtColor(frame, cv2.COLOR_RGB2BGR), [option, QUALITY[format]])
    if not done:
        raise LingBotError(f"a frame of {frame.shape[1]}x{frame.shape[0]} could not be written as {format}")
    return data.tobytes()


class Encoder:
    """Encodes chunks for whoever watches. Used by one thread, which is not the event loop's.

    fragments: the stream of mp4 that all who want it share, begun when somebody does.
    """

    def __init__(self, *, width: int, height: int, fps: float) -> None:
        self._size = {"width": width, "height": height, "fps": fps}
        self._stream: FragmentWriter | None = None

    def chunk(
        self,
        frames: np.ndarray,
        formats: Collection[str],
        show: Callable[[int, Mapping[str, bytes]], None],
    ) -> None:
        """Hands over each frame of a chunk, uint8 [T, H, W, 3], as soon as it is encoded: ``show(index, by format)``.

        A fragment comes with the first frame.
        """
        pictures = [format for format in formats if format != "fragments"]
        first = {}
        if "fragments" in formats:
            first["fragments"] = self._fragments().push(frames)
        for index, frame in enumerate(frames):
            show(index, {**first, **{format: encode_picture(frame, format) for format in pictures}})
            first = {}

    def init_segment(self) -> bytes:
        """What a player of fragments needs before the first one that it sees."""
        return self._fragments().init_segment

    def _fragments(self) -> FragmentWriter:
        if self._stream is None:
            self._stream = FragmentWriter(**self._size)  # type: ignore[arg-type]
        return self._stream
