"""An mp4 file written frame by frame, that plays at any time.

It encodes without delay (no B-frames, no look-ahead): what went in is out again at once, so a file lacks at most its
newest frame whenever the process dies. It begins as ``NAME.part`` and gets its name with the first frames.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fractions import Fraction
from io import FileIO
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ..errors import VideoError
from .encoding import DEFAULT_CRF, Encoding, reason
from .part_file import PartFile

if TYPE_CHECKING:
    import av
    from numpy.typing import NDArray

# Every frame is a fragment of its own while recording; where FFmpeg knows `hybrid_fragmented` (7.1 on), closing turns
# the file into a regular mp4, elsewhere it stays fragmented.
RECORDING_FLAGS = (
    "hybrid_fragmented+frag_every_frame+use_metadata_tags",
    "empty_moov+default_base_moof+frag_every_frame+use_metadata_tags",
)
_IO_BUFFER = 1 << 22  # a fragment reaches the file in one piece


class VideoWriter:
    """Writes an mp4 file frame by frame, in constant memory.

    Until the first :meth:`write` is whole the frames are in NAME.part, and a video that was there stays; a run that
    cannot even write these leaves it as it was. From then on the file plays at any time: after a crash or a kill it
    holds all frames but the newest, after a full disk the frames that the error counts. (On Windows NAME.part gets its
    name when it is closed.) A second writer of the same file is refused until then.

    metadata: tags by any name, as probe.read_metadata returns them. crf: quantiser of the encoder, 1 (best) to 51. The
    path is checked at once. Raises VideoError. As a context manager it closes, also when the body failed.
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
        self._encoding = Encoding(width, height, fps, metadata, crf, codec)
        self._frames = 0  # given to the muxer
        self._safe_frames, self._safe_size = 0, 0  # whole in the file
        self._container: av.container.OutputContainer | None = None
        self._part = PartFile(self.path, "world.mp4", VideoError)
        self._file: _RecordingFile | None = _RecordingFile(self._part.file)

    @property
    def frames(self) -> int:
        """Frames written so far; once closed, frames that the file holds."""
        return self._frames

    @property
    def closed(self) -> bool:
        return self._file is None

    @property
    def published(self) -> bool:
        """Whether the frames are under the file's own name; what was there before is gone."""
        return self._part.published

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
        if self._safe_frames:
            with suppress(OSError):  # tried again when it is closed
                self._part.publish()

    def close(self) -> int:
        """Finishes the file and returns its number of frames; a second call does nothing.

        Without any frame no file is left, and one that was there before stays as it was.
        """
        if self._file is None:
            return self._frames
        if self._container is None:
            self._file = None
            self._part.discard()
            return 0
        with self._guard():
            self._mux(self._stream.encode())
            self._container.close()
        self._file = self._container = None
        try:
            self._part.finish()
        except OSError as error:
            if os.path.exists(self._part.part):
                kept = f"its {self._frames} frames are in {self._part.part}"
                raise VideoError(f"{self.path} {reason(error)}; {kept}") from error
        # What is there may be an older file, whose place this one never took.
        if not (self.published and os.path.exists(self.path)):
            self._frames = 0
            raise VideoError(f"{self.path} was removed while it was written; generate again")
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
            raise VideoError(f"{self.path} {reason(failure)}; {self._keep()}") from failure

    def _keep(self) -> str:
        """What is left of a video that could not be finished; it does not take the place of an earlier one with less
        than its first write.
        """
        earlier = not self._part.published and os.path.exists(self._part.path)
        if not self._frames or earlier:
            self._frames = 0
            self._part.discard()
            return "the video that was there is as it was" if earlier else "no frame was written and no file is left"
        kept = f"the {self._frames} frames written before"
        try:
            self._part.finish()
        except OSError:
            return f"{kept} are in {self._part.part} and play"
        return f"{kept} are in the file and play"


class _RecordingFile(io.RawIOBase):
    """An unbuffered file for a muxer. After its first failure it swallows what comes, so that a closing muxer cannot
    spoil what is there.
    """

    def __init__(self, raw: FileIO) -> None:
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
