"""Realtime sessions inside ComfyUI: run by the prompt worker while a node serves, reached through ComfyUI's own server.

The routes are there from the start; what is behind them comes and goes with the node.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

from comfy.cli_args import args
from comfy.model_management import InterruptProcessingException
from torch import Tensor

from ...lingbot_core.engine.condition import ImageCondition
from ...lingbot_core.engine.drive import Drive
from ...lingbot_core.engine.handle import WorldHandle
from ...lingbot_core.engine.memory import GIB
from ...lingbot_core.engine.session import WorldSession
from ...lingbot_core.errors import LingBotError
from ...lingbot_core.realtime.host import Beginning, OfWorld
from ...lingbot_core.realtime.residents import StoppedError
from ...lingbot_core.realtime.server import LOCAL, Visitors, routes
from ...lingbot_core.realtime.service import Service
from .memory import out_of_memory_explained
from .progress import prompt_server, stop_if_cancelled
from .run import WORLDS
from .source import HostRoom, WorldSource, shared_host
from .start_image import StartPicture
from .text import ClipText
from .vae import world_vae

T = TypeVar("T")

NOT_SERVED = "no world is served here: queue a workflow with LingBotRealtimeEndpoint"


class ComfyHost(OfWorld):
    """A world of ComfyUI's MODEL, VAE and CLIP; see realtime.host.Host. The prompt worker calls its methods."""

    def __init__(self, model: Any, vae: Any, clip: Any) -> None:
        self._parts = (model, vae, clip)
        self.world = shared_host(model, vae, clip).world

    def check(self) -> None:
        stop_if_cancelled()

    def begin(self, beginning: Beginning) -> WorldHandle:
        model, vae, clip = self._parts
        streaming, patcher = world_vae(vae)
        condition = ImageCondition(streaming, beginning.picture, device=patcher.load_device)
        source = WorldSource.of(model, vae, clip, StartPicture(beginning.picture, condition, vae))
        preset, prompt = beginning.preset, beginning.prompt
        states = source.encode((prompt, *((preset.negative_prompt,) if preset.guided else ())))
        room = HostRoom(source, preset, chunks=1, rewind_depth=0, noise="seeded")
        with (
            out_of_memory_explained(lambda: _out_of_memory(room), condition.release),
            WORLDS.lease(source.host.world.device, on_wait=stop_if_cancelled),
        ):
            room.ready(None)
            session = WorldSession.start(
                source.host.world,
                condition,
                prompt,
                preset=preset,
                prompt_states=states[prompt],
                negative_states=states[preset.negative_prompt] if preset.guided else None,
                **beginning.settings,
            )
            handle = WORLDS.add(session, source)
        living = WORLDS.living(handle)
        assert living is not None
        room.settle(living)
        return handle

    def encode(self, prompts: tuple[str, ...]) -> Mapping[str, Tensor]:
        text = ClipText(self._parts[2], dim=self.world.dit.config.text_dim)
        return {prompt: text.encode(prompt).states for prompt in prompts}

    @contextmanager
    def drive(self, handle: WorldHandle) -> Iterator[Drive]:
        start = handle.history.start
        depth = handle.rewind_depth
        room = HostRoom(handle.source, start.preset, chunks=handle.chunks + 1, rewind_depth=depth, noise=start.noise)
        driven: list[Drive] = []

        def give_back() -> None:
            living = driven[0].living if driven else WORLDS.living(handle)
            if living is not None:
                living.sleep()

        with (
            out_of_memory_explained(lambda: _out_of_memory(room), give_back),
            WORLDS.drive(handle, room, on_wait=stop_if_cancelled) as drive,
        ):
            driven.append(drive)
            try:
                yield drive
            finally:
                room.settle(drive.living)

    def sleep(self, handle: WorldHandle) -> None:
        living = WORLDS.living(handle)
        if living is not None:
            living.sleep()
        handle.source.picture.condition.release()

    def close(self, handle: WorldHandle) -> None:
        WORLDS.close(handle)
        handle.source.picture.condition.release()

    def nbytes(self, handle: WorldHandle) -> int:
        living = WORLDS.living(handle)
        return (0 if living is None else living.cache_nbytes) + handle.source.picture.condition.nbytes


