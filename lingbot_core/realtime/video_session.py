"""The work behind one connection of the video socket: a world of its own, chunk after chunk."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any, Protocol

from ..camera.controls import Controls, KeyMotion
from ..camera.keys import PER_LATENT, arrays_from_keys
from ..camera.units import translation_unit
from ..engine.drive import Drive
from ..engine.image import PreparedImage, prepare_image
from ..engine.route.base import Route, unit_rule
from ..errors import CameraError, LingBotError
from .errors import MessageError
from .host import Beginning
from .interactions import Interactions, Turn
from .making import Pictures, make_chunk
from .pictures import load_picture
from .residents import Resident, StoppedError
from .service import Service
from .video_messages import VideoStart
from .video_route import route_of

ENDLESS_FRAMES = 57_600
"""Frames at which a session without an end ends all the same: an hour at 16 a second. Its history is kept in memory."""
ENDLESS_FRAMES_WITHOUT_WINDOW = 961
"""The same where attention sees all of the past, which fills the memory: upstream's minute."""


class Client(Protocol):
    """Who the video is for. All of it raises GoneError."""

    async def send(self, message: Mapping[str, Any]) -> None: ...

    async def send_chunk(self, message: Mapping[str, Any], fragment: bytes) -> None:
        """A message and, right behind it, what it describes."""
        ...

    async def send_error(self, error: MessageError, *, event_id: str | None = None) -> None: ...

    async def caught_up(self) -> None:
        """Waits until all but a few chunks were read."""
        ...


