"""Videos out: an mp4 file written frame by frame, and fragmented mp4 chunk by chunk in memory.

Both encode without delay (no B-frames, no look-ahead): what went in is out again at once, so a file lacks at most its
newest frame whenever the process dies, and a chunk's fragment holds all frames of the chunk.
"""

from __future__ import annotations

import errno
import io
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import InputFileError, VideoError

if TYPE_CHECKING:
    import av
    from numpy.typing import NDArray

ENCODERS = {"h264": "libx264"}
"""Encoder of the bundled FFmpeg by the name of the codec."""

DEFAULT_CRF = 17

# Every frame is a fragment of its own while recording; where FFmpeg knows `hybrid_fragmented` (7.1 on), closing turns
# the file into a regular mp4, elsewhere it stays fragmented.
RECORDING_FLAGS = (
    "hybrid_fragmented+frag_every_frame+use_metadata_tags",
    "empty_moov+default_base_moof+frag_every_frame+use_metadata_tags",
)
_FRAGMENT_FLAGS = "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer+use_metadata_tags"

# What the muxer writes by itself, and a key that would add a track.
_MUXER_KEYS = frozenset({"major_brand", "minor_version", "compatible_brands", "encoder", "creation_time", "timecode"})
_BT709, _LIMITED, _INTRA = 1, 1, 1  # the codes of ITU-T H.273 and of FFmpeg's picture types
_IO_BUFFER = 1 << 22  # a fragment reaches the file in one piece


@dataclass(frozen=True)
class VideoInfo:
    """What is in a video file: frames as decoded, size in pixels, frames per second, seconds, and tags."""

    frames: int
    width: int
    height: int
    fps: float
    duration: float
    metadata: Mapping[str, str]


class VideoWriter:
    """Writes an mp4 file frame by frame, in constant memory.

    The file plays at any time: after a crash or a kill it holds all frames but the newest, after a full disk the
    frames that the error counts. metadata: tags by any name, as :func:`read_metadata` returns them. crf: quantiser
    of the encoder, 1 (best) to 51. The path is checked at once, and an existing file is replaced with the first frame.
    Raises VideoError. As a context manager it closes, also when the body failed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        width: int,
        height: int,
        fps: float | Fraction,
        metadata: Mapping[str, str] | None = None,
        crf: float = DEFAULT_CRF,
        codec: str = "h264",
    ) -> None:
        self.path = os.fspath(path)
        self._encoding = _Encoding(width, height, fps, metadata, crf, codec)
        self._frames = 0  # given to the muxer
        self._safe_frames, self._safe_size = 0, 0  # whole in the file
        self._container: av.container.OutputContainer | None = None
        self._created = not os.path.exists(self.path)
        self._file: _RecordingFile | None = _RecordingFile(_open_for_writing(self.path))

    @property
    def frames(self) -> int:
        """Frames written so far; once closed, frames that the file holds."""
        return self._frames

    @property
    def closed(self) -> bool:
        return self._file is None

    def write(self, frames: NDArray[np.uint8]) -> None:
        """Adds frames, uint8 [T, H, W, 3] RGB. When the file cannot take them, the writer closes with what it has and
        raises VideoError.
        """
        if self._file is None:
            raise VideoError(f"{self.path} is closed with {self._frames} frames; open a new writer")
        self._encoding.check(frames)
        with self._guard():
            if self._container is None:
                self._start(self._file)
            for frame in frames:
                self._mux(self._stream.encode(self._encoding.picture(frame)))

    def close(self) -> int:
        """Finishes the file and returns its number of frames; a second call does nothing.

        Without any frame no file is left, and one that was there before stays as it was.
        """
        if self._file is None:
            return self._frames
        if self._container is None:
            self._file.close()
            self._file = None
            if self._created:
                os.unlink(self.path)
            return 0
        with self._guard():
            self._mux(self._stream.encode())
            self._container.close()
        self._file.close()
        self._file = self._container = None
        return self._frames

    def abort(self) -> int:
        """Finishes the file as well as is still possible, without raising, and returns its number of frames."""
        with suppress(VideoError):
            self.close()
        return self._frames

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def _start(self, file: _RecordingFile) -> None:
        import av

        for flags in RECORDING_FLAGS:
            file.truncate(0)
            options = {"movflags": flags, "flush_packets": "1"}
            container = av.open(file, "w", format="mp4", options=options, buffer_size=_IO_BUFFER)
            self._stream = self._encoding.add_stream(container)
            try:
                container.start_encoding()
            except av.error.ArgumentError:  # this FFmpeg does not know one of the flags
                if flags == RECORDING_FLAGS[-1]:
                    raise
                continue
            self._container = container
            return

    def _mux(self, packets: list[av.Packet]) -> None:
        assert self._container is not None
        assert self._file is not None
        for packet in packets:
            self._container.mux(packet)
            if self._file.failure is not None:
                raise self._file.failure
            # The muxer writes a fragment when the next packet comes.
            self._safe_frames, self._safe_size = self._frames, self._file.tell()
            self._frames += 1

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Turns a failure to write or encode into a closed, playable file and a VideoError."""
        import av

        file = self._file
        assert file is not None
        try:
            yield
            if file.failure is not None:
                raise file.failure
        except (OSError, ValueError, av.FFmpegError) as error:
            failure = file.failure or error
            file.failure = failure  # from here on the muxer's last words go nowhere
            if self._container is not None:
                with suppress(OSError, ValueError, av.FFmpegError):
                    self._container.close()
            self._file = self._container = None
            self._frames = self._safe_frames
            with suppress(OSError):
                file.truncate(self._safe_size)
            file.close()
            if not self._frames:
                with suppress(OSError):
                    os.unlink(self.path)
            raise VideoError(f"{self.path} {_reason(failure)}; {self._kept()}") from failure

    def _kept(self) -> str:
        if not self._frames:
            return "no frame was written and no file is left"
        return f"the {self._frames} frames written before are in the file and play"


