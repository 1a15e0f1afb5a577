"""``/v1/realtime/world/camera``: cameras in, chunks out, in msgpack."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..camera.controls import CameraCarry, Controls, latents_of_slice
from ..camera.keys import KEY_STEPS
from ..camera.pose import Array
from ..camera.units import translation_unit
from ..engine.chunk import Chunk
from ..engine.drive import Drive
from ..engine.image import PreparedImage, frames_to_uint8, prepare_image
from ..engine.route.base import for_image, unit_rule
from ..errors import CameraError, LingBotError
from ..models.vae import TEMPORAL_STRIDE
from .codec import pack, unpack
from .connection import Connection, Data, GoneError
from .errors import MessageError
from .host import Beginning
from .infer import Infer, read_infer, session_id
from .pictures import load_picture
from .residents import Resident, StoppedError
from .service import Service

FIRST_MOVE = "first-move"
"""The rule for the translation unit where nobody names one: the longest step of the first chunk that moves."""
FPS = 16.0


@dataclass(frozen=True, eq=False)
class _Pictures:
    """A chunk as it leaves the worker. frames: uint8 [T, H, W, 3]. unit: what its translations were divided by."""

    chunk: Chunk
    frames: np.ndarray
    unit: float


class CameraSocket:
    """One connection. It drives one session at a time; another session_id ends that one."""

    def __init__(self, service: Service, connection: Connection) -> None:
        self._service, self._connection = service, connection
        self._resident: Resident | None = None
        self._reported: set[str] = set()
        self._greeted = False

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
            self._greeted = True
        except MessageError as error:
            await self._answer_error(error)
        except GoneError:
            pass

    async def _take(self, data: Data) -> None:
        self._service.metrics.add("messages_total", socket="camera")
        try:
            await self._dispatch(data)
        except StoppedError:
            pass  # nobody waits for it
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
        request = read_infer(message, self._service.limits)
        residents = self._service.residents
        if residents.host.control == "act":
            raise MessageError("this world is steered by actions, which this socket does not carry", code="bad_camera")
        resident = await self._claim(request.session_id)
        async with resident.lock:
            self._still_ours(resident)
            if resident.broken:
                raise MessageError("this session failed; reset it first", code="internal")
            prompt = await self._settle(resident, request)
            parts = self._parts(resident, request)
            for index, part in enumerate(parts):
                self._still_ours(resident)
                await self._chunk(resident, request, part, prompt if index == 0 else None, index, len(parts))

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
        if self._resident is not None and self._resident.key != name:
            old, self._resident = self._resident, None
            await residents.end(old)
        self._resident = residents.claim(name, self)
        return self._resident

    async def _settle(self, resident: Resident, request: Infer) -> str | None:
        """Begins a world where the message asks for one. Returns a prompt that is to change in the one there is."""
        first = resident.handle is None
        picture = await self._picture(resident, request)
        prompt = resident.prompt if request.prompt is None else request.prompt
        if picture is None or prompt is None:
            missing = "image" if picture is None else "prompt"
            raise MessageError(f"the first infer of a session needs {missing}", code="missing_field")
        other_picture = resident.picture is None or picture.digest != resident.picture.digest
        other_prompt = prompt != resident.prompt
        resident.picture, resident.prompt = picture, prompt
        if not first and not other_picture and (not other_prompt or request.keep_world):
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
        unit, rule = 1.0, FIRST_MOVE
        if request.translation_unit is not None:
            count = self._count(request)
            latents = latents_of_slice(request.poses, count * preset.chunk, CameraCarry.start())
            unit = translation_unit(request.translation_unit, latent_poses=latents, steps=KEY_STEPS["per-latent"])
            rule = unit_rule(request.translation_unit)
        settings = {
            "intrinsics": for_image(request.intrinsics, picture),
            "seed": request.seed or 0,
            "fps": request.fps or FPS,
            "translation_unit": unit,
            "unit_rule": rule,
            "first_delta": request.first_delta or "identity",
        }
        await residents.begin(resident, Beginning(picture, prompt, preset, settings))
        resident.settled = rule != FIRST_MOVE

    # Chunks

    def _count(self, request: Infer) -> int:
        """Chunks that a message asks for."""
        if request.num_frames is None:
            return 1
        chunk = self._service.residents.host.preset.chunk
        return max(1, ((request.num_frames - 1) // TEMPORAL_STRIDE + 1) // chunk)

    def _parts(self, resident: Resident, request: Infer) -> list[Array]:
        """The latent frames' absolute poses, chunk by chunk."""
        assert resident.handle is not None
        history = resident.handle.history
        chunk, count = history.start.preset.chunk, self._count(request)
        latents = latents_of_slice(request.poses, count * chunk, history.carry)
        return [latents[i * chunk : (i + 1) * chunk] for i in range(count)]

    async def _chunk(
        self, resident: Resident, request: Infer, poses: Array, prompt: str | None, index: int, total: int
    ) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[_Pictures] = loop.create_future()

        def deliver(pictures: _Pictures) -> None:
            if not ready.done():
                ready.set_result(pictures)

        def on_frames(chunk: Chunk) -> None:
            pictures = _Pictures(chunk, frames_to_uint8(chunk.frames), steering.unit)
            loop.call_soon_threadsafe(deliver, pictures)

        steering = _Steering(resident, poses, request.intrinsics)
        made = asyncio.ensure_future(
            self._service.residents.advance(resident, steering.controls, prompt=prompt, on_frames=on_frames)
        )
        try:
            # The frames leave while the worker goes on with the commit.
            waited: set[asyncio.Future[Any]] = {ready, made}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await self._send_frames(resident, request, ready.result(), index, total)
        finally:
            seconds = await made
            resident.settled = resident.settled or steering.moves
        self._service.metrics.chunk(ready.result().frames.shape[0], seconds)

    async def _send_frames(
        self, resident: Resident, request: Infer, pictures: _Pictures, index: int, total: int
    ) -> None:
        chunk, frames = pictures.chunk, pictures.frames
        common = {
            "type": "frame",
            "chunk_id": chunk.index,
            "translation_unit": pictures.unit,
            "stage_durations": dict(chunk.timings),
            **self._unknown(request),
        }
        size = request.frames_per_part
        if size is None:
            assert resident.stream is not None
            video = await asyncio.to_thread(resident.stream.push, frames)
            await self._send({**common, "index": index, "total": total, "video": video})
            return
        parts = [frames[i : i + size] for i in range(0, len(frames), size)]
        for number, part in enumerate(parts):
            await self._send({**common, "index": number, "total": len(parts), "video": part})

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


class _Steering:
    """Poses of one chunk as its controls. unit: the translation unit they are in. moves: whether they move at all."""

    def __init__(self, resident: Resident, poses: Array, intrinsics: Array) -> None:
        self._resident, self._poses, self._intrinsics = resident, poses, intrinsics
        self.unit, self.moves = 1.0, False

    def controls(self, drive: Drive) -> Controls:
        """Called by the worker. A unit that waits for the first move is settled here."""
        assert self._resident.picture is not None
        controls = drive.controls(self._poses)
        longest = float(np.linalg.norm(controls.relative[:, :3, 3], axis=1).max())
        self.moves = longest > 0
        if self.moves and not self._resident.settled:
            drive.settle_unit(longest * drive.history.start.translation_unit, FIRST_MOVE)
        start = drive.history.start
        self.unit = start.translation_unit
        own = for_image(self._intrinsics, self._resident.picture)
        return drive.controls(self._poses, intrinsics=None if own == start.intrinsics else own)