class VideoSession:
    """One video from its start to its end. It belongs to the event loop; ``run`` is called once."""

    def __init__(self, service: Service, start: VideoStart, interactions: Interactions, client: Client) -> None:
        self.request_id = f"video_{uuid.uuid4().hex}"
        self.interactions = interactions
        self._service, self._start, self._client = service, start, client
        self._residents = service.residents  # its own: a service that closes has none any more
        self._resident: Resident | None = None
        self._stopped = self._left = False
        self._reported: set[str] = set()
        self._sent = 0

    def stop(self) -> None:
        """No more chunks; one that is being denoised is given up."""
        self._stopped = True
        if self._resident is not None:
            self._resident.stop.set()

    def leave(self) -> None:
        """The client is gone: the same, and nobody is told."""
        self._left = True
        self.stop()

    def warnings(self, unknown: tuple[str, ...]) -> list[str]:
        """What to say of fields that mean nothing here, once for each."""
        new = [name for name in unknown if name not in self._reported][:20]
        if len(self._reported) < 1000:
            self._reported.update(new)
        return [f"unknown field ignored: {name[:60]}" for name in new]

    async def run(self) -> bool:
        """Makes the video and says that it is done. False: it failed, and the client was told why.

        Raises MessageError where nothing was begun, of which the client was not told, and GoneError.
        """
        resident = self._resident = self._residents.claim(self.request_id, self)
        try:
            try:
                picture, route = await self._begin(resident)
            except MessageError:
                raise
            except LingBotError as error:
                raise MessageError(str(error), code="unsupported") from None
            chunks, limited = self._chunks(route)
            await self._client.send(self._introduction(resident, route, chunks, limited))
            try:
                whole = await self._make(resident, picture, route, chunks)
            except LingBotError as error:
                await self._client.send_error(MessageError(str(error), code="internal"))
                return False
            if not self._left:
                end = "limit" if limited else "completed"
                reason = end if whole else "stopped" if self._stopped else "closed"
                await self._client.send(
                    {
                        "type": "session.done", "request_id": self.request_id, "chunks": self._sent,
                        "stopped": reason != "completed", "reason": reason,
                    }
                )  # fmt: skip
            return True
        finally:
            await self._residents.end(resident)

    # The beginning

    async def _begin(self, resident: Resident) -> tuple[PreparedImage, Route | None]:
        start, service = self._start, self._service
        host = self._residents.host
        # What is wrong with the camera is cheaper to find than what is wrong with a picture.
        route = await asyncio.to_thread(route_of, start, service.trusted)
        settings = self._camera_settings(route)
        pixels = await load_picture(
            start.image, service.limits, allow_urls=service.allow_urls, name="image_reference.image_url"
        )
        make = partial(prepare_image, pixels, size=start.size, area=host.area, mode="crop" if start.size else "area")
        picture = await asyncio.to_thread(make)
        if route is not None:
            self.interactions.start = route.latent_poses[0]
            settings["intrinsics"] = route.intrinsics(picture)
        chunks, _ = self._chunks(route)
        if start.preset.window is None:
            settings["chunks"] = chunks  # the memory that they will take is asked for at the start
        settings |= {"seed": start.seed, "fps": start.fps}
        resident.picture, resident.prompt = picture, start.prompt
        await self._residents.begin(resident, Beginning(picture, start.prompt, start.preset, settings))
        return picture, route

    def _camera_settings(self, route: Route | None) -> dict[str, Any]:
        start = self._start
        try:
            if route is not None:
                number, rule = route.translation_unit(start.translation_unit)
                first_delta = start.first_delta or route.first_delta
            else:
                wish = "key" if start.translation_unit is None else start.translation_unit
                number, rule = translation_unit(wish, steps=PER_LATENT), unit_rule(wish)
                # Held velocities are like held keys: the first press moves at once.
                first_delta = start.first_delta or "from_rest"
        except CameraError as error:
            raise MessageError(str(error), code="bad_camera") from None
        return {"translation_unit": number, "unit_rule": rule, "first_delta": first_delta}

    def _chunks(self, route: Route | None) -> tuple[int, bool]:
        """How many there will be, and whether that is the bound of a session without an end."""
        preset = self._start.preset
        if route is not None:
            return route.chunks, False
        if self._start.chunks is not None:
            return self._start.chunks, False
        frames = ENDLESS_FRAMES_WITHOUT_WINDOW if preset.window is None else ENDLESS_FRAMES
        return preset.chunks_for(frames), True

    def _introduction(self, resident: Resident, route: Route | None, chunks: int, limited: bool) -> dict[str, Any]:
        assert resident.handle is not None
        record, preset = resident.handle.history.start, self._start.preset
        frames = preset.frames(chunks)
        config = {
            "model": self._residents.host.name,
            "preset": preset.label,
            "width": record.width,
            "height": record.height,
            "fps": record.fps,
            "num_frames": None if limited else frames,
            "chunks": None if limited else chunks,
            "max_frames": frames,
            "chunk_latent_frames": preset.chunk,
            "num_inference_steps": preset.steps,
            "guidance_scale": preset.guidance_scale,
            "flow_shift": preset.shift,
            "seed": record.seed,
            "translation_unit": record.translation_unit,
            "translation_unit_rule": record.unit_rule,
            "first_delta": record.first_delta,
            "intrinsics": list(record.intrinsics),
            "camera": None if route is None else route.source,
        }
        warnings = self.warnings(self._start.unknown)
        return {
            "type": "video.start",
            "request_id": self.request_id,
            "format": "m4s",
            "config": config,
            **({"warnings": warnings} if warnings else {}),
        }

    # Chunks

    async def _make(self, resident: Resident, picture: PreparedImage, route: Route | None, chunks: int) -> bool:
        """Returns whether all chunks were made. Raises LingBotError and GoneError."""
        for _ in range(chunks):
            await self._client.caught_up()
            if self._stopped or resident.handle is None:
                return False
            try:
                await self._chunk(resident, picture, route)
            except StoppedError:
                return False
        return True

    async def _chunk(self, resident: Resident, picture: PreparedImage, route: Route | None) -> None:
        """The next chunk. A new prompt that it cannot be made with is given up, and it is made with the old one."""
        assert resident.handle is not None
        history = resident.handle.history
        # A path may begin anywhere; who takes the camera from it before it has moved takes it there.
        pose = history.carry.pose if history.chunks else self.interactions.start
        turn = self.interactions.turn(pose)
        for event_id, why in turn.rejected:
            await self._client.send_error(MessageError(why, code="interaction_failed"), event_id=event_id)
        sent = self._sent
        try:
            await self._attempt(resident, picture, route, turn)
        except LingBotError as error:
            if turn.prompt_id is None or self._sent > sent or isinstance(error, MessageError):
                raise
            self.interactions.reject(turn.prompt_id)
            await self._attempt(resident, picture, route, self.interactions.turn(pose))
            # Only now it is known that it was the prompt.
            await self._client.send_error(MessageError(str(error), code="interaction_failed"), event_id=turn.prompt_id)

    async def _attempt(self, resident: Resident, picture: PreparedImage, route: Route | None, turn: Turn) -> None:
        if resident.handle is None:
            raise StoppedError  # the service has closed
        act = self._residents.host.control == "act"
        frames = 0

        async def deliver(pictures: Pictures) -> None:
            nonlocal frames
            frames = len(pictures.frames)
            if resident.stream is None:
                return
            fragment = await asyncio.to_thread(resident.stream.push, pictures.frames)
            await self._client.send_chunk(self._metadata(pictures, turn, fragment), fragment)
            self._sent += 1

        steer = partial(_steer, turn=turn, route=route, picture=picture, act=act)
        seconds = await make_chunk(self._residents, resident, steer, deliver, prompt=turn.prompt)
        self.interactions.made(turn)
        self._service.metrics.chunk(frames, seconds)

    def _metadata(self, pictures: Pictures, turn: Turn, fragment: bytes) -> dict[str, Any]:
        return {
            "type": "video.chunk_metadata",
            "request_id": self.request_id,
            "kind": "media",
            "transport_chunk_index": self._sent,
            "generation_chunk_index": pictures.chunk.index,
            "num_frames": len(pictures.frames),
            "byte_length": len(fragment),
            "started_event_ids": list(turn.started),
            "active_event_ids": list(turn.active),
            "completed_event_ids": list(turn.completed),
            "stage_durations": dict(pictures.chunk.timings),
        }


def _steer(drive: Drive, *, turn: Turn, route: Route | None, picture: PreparedImage, act: bool) -> Controls:
    """Called by the worker. Once an interaction has taken the camera it does not go back to its route."""
    if turn.poses is not None:
        return drive.controls(turn.poses)
    if route is not None:
        return next(route.controls(drive, picture, act=act, begin=len(drive.history), chunks=1))
    nothing = ("",) * drive.history.start.preset.chunk
    return drive.controls(KeyMotion(nothing, PER_LATENT), actions=arrays_from_keys(nothing)[0] if act else None)
