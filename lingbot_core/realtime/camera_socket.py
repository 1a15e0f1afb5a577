"""``/v1/realtime/world/camera``: cameras in, chunks out, in msgpack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..camera.controls import KeyMotion
from ..camera.keys import PER_LATENT
from ..camera.pose import Array
from ..camera.units import translation_unit
from ..engine.image import PreparedImage, prepare_image
from ..engine.route.base import for_image, unit_rule
from ..errors import CameraError, LingBotError
from ..models.vae import TEMPORAL_STRIDE
from .camera_steering import FIRST_MOVE, Steering, intrinsics_of, motions, planned
from .codec import pack, unpack
from .connection import Connection, Data, GoneError
from .errors import MessageError
from .host import Beginning
from .infer import Infer, read_infer, session_id
from .making import Pictures, make_chunk
from .pictures import load_picture
from .residents import Resident, StoppedError
from .service import Service

FPS = 16.0


@dataclass
class _Count:
    """Answers to one message, of all its chunks together."""

    total: int
    index: int = 0


class CameraSocket:
    """One connection. It drives one session at a time; another session_id ends that one."""

    def __init__(self, service: Service, connection: Connection) -> None:
        self._service, self._connection = service, connection
        self._resident: Resident | None = None
        self._reported: set[str] = set()

    async def serve(self) -> None:
        """Until the other side closes."""
        waiting = asyncio.ensure_future(self._greet())
        try:
            await self._connection.run(self._take, self._flooded, self._gone)
        finally:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            self._gone()

    # Messages

    async def _greet(self) -> None:
        """The server's configuration, as soon as a model is there; until then, that it loads."""
        try:
            self._service.residents  # noqa: B018 - raises while there is none
        except MessageError as error:
            await self._answer_error(error)
            await self._service.decided()
        try:
            await self._send(self._config())
        except MessageError as error:
            await self._answer_error(error)
        except GoneError:
            pass

    async def _take(self, data: Data) -> None:
        self._service.metrics.add("messages_total", socket="camera")
        try:
            await self._dispatch(data)
        except StoppedError:
            return  # nobody waits for an answer
        except MessageError as error:
            await self._answer_error(error)
        except CameraError as error:
            await self._answer_error(MessageError(str(error), code="bad_camera"))
        except LingBotError as error:
            await self._answer_error(MessageError(str(error), code="malformed_payload"))
        except GoneError:
            raise
        except Exception as error:
            self._service.failed(error)
            if self._resident is not None:
                self._resident.broken = True
            name = type(error).__name__
            await self._answer_error(
                MessageError(f"something failed inside the server ({name}); reset the session", code="internal")
            )

    async def _dispatch(self, data: Data) -> None:
        if isinstance(data, str):
            raise MessageError("this socket takes msgpack in binary messages, not text", code="malformed_payload")
        message = unpack(data, self._service.limits)
        endpoint = message.get("endpoint", "infer")
        if endpoint == "infer":
            await self._infer(message)
        elif endpoint == "reset":
            await self._reset(message)
        else:
            raise MessageError(f"endpoint {endpoint!r:.60} is unknown; use infer or reset", code="malformed_payload")

    async def _reset(self, message: Mapping[str, Any]) -> None:
        name = session_id(message)
        resident = await self._claim(name)
        async with resident.lock:
            self._still_ours(resident)
            await self._service.residents.reset(resident)
        await self._send({"type": "reset_ok", "session_id": name})

    async def _infer(self, message: Mapping[str, Any]) -> None:
        residents = self._service.residents
        request = read_infer(message, self._service.limits, residents.host.preset.chunk)
        keys = request.event is not None and not isinstance(request.event.motion, np.ndarray)
        if residents.host.control == "act" and not keys:
            raise MessageError(
                "this world is steered by keys; send an event with key lists instead of cameras", code="bad_camera"
            )
        resident = await self._claim(request.session_id)
        async with resident.lock:
            self._still_ours(resident)
            if resident.broken:
                raise MessageError("this session failed; reset it first", code="internal")
            if request.event is not None and request.event.event_id <= resident.event_id:
                raise MessageError(
                    f"event_id {request.event.event_id} follows {resident.event_id}; ids must rise, also across a reset"
                )
            prompt = await self._settle(resident, request)
            assert resident.handle is not None
            parts = motions(request, resident.handle.history)
            count = _Count(total=self._pieces(resident, request, len(parts)))
            for index, part in enumerate(parts):
                self._still_ours(resident)
                await self._chunk(resident, request, part, prompt if index == 0 else None, count)
            if request.event is not None:
                resident.event_id = request.event.event_id

    def _still_ours(self, resident: Resident) -> None:
        if resident.owner is not self:
            raise StoppedError

    def _gone(self) -> None:
        if self._resident is not None:
            self._service_leave(self._resident)
            self._resident = None

    def _service_leave(self, resident: Resident) -> None:
        try:
            self._service.residents.leave(resident)
        except MessageError:
            resident.stop.set()  # the world is not served any more, and its sessions have ended

    async def _flooded(self) -> None:
        await self._answer_error(
            MessageError("too many messages wait already; this one was dropped", code="session_busy")
        )

    # Sessions

    async def _claim(self, name: str | None) -> Resident:
        residents = self._service.residents
        # First the new one: where another connection drives it, this one keeps its own.
        claimed = residents.claim(name, self)
        old, self._resident = self._resident, claimed
        if old is not None and old is not claimed:
            await residents.end(old)
        return claimed

    async def _settle(self, resident: Resident, request: Infer) -> str | None:
        """Begins a world where the message asks for one. Returns a prompt that is to change in the one there is."""
        first = resident.handle is None
        picture = await self._picture(resident, request)
        self._still_ours(resident)
        told = request.prompt if request.event is None or request.event.prompt is None else request.event.prompt
        prompt = resident.prompt if told is None else told
        keep = request.keep_world or (request.event is not None and request.event.prompt is not None)
        if picture is None or prompt is None:
            missing = "image" if picture is None else "prompt"
            raise MessageError(f"the first infer of a session needs {missing}", code="missing_field")
        other_picture = resident.picture is None or picture.digest != resident.picture.digest
        other_prompt = prompt != resident.prompt
        resident.picture, resident.prompt = picture, prompt
        if not first and not other_picture and (not other_prompt or keep):
            return prompt if other_prompt else None
        await self._begin(resident, request, picture, prompt)
        return None

    async def _picture(self, resident: Resident, request: Infer) -> PreparedImage | None:
        if request.image is None:
            return resident.picture
        pixels = await load_picture(request.image, self._service.limits, allow_urls=self._service.allow_urls)
        area = self._service.residents.host.area
        make = partial(prepare_image, pixels, size=request.size, area=area, mode="crop" if request.size else "area")
        return await asyncio.to_thread(make)

    async def _begin(self, resident: Resident, request: Infer, picture: PreparedImage, prompt: str) -> None:
        residents = self._service.residents
        preset = residents.host.preset
        keys = request.event is not None and not isinstance(request.event.motion, np.ndarray)
        wish = request.translation_unit
        if wish is None and keys:
            wish = "key"
        unit, rule = 1.0, FIRST_MOVE
        if wish is not None:
            unit, rule = (
                translation_unit(wish, latent_poses=planned(request, preset.chunk), steps=PER_LATENT),
                unit_rule(wish),
            )
        settings: dict[str, Any] = {
            "seed": request.seed or 0,
            "fps": request.fps or FPS,
            "translation_unit": unit,
            "unit_rule": rule,
            "first_delta": request.first_delta or ("from_rest" if keys else "identity"),
        }
        intrinsics = intrinsics_of(request)
        if intrinsics is not None:
            settings["intrinsics"] = for_image(intrinsics, picture)
        await residents.begin(resident, Beginning(picture, prompt, preset, settings))
        resident.settled = rule != FIRST_MOVE

    # Chunks

    async def _chunk(
        self,
        resident: Resident,
        request: Infer,
        motion: Array | KeyMotion,
        prompt: str | None,
        count: _Count,
    ) -> None:
        residents = self._service.residents
        steering = Steering(resident, motion, intrinsics_of(request), act=residents.host.control == "act")
        frames = 0

        async def deliver(pictures: Pictures) -> None:
            nonlocal frames
            frames = len(pictures.frames)
            self._still_ours(resident)
            await self._send_frames(resident, request, pictures, steering.unit, count)

        seconds = await make_chunk(residents, resident, steering.controls, deliver, prompt=prompt)
        resident.settled = resident.settled or steering.moves
        self._service.metrics.chunk(frames, seconds)

    async def _send_frames(
        self, resident: Resident, request: Infer, pictures: Pictures, unit: float, count: _Count
    ) -> None:
        chunk, frames = pictures.chunk, pictures.frames
        common = {
            "type": "frame",
            "chunk_id": chunk.index,
            "chunk_index": chunk.index,
            "translation_unit": unit,
            **({} if request.request_id is None else {"request_id": request.request_id}),
            **({} if request.event is None else {"event_id": request.event.event_id}),
            "stage_durations": dict(chunk.timings),
            **self._unknown(request),
        }
        size = request.frames_per_part
        if size is None:
            assert resident.stream is not None
            pieces: list[Any] = [await asyncio.to_thread(resident.stream.push, frames)]
        else:
            pieces = [frames[i : i + size] for i in range(0, len(frames), size)]
        for piece in pieces:
            await self._send({**common, "index": count.index, "total": count.total, "video": piece})
            count.index += 1

    def _pieces(self, resident: Resident, request: Infer, chunks: int) -> int:
        """Answers that a message of so many chunks gets."""
        assert resident.handle is not None
        history, size = resident.handle.history, request.frames_per_part
        if size is None:
            return chunks
        frames, made = history.start.preset.frames, len(history)
        return sum(-(-(frames(i + 1) - frames(i)) // size) for i in range(made, made + chunks))

    def _unknown(self, request: Infer) -> dict[str, Any]:
        """Names that mean nothing here, once for each."""
        new = [name for name in request.unknown if name not in self._reported]
        self._reported.update(new[:100])
        return {"warnings": [f"unknown field ignored: {name[:60]}" for name in new[:20]]} if new else {}

    # Answers

    def _config(self) -> dict[str, Any]:
        host = self._service.residents.host
        preset = host.preset
        height, width = host.size
        return {
            "patch_size": [1, 2, 2],
            "chunk_latent_frames": preset.chunk,
            "chunk_video_frames": TEMPORAL_STRIDE * preset.chunk,
            "first_chunk_video_frames": preset.frames(1),
            "vae_temporal_stride": TEMPORAL_STRIDE,
            "image_resolution": [height, width],
            "frame_dtype": "uint8",
            "fps": int(FPS),
            "needs_session_id": False,
            "supported_modalities": ["camera_pose"],
            "coordinate_convention": "opencv_c2w",
            "pipeline": f"lingbot-world {host.name}",
        }

    async def _answer_error(self, error: MessageError) -> None:
        self._service.metrics.add("errors_total", code=error.code)
        await self._send({"type": "error", "code": error.code, "message": str(error)})

    async def _send(self, message: Mapping[str, Any]) -> None:
        await self._connection.send(pack(message))