def _out_of_memory(room: HostRoom) -> str:
    return (
        f"the memory of {room.device} ran out; this world needs {room.estimate.session / GIB:.2f} GiB beside the "
        f"weights, in all {room.estimate.describe()}. What it took is free again and finished chunks are kept. Use a "
        "smaller picture, or serve fewer sessions"
    )


class PromptWorker:
    """Runs what sockets ask for in the thread that executes prompts, while that thread serves."""

    POLL_SECONDS = 0.05

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[Callable[[], Any], Future[Any]]] = queue.Queue()
        self._mutex = threading.Lock()
        self._closed = False

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """See realtime.worker.Worker."""
        future: Future[T] = Future()
        with self._mutex:
            if self._closed:
                future.set_exception(StoppedError())
            else:
                self._queue.put((work, future))
        return future

    def finish(self, until: Callable[[], bool]) -> None:
        """Works until ``until()`` is true, whatever the user cancels meanwhile; what is asked for later is refused."""
        while not until():
            with suppress(InterruptProcessingException):
                self.serve(until)
        with self._mutex:
            self._closed = True
        while not self._queue.empty():
            self._queue.get()[1].set_exception(StoppedError())

    def serve(self, until: Callable[[], bool]) -> None:
        """Works until ``until()`` is true, asked again and again; what it raises passes through."""
        while not until():
            try:
                work, future = self._queue.get(timeout=self.POLL_SECONDS)
            except queue.Empty:
                continue
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except InterruptProcessingException:
                future.set_exception(StoppedError())  # ComfyUI's own is no Exception: it would pass through the sockets
                raise  # ComfyUI says so once only
            except BaseException as error:
                future.set_exception(error)


class Endpoint:
    """What this ComfyUI serves. One world at a time, by the thread that executes prompts."""

    def __init__(self) -> None:
        self.service = Service()
        self.visitors = Visitors()
        self._loop: asyncio.AbstractEventLoop | None = None

    def offer(self) -> None:
        """Adds the routes; before ComfyUI's server starts. Nothing that goes wrong keeps the pack from loading."""
        server = prompt_server()
        if server is None:
            return
        self._loop = server.loop
        self._on_loop(self.service.close(NOT_SERVED))
        try:
            server.app.add_routes(routes(self.service, lambda: self.visitors))
        except (RuntimeError, ValueError) as error:
            logging.info("LingBot World: the realtime sockets cannot be offered: %s", error)

    def serve(
        self, host: ComfyHost, *, origins: tuple[str, ...], say: Callable[[str], None], **bounds: Any
    ) -> NoReturn:
        """Serves a world until the user cancels. bounds: see Residents. say: called with a line for the node.

        Raises ComfyUI's InterruptProcessingException when it is over, and LingBotError without a server.
        """
        if self._loop is None:
            raise LingBotError("there is no server to serve with: ComfyUI runs without one")
        worker, lines = PromptWorker(), _Lines(self.service, say)
        self.visitors = Visitors(_hosts(), frozenset(origins), any_address=not _only_local())
        self._on_loop(_later(partial(self.service.open, host, worker, **bounds))).result()

        def go_on() -> bool:
            lines.look()
            stop_if_cancelled()
            return False

        try:
            worker.serve(go_on)
        finally:
            ended = self._on_loop(self._end())
            worker.finish(ended.done)  # sessions are ended by this very thread
            ended.result()
        raise AssertionError("serving ends by a cancel")

    async def _end(self) -> None:
        await self.service.close(NOT_SERVED)
        await self.service.hang_up("the world is not served any more")

    def _on_loop(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(work, self._loop)


class _Lines:
    """Says on the node what is served, when it changes and not more than twice a second."""

    EVERY = 0.5

    def __init__(self, service: Service, say: Callable[[str], None]) -> None:
        self._service, self._say = service, say
        self._told, self._at = "", float("-inf")

    def look(self) -> None:
        count = self._service.metrics.count
        text = (
            f"serving: {self._service.connections} connections, {count('chunks_total'):.0f} chunks and "
            f"{count('frames_total'):.0f} frames so far"
        )
        now = time.monotonic()
        if text != self._told and now - self._at >= self.EVERY:
            self._told, self._at = text, now
            self._say(text)


async def _later(work: Callable[[], None]) -> None:
    work()


def _only_local() -> bool:
    return all(address in LOCAL for address in args.listen.split(","))


def _hosts() -> set[str]:
    return {*LOCAL, *args.listen.split(",")}


ENDPOINT = Endpoint()
