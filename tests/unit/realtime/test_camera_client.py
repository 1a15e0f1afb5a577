"""The client of /v1/realtime/world/camera against messages whose bytes are written down here."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import msgpack
import numpy as np
import pytest
from socket_stub import Peer, SocketStub

from lingbot_core.errors import ImageError, InputFileError
from lingbot_core.realtime.client import CameraClient, ServerError, ServerGoneError, SyncCameraClient
from lingbot_core.realtime.client.socket import endpoint

PATH = "/v1/realtime/world/camera"
CONFIG = b"\x83\xb3chunk_latent_frames\x03\xb0image_resolution\x92\x60\xcc\xa0\xb5coordinate_convention\xaaopencv_c2w"
RESET_OK = b"\x82\xa4type\xa8reset_ok\xaasession_id\xa1a"
BAD_CAMERA = b"\x83\xa4type\xa5error\xa4code\xaabad_camera\xa7message\xadpose 3: a NaN"
LOADING = b"\x83\xa4type\xa5error\xa4code\xa7loading\xa7message\xaawait a bit"
PIXELS = bytes(range(24))


def frame(video: bytes, chunk_id: int = 0, index: int = 0, total: int = 1) -> bytes:
    """A frame message; ``video`` is msgpack already."""
    numbers = b"\xa8chunk_id%c\xa5index%c\xa5total%c" % (chunk_id, index, total)
    seconds = b"\xafstage_durations\x81\xa7denoise\xcb\x3f\xe0\x00\x00\x00\x00\x00\x00"  # 0.5
    return b"\x86\xa4type\xa5frame" + numbers + b"\xa5video" + video + seconds


MOOF = b"\xc4\x04moof"
# uint8 [2, 2, 2, 3] as openpi-client packs it.
ARRAY = (
    b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data\xc4\x18"
    + PIXELS
    + b"\xc4\x05dtype\xa3|u1\xc4\x05shape\x94\x02\x02\x02\x03"
)
POSES = np.stack([np.eye(4), np.diag([1.0, 1.0, 1.0, 1.0])])
POSES[1, 2, 3] = 0.25
LENS = np.array([[500.0, 501.0, 416.0, 240.0]] * 2)


def as_numpy(value: dict[bytes, object]) -> np.ndarray:
    """Reads an array as the protocol has it, without the code under test."""
    assert value[b"__ndarray__"] is True
    return np.frombuffer(value[b"data"], dtype=value[b"dtype"]).reshape(value[b"shape"])


def plain(message: bytes | str) -> dict:
    assert isinstance(message, bytes)
    return msgpack.unpackb(message, strict_map_key=False)


def play(talk) -> SocketStub:
    """A server that begins with its configuration."""

    async def whole(peer: Peer) -> None:
        await peer.send(CONFIG)
        await talk(peer)

    return SocketStub({PATH: whole})


def answering(*answers: list[bytes | str]):
    """A talk that gives one list of messages to each request, and what it was asked."""
    asked: list[dict] = []

    async def talk(peer: Peer) -> None:
        for messages in answers:
            asked.append(plain(await peer.receive()))
            for message in messages:
                await peer.send(message)

    return talk, asked


async def collect(client: CameraClient, **options):
    return [answer async for answer in client.infer(POSES, LENS, **options)]


def run(stub: SocketStub, work):
    """Runs ``work(client)`` with a connected client."""

    async def connected():
        async with CameraClient(stub.url) as client:
            return await asyncio.wait_for(work(client), 20)

    return asyncio.run(connected())


def test_the_configuration_is_there_once_connected():
    talk, _ = answering()

    async def look(client: CameraClient):
        return dict(client.config), client.chunk

    with play(talk) as stub:
        config, chunk = run(stub, look)

    assert config == {
        "chunk_latent_frames": 3,
        "image_resolution": [96, 160],
        "coordinate_convention": "opencv_c2w",
    }
    assert chunk == 3


def test_the_first_infer_of_a_session_on_the_wire():
    talk, asked = answering([frame(MOOF)])

    async def first(client: CameraClient):
        return await collect(
            client, image=b"\x89PNG", prompt="hills", session_id="a", translation_unit=0.5, first_delta="identity"
        )

    with play(talk) as stub:
        (answer,) = run(stub, first)

    (request,) = asked
    camera = request.pop("cameras")
    assert request == {
        "endpoint": "infer",
        "session_id": "a",
        "image": b"\x89PNG",
        "prompt": "hills",
        "extra_body": {"translation_unit": 0.5, "first_delta": "identity"},
    }
    assert np.array_equal(as_numpy(camera["poses"]), POSES)
    assert np.array_equal(as_numpy(camera["intrinsics"]), LENS)
    assert (answer.chunk_id, answer.index, answer.total, answer.video, answer.last) == (0, 0, 1, b"moof", True)
    assert dict(answer.stage_durations) == {"denoise": 0.5}


def test_a_later_infer_says_only_what_changes():
    talk, asked = answering([frame(MOOF)], [frame(MOOF, chunk_id=1)])

    async def two(client: CameraClient):
        await collect(client, image=b"\x89PNG", prompt="hills")
        return await collect(client, prompt="hills in snow", keep_world=True)

    with play(talk) as stub:
        (answer,) = run(stub, two)

    assert answer.chunk_id == 1
    assert set(asked[1]) == {"endpoint", "session_id", "cameras", "prompt", "keep_world"}
    assert asked[1]["session_id"] is None
    assert asked[1]["keep_world"] is True


def test_an_image_can_be_a_file_or_an_array(tmp_path):
    file = tmp_path / "start.jpg"
    file.write_bytes(b"\xff\xd8\xff")
    pixels = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    talk, asked = answering([frame(MOOF)], [frame(MOOF)])

    async def both(client: CameraClient):
        await collect(client, image=file)
        await collect(client, image=pixels[:, ::-1])

    with play(talk) as stub:
        run(stub, both)

    assert asked[0]["image"] == b"\xff\xd8\xff"
    assert np.array_equal(as_numpy(asked[1]["image"]), pixels[:, ::-1])


@pytest.mark.parametrize(
    ("image", "error", "message"),
    [
        ("nowhere.png", InputFileError, "nowhere.png cannot be read"),
        (np.zeros((2, 2, 3)), ImageError, r"float64 \[2, 2, 3\] cannot be sent; uint8 \[H, W, 3\]"),
        (np.zeros((2, 2), np.uint8), ImageError, r"uint8 \[2, 2\] cannot be sent"),
    ],
)
def test_an_image_that_is_none_is_refused_before_anything_is_sent(image, error, message):
    talk, asked = answering([frame(MOOF)])

    async def bad_then_good(client: CameraClient):
        with pytest.raises(error, match=message):
            await collect(client, image=image)
        return await collect(client)

    with play(talk) as stub:
        assert len(run(stub, bad_then_good)) == 1
    assert len(asked) == 1


def test_parts_of_an_answer_come_one_by_one_as_arrays():
    talk, asked = answering([frame(ARRAY, index=0, total=3), frame(ARRAY, index=1, total=3), frame(ARRAY, 0, 2, 3)])

    async def parts(client: CameraClient):
        return await collect(client, frames_per_chunk=2)

    with play(talk) as stub:
        answers = run(stub, parts)

    assert asked[0]["extra_body"] == {"frames_per_chunk": 2}
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert [answer.last for answer in answers] == [False, False, True]
    expected = np.frombuffer(PIXELS, np.uint8).reshape(2, 2, 2, 3)
    for answer in answers:
        assert answer.video.dtype == np.uint8
        assert np.array_equal(answer.video, expected)


def test_an_answer_left_early_is_not_taken_for_the_next_one():
    parts = [frame(MOOF, index=index, total=3) for index in range(3)]
    talk, asked = answering(parts, [frame(b"\xc4\x04next", chunk_id=1)], [RESET_OK])

    async def leave(client: CameraClient):
        async for _ in client.infer(POSES, LENS):
            break
        following = await collect(client)
        await client.reset("a")
        return following

    with play(talk) as stub:
        answers = run(stub, leave)

    assert [answer.video for answer in answers] == [b"next"]
    assert asked[2] == {"endpoint": "reset", "session_id": "a"}


def test_what_the_server_refuses_is_one_error_and_the_connection_goes_on():
    talk, _ = answering([BAD_CAMERA], [frame(MOOF)])

    async def bad_then_good(client: CameraClient):
        with pytest.raises(ServerError, match=r"^pose 3: a NaN \(bad_camera\)$") as caught:
            await collect(client)
        assert caught.value.code == "bad_camera"
        return await collect(client)

    with play(talk) as stub:
        assert len(run(stub, bad_then_good)) == 1


def test_a_model_that_loads_is_an_error_not_a_hang():
    async def talk(peer: Peer) -> None:
        await peer.send(LOADING)

    async def nothing(client: CameraClient):
        raise AssertionError

    with SocketStub({PATH: talk}) as stub, pytest.raises(ServerError, match="wait a bit") as caught:
        run(stub, nothing)
    assert caught.value.code == "loading"


@pytest.mark.parametrize("answer", [RESET_OK, "reset successful"])
def test_a_reset_is_confirmed(answer):
    talk, asked = answering([answer])

    async def reset(client: CameraClient):
        await client.reset("a")

    with play(talk) as stub:
        run(stub, reset)
    assert asked == [{"endpoint": "reset", "session_id": "a"}]


def test_a_server_that_vanishes_is_one_error_and_the_session_goes_on_over_a_new_connection():
    asked = []

    async def talk(peer: Peer) -> None:
        asked.append(plain(await peer.receive()))
        if len(asked) == 1:
            peer.vanish()
        else:
            await peer.send(frame(MOOF, chunk_id=1))

    async def twice(client: CameraClient):
        with pytest.raises(ServerGoneError, match=r"is gone .*the same session_id goes on") as caught:
            await collect(client, session_id="a")
        assert caught.value.code == "server_gone"
        await client.connect()
        return await collect(client, session_id="a")

    with play(talk) as stub:
        (answer,) = run(stub, twice)
        assert stub.connections == 2
    assert answer.chunk_id == 1
    assert [request["session_id"] for request in asked] == ["a", "a"]


def test_why_a_server_closed_is_in_the_message():
    async def talk(peer: Peer) -> None:
        await peer.receive()
        await peer.socket.close(code=1011, message=b"the session is lost")

    with play(talk) as stub, pytest.raises(ServerGoneError, match="closed with code 1011: the session is lost"):
        run(stub, collect)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"\xc1", "no message of this protocol"),
        (b"\x93\x01\x02\x03", "no message of this protocol: "),
        (b"\x81\xa4type\xa5frame", "answered an infer with 'frame'"),
        (RESET_OK, "answered an infer with 'reset_ok'"),
        ("hello", "sent text"),
    ],
)
def test_a_server_that_speaks_something_else_is_named(answer, message):
    talk, _ = answering([answer])
    with play(talk) as stub, pytest.raises(ServerGoneError, match=message):
        run(stub, collect)


def test_nobody_at_the_address_is_said_at_once():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    began = time.monotonic()
    with (
        pytest.raises(ServerGoneError, match=rf"no connection to ws://127.0.0.1:{port}{PATH} .*start the server"),
        SyncCameraClient(f"127.0.0.1:{port}"),
    ):
        pass
    assert time.monotonic() - began < 10


def test_a_server_without_that_path_is_told_apart():
    with (
        SocketStub({"/other": answering()[0]}) as stub,
        pytest.raises(ServerGoneError, match="answered 404 instead of a WebSocket"),
        SyncCameraClient(stub.url),
    ):
        pass


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:8760", "ws://localhost:8760/v1/realtime/world/camera"),
        ("http://host:1/", "ws://host:1/v1/realtime/world/camera"),
        ("https://host/desk", "wss://host/desk/v1/realtime/world/camera"),
        ("ws://host:1/v1/realtime/world/camera", "ws://host:1/v1/realtime/world/camera"),
        ("ws://[::1]:1?token=x", "ws://[::1]:1/v1/realtime/world/camera?token=x"),
    ],
)
def test_addresses_get_the_path_of_the_protocol(url, address):
    assert endpoint(url, PATH) == address


@pytest.mark.parametrize("url", ["", "ftp://host", "ws://", "ws://host:port", "ws://host:99999", "ws://a b"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ServerGoneError, match="is no address of a server, such as ws://"):
        CameraClient(url)


def test_the_blocking_client_has_the_same_verbs():
    talk, asked = answering(
        [frame(MOOF, index=0, total=2), frame(MOOF, index=1, total=2)], [BAD_CAMERA], [RESET_OK], [frame(MOOF)]
    )
    before = threading.active_count()
    with play(talk) as stub:
        with SyncCameraClient(stub.url) as client:
            assert client.connected
            assert client.chunk == 3
            first = list(client.infer(POSES, LENS, image=b"\x89PNG", prompt="hills", session_id="a", seed=1))
            with pytest.raises(ServerError, match="pose 3") as caught:
                list(client.infer(POSES, LENS, session_id="a"))
            client.reset("a")
            after = list(client.infer(POSES, LENS, session_id="a"))
        assert not client.connected
        with pytest.raises(ServerGoneError, match="not connected"):
            client.reset("a")

    assert [answer.index for answer in first] == [0, 1]
    assert caught.value.code == "bad_camera"
    assert len(after) == 1
    assert asked[0]["extra_body"] == {"seed": 1}
    assert threading.active_count() <= before


def test_the_blocking_client_answers_pings_while_its_program_is_busy():
    async def talk(peer: Peer) -> None:
        await peer.send(CONFIG)
        await peer.receive()
        await peer.send(frame(MOOF))

    with SocketStub({PATH: talk}, heartbeat=1.0) as stub, SyncCameraClient(stub.url) as client:
        time.sleep(2.5)  # the server gives up a connection that leaves a ping without an answer for half a second
        assert len(list(client.infer(POSES, LENS))) == 1


def test_the_blocking_client_goes_on_after_a_server_that_vanished():
    asked = []

    async def talk(peer: Peer) -> None:
        asked.append(plain(await peer.receive()))
        if len(asked) == 1:
            peer.vanish()
        else:
            await peer.send(frame(MOOF, chunk_id=1))

    with play(talk) as stub, SyncCameraClient(stub.url) as client:
        with pytest.raises(ServerGoneError, match="is gone"):
            list(client.infer(POSES, LENS, session_id="a"))
        client.connect()
        (answer,) = client.infer(POSES, LENS, session_id="a")
        client.close()
        client.connect()
        (again,) = client.infer(POSES, LENS, session_id="a")
    assert answer.chunk_id == again.chunk_id == 1


def test_what_nobody_takes_is_held_up_to_a_bound_and_nothing_is_lost(monkeypatch):
    from lingbot_core.realtime.client import socket as client_socket

    monkeypatch.setattr(client_socket, "MAX_WAITING", 1_000_000)
    video = b"\xc5\xea\x60" + bytes(60_000)
    count = 100  # times 60 kB: six times the bound
    talk, _ = answering([frame(video, index=index, total=count) for index in range(count)])

    async def slow(client: CameraClient):
        taken = 0
        async for answer in client.infer(POSES, LENS):
            if taken == 0:
                await asyncio.sleep(0.5)
                assert 900_000 < client._socket._held < 1_100_000
            assert (answer.index, len(answer.video)) == (taken, 60_000)
            taken += 1
        return taken

    with play(talk) as stub:
        assert run(stub, slow) == count


def test_an_idle_connection_with_its_own_heartbeat_stays():
    talk, _ = answering([frame(MOOF)])

    async def idle(stub: SocketStub):
        async with CameraClient(stub.url, heartbeat=0.4) as client:
            await asyncio.sleep(1.5)  # a pong that is not read within 0.2 s would end the connection
            return await collect(client)

    with play(talk) as stub:
        assert len(asyncio.run(idle(stub))) == 1


def test_a_server_that_answers_no_pings_is_given_up():
    async def talk(peer: Peer) -> None:
        await peer.receive()
        assert peer.request.transport is not None
        peer.request.transport.pause_reading()  # the machine is there and nothing on it answers
        await asyncio.sleep(30)

    async def wait(stub: SocketStub):
        async with CameraClient(stub.url, heartbeat=0.4, timeout=0.5) as client:
            await collect(client)

    began = time.monotonic()
    with play(talk) as stub, pytest.raises(ServerGoneError, match="is gone"):
        asyncio.run(wait(stub))
    assert time.monotonic() - began < 10
