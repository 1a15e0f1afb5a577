"""One chunk of a session: its frames are handed over while the worker goes on with the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.chunk import Chunk
from ..engine.image import frames_to_uint8
from .residents import Resident, Residents, Steer


@dataclass(frozen=True, eq=False)
class Pictures:
    """A chunk as it leaves the worker. frames: uint8 [T, H, W, 3]."""

    chunk: Chunk
    frames: np.ndarray


async def make_chunk(
    residents: Residents,
    resident: Resident,
    steer: Steer,
    deliver: Callable[[Pictures], Awaitable[None]],
    *,
    prompt: str | None = None,
) -> Mapping[str, float]:
    """Makes the next chunk of a session and returns its seconds by stage. steer, prompt: see Residents.advance.

    deliver: is awaited with the frames, once, before the commit is done. Returns or raises only when the worker has
    let go of the session. Raises what ``advance`` raises, else what ``deliver`` raised.
    """
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Pictures] = loop.create_future()

    def show(pictures: Pictures) -> None:
        if not ready.done():
            ready.set_result(pictures)

    def on_frames(chunk: Chunk) -> None:
        pictures = Pictures(chunk, frames_to_uint8(chunk.frames))
        loop.call_soon_threadsafe(show, pictures)

    made = asyncio.ensure_future(residents.advance(resident, steer, prompt=prompt, on_frames=on_frames))
    waited: set[asyncio.Future[Any]] = {ready, made}
    await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
    try:
        if ready.done():
            await deliver(ready.result())
    finally:
        seconds = await made
    return seconds
