"""What every video writer shares: checks, colours, encoder settings, and why a write failed."""

from __future__ import annotations

import errno
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import VideoError

if TYPE_CHECKING:
    import av
    from numpy.typing import NDArray

ENCODERS = {"h264": "libx264"}
"""Encoder of the bundled FFmpeg by the name of the codec."""

DEFAULT_CRF = 17

# What the muxer writes by itself, and a key that would add a track.
MUXER_KEYS = frozenset({"major_brand", "minor_version", "compatible_brands", "encoder", "creation_time", "timecode"})
INTRA = 1  # FFmpeg's picture type of a key frame
_BT709, _LIMITED = 1, 1  # the codes of ITU-T H.273


class Encoding:
    """What both writers need to know about a video: checks, colours, encoder settings."""

    def __init__(
        self,
        width: int,
        height: int,
        fps: float | Fraction,
        metadata: Mapping[str, str] | None,
        crf: float,
        codec: str,
    ) -> None:
        import av

        for side, value in (("width", width), ("height", height)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise VideoError(f"video {side}={value!r} must be a whole number of pixels")
            if not 16 <= value <= 16384 or value % 2:
                raise VideoError(f"video {side}={value} must be even and between 16 and 16384 pixels")
        if codec not in ENCODERS:
            raise VideoError(f"there is no video codec {codec!r}; use one of {', '.join(ENCODERS)}")
        if not 1 <= crf <= 51:
            raise VideoError(f"crf={crf} must be between 1 (best) and 51")
        self.encoder = ENCODERS[codec]
        try:
            av.Codec(self.encoder, "w")
        except ValueError as error:  # also FFmpeg's own error for an unknown codec
            raise VideoError(f"this PyAV has no encoder {self.encoder}; install its wheel: pip install av") from error
        self.width, self.height, self.crf = int(width), int(height), crf
        self.rate = _rate(fps)
        self.metadata = _checked_tags(metadata or {})
        self._converter = av.video.reformatter.VideoReformatter()

    def add_stream(self, container: av.container.OutputContainer) -> av.VideoStream:
        """Adds the encoder's stream and the tags to a container that is still empty."""
        container.metadata.update(self.metadata)
        # forced-idr: a frame asked to be a key frame is one that a player can start from.
        options = {"crf": str(self.crf), "preset": "fast", "tune": "zerolatency", "forced-idr": "1"}
        stream = container.add_stream(self.encoder, rate=self.rate, options=options)
        stream.width, stream.height, stream.pix_fmt = self.width, self.height, "yuv420p"
        context = stream.codec_context
        context.time_base = 1 / self.rate
        context.gop_size = max(1, round(self.rate))
        context.color_primaries = context.color_trc = context.colorspace = _BT709
        context.color_range = _LIMITED
        return stream

    def check(self, frames: Any) -> None:
        if not isinstance(frames, np.ndarray):
            raise VideoError(f"video frames must be a numpy array, not {type(frames).__name__}")
        expected = f"uint8 [T, {self.height}, {self.width}, 3] with T at least 1"
        if frames.ndim != 4 or frames.shape[1:] != (self.height, self.width, 3) or not len(frames):
            raise VideoError(f"video frames of shape {list(frames.shape)} must be {expected}")
        if frames.dtype != np.uint8:
            raise VideoError(f"video frames of {frames.dtype} must be {expected}")

    def picture(self, frame: NDArray[np.uint8]) -> av.VideoFrame:
        """Turns uint8 [H, W, 3] RGB into a BT.709 yuv420p picture; its time is left to the encoder."""
        import av

        rgb = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
        return self._converter.reformat(
            rgb,
            format="yuv420p",
            dst_colorspace="ITU709",
            dst_color_range="MPEG",
            interpolation="BICUBIC",
        )


def reason(error: BaseException) -> str:
    """Why a write failed and what to do, to go after the name of the file."""
    match getattr(error, "errno", None):
        case errno.ENOSPC | errno.EDQUOT:
            return "could not be written to the end because the disk is full; free some space and generate again"
        case errno.EFBIG:
            return "could not be written to the end because it reached the largest file size allowed here"
    return f"could not be written: {getattr(error, 'strerror', None) or error}"


def _rate(fps: float | Fraction) -> Fraction:
    if isinstance(fps, bool) or not isinstance(fps, (int, float, Fraction, np.number)) or not math.isfinite(fps):
        raise VideoError(f"fps={fps!r} must be a number of frames per second")
    rate = Fraction(fps if isinstance(fps, Fraction) else float(fps)).limit_denominator(1001)
    if not 0 < rate <= 1000:
        raise VideoError(f"fps={fps} must be above 0 and at most 1000 frames per second")
    return rate


def _checked_tags(metadata: Mapping[str, str]) -> dict[str, str]:
    for key, value in metadata.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise VideoError(f"video metadata {key!r}: {value!r} must be text; convert it with str() or json.dumps()")
        if not can_be_tag(key, value):
            raise VideoError(
                f"video metadata cannot hold {key!r}; the name is empty or taken, or there is a NUL or half a "
                "surrogate pair inside"
            )
    return dict(metadata)


def can_be_tag(key: str, value: str) -> bool:
    """Whether a video can carry a text under that name."""
    try:
        (key + value).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return bool(key) and key not in MUXER_KEYS and "\0" not in key + value