class FragmentWriter:
    """Encodes a video chunk by chunk into fragmented mp4, for sending.

    ``init_segment`` is ready at once. Each :meth:`push` returns one fragment (moof and mdat) that starts with a key
    frame and holds all frames of the call; the first is preceded by the init segment. All of it in order is a playable
    mp4.
    """

    def __init__(
        self,
        *,
        width: int,
        height: int,
        fps: float | Fraction,
        metadata: Mapping[str, str] | None = None,
        crf: float = DEFAULT_CRF,
    ) -> None:
        import av

        self._encoding = _Encoding(width, height, fps, metadata, crf, "h264")
        self._pushed = 0
        self._fragments = 0
        self._finished = False
        init = io.BytesIO()
        # This container only owns the encoder and writes the init segment; each fragment comes from a muxer of its own,
        # because FFmpeg ends a fragment either with the next packet or with the file.
        self._owner = av.open(init, "w", format="mp4", options=self._options())
        self._stream = self._encoding.add_stream(self._owner)
        try:
            self._owner.start_encoding()
        except av.FFmpegError as error:
            raise VideoError(f"an mp4 stream {_reason(error)}") from error
        self.init_segment: bytes = init.getvalue()

    @property
    def frames(self) -> int:
        """Frames pushed so far."""
        return self._pushed

    def push(self, frames: NDArray[np.uint8]) -> bytes:
        """Encodes one chunk, uint8 [T, H, W, 3] RGB. Raises VideoError."""
        if self._finished:
            raise VideoError(f"the mp4 stream was finished after {self._pushed} frames; start a new one")
        self._encoding.check(frames)
        packets = []
        for index, frame in enumerate(frames):
            picture = self._encoding.picture(frame)
            picture.pict_type = _INTRA if index == 0 else 0
            packets += self._stream.encode(picture)
        fragment = self._mux(packets)
        first = self._pushed == 0
        self._pushed += len(frames)
        return self.init_segment + fragment if first else fragment

    def finish(self) -> bytes:
        """Ends the stream; returns what the encoder still held, which is nothing when it works without delay."""
        if self._finished:
            return b""
        self._finished = True
        packets = self._stream.encode()
        return self._mux(packets) if packets else b""

    def _options(self) -> dict[str, str]:
        # Times stay absolute only if the muxer of each fragment does not shift them to its own zero.
        return {
            "movflags": _FRAGMENT_FLAGS,
            "fragment_index": str(self._fragments + 1),
            "avoid_negative_ts": "disabled",
        }

    def _mux(self, packets: list[av.Packet]) -> bytes:
        import av

        data = io.BytesIO()
        try:
            with av.open(data, "w", format="mp4", options=self._options()) as container:
                stream = container.add_stream_from_template(self._stream)
                for packet in packets:
                    packet.stream = stream
                    container.mux(packet)
        except av.FFmpegError as error:
            raise VideoError(f"a fragment of {len(packets)} frames {_reason(error)}") from error
        self._fragments += 1
        return b"".join(box for kind, box in _boxes(data.getvalue()) if kind in (b"moof", b"mdat"))


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


class _Encoding:
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


class _RecordingFile(io.RawIOBase):
    """An unbuffered file for a muxer. After its first failure it swallows what comes, so that a closing muxer cannot
    spoil what is there.
    """

    def __init__(self, raw: io.FileIO) -> None:
        self._raw = raw
        self.failure: BaseException | None = None

    def write(self, data: Any) -> int:
        rest = memoryview(data)
        try:
            while self.failure is None and rest:
                rest = rest[self._raw.write(rest) :]
        except OSError as error:
            self.failure = error
            raise
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def tell(self) -> int:
        return self._raw.tell()

    def truncate(self, size: int | None = None) -> int:
        assert size is not None
        self._raw.seek(size)
        return self._raw.truncate(size)

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()


def _open_for_writing(path: str) -> io.FileIO:
    """Opens a file for writing without changing what is in it."""
    folder = os.path.dirname(path) or "."
    try:
        if os.path.exists(path):
            mode = os.stat(path).st_mode
            if stat.S_ISDIR(mode):
                raise VideoError(
                    f"{path} is a folder; name a video file in it, such as {os.path.join(path, 'world.mp4')}"
                )
            if not stat.S_ISREG(mode):
                raise VideoError(f"{path} is not a regular file; name a video file such as world.mp4")
            return open(path, "r+b", buffering=0)
        if not os.path.exists(folder):
            raise VideoError(f"{path} cannot be written: the folder {folder} does not exist; create it first")
        if not os.path.isdir(folder):
            raise VideoError(f"{path} cannot be written: {folder} is not a folder; choose another place")
        return open(path, "xb", buffering=0)
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the path
        reason = getattr(error, "strerror", None) or error
        raise VideoError(
            f"{path} cannot be written: {reason}; choose another place or change its permissions"
        ) from error


def _reason(error: BaseException) -> str:
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
        if not key or key in _MUXER_KEYS or "\0" in key + value:
            raise VideoError(f"video metadata cannot hold {key!r}; the name is empty, taken, or there is a NUL inside")
    return dict(metadata)


def _tags(container: av.container.InputContainer) -> dict[str, str]:
    return {key: value for key, value in container.metadata.items() if key not in _MUXER_KEYS}


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


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields type and bytes of the top-level boxes of mp4 data."""
    offset = 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4])
        if size == 1:  # a 64-bit size follows the type
            size = int.from_bytes(data[offset + 8 : offset + 16])
        yield data[offset + 4 : offset + 8], data[offset : offset + size]
        offset += size
