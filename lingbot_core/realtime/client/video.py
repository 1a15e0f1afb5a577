"""The client of ``/v1/realtime/video``: one start, then chunks until the end, steered while they come."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import ArrayLike

from ...camera import PER_LATENT, KeySteps, check_poses, step_pose
from ...errors import ServerError, ServerGoneError
from .images import ImageInput, image_url
from .socket import ClientSocket

if TYPE_CHECKING:
    from numpy.typing import NDArray

VIDEO_PATH = "/v1/realtime/video"
Event = Mapping[str, Any]


class VideoClient:
    """A connection to ``/v1/realtime/video``; use it with ``async with``.

    :meth:`start` once, then loop over :meth:`chunks`; another task may :meth:`interact`, :meth:`ping` and :meth:`stop`
    meanwhile. on_event: is called with every message that is no chunk: an interaction that was queued, a pong, and the
    error of an interaction, which ends nothing. done: the server's ``session.done``, None before. Raises ServerError
    for what the server refuses, ServerGoneError when it cannot be reached or went away.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        heartbeat: float | None = 30.0,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._socket = ClientSocket(url, VIDEO_PATH, timeout=timeout, heartbeat=heartbeat)
        self._on_event = on_event or (lambda event: None)
        self.done: Event | None = None

    @property
    def connected(self) -> bool:
        return self._socket.connected

    async def connect(self) -> None:
        """Connects, anew if it was connected before."""
        self.done = None
        await self._socket.open()

    async def start(self, prompt: str, *, image: ImageInput | None = None, **fields: Any) -> Event:
        """Begins the video and returns the server's ``video.start`` with request_id, format and config.

        image: the start picture, sent as a data URL. fields: any others of session.start, such as num_frames, seed,
        width, height, negative_prompt, extra_params; what the server cannot honour it refuses by name.
        """
        message = {"type": "session.start", "prompt": prompt, **fields}
        if image is not None:
            message["image_reference"] = {"image_url": image_url(image)}
        await self._send(message)
        while (answer := await self._receive()).get("type") != "video.start":
            self._raise_error(answer)
            self._on_event(answer)
        return answer

    async def chunks(self) -> AsyncIterator[tuple[Event, bytes]]:
        """Yields (metadata, fragment of mp4) until ``session.done``.

        metadata: kind, num_frames, generation_chunk_index, active_event_ids. An error that names an interaction's
        event_id goes to on_event; any other is raised, and :meth:`chunks` may be called again if the server goes on.
        """
        while self.done is None:
            message = await self._receive()
            match message.get("type"):
                case "video.chunk_metadata":
                    yield message, await self._receive_fragment()
                case "session.done":
                    self.done = message
                case _:
                    if message.get("event_id") is None:
                        self._raise_error(message)
                    self._on_event(message)

    async def interact(
        self,
        *,
        prompt: str | None = None,
        velocity: ArrayLike | None = None,
        target: ArrayLike | None = None,
        event_id: str | None = None,
        transition_chunks: int | None = None,
    ) -> None:
        """Steers the video from its next chunk on.

        velocity: a camera-local step per latent frame [4, 4], held until another one comes (the identity rests);
        :func:`key_velocity` makes one of held keys. target: a pose [4, 4] relative to the start, reached within
        transition_chunks. Both OpenCV axes. Raises CameraError for what is no pose.
        """
        if velocity is not None and target is not None:
            raise ValueError("velocity and target exclude each other; send one of them")
        event: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        if velocity is not None:
            event["multi_modal_data"] = {"camera": {"mode": "velocity", "data": camera_delta(velocity)}}
        elif target is not None:
            event["multi_modal_data"] = {"camera": {"mode": "target", "data": camera_delta(target)}}
        interaction: dict[str, Any] = {"event": event}
        if event_id is not None:
            interaction["event_id"] = event_id
        if transition_chunks is not None:
            interaction["transition_chunks"] = transition_chunks
        await self._send({"type": "session.interaction", "interaction": interaction})

    async def ping(self) -> None:
        """Tells the server that somebody is there; its pong goes to on_event."""
        await self._send({"type": "session.ping"})

    async def stop(self) -> None:
        """Asks the server to end the video; :meth:`chunks` ends with what was on its way."""
        await self._send({"type": "session.stop"})

    async def close(self) -> None:
        """Ends the connection, and with it the video."""
        await self._socket.close()

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _send(self, message: Mapping[str, Any]) -> None:
        await self._socket.send(json.dumps(message))

    async def _receive(self) -> dict[str, Any]:
        data = await self._socket.receive()
        if isinstance(data, bytes):
            raise ServerGoneError(f"{self._socket.url} sent {len(data)} bytes that no video.chunk_metadata announced")
        try:
            message = json.loads(data)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ServerGoneError(f"{self._socket.url} sent text that is no message of this protocol: {data[:80]!r}")
        return message

    async def _receive_fragment(self) -> bytes:
        data = await self._socket.receive()
        if isinstance(data, str):
            raise ServerGoneError(f"{self._socket.url} announced a chunk and then sent text: {data[:80]!r}")
        return data

    @staticmethod
    def _raise_error(message: Event) -> None:
        if message.get("type") == "error":
            raise ServerError(str(message.get("code", "internal")), message.get("message", ""))


def camera_delta(pose: ArrayLike) -> dict[str, list[float]]:
    """A rigid matrix [4, 4] as the protocol writes it: translation [3], rotation as a quaternion x y z w [4]."""
    from scipy.spatial.transform import Rotation

    matrix = check_poses(np.asarray(pose)[None], name="the camera")[0]
    rotation = Rotation.from_matrix(matrix[:3, :3]).as_quat(canonical=True)
    return {"translation": matrix[:3, 3].tolist(), "rotation": rotation.tolist()}


def key_velocity(keys: Iterable[str], steps: KeySteps = PER_LATENT) -> NDArray[np.float64]:
    """The camera-local step [4, 4] of one latent frame with these keys held, for :meth:`VideoClient.interact`."""
    held = list(keys)
    pose: NDArray[np.float64] = np.eye(4)
    for _ in range(steps.steps_per_latent):
        pose = step_pose(pose, held, steps)
    return pose
