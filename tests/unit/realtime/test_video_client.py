"""The client of /v1/realtime/video against messages that are written down here."""

from __future__ import annotations

import asyncio
import base64
import json
import math

import numpy as np
import pytest
from socket_stub import Peer, SocketStub

from lingbot_core.errors import CameraError, ImageError
from lingbot_core.realtime.client import ServerError, ServerGoneError, VideoClient, key_velocity

PATH = "/v1/realtime/video"
START = '{"type": "video.start", "request_id": "r1", "format": "m4s", "config": {"width": 160, "height": 96}}'
FIRST = '{"type": "video.chunk_metadata", "kind": "chunk", "num_frames": 9, "generation_chunk_index": 0}'
SECOND = '{"type": "video.chunk_metadata", "kind": "chunk", "num_frames": 12, "generation_chunk_index": 1}'
QUEUED = '{"type": "session.interaction.queued", "event_id": "e1"}'
PONG = '{"type": "session.pong"}'
FAILED = '{"type": "error", "code": "interaction_failed", "message": "no such mode", "event_id": "e1"}'
REFUSED = '{"type": "error", "code": "unsupported", "message": "guidance_scale is not of this preset"}'
DONE = '{"type": "session.done", "chunks": 2, "reason": "completed"}'
# A grey pixel.
PNG = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg==")


def answering(*steps: tuple[int, list[bytes | str]]):
    """A talk of steps (messages to read first, messages to send then), and what it read."""
    asked: list[dict] = []

    async def talk(peer: Peer) -> None:
        for reads, messages in steps:
            for _ in range(reads):
                message = await peer.receive()
                assert isinstance(message, str)
                asked.append(json.loads(message))
            for message in messages:
                await peer.send(message)
        await peer.receive()  # until the client leaves

    return talk, asked


def run(talk, work, **options):
    with SocketStub({PATH: talk}) as stub:

        async def connected():
            async with VideoClient(stub.url, **options) as client:
                return await asyncio.wait_for(work(client), 20)

        return asyncio.run(connected())


def test_a_video_from_start_to_done():
    talk, asked = answering((1, [START, FIRST, b"one", SECOND, b"two", DONE]))

    async def watch(client: VideoClient):
        start = await client.start("hills", image=PNG, num_frames=21, extra_params={"translation_unit": 0.05})
        chunks = [(chunk["num_frames"], data) async for chunk, data in client.chunks()]
        return start, chunks, client.done

    start, chunks, done = run(talk, watch)

    assert asked == [
        {
            "type": "session.start",
            "prompt": "hills",
            "num_frames": 21,
            "extra_params": {"translation_unit": 0.05},
            "image_reference": {"image_url": "data:image/png;base64," + base64.b64encode(PNG).decode()},
        }
    ]
    assert start["config"] == {"width": 160, "height": 96}
    assert chunks == [(9, b"one"), (12, b"two")]
    assert done is not None
    assert (done["chunks"], done["reason"]) == (2, "completed")


def test_an_image_array_is_sent_as_png_with_the_same_pixels():
    import io

    from PIL import Image

    pixels = np.arange(48, dtype=np.uint8).reshape(4, 4, 3)
    talk, asked = answering((1, [START]))

    async def begin(client: VideoClient):
        await client.start("hills", image=pixels)
        with pytest.raises(ImageError, match="no known format"):
            await client.start("hills", image=b"no picture")

    run(talk, begin)
    head, _, data = asked[0]["image_reference"]["image_url"].partition(",")
    assert head == "data:image/png;base64"
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))), pixels)


def test_interactions_go_out_while_chunks_come_and_their_errors_end_nothing():
    talk, asked = answering((1, [START, FIRST, b"one"]), (3, [QUEUED, PONG, FAILED, SECOND, b"two"]), (1, [DONE]))
    events: list[dict] = []

    async def steer(client: VideoClient):
        await client.start("hills")
        chunks = []
        async for _, data in client.chunks():
            chunks.append(data)
            if len(chunks) == 1:
                await client.interact(velocity=key_velocity("w"), event_id="e1")
                await client.interact(prompt="snow", target=np.diag([-1.0, 1, -1, 1]), transition_chunks=2)
                await client.ping()
            else:
                await client.stop()
        return chunks

    assert run(talk, steer, on_event=events.append) == [b"one", b"two"]
    assert asked[1] == {
        "type": "session.interaction",
        "interaction": {
            "event_id": "e1",
            "event": {
                "multi_modal_data": {
                    "camera": {
                        "mode": "velocity",
                        "data": {"translation": [0.0, 0.0, pytest.approx(0.05, rel=1e-5)], "rotation": [0, 0, 0, 1]},
                    }
                }
            },
        },
    }
    assert asked[2] == {
        "type": "session.interaction",
        "interaction": {
            "event": {
                "prompt": "snow",
                "multi_modal_data": {
                    "camera": {
                        "mode": "target",
                        "data": {"translation": [0, 0, 0], "rotation": pytest.approx([0, 1, 0, 0], abs=1e-12)},
                    }
                },
            },
            "transition_chunks": 2,
        },
    }
    assert asked[3:] == [{"type": "session.ping"}, {"type": "session.stop"}]
    assert [event["type"] for event in events] == ["session.interaction.queued", "session.pong", "error"]
    assert events[2]["code"] == "interaction_failed"


