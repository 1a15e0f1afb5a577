"""Fragmented mp4 chunk by chunk in memory, for sending: each chunk's fragment holds all frames of the chunk."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from ..errors import VideoError
from .encoding import DEFAULT_CRF, INTRA, Encoding, reason

if TYPE_CHECKING:
    import av
    from numpy.typing import NDArray

_FRAGMENT_FLAGS = "empty_moov+default_base_moof+frag_custom+frag_discont+skip_trailer+use_metadata_tags"


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

        self._encoding = Encoding(width, height, fps, metadata, crf, "h264")
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
            raise VideoError(f"an mp4 stream {reason(error)}") from error
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
            picture.pict_type = INTRA if index == 0 else 0
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
            raise VideoError(f"a fragment of {len(packets)} frames {reason(error)}") from error
        self._fragments += 1
        return b"".join(box for kind, box in _boxes(data.getvalue()) if kind in (b"moof", b"mdat"))


def _boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yields type and bytes of the top-level boxes of mp4 data."""
    offset = 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 4])
        if size == 1:  # a 64-bit size follows the type
            size = int.from_bytes(data[offset + 8 : offset + 16])
        yield data[offset + 4 : offset + 8], data[offset : offset + size]
        offset += size
