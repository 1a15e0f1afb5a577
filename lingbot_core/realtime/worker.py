"""The one thread that may touch a device. Sockets live on an event loop, and ask it for one chunk at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Worker(Protocol):
    """Runs work in order, one piece at a time."""

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queues a piece of work; its result or exception is the future's. Callable from any thread."""
        ...


class ThreadWorker:
    """A thread of its own, for a server of its own."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lingbot-world")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """See Worker."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Waits for the piece of work that is running; what is queued is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)


async def run(worker: Worker, work: Callable[[], T]) -> T:
    """Waits for a piece of work. A cancelled wait leaves it running if it has begun: it has to be told to stop."""
    return await asyncio.wrap_future(worker.submit(work))
