"""What is in a video file: its tags, and its frames as they decode."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from ..errors import InputFileError, VideoError
from .encoding import MUXER_KEYS

if TYPE_CHECKING:
    import av


@dataclass(frozen=True)
class VideoInfo:
    """What is in a video file: frames as decoded, size in pixels, frames per second, seconds, and tags."""

    frames: int
    width: int
    height: int
    fps: float
    duration: float
    metadata: Mapping[str, str]


def read_metadata(source: str | os.PathLike[str] | bytes) -> dict[str, str]:
    """Reads the tags of a video file, or of its bytes, without those that the muxer adds. Raises InputFileError."""
    with _opened(source) as (_, container):
        return _tags(container)


def probe(source: str | os.PathLike[str] | bytes) -> VideoInfo:
    """Decodes a whole video file, or its bytes, and says what is in it.

    A last frame that was cut off does not count. Raises InputFileError for what is no video, VideoError for one that is
    damaged.
    """
    import av

    with _opened(source) as (name, container):
        stream = container.streams.video[0]
        frames = 0
        first = last = 0.0
        try:
            for packet in container.demux(stream):
                if packet.is_corrupt:
                    continue
                for frame in packet.decode():
                    last = frame.time or 0.0
                    first = last if frames == 0 else first
                    frames += 1
        except av.FFmpegError as error:
            raise VideoError(f"{name} is damaged after {frames} frames: {error}; write it again") from error
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        duration = last - first + (1.0 / fps if fps and frames else 0.0)
        return VideoInfo(frames, stream.width, stream.height, fps, duration, MappingProxyType(_tags(container)))


def _tags(container: av.container.InputContainer) -> dict[str, str]:
    return {key: value for key, value in container.metadata.items() if key not in MUXER_KEYS}


@contextmanager
def _opened(source: str | os.PathLike[str] | bytes) -> Iterator[tuple[str, av.container.InputContainer]]:
    import av

    name = "the video data" if isinstance(source, bytes) else os.fspath(source)
    with ExitStack() as stack:
        try:
            # A file object, because FFmpeg would take some names for network addresses.
            file = stack.enter_context(io.BytesIO(source) if isinstance(source, bytes) else io.FileIO(name))
            container = stack.enter_context(av.open(file))
        except FileNotFoundError:
            raise InputFileError(f"{name} does not exist; check the path of the video") from None
        except (OSError, ValueError, av.FFmpegError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputFileError(f"{name} cannot be read as a video: {reason}; name an mp4 file") from error
        if not container.streams.video:
            raise InputFileError(f"{name} holds no video; name an mp4 file")
        yield name, container
