"""The camera socket: what it answers, and that what it makes is what a session makes."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import subprocess
import sys
import textwrap
import threading

import av
import numpy as np
import pytest
from aiohttp import WSMsgType
from aiohttp.test_utils import make_mocked_request

from lingbot_core.camera import CameraTrajectory
from lingbot_core.camera.controls import CameraCarry, clip_controls, latents_of_slice, to_controls
from lingbot_core.camera.units import translation_unit
from lingbot_core.engine.image import frames_to_uint8, prepare_image
from lingbot_core.engine.route import route_from_events
from lingbot_core.engine.session import WorldSession
from lingbot_core.realtime import making
from lingbot_core.realtime.codec import pack, unpack
from lingbot_core.realtime.host import LoadedHost
from lingbot_core.realtime.server import CAMERA, Visitors

from .conftest import HEIGHT, SMALL, WIDTH, run, serving

PROMPT = "a sunny day"


def slices(count: int, first: int = 9) -> list[slice]:
    ends = [first + 12 * i for i in range(count)]
    return [slice(0 if i == 0 else ends[i - 1], end) for i, end in enumerate(ends)]


def cameras(path, part: slice) -> dict:
    poses, intrinsics = path
    return {"poses": poses[part], "intrinsics": intrinsics[part]}


def begin(picture, path, part: slice = slice(0, 9), **options) -> dict:
    """The first infer of a session."""
    return {
        "session_id": "one", "image": picture, "prompt": PROMPT, "cameras": cameras(path, part),
        "extra_body": {**SMALL, **options},
    }  # fmt: skip


def go_on(path, part: slice, **message) -> dict:
    return {"session_id": "one", "cameras": cameras(path, part), **message}


async def replay(peer, picture, path, parts, **options) -> list[np.ndarray]:
    """Frames of infers with these slices of the path."""
    out = []
    for index, part in enumerate(parts):
        message = begin(picture, path, part, **options) if index == 0 else go_on(path, part)
        out.append(await peer.frames(**message))
    return out


def offline(tiny, picture, path, frames: int) -> tuple[list[np.ndarray], float]:
    """The same poses as one path, and its longest step."""
    poses, intrinsics = path
    prepared = prepare_image(picture, size=(HEIGHT, WIDTH), mode="crop")
    latents = CameraTrajectory(poses[:frames], intrinsics[:frames], 832, 480).to_latent((frames - 1) // 4 + 1)
    unit = translation_unit("clip", latent_poses=latents.poses)
    session = WorldSession.start(
        tiny, prepared, PROMPT, translation_unit=unit,
        intrinsics=prepared.intrinsics_for(intrinsics[0], 480, 832).tolist(),
    )  # fmt: skip
    made = []
    for controls in clip_controls(latents, chunk=3, unit=unit, first_delta="identity", width=WIDTH, height=HEIGHT):
        own = session.controls(latents.poses[3 * len(made) : 3 * len(made) + 3])
        assert np.array_equal(own.relative, controls.relative)
        made.append(frames_to_uint8(session.advance(own).frames))
    return made, unit


# What is said


def test_the_server_introduces_itself(tiny):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            return peer.config

    assert run(scenario()) == {
        "patch_size": [1, 2, 2],
        "chunk_latent_frames": 3,
        "chunk_video_frames": 12,
        "first_chunk_video_frames": 9,
        "vae_temporal_stride": 4,
        "image_resolution": [96, 160],
        "frame_dtype": "uint8",
        "fps": 16,
        "needs_session_id": False,
        "supported_modalities": ["camera_pose"],
        "coordinate_convention": "opencv_c2w",
        "pipeline": "lingbot-world tiny",
    }


def test_a_reset_byte_for_byte(tiny):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.socket.send_bytes(b"\x82\xa8endpoint\xa5reset\xaasession_id\xa3one")
            return (await peer.socket.receive()).data

    assert run(scenario()) == b"\x82\xa4type\xa8reset_ok\xaasession_id\xa3one"


def test_an_answer_holds_what_the_protocol_names_and_its_fragments_are_a_video(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            first = await peer.ask(**begin(picture, path), colour="red")
            second = await peer.ask(**go_on(path, slice(9, 21)), colour="blue")
            return first, second

    first, second = run(scenario())
    assert (first["type"], first["chunk_id"], first["index"], first["total"]) == ("frame", 0, 0, 1)
    assert (second["chunk_id"], second["index"], second["total"]) == (1, 0, 1)
    assert set(first["stage_durations"]) == {"prepare", "denoise", "decode"}
    assert all(seconds >= 0 for seconds in first["stage_durations"].values())
    assert first["warnings"] == ["unknown field ignored: colour"]
    assert "warnings" not in second
    with av.open(io.BytesIO(first["video"] + second["video"])) as container:
        frames = list(container.decode(video=0))
    assert (len(frames), frames[0].width, frames[0].height) == (21, WIDTH, HEIGHT)


def test_frames_as_arrays_in_parts(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.send(**begin(picture, path, frames_per_chunk=4))
            return [await peer.get() for _ in range(3)]

    parts = run(scenario())
    assert [(p["chunk_id"], p["index"], p["total"]) for p in parts] == [(0, 0, 3), (0, 1, 3), (0, 2, 3)]
    assert [p["video"].shape for p in parts] == [(4, HEIGHT, WIDTH, 3)] * 2 + [(1, HEIGHT, WIDTH, 3)]
    assert all(p["video"].dtype == np.uint8 for p in parts)


def test_parts_are_counted_over_all_chunks_of_an_answer(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.send(**begin(picture, path, frames_per_chunk=5, num_frames=21))
            answers = [await peer.get()]
            while answers[-1]["index"] < answers[-1]["total"] - 1:
                answers.append(await peer.get())
            assert (await peer.ask(endpoint="reset", session_id="one"))["type"] == "reset_ok"
            return answers

    answers = run(scenario())
    assert [(a["chunk_id"], a["index"], a["total"], len(a["video"])) for a in answers] == [
        (0, 0, 5, 5), (0, 1, 5, 4), (1, 2, 5, 5), (1, 3, 5, 5), (1, 4, 5, 2),
    ]  # fmt: skip


# What is made


@pytest.mark.parametrize("count", [2, 7, 9, 27])
def test_slices_of_9_and_12_poses_are_the_offline_run(tiny, picture, path, count):
    expected, unit = offline(tiny, picture, path, 9 + 12 * (count - 1))

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            return await replay(peer, picture, path, slices(count), translation_unit=unit)

    got = run(scenario())
    assert [len(frames) for frames in got] == [9] + [12] * (count - 1)
    for mine, theirs in zip(got, expected, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_first_slice_of_12_poses_is_another_walk(tiny, picture, path):
    expected, unit = offline(tiny, picture, path, 21)

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            return await replay(peer, picture, path, slices(2, first=12), translation_unit=unit)

    assert not np.array_equal(run(scenario())[0], expected[0])


def test_a_request_for_many_frames_is_made_chunk_by_chunk_from_all_of_its_poses(tiny, picture, path):
    poses = path[0][:33]
    latents = latents_of_slice(poses, 9, CameraCarry.start())

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.send(**begin(picture, path, slice(0, 33), num_frames=35, translation_unit=2.0))
            answers = [await peer.get() for _ in range(3)]
            await at.until(lambda: at.service.sessions()[0]["frames"] == 33)
            return answers, next(iter(at.service.residents)).handle.history

    answers, history = run(scenario())
    assert [(a["chunk_id"], a["index"], a["total"]) for a in answers] == [(0, 0, 3), (1, 1, 3), (2, 2, 3)]
    carry = CameraCarry.start()
    for index, record in enumerate(history.chunks):
        part = latents[3 * index : 3 * index + 3]
        controls, carry = to_controls(part, latents=3, unit=2.0, first_delta="identity", carry=carry)
        assert np.array_equal(record.controls.relative, controls.relative)


def test_without_a_unit_the_first_chunk_that_moves_is_the_measure(tiny, picture, path):
    poses, intrinsics = path[0].copy(), path[1]
    poses[:9] = poses[0]  # at rest
    still = poses, intrinsics
    latents = latents_of_slice(poses[9:21], 3, CameraCarry(poses[8], 3))
    unit = translation_unit("clip", latent_poses=np.concatenate([poses[8:9], latents]))

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            answers = [await peer.ask(**begin(picture, still)), await peer.ask(**go_on(still, slice(9, 21)))]
            answers.append(await peer.ask(**go_on(still, slice(21, 33))))
            [row] = at.service.sessions()
            waited = [a["translation_unit"] for a in answers], row["translation_unit"]
            parts = slices(3)
            await peer.ask(endpoint="reset", session_id="one")
            again = await replay(peer, picture, still, parts)
            await peer.ask(endpoint="reset", session_id="one")
            return waited, again, await replay(peer, picture, still, parts, translation_unit=unit)

    (units, listed), waited, told = run(scenario())
    assert units == [1.0, unit, unit]
    assert listed == unit
    for mine, theirs in zip(waited, told, strict=True):
        assert np.array_equal(mine, theirs)


def test_a_changed_prompt_or_picture_begins_a_new_world_unless_it_is_to_be_kept(tiny, picture, path):
    other = np.zeros((HEIGHT, WIDTH, 3), np.uint8)

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            ids = [(await peer.ask(**begin(picture, path)))["chunk_id"]]
            for change in (
                {"prompt": PROMPT, "image": picture, "extra_body": SMALL},  # nothing is new
                {"prompt": "a night in winter", "keep_world": True},
                {"prompt": "a night in winter"},
                {"prompt": "warm evening light"},
                {"image": other, "extra_body": SMALL},
                {"image": other, "extra_body": SMALL},
            ):
                ids.append((await peer.ask(**go_on(path, slice(9, 21), **change)))["chunk_id"])
            [resident] = at.service.residents
            return ids, resident.handle.history.prompt

    assert run(scenario()) == ([0, 1, 2, 3, 0, 0, 1], "warm evening light")


def test_a_kept_world_goes_on_with_the_new_prompt_as_a_session_does(tiny, picture, path):
    async def scenario(words):
        async with serving(tiny) as at, at.peer() as peer:
            first = await peer.frames(**begin(picture, path, translation_unit=1.0))
            return first, await peer.frames(**go_on(path, slice(9, 21), prompt=words, keep_world=True))

    first, changed = run(scenario("a night in winter"))
    same, kept = run(scenario(PROMPT))
    assert np.array_equal(first, same)
    assert not np.array_equal(changed, kept)


def test_after_a_reset_everything_begins_anew_and_picture_and_prompt_are_remembered(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            first = await peer.frames(**begin(picture, path))
            await peer.frames(**go_on(path, slice(9, 21)))
            assert await peer.ask(endpoint="reset", session_id="one") == {"type": "reset_ok", "session_id": "one"}
            [resident] = at.service.residents
            assert at.service.residents.nbytes_of(resident) == 0
            return first, await peer.frames(**go_on(path, slice(0, 9)))

    first, again = run(scenario())
    assert np.array_equal(first, again)


def test_a_line_of_an_event_script_steers_a_chunk_as_the_script_does(tiny, picture):
    lines = [
        {"event_id": 1, "frames": [["w"], ["w", "l"], []]},
        {"event_id": 4, "prompt": "a night in winter"},
        {"event_id": 5, "frames": [["d"], [], ["j"]]},
    ]
    prepared = prepare_image(picture, size=(HEIGHT, WIDTH), mode="crop")
    route = route_from_events("\n".join(map(json.dumps, lines)), tiny.preset)
    unit, rule = route.translation_unit()
    session = WorldSession.start(
        tiny, prepared, PROMPT, translation_unit=unit, unit_rule=rule, first_delta=route.first_delta
    )
    expected = [frames_to_uint8(session.advance(c).frames) for c in route.controls(session, prepared, act=False)]

    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            first = {"image": picture, "prompt": PROMPT}
            answers = []
            for index, line in enumerate(lines):
                more = first if index == 0 else {}
                answers.append(
                    await peer.ask(
                        event=line, request_id=f"r{index}", extra_body={**SMALL, "frames_per_chunk": 99}, **more
                    )
                )
            await peer.ask(endpoint="reset", session_id=None)
            late = [await peer.ask(event={"event_id": 5}), await peer.ask(event={"event_id": 6})]
            twice = await peer.ask(event={"event_id": 7, "frames": [["w"]]})
            return answers, late, twice

    answers, (stale, anew), twice = run(scenario())
    for answer, frames in zip(answers, expected, strict=True):
        assert np.array_equal(answer["video"], frames)
    told = [(a["request_id"], a["event_id"], a["chunk_index"]) for a in answers]
    assert told == [("r0", 1, 0), ("r1", 4, 1), ("r2", 5, 2)]
    assert (stale["code"], anew["event_id"], anew["chunk_index"]) == ("malformed_payload", 6, 0)
    assert "ids must rise, also across a reset" in stale["message"]
    assert (twice["code"], "a chunk has 3 latent frames" in twice["message"]) == ("bad_camera", True)


# Sessions


def test_another_session_id_ends_the_one_before_it(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.ask(**begin(picture, path))
            other = {**begin(picture, path), "session_id": None}
            assert (await peer.ask(**other))["chunk_id"] == 0
            assert [r.key for r in at.service.residents] == [None]
            return await peer.ask(**go_on(path, slice(9, 21)))

    assert (run(scenario())["code"]) == "missing_field"


def test_a_session_belongs_to_one_connection_and_outlives_it(tiny, picture, path):
    async def scenario():
        async with serving(tiny, timeout=30) as at:
            async with at.peer() as peer, at.peer() as other:
                alone = [await peer.frames(**begin(picture, path))]
                await other.ask(**{**begin(picture, path), "session_id": "own"})
                refused = await other.ask(**go_on(path, slice(9, 21)))
                # What it had is still its own.
                kept = await other.ask(**{**go_on(path, slice(9, 21)), "session_id": "own"})
                assert kept["chunk_id"] == 1
            for resident in at.service.residents:
                await at.service.residents.end(resident)
            async with at.peer() as peer:
                await peer.frames(**begin(picture, path))
                alone.append(await peer.frames(**go_on(path, slice(9, 21))))
                await peer.ask(endpoint="reset", session_id="one")
                await peer.frames(**go_on(path, slice(0, 9)))
            async with at.peer() as peer:
                return refused, alone, await peer.frames(**go_on(path, slice(9, 21)))

    refused, alone, continued = run(scenario())
    assert (refused["type"], refused["code"]) == ("error", "session_busy")
    assert np.array_equal(continued, alone[1])


@pytest.mark.parametrize("timeout", [0, 0.3])
def test_a_vanished_client_frees_its_session_after_the_time_out(tiny, picture, path, timeout):
    async def scenario():
        async with serving(tiny, timeout=timeout) as at:
            async with at.peer() as peer:
                await peer.ask(**begin(picture, path))
                residents = at.service.residents
                [resident] = residents
                handle = resident.handle
                assert residents.nbytes() > 0
            gone = asyncio.get_running_loop().time()
            await at.until(lambda: not len(residents) and not residents.host.nbytes(handle))
            assert residents.host.registry.is_closed(handle.session)
            return asyncio.get_running_loop().time() - gone

    assert timeout <= run(scenario()) < timeout + 10


@pytest.mark.parametrize("moment", ["begin", "frames"])
def test_a_client_that_vanishes_leaves_neither_a_world_nor_an_error_behind(tiny, picture, path, monkeypatch, moment):
    there, go_ahead = threading.Event(), threading.Event()

    def held(work):
        def waits(*arguments):
            there.set()
            assert go_ahead.wait(30)
            return work(*arguments)

        return waits

    if moment == "begin":
        monkeypatch.setattr(LoadedHost, "begin", held(LoadedHost.begin))
    else:
        monkeypatch.setattr(making, "frames_to_uint8", held(making.frames_to_uint8))

    async def scenario():
        async with serving(tiny, timeout=0) as at:
            residents = at.service.residents
            async with at.peer() as peer:
                await peer.send(**begin(picture, path))
                await at.until(there.is_set)
                [resident] = residents
            await at.until(lambda: not len(residents))
            go_ahead.set()
            await at.until(lambda: not resident.lock.locked() and not residents._ends)
            return (
                resident.handle,
                residents.host.registry._all(),
                at.service.metrics.count("errors_total", code="internal"),
            )

    assert run(scenario()) == (None, [], 0)


def test_a_killed_client_frees_its_session_while_a_chunk_runs(tiny, picture, path, tmp_path):
    (tmp_path / "picture.png").write_bytes(picture)
    np.save(tmp_path / "poses.npy", path[0][:9])
    client = textwrap.dedent(
        """
        import asyncio, sys, aiohttp, numpy as np
        from lingbot_core.realtime.codec import pack

        async def main():
            poses = np.load("poses.npy")
            async with aiohttp.ClientSession() as client, client.ws_connect(sys.argv[1], max_msg_size=0) as socket:
                await socket.receive()
                await socket.send_bytes(pack({
                    "session_id": "doomed", "image": open("picture.png", "rb").read(), "prompt": "a sunny day",
                    "cameras": {"poses": poses, "intrinsics": np.array([500.0, 500, 416, 240])},
                    "extra_body": {"num_frames": 4000, "height": 32, "width": 48},
                }))
                await socket.receive()
                print("begun", flush=True)
                await asyncio.sleep(60)

        asyncio.run(main())
        """
    )

    async def scenario():
        async with serving(tiny, timeout=0) as at:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", client, str(at.server.make_url(CAMERA)), cwd=tmp_path, stdout=subprocess.PIPE
            )
            assert process.stdout is not None
            assert (await process.stdout.readline()) == b"begun\n"
            residents = at.service.residents
            assert [r.key for r in residents] == ["doomed"]
            process.kill()
            await process.wait()
            await at.until(lambda: not len(residents))
            async with at.peer() as peer:  # and the server goes on
                return await peer.ask(**begin(picture, path))

    assert run(scenario())["chunk_id"] == 0


def test_interleaved_sessions_are_bitwise_what_each_is_alone_even_where_only_one_stays_awake(tiny, picture, path):
    count = 3

    async def walk(peer, seed):
        out = []
        for index, part in enumerate(slices(count)):
            message = begin(picture, path, part, seed=seed) if index == 0 else go_on(path, part)
            out.append(await peer.frames(**{**message, "session_id": f"s{seed}"}))
            yield out

    async def scenario(seeds, awake):
        async with serving(tiny, awake=awake) as at:
            peers = [at.peer() for _ in seeds]
            opened = [await peer.__aenter__() for peer in peers]
            walks = [walk(peer, seed) for peer, seed in zip(opened, seeds, strict=True)]
            for _ in range(count):
                made = [await anext(w) for w in walks]
                await at.until(lambda: sum(row["state"] != "asleep" for row in at.service.sessions()) <= awake)
            for peer in peers:
                await peer.__aexit__(None, None, None)
            return made

    alone = [run(scenario([seed], 4))[0] for seed in (0, 1, 2, 3)]
    assert not np.array_equal(alone[0][0], alone[1][0])
    for awake in (4, 1):
        for mine, theirs in zip(run(scenario([0, 1, 2, 3], awake)), alone, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_no_more_sessions_than_agreed_are_awake_however_many_ask_at_once(tiny, picture, path, monkeypatch):
    async def scenario():
        awake = []
        async with serving(tiny, awake=1) as at, at.peer() as one, at.peer() as two, at.peer() as three:
            residents, forward = at.service.residents, tiny.dit.forward

            def counted(*arguments):
                awake.append(sum(residents.nbytes_of(r) > 0 for r in residents))
                return forward(*arguments)

            monkeypatch.setattr(tiny.dit, "forward", counted)
            peers = {"one": one, "two": two, "three": three}
            for part in slices(3):
                await asyncio.gather(
                    *(peer.ask(**{**begin(picture, path, part), "session_id": name}) for name, peer in peers.items())
                )
            return max(awake)

    assert run(scenario()) == 1


def test_a_bound_in_bytes_puts_idle_sessions_to_sleep(tiny, picture, path):
    async def scenario():
        async with serving(tiny, cache_bytes=1) as at, at.peer() as one, at.peer() as two:
            await one.ask(**begin(picture, path))
            await two.ask(**{**begin(picture, path), "session_id": "two"})
            await at.until(lambda: [row["state"] for row in at.service.sessions()] == ["asleep", "idle"])
            assert (await one.ask(**go_on(path, slice(9, 21))))["chunk_id"] == 1
            await at.until(lambda: [row["state"] for row in at.service.sessions()] == ["asleep", "idle"])
            return [row["session_id"] for row in at.service.sessions()]

    assert run(scenario()) == ["two", "one"]


def test_there_is_a_bound_of_all_sessions(tiny, picture, path):
    async def scenario():
        async with serving(tiny, known=1, timeout=100) as at:
            async with at.peer() as one, at.peer() as two:
                await one.ask(**begin(picture, path))
                refused = await two.ask(**{**begin(picture, path), "session_id": "two"})
            async with at.peer() as two:  # nobody drives the first one any more
                answer = await two.ask(**{**begin(picture, path), "session_id": "two"})
                return refused["code"], answer["type"], [r.key for r in at.service.residents]

    assert run(scenario()) == ("session_busy", "frame", ["two"])


# What cannot be honoured


def wrong(picture, path) -> dict[str, tuple[dict, str, str]]:
    good = begin(picture, path)
    bent = path[0][:9].copy()
    bent[4, 0, 0] = 7
    return {
        "endpoint": ({"endpoint": "dance"}, "malformed_payload", "use infer or reset"),
        "no camera": ({"session_id": "one"}, "missing_field", "cameras"),
        "no picture": ({**good, "image": None}, "missing_field", "image"),
        "no prompt": ({**good, "prompt": None}, "missing_field", "prompt"),
        "no picture at all": ({**good, "image": b"GIF89a"}, "malformed_payload", "image"),
        "a web address": ({**good, "image": "http://example.org/a.png"}, "malformed_payload", "URL"),
        "a bent pose": ({**good, "cameras": {**good["cameras"], "poses": bent}}, "bad_camera", "poses"),
        "a name": ({**good, "session_id": 3}, "malformed_payload", "session_id must be text"),
        "a seed": ({**good, "extra_body": {"seed": -1}}, "malformed_payload", "seed must be a whole number"),
        "one side": ({**good, "extra_body": {"height": 32}}, "missing_field", "height and width"),
        "odd sides": ({**good, "extra_body": {"height": 33, "width": 48}}, "malformed_payload", "33"),
        "a unit": ({**good, "extra_body": {**SMALL, "translation_unit": "mile"}}, "bad_camera", "mile"),
        "a delta": ({**good, "extra_body": {"first_delta": "now"}}, "malformed_payload", "identity or from_rest"),
        "both": ({**good, "event": {"event_id": 1}}, "bad_camera", "both an event and cameras"),
        "an event": ({**good, "cameras": None, "event": {"event_id": -1}}, "malformed_payload", "event_id is -1"),
        "a long event": (
            {**good, "cameras": None, "event": {"event_id": 1, "prompt": "x" * 20_001}}, "malformed_payload", "at most"
        ),
        "options": ({**good, "extra_body": 3}, "malformed_payload", "extra_body must be a map"),
    }  # fmt: skip


def test_a_bad_message_gets_one_clear_error_and_the_connection_stays(tiny, picture, path):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            for name, (message, code, words) in wrong(picture, path).items():
                answer = await peer.ask(**message)
                assert (answer["type"], answer["code"]) == ("error", code), (name, answer)
                assert words in answer["message"], (name, answer)
            for data in (b"", b"\xc1", pack([1]), b"\x82\xa4type"):
                await peer.socket.send_bytes(data)
                assert (await peer.get())["code"] == "malformed_payload"
            await peer.socket.send_str('{"endpoint": "infer"}')
            assert "binary" in (await peer.get())["message"]
            metrics = at.service.metrics
            assert metrics.count("errors_total", code="malformed_payload") >= 13
            return await peer.ask(**begin(picture, path))

    assert run(scenario())["type"] == "frame"


def test_while_the_model_loads_everybody_is_told_so(tiny, picture, path):
    from lingbot_core.realtime.host import LoadedHost
    from lingbot_core.realtime.worker import ThreadWorker

    async def scenario():
        async with serving(None) as at, at.client.ws_connect(at.server.make_url(CAMERA)) as socket:
            from .conftest import Peer

            peer = Peer(socket)
            told = [await peer.get(), await peer.ask(**begin(picture, path))]
            async with at.client.get(at.server.make_url("/health")) as response:
                told.append((response.status, await response.json()))
            at.service.open(LoadedHost(tiny), worker := ThreadWorker())
            config = await peer.get()
            answer = await peer.ask(**begin(picture, path))
            async with at.client.get(at.server.make_url("/health")) as response:
                told.append((response.status, await response.json()))
            await at.service.close()
            worker.close()
            return told, config["fps"], answer["type"]

    (first, second, before, after), fps, kind = run(scenario())
    assert (first["code"], second["code"], before) == ("loading", "loading", (503, {"state": "loading"}))
    assert (fps, kind, after) == (16, "frame", (200, {"state": "ready"}))


def test_after_an_internal_error_a_session_waits_for_a_reset(tiny, picture, path, monkeypatch):
    async def scenario():
        async with serving(tiny) as at, at.peer() as peer:
            await peer.ask(**begin(picture, path))
            forward = tiny.dit.forward

            def broken(*_):
                raise RuntimeError("a wire came loose")

            monkeypatch.setattr(tiny.dit, "forward", broken)
            answers = [await peer.ask(**go_on(path, slice(9, 21)))]
            monkeypatch.setattr(tiny.dit, "forward", forward)
            answers.append(await peer.ask(**go_on(path, slice(9, 21))))
            answers.append(await peer.ask(endpoint="reset", session_id="one"))
            answers.append(await peer.ask(**go_on(path, slice(0, 9))))
            return answers

    failed, refused, reset, again = run(scenario())
    assert failed["code"] == refused["code"] == "internal"
    assert "RuntimeError" in failed["message"]
    assert "reset" in refused["message"]
    assert (reset["type"], again["type"], again["chunk_id"]) == ("reset_ok", "frame", 0)


def test_pings_are_answered_and_messages_counted_while_a_chunk_runs(tiny, picture, path, monkeypatch):
    async def scenario():
        hold = threading.Event()
        forward = tiny.dit.forward
        monkeypatch.setattr(tiny.dit, "forward", lambda *a: hold.wait(30) and forward(*a))
        async with serving(tiny) as at, at.peer(autoping=False) as peer:
            await peer.send(**begin(picture, path))
            await peer.socket.ping(b"there?")
            pong = await peer.socket.receive(timeout=10)
            for _ in range(40):
                await peer.send(endpoint="dance")
            dropped = await peer.get()
            hold.set()
            answers = [await peer.get()]
            while len(answers) < 1 + 16 + (40 - 16 - 1):
                answers.append(await peer.get())
            assert (await peer.ask(endpoint="reset", session_id="one"))["type"] == "reset_ok"
            return pong, [dropped, *answers]

    pong, answers = run(scenario())
    assert (pong.type, bytes(pong.data)) == (WSMsgType.PONG, b"there?")
    kinds = [a["type"] if a["type"] == "frame" else a["code"] for a in answers]
    assert kinds.count("frame") == 1
    assert kinds.count("session_busy") == 40 - 16
    assert kinds.count("malformed_payload") == 16


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 101),
        ({"Origin": "http://127.0.0.1:{port}"}, 101),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "evil.example"}, 403),
        ({"Host": "localhost:{port}"}, 101),
        ({"Host": "[::1"}, 403),
        ({"Origin": "http://[::1"}, 403),
    ],
)
def test_only_this_machine_and_its_own_pages_are_answered(tiny, headers, status):
    async def scenario():
        async with serving(tiny) as at:
            sent = {name: value.format(port=at.server.port) for name, value in headers.items()}
            upgrade = {
                "Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
                "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            }  # fmt: skip
            async with at.client.get(at.server.make_url(CAMERA), headers={**upgrade, **sent}) as response:
                return response.status

    assert run(scenario()) == status


def test_a_machine_that_vanished_is_noticed_within_a_minute(tiny):
    async def scenario():
        async with serving(tiny) as at, at.peer():
            [server_side] = at.service.sockets
            connection = server_side._req.transport.get_extra_info("socket")
            idle, every, count = (
                connection.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            return connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), idle + every * count

    on, seconds = run(scenario())
    assert on == 1
    assert 0 < seconds <= 60


def test_a_name_of_the_server_counts_in_any_spelling():
    request = make_mocked_request("GET", "/", headers={"Host": "Studio:8760"})
    assert Visitors({"Studio"}).refusal(request) is None
    assert Visitors({"studio"}).refusal(request) is None


def test_who_waits_while_nothing_is_served_is_told_once_and_greeted_when_it_is_served_again(tiny):
    async def scenario():
        async with serving(tiny) as at:
            residents = at.service.residents
            await at.service.close("not now")
            async with at.client.ws_connect(at.server.make_url(CAMERA)) as waiting:
                told = unpack((await waiting.receive(timeout=10)).data)
                at.service.open(residents.host, residents.worker)
                return told, unpack((await waiting.receive(timeout=10)).data)

    told, greeting = run(scenario())
    assert told["message"] == "not now"
    assert greeting["pipeline"] == "lingbot-world tiny"


def test_sockets_that_do_not_answer_are_hung_up_all_at_once(tiny):
    async def scenario():
        async with serving(tiny) as at, at.peer(), at.peer(), at.peer():  # none of them reads
            before = asyncio.get_running_loop().time()
            await at.service.hang_up("that is all")
            return asyncio.get_running_loop().time() - before

    assert run(scenario()) < 15
