"""What is in a video file, read with PyAV."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np


@dataclass(frozen=True, eq=False)
class VideoFile:
    """frames: uint8 [T, H, W, 3], decoded. tags: the container's metadata."""

    frames: np.ndarray
    fps: Fraction
    codec: str
    tags: dict[str, str]

    @property
    def size(self) -> tuple[int, int]:
        """Width, height."""
        return self.frames.shape[2], self.frames.shape[1]


def read_video(path: Path) -> VideoFile:
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.average_rate is not None
        return VideoFile(np.stack(frames), stream.average_rate, stream.codec.canonical_name, dict(container.metadata))


def stored_prompt(video: VideoFile) -> dict[str, Any]:
    """The prompt that the file was made with, as it was queued.

    VideoHelperSuite keeps all in one comment. ComfyUI adds ``is_changed`` to nodes that look at files.
    """
    tags = json.loads(video.tags["comment"]) if "comment" in video.tags else video.tags
    prompt = json.loads(tags["prompt"]) if isinstance(tags["prompt"], str) else tags["prompt"]
    for node in prompt.values():
        node.pop("is_changed", None)
    return prompt