@pytest.mark.parametrize(
    ("keys", "translation", "axis", "degrees"),
    [
        ("w", [0, 0, 0.05], None, 0),
        ("s", [0, 0, -0.05], None, 0),
        ("d", [0.05, 0, 0], None, 0),
        ("a", [-0.05, 0, 0], None, 0),
        ("l", [0, 0, 0], 1, 6),  # OpenCV axes: about +Y, from +Z towards +X, which is to the right
        ("j", [0, 0, 0], 1, -6),
        ("i", [0, 0, 0], 0, 4),  # about +X, from +Z towards -Y, which is up
        ("k", [0, 0, 0], 0, -4),
        ("", [0, 0, 0], None, 0),
        ("ad", [0, 0, 0], None, 0),
    ],
)
def test_held_keys_as_the_protocol_writes_them(keys, translation, axis, degrees):
    talk, asked = answering((1, [QUEUED]))
    rotation = [0.0, 0.0, 0.0, math.cos(math.radians(degrees / 2))]
    if axis is not None:
        rotation[axis] = math.sin(math.radians(degrees / 2))

    async def press(client: VideoClient):
        await client.interact(velocity=key_velocity(keys))

    run(talk, press)
    data = asked[0]["interaction"]["event"]["multi_modal_data"]["camera"]["data"]
    assert data["translation"] == pytest.approx(translation, abs=1e-6)
    assert data["rotation"] == pytest.approx(rotation, abs=1e-9)


def test_what_is_no_pose_is_not_sent():
    talk, asked = answering((1, [QUEUED]))

    async def press(client: VideoClient):
        with pytest.raises(CameraError, match="the camera: row 0 is not rigid"):
            await client.interact(velocity=2 * np.diag([1.0, 1, 1, 0.5]))
        with pytest.raises(ValueError, match="exclude each other"):
            await client.interact(velocity=np.eye(4), target=np.eye(4))
        await client.ping()

    run(talk, press)
    assert asked == [{"type": "session.ping"}]


def test_what_the_server_refuses_is_one_error_and_the_next_start_is_answered():
    talk, _ = answering((1, [REFUSED]), (1, [START]))

    async def bad_then_good(client: VideoClient):
        with pytest.raises(ServerError, match="guidance_scale is not of this preset") as caught:
            await client.start("hills", guidance_scale=9)
        assert caught.value.code == "unsupported"
        return await client.start("hills")

    assert run(talk, bad_then_good)["request_id"] == "r1"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([START, b"alone"], "5 bytes that no video.chunk_metadata announced"),
        ([START, FIRST, SECOND], "announced a chunk and then sent text"),
        ([START, "nonsense"], "no message of this protocol"),
        ([START, "[1]"], "no message of this protocol"),
    ],
)
def test_a_server_that_speaks_something_else_is_named(messages, message):
    talk, _ = answering((1, messages))

    async def watch(client: VideoClient):
        await client.start("hills")
        async for _ in client.chunks():
            pass

    with pytest.raises(ServerGoneError, match=message):
        run(talk, watch)


def test_a_server_that_vanishes_is_one_error():
    async def talk(peer: Peer) -> None:
        await peer.receive()
        await peer.send(START)
        await peer.send(FIRST)
        await peer.send(b"one")
        await asyncio.sleep(0.2)
        peer.vanish()

    chunks = []

    async def watch(client: VideoClient):
        await client.start("hills")
        async for _, data in client.chunks():
            chunks.append(data)

    with pytest.raises(ServerGoneError, match="is gone"):
        run(talk, watch)
    assert chunks == [b"one"]
