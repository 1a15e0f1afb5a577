"""A live world on a real server with the embedded model: steered, watched, interrupted, and walked again."""

from __future__ import annotations

import asyncio
import gc
import io
import json
from functools import partial

import av
import cv2
import numpy as np
import pytest
import torch
from live_server import SETTINGS, live_server, picture
from video_server import run

from lingbot_core.camera import PER_LATENT, KeyMotion
from lingbot_core.engine.controls_file import load_controls
from lingbot_core.engine.image import frames_to_uint8
from lingbot_core.engine.session import WorldSession
from lingbot_core.engine.walked import walked_camera, walked_poses
from lingbot_core.errors import SessionError
from lingbot_core.realtime import live_socket
from lingbot_core.realtime.live_outbox import Outbox
from lingbot_core.realtime.live_world import LiveWorld


def keys_of(at) -> list[tuple[str, ...] | None]:
    return [record.controls.keys for record in at.history.chunks]


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.latents, b.latents) and a.prompt == b.prompt
        for a, b in zip(one.chunks, other.chunks, strict=True)
    )


# Steering


def test_a_page_is_told_what_the_world_is_and_sees_its_start_picture(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            [hello] = peer.of("hello")
            assert (hello["v"], hello["role"], hello["fps"]) == (1, "drive", 16)
            assert (hello["width"], hello["height"]) == (48, 32)
            assert hello["path"] == []
            header, data = await peer.until(lambda: peer.frames and peer.frames[0])
            assert (header["chunk"], header["format"]) == (-1, "jpeg")
            shown = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1]
            assert (
                np.abs(shown.astype(int) - frames_to_uint8(picture().pixels[:, None])[0]).mean() < 12
            )  # of a picture of noise
            assert peer.status["state"] == "paused"

    run(scenario())


def test_held_keys_move_the_world_as_the_same_keys_do_offline(tiny):
    async def scenario():
        async with live_server(tiny, running=False, seed=4) as at:
            peer = await at.peer()
            for held in ("w", "wl", ""):
                await peer.control(held)
                await peer.ask("step")
                await peer.chunk(len(at.history) + 1)
                await peer.become("paused")
            return at.history

    history = run(scenario())
    session = WorldSession.start(tiny, picture(), "a sunny day", seed=4, **SETTINGS)
    for keys in ("w", "lw", ""):
        session.advance(session.controls(KeyMotion((keys,) * 3, PER_LATENT)))
    assert same(history, session.history)
    # The very first press is visible, and W goes along +Z.
    np.testing.assert_allclose(walked_poses(history)[:3, 2, 3], [0.05, 0.1, 0.15], rtol=1e-5)


