"""The camera client for programs without a loop of events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, TypeVar

from numpy.typing import ArrayLike

from ...errors import ServerGoneError
from ..codec import Limits
from .camera import CameraClient, CameraFrame
from .images import ImageInput

T = TypeVar("T")


class SyncCameraClient:
    """:class:`CameraClient` with the same verbs, each of which waits for its end; use it with ``with``.

    The connection lives in a thread of its own, so that pings are answered while the program does something else. One
    thread may use a client at a time. Raises ServerError and ServerGoneError.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 30.0,
        heartbeat: float | None = 30.0,
        limits: Limits | None = None,
    ) -> None:
        self._client = CameraClient(url, timeout=timeout, heartbeat=heartbeat, limits=limits)
        self._loop: _LoopThread | None = None

    @property
    def config(self) -> Mapping[str, Any]:
        """What the server said of itself; see :attr:`CameraClient.config`."""
        return self._client.config

    @property
    def chunk(self) -> int:
        """Latent frames of a chunk."""
        return self._client.chunk

    @property
    def connected(self) -> bool:
        return self._client.connected

    def connect(self) -> None:
        """Connects, anew if it was connected before."""
        if self._loop is None:
            self._loop = _LoopThread()
        try:
            self._loop.run(self._client.connect())
        except BaseException:
            self.close()
            raise

    def infer(
        self,
        poses: ArrayLike,
        intrinsics: ArrayLike,
        *,
        image: ImageInput | None = None,
        prompt: str | None = None,
        session_id: str | None = None,
        keep_world: bool = False,
        **extra_body: Any,
    ) -> Iterator[CameraFrame]:
        """Sends one slice of a camera path and yields what comes of it; see :meth:`CameraClient.infer`."""
        loop = self._running()
        frames = self._client.infer(
            poses,
            intrinsics,
            image=image,
            prompt=prompt,
            session_id=session_id,
            keep_world=keep_world,
            **extra_body,
        )
        while True:
            frame: CameraFrame | None = loop.run(anext(frames, None))
            if frame is None:
                return
            yield frame

    def reset(self, session_id: str | None = None) -> None:
        """Lets the session's next infer begin anew."""
        self._running().run(self._client.reset(session_id))

    def close(self) -> None:
        """Ends the connection and its thread; the session lives on until the server's time-out."""
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._client.close())
            finally:
                loop.stop()

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _running(self) -> _LoopThread:
        if self._loop is None:
            raise ServerGoneError("the client is not connected; connect first, or use it as a context manager")
        return self._loop


class _LoopThread:
    """A loop of events in a thread; it does not keep the program from ending."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lingbot-client", daemon=True)
        self._thread.start()

    def run(self, work: Awaitable[T]) -> T:
        future = asyncio.run_coroutine_threadsafe(_awaited(work), self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C in this thread ends the work in the other one too
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


async def _awaited(work: Awaitable[T]) -> T:
    # anext() gives an awaitable that is no coroutine.
    return await work
