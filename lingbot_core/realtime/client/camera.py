"""The asynchronous client of ``/v1/realtime/world/camera``: one infer, one chunk of video."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ...errors import ServerError, ServerGoneError
from ..codec import Limits, pack, unpack
from ..errors import MessageError
from .images import ImageInput, image_value
from .socket import MAX_MESSAGE, ClientSocket

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAMERA_PATH = "/v1/realtime/world/camera"


@dataclass(frozen=True, eq=False)
class CameraFrame:
    """One answer to an infer.

    chunk_id: number of the chunk in its session. index, total: which part of the infer's answer it is, and of how many.
    video: a fragment of mp4, or frames uint8 [n, H, W, 3] where ``frames_per_chunk`` was asked for. stage_durations:
    seconds by stage. fields: the whole message, also what later servers may add.
    """

    chunk_id: int
    index: int
    total: int
    video: bytes | NDArray[np.uint8]
    stage_durations: Mapping[str, float]
    fields: Mapping[str, Any] = field(repr=False)

    @property
    def last(self) -> bool:
        """Whether the answer to the infer ends with it."""
        return self.index + 1 >= self.total


class CameraClient:
    """A connection to ``/v1/realtime/world/camera``; use it with ``async with``.

    url: such as ``ws://127.0.0.1:8760``. One infer at a time; it is one coroutine's. A session outlives its connection:
    after a ServerGoneError, :meth:`connect` and the same session_id go on. Raises ServerError for what the server
    refuses, ServerGoneError when it cannot be reached or went away.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        heartbeat: float | None = 30.0,
        limits: Limits | None = None,
    ) -> None:
        self._socket = ClientSocket(url, CAMERA_PATH, timeout=timeout, heartbeat=heartbeat)
        self._limits = limits or Limits(message_bytes=MAX_MESSAGE, array_bytes=MAX_MESSAGE)
        self._config: Mapping[str, Any] | None = None
        self._answer: object | None = None  # the infer whose answer is still on its way

    @property
    def config(self) -> Mapping[str, Any]:
        """What the server said of itself: chunk_latent_frames, chunk_video_frames, image_resolution [H, W], fps ..."""
        if self._config is None:
            raise ServerGoneError(
                f"there is no connection to {self._socket.url}; connect first, or use it as a context manager"
            )
        return self._config

    @property
    def chunk(self) -> int:
        """Latent frames of a chunk."""
        try:
            return int(self.config["chunk_latent_frames"])
        except (KeyError, TypeError, ValueError):
            raise ServerGoneError(
                f"{self._socket.url} does not say chunk_latent_frames, the latent frames of its chunks"
            ) from None

    @property
    def connected(self) -> bool:
        return self._socket.connected

    async def connect(self) -> None:
        """Connects, anew if it was connected before, and reads :attr:`config`."""
        self._config = self._answer = None
        await self._socket.open()
        try:
            self._config = MappingProxyType(await self._receive())
        except BaseException:
            await self._socket.close()
            raise

    async def infer(
        self,
        poses: ArrayLike,
        intrinsics: ArrayLike,
        *,
        image: ImageInput | None = None,
        prompt: str | None = None,
        session_id: str | None = None,
        keep_world: bool = False,
        **extra_body: Any,
    ) -> AsyncIterator[CameraFrame]:
        """Sends one slice of a camera path and yields what comes of it, as it comes.

        poses: camera-to-world, OpenCV axes, [N, 4, 4]. intrinsics: fx, fy, cx, cy in pixels, [N, 4]. image: png or jpg
        bytes, the path of such a file, or uint8 [H, W, 3]; it and the prompt are needed with the first infer of a
        session, later None means unchanged. session_id: None is the server's one anonymous session. keep_world: with
        another prompt the world goes on instead of beginning anew. extra_body: translation_unit, first_delta,
        num_frames, frames_per_chunk, seed, height, width, fps. Leaving the loop early is fine: the next request waits
        until the rest has come, and drops it.
        """
        request: dict[str, Any] = {
            "endpoint": "infer",
            "session_id": session_id,
            "cameras": {
                "intrinsics": np.ascontiguousarray(intrinsics, dtype=np.float64),
                "poses": np.ascontiguousarray(poses, dtype=np.float64),
            },
        }
        if image is not None:
            request["image"] = image_value(image)
        if prompt is not None:
            request["prompt"] = prompt
        if keep_world:
            request["keep_world"] = True
        if extra_body:
            request["extra_body"] = extra_body
        await self._send(request)
        self._answer = mine = object()
        while self._answer is mine:
            yield await self._next_frame()

    async def reset(self, session_id: str | None = None) -> None:
        """Lets the session's next infer begin anew, with the image and the prompt that it had."""
        await self._send({"endpoint": "reset", "session_id": session_id})
        answer = await self._receive()
        if answer.get("type") != "reset_ok":
            raise ServerGoneError(f"{self._socket.url} answered {answer.get('type')!r} to a reset, not 'reset_ok'")

    async def close(self) -> None:
        """Ends the connection; the session lives on until the server's time-out."""
        self._answer = None
        await self._socket.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, message: dict[str, Any]) -> None:
        # The end of an answer that nobody read to its end would be taken for that of the next request.
        while self._answer is not None:
            try:
                await self._next_frame()
            except ServerError:
                break
        await self._socket.send(pack(message))

    async def _next_frame(self) -> CameraFrame:
        try:
            message = await self._receive()
            frame = _frame(message, self._socket.url)
        except (ServerError, ServerGoneError):
            self._answer = None
            raise
        if frame.last:
            self._answer = None
        return frame

    async def _receive(self) -> dict[str, Any]:
        data = await self._socket.receive()
        if isinstance(data, str):
            # A text frame has no place in this protocol, but a peer's server confirms a reset with one.
            if data == "reset successful":
                return {"type": "reset_ok"}
            raise ServerGoneError(f"{self._socket.url} sent text ({data[:80]!r}) where msgpack belongs")
        try:
            message = unpack(data, self._limits)
        except MessageError as error:
            raise ServerGoneError(f"{self._socket.url} sent what is no message of this protocol: {error}") from error
        if message.get("type") == "error":
            raise ServerError(str(message.get("code", "internal")), message.get("message", ""))
        return message


def _frame(message: Mapping[str, Any], url: str) -> CameraFrame:
    video, durations = message.get("video"), message.get("stage_durations")
    try:
        if message.get("type") != "frame" or not isinstance(video, bytes | np.ndarray):
            raise ValueError
        return CameraFrame(
            chunk_id=int(message.get("chunk_id", -1)),
            index=int(message["index"]),
            total=int(message["total"]),
            video=video,
            stage_durations=MappingProxyType(dict(durations or {})),
            fields=MappingProxyType(dict(message)),
        )
    except (KeyError, TypeError, ValueError):
        kind, names = message.get("type"), ", ".join(sorted(map(str, message)))
        raise ServerGoneError(
            f"{url} answered an infer with {kind!r} ({names}); a frame with index, total and video belongs there"
        ) from None