def test_taps_between_two_chunks_move_the_next_one(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            await at.host.hold()
            made = len(at.history)
            await peer.control("w")
            await peer.control("")
            await peer.control("wj", press="j")
            await peer.control("")
            await peer.ask("pause")
            at.host.gate.set()
            await peer.become("paused")
            await peer.ask("step")
            await peer.chunk(made + 2)
            return keys_of(at)[made:]

    first, second = run(scenario())[:2]
    assert first == ("jw", "", "")
    assert second == ("", "", "")


def test_a_mouse_a_stick_and_the_keys_for_up_and_down_steer_by_poses(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await peer.control("e", look=[9.0, 3.0], axes=[0, 0.5, 0, 0, 0])
            await peer.ask("step")
            await peer.chunk(1)
            return at.history, peer.of("chunk")[-1]

    history, told = run(scenario())
    assert history.chunks[0].controls.keys is None
    pose = walked_poses(history)[-1]
    assert pose[1, 3] == pytest.approx(-0.15)
    assert pose[0, 3] > 0.06
    x, z, turn, y, up = told["path"][-1]
    assert (x, z, y) == pytest.approx((pose[0, 3], pose[2, 3], pose[1, 3]), abs=1e-4)
    assert (turn, up) == pytest.approx((9.0, 3.0), abs=1e-3)


def test_frames_name_the_last_control_that_is_in_them_and_the_latency_is_measured(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            seq = await peer.control("w")
            header, _ = await peer.until(lambda: next((f for f in peer.frames if f[0]["seq"] >= seq), None))
            assert header["index"] == 0
            await peer.until(lambda: peer.status["latency"] is not None)
            assert 0 < peer.status["latency"] < 20
            numbers = [header["frame"] for header, _ in peer.frames]
            assert numbers == sorted(numbers)

    run(scenario())


def test_speeds_and_prompts_change_from_the_next_chunk_on(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await peer.ask("settings", move=0.5, turn=1.5)
            await peer.ask("prompt", prompt="deep snow")
            assert peer.status["prompt_waits"]
            await peer.control("w")
            await peer.ask("step")
            await peer.chunk(1)
            assert (peer.status["move"], peer.status["turn"]) == (0.5, 1.5)
            assert peer.status["prompt"] == "deep snow"
            return at.history

    history = run(scenario())
    np.testing.assert_allclose(walked_poses(history)[-1, 2, 3], 0.075, rtol=1e-5)


def test_a_prompt_that_cannot_be_encoded_is_told_and_the_world_goes_on(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            at.host.unsayable = {"xyz"}
            peer = await at.peer()
            await peer.control("", press="w")
            await peer.ask("prompt", prompt="xyz")
            await peer.ask("step")
            await peer.chunk(1)
            [error] = peer.of("error")
            assert (error["code"], "xyz cannot be said" in error["message"]) == ("prompt_failed", True)
            assert keys_of(at) == [("w", "", "")]  # the tap was not lost with the prompt
            assert at.history.prompt == "a sunny day"

    run(scenario())


# Start, pause, step, stop, rewind, snapshot, replay


def test_a_rewind_takes_chunks_back_in_place_and_another_way_can_be_gone(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            for held in ("w", "wj"):
                await peer.control(held)
                await peer.ask("step")
                await peer.chunk(len(at.history) + 1)
            answer = await peer.ask("rewind")
            assert answer["type"] == "done"
            await peer.until(lambda: peer.of("rewound"))
            assert peer.of("rewound")[0]["latents"] == 3
            await peer.control("wl")
            await peer.ask("step")
            await peer.until(lambda: len(at.history) == 2)
            assert len(at.host.registry._living) == 1, "the session itself went back"
            refused = await peer.ask("rewind", chunks=3)
            assert (refused["code"], "this walk has 2" in refused["message"]) == ("out_of_order", True)
            return at.history

    history = run(scenario())
    assert [record.controls.keys for record in history.chunks] == [("w",) * 3, ("lw",) * 3]


def test_a_snapshot_outlives_a_rewind_and_goes_on_elsewhere(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            for held in ("w", "wj"):
                await peer.control(held)
                await peer.ask("step")
                await peer.chunk(len(at.history) + 1)
            assert (await peer.ask("snapshot"))["chunks"] == 2
            kept = at.history
            await peer.ask("restart")
            await peer.until(lambda: peer.of("rewound"))
            await peer.chunk(1)
            handle = at.world.snapshot_handle
            assert same(handle.history, kept)
            at.world.close()
            await at.life

            def go_on():
                with at.host.drive(handle) as drive:
                    drive.advance(drive.controls(KeyMotion(("",) * 3, PER_LATENT)))
                    return drive.history

            return kept, await asyncio.to_thread(go_on)

    kept, longer = run(scenario())
    assert same(longer.first(2), kept)


def test_a_walk_that_is_recorded_is_walked_again_bit_for_bit(tiny):
    async def scenario():
        async with live_server(tiny, running=False, seed=2) as at:
            peer = await at.peer()
            await peer.control("w")
            await peer.ask("step")
            await peer.chunk(1)
            await peer.control("q", look=[5.0, 0.0])
            await peer.ask("prompt", prompt="deep snow")
            await peer.ask("step")
            await peer.chunk(2)
            record = (await peer.ask("record"))["record"]
            walked = at.history
        async with live_server(tiny, running=False, seed=2) as at:
            peer = await at.peer()
            assert (await peer.ask("replay", record=record))["chunks"] == 2
            await peer.until(lambda: peer.status["notice"] == "the recorded way has been walked")
            assert peer.status["state"] == "paused"
            return walked, at.history

    walked, again = run(scenario())
    assert same(walked, again)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda text: text[:-200], "damaged"),
        (lambda text: text.replace('"seed": 0', '"seed": 7'), "seed=7"),
        (lambda text: "a walk", "no record"),
    ],
)
def test_a_record_that_does_not_fit_is_refused_and_the_world_is_as_it_was(tiny, spoil, why):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await peer.ask("step")
            await peer.chunk(1)
            record = (await peer.ask("record"))["record"]
            answer = await peer.ask("replay", record=spoil(record))
            assert (answer["type"], answer["code"]) == ("error", "replay_failed")
            assert why in answer["message"]
            assert len(at.history) == 1

    run(scenario())


def test_a_record_can_be_downloaded(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            async with at.client.get(at.server.make_url("/v1/live/record")) as response:
                assert response.status == 409
            await peer.ask("step")
            await peer.chunk(1)
            async with at.client.get(at.server.make_url("/v1/live/record")) as response:
                assert len(load_controls(await response.text()).controls) == 1
            async with at.client.get(at.server.make_url("/v1/live/record?world=other")) as response:
                assert response.status == 404

    run(scenario())


def test_a_stop_gives_up_the_running_chunk_and_a_start_goes_on(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            await at.host.hold()
            made = len(at.history)
            await peer.ask("stop")
            at.host.gate.set()
            await peer.become("stopped")
            await asyncio.sleep(0.2)
            assert len(at.history) == made
            await peer.ask("start")
            await peer.chunk(made + 1)

    run(scenario())


def test_a_world_with_an_end_stops_there_and_says_so(tiny):
    async def scenario():
        async with live_server(tiny, limit=2, ends=True) as at:
            peer = await at.peer()
            await peer.become("stopped")
            assert "2 chunks were asked for" in peer.status["notice"]
            await asyncio.wait_for(at.life, 10)
            assert len(at.history) == 2

    run(scenario())


def test_the_walked_way_is_a_camera_path(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            with pytest.raises(Exception, match="nothing has been walked"):
                walked_camera(at.history)
            peer = await at.peer()
            await peer.control("wl")
            for _ in range(2):
                await peer.ask("step")
                await peer.chunk(len(at.history) + 1)
            return at.history

    history = run(scenario())
    camera = walked_camera(history)
    assert (len(camera), camera.rate, camera.width, camera.height) == (6, "latent", 48, 32)
    np.testing.assert_array_equal(camera.poses[2], history.chunks[0].controls.pose_after)
    from lingbot_core.camera import walk

    np.testing.assert_allclose(camera.poses, walk(np.eye(4), ["wl"] * 6, PER_LATENT, per_latent=True), atol=1e-12)


# Who is there


def test_the_second_who_wants_to_drive_watches_and_is_told(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            first = await at.peer()
            second = await at.peer()
            [hello] = second.of("hello")
            assert (hello["role"], "somebody else drives" in hello["reason"]) == ("watch", True)
            for kind in ("start", "step", "rewind"):
                assert (await second.ask(kind))["code"] == "not_driving"
            await second.control("w")
            await second.until(lambda: [e for e in second.of("error") if e["code"] == "not_driving"])
            assert (await second.ask("claim"))["code"] == "driver_taken"
            await first.ask("step")
            await second.until(lambda: [f for f in second.frames if f[0]["chunk"] == 0])
            await second.chunk(1)
            assert keys_of(at) == [("", "", "")]
            # The first leaves; the second is told that the wheel is free, and takes it.
            await first.leave()
            await second.until(lambda: second.of("free"))
            assert (await second.ask("claim"))["type"] == "done"
            assert (await second.ask("step"))["type"] == "done"
            third = await at.peer()
            await third.ask("claim", force=True)
            await second.until(lambda: [m for m in second.of("role") if "another page has taken" in m["reason"]])
            assert (await second.ask("step"))["code"] == "not_driving"

    run(scenario())


def test_a_page_that_is_loaded_again_drives_on_at_once_and_sees_where_it_is(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer(client="tab 1")
            await peer.control("w")
            await peer.chunk(2)
            again = await at.peer(client="tab 1")  # the old connection is not gone yet
            [hello] = again.of("hello")
            assert hello["role"] == "drive"
            assert hello["instance"] == peer.of("hello")[0]["instance"]
            assert len(hello["path"]) >= 6
            await peer.until(lambda: [m for m in peer.of("role") if "connected once more" in m["reason"]])
            header, _ = await again.until(lambda: again.frames and again.frames[0])
            assert header["chunk"] >= 0
            await again.chunk(at.world.chunks + 1)
            assert keys_of(at)[-1] == ("", "", ""), "keys that the page before held are up"

    run(scenario())


def test_a_driver_who_vanishes_in_the_middle_of_a_chunk_leaves_a_world_that_waits(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer(client="tab 1")
            await peer.control("w")
            await peer.chunk(1)
            await at.host.hold()
            peer.vanish()
            at.host.gate.set()
            viewer = await at.peer(drive=False)
            await viewer.become("waiting")
            made = await viewer.until(lambda: not viewer.status["making"] and viewer.status["chunks"])
            await asyncio.sleep(0.3)
            assert at.world.chunks == made, "the chunk was finished, and no other one begun"
            again = await at.peer(client="tab 1")
            await again.chunk(made + 1)

    run(scenario())


def test_a_world_that_is_to_keep_going_does_so_without_a_driver(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.ask("settings", keep_going=True)
            await peer.leave()
            made = at.world.chunks
            viewer = await at.peer(drive=False)
            await viewer.until(lambda: at.world.chunks > made + 1)
            assert viewer.status["state"] == "running"

    run(scenario())


def test_a_hidden_page_is_nobody_and_gets_no_frames(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            await peer.ask("visible", visible=False)
            await peer.become("waiting")
            await asyncio.sleep(0.5)
            seen, made = len(peer.frames), at.world.chunks
            await asyncio.sleep(0.3)
            assert (len(peer.frames), at.world.chunks) == (seen, made)
            await peer.ask("visible", visible=True)
            await peer.chunk(made + 1)

    run(scenario())


@pytest.mark.parametrize("format", ["jpeg", "webp", "fragments"])
def test_each_viewer_gets_the_format_it_asks_for(tiny, format):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            driver = await at.peer()
            viewer = await at.peer(drive=False, format=format)
            for _ in range(2):
                await driver.ask("step")
                await driver.chunk(len(at.history) + 1)
            wanted = 21 if format != "fragments" else 2
            await viewer.until(lambda: sum(f[0].get("chunk", -1) >= 0 for f in viewer.frames) >= wanted)
            return viewer.frames

    frames = run(scenario())
    assert {header["format"] for header, _ in frames} == {format}
    if format == "fragments":
        assert frames[0][0]["type"] == "init"
        # The first fragment of a stream brings the init segment itself.
        video = frames[0][1] + b"".join(data for header, data in frames[1:])
        with av.open(io.BytesIO(video.replace(frames[0][1], b"", 1))) as container:
            assert sum(1 for _ in container.decode(video=0)) == 21
    else:
        magic = {"jpeg": b"\xff\xd8", "webp": b"RIFF"}[format]
        assert all(data.startswith(magic) for _, data in frames)


def test_frames_come_at_the_pace_of_the_video(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await peer.ask("step")
            await peer.until(lambda: len(peer.frames) == 10)
            times = [header["time"] for header, _ in peer.frames[1:]]
            return np.diff(times)

    assert run(scenario()).sum() == pytest.approx(8 / 16, abs=0.15)


# Faults


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "malformed_payload"),
        ("[1]", "malformed_payload"),
        ('{"type": "fly"}', "malformed_payload"),
        ('{"kind": "start"}', "missing_field"),
        ('{"type": "control", "held": "w"}', "missing_field"),
        ('{"type": "control", "seq": 1, "held": "wx"}', "malformed_payload"),
        ('{"type": "control", "seq": -1}', "malformed_payload"),
        ('{"type": "control", "seq": 1, "look": [1]}', "malformed_payload"),
        ('{"type": "control", "seq": 1, "axes": [1, 2, 3, 4, "5"]}', "malformed_payload"),
        ('{"type": "control", "seq": 1, "look": [NaN, 0]}', "malformed_payload"),
        ('{"type": "control", "seq": 1, "press": "' + "w" * 65 + '"}', "malformed_payload"),
        ('{"type": "settings", "move": 99}', "malformed_payload"),
        ('{"type": "settings", "keep_going": 1}', "malformed_payload"),
        ('{"type": "rewind", "chunks": 0}', "malformed_payload"),
        ('{"type": "prompt"}', "missing_field"),
        ('{"type": "prompt", "prompt": "' + "a" * 20_001 + '"}', "malformed_payload"),
        ('{"type": "prompt", "prompt": "' + "a" * 70_000 + '"}', "malformed_payload"),
        ('{"type": "replay", "record": ""}', "missing_field"),
        ('{"type": "hello", "v": 1, "client": "x"}', "out_of_order"),
        ("[" * 70_000, "malformed_payload"),
        (b"\x00\x01", "malformed_payload"),
    ],
)
def test_a_bad_message_is_answered_and_nothing_else_happens(tiny, text, code):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await (peer.socket.send_bytes(text) if isinstance(text, bytes) else peer.socket.send_str(text))
            [error] = await peer.until(lambda: peer.of("error"))
            assert error["code"] == code, error
            assert len(error["message"]) < 400
            assert (await peer.ask("step"))["type"] == "done"
            await peer.chunk(1)
            assert keys_of(at) == [("", "", "")]

    run(scenario())


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        ({"v": 2, "client": "x"}, "unsupported"),
        ({"v": 1}, "missing_field"),
        ({"v": 1, "client": "x", "format": "gif"}, "malformed_payload"),
    ],
)
def test_who_does_not_introduce_himself_gets_nothing(tiny, hello, code):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer(hello=False)
            await peer.send("start")
            await peer.until(lambda: peer.of("error"))
            assert peer.of("error")[0]["code"] == "out_of_order"
            await peer.send("hello", **hello)
            await peer.until(lambda: len(peer.of("error")) == 2)
            assert peer.of("error")[1]["code"] == code
            assert not peer.frames

    run(scenario())


def test_ten_thousand_messages_a_second_cost_neither_the_world_nor_the_last_word(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            gaps: list[float] = []

            async def listen() -> None:
                loop = asyncio.get_running_loop()
                while True:
                    before = loop.time()
                    await asyncio.sleep(0.005)
                    gaps.append(loop.time() - before - 0.005)

            listening = asyncio.ensure_future(listen())
            begun, made = asyncio.get_running_loop().time(), at.world.chunks
            for number in range(10_000):
                held = "w" if number % 2 else ""
                await peer.socket.send_str(json.dumps({"type": "control", "seq": number, "held": held, "press": held}))
                if number % 100 == 99:
                    await asyncio.sleep(max(0.0, begun + number / 10_000 - asyncio.get_running_loop().time()))
            await peer.until(lambda: at.world.steering.seq == 9_999)
            listening.cancel()
            flooded = await peer.until(lambda: [e for e in peer.of("error") if e["code"] == "flooded"])
            assert len(flooded) <= 4
            assert at.world.steering.held == "w"
            await peer.chunk(made + 1)
            return gaps

    gaps = run(scenario())
    assert max(gaps) < 1.0  # a bound for any machine; benchmarks/live.py has the figures


def test_a_clock_that_is_wrong_changes_nothing(tiny):
    """No message carries a time that the server believes; what a ping brings comes back as it was."""

    async def scenario():
        async with live_server(tiny, running=False) as at:
            peer = await at.peer()
            await peer.send("ping", t=-1e15)
            pong = await peer.until(lambda: peer.of("pong"))
            assert pong[0]["t"] == -1e15
            assert 0 <= pong[0]["time"] < 60

    run(scenario())


def test_a_viewer_that_does_not_read_holds_up_nobody_and_misses_frames(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            driver = await at.peer()
            lazy = await at.peer(drive=False)
            lazy._reader.cancel()
            await driver.chunk(5)
            await driver.until(lambda: sum(f[0]["chunk"] >= 0 for f in driver.frames) > 40)
            [watching] = [v for v in at.world._viewers if v.client != at.world.driver.client]
            assert watching.dropped > 10

    run(scenario())


def test_a_driver_whose_machine_sleeps_is_gone_after_a_while(tiny, monkeypatch):
    monkeypatch.setattr(live_socket, "Outbox", partial(Outbox, patience=0.6, silence=0.2))

    async def scenario():
        async with live_server(tiny) as at:
            asleep = await at.peer()
            await asleep.control("w")
            await asleep.chunk(1)
            asleep._reader.cancel()  # nobody answers a ping any more
            viewer = await at.peer(drive=False)
            await viewer.until(lambda: viewer.of("free"))
            await viewer.become("waiting")
            assert at.world.steering.held == ""
            assert (await viewer.ask("claim"))["type"] == "done"

    run(scenario())


def test_pages_that_come_and_vanish_leave_nothing_behind(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            await at.peer()
            for number in range(30):
                viewer = await at.peer(drive=False, format=("jpeg", "webp", "fragments")[number % 3])
                await viewer.leave() if number % 2 else viewer.vanish()
                del viewer
            await asyncio.sleep(0.5)
            gc.collect()
            return len(at.world._viewers), sum(type(one) is live_socket.LiveSocket for one in gc.get_objects())

    assert run(scenario()) == (1, 1)


def test_a_chunk_that_fails_is_told_keeps_the_world_and_can_be_tried_again(tiny):
    async def scenario():
        async with live_server(tiny) as at:
            peer = await at.peer()
            await peer.chunk(1)
            at.host.problem = SessionError("the card has gone to lunch")
            await peer.become("failed")
            made = len(at.history)
            assert peer.status["problem"] == "the card has gone to lunch"
            at.host.problem = RuntimeError("a secret path")
            await peer.ask("start")
            await peer.until(lambda: "RuntimeError" in peer.status["problem"])
            assert "secret" not in peer.status["problem"]
            at.host.problem = None
            await peer.ask("start")
            await peer.chunk(made + 1)

    run(scenario())


def test_another_page_may_not_connect(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
                async with at.client.get(at.server.make_url("/v1/live"), headers=headers) as response:
                    assert response.status == 403

    run(scenario())


def test_a_page_may_come_before_its_world_and_stay_after_it(tiny):
    async def scenario():
        async with live_server(tiny, running=False) as at:
            socket = await at.client.ws_connect(at.server.make_url("/v1/live?world=later"))
            await socket.send_json({"type": "hello", "v": 1, "client": "x", "drive": True})
            assert (await socket.receive_json())["type"] == "waiting"
            await socket.send_json({"type": "start", "seq": 1})
            refused = await socket.receive_json()
            assert (refused["code"], "no world 'later' is open" in refused["message"]) == ("loading", True)
            other = LiveWorld(at.world.walk, at.worker, running=False)
            at.worlds.open("later", other)
            assert (await socket.receive_json())["role"] == "drive"
            at.worlds.close("later", "the run is over")
            while (told := await socket.receive_json())["type"] != "closed":
                pass
            assert told["reason"] == "the run is over"
            assert other.driver is None
            other._screen.close()
            await socket.close()

    run(scenario())
